"""What was made from records is kept as long as they are the same ones: a change makes one anew.

Records are never changed in place, so the very same object means the very same content. Bounded,
and what nobody asks for any more goes: the keys of NICs that have gone never come back. Forgetting
costs time only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K")
S = TypeVar("S")
T = TypeVar("T")
KEPT_MAX = 16384
ROUND_S = 60.0  # a resync, which looks at everything that is there, comes twice in it


class Recent(Generic[K, T]):
    """What was put or asked for in this round or the last one; a round ends with a new thing."""

    def __init__(self) -> None:
        self._values: dict[K, T] = {}
        self._before: dict[K, T] = {}
        self._ends_at = 0.0

    def __len__(self) -> int:
        """Return how much is remembered, at most: some of it may be counted twice."""
        return len(self._values) + len(self._before)

    def get(self, key: K) -> T | None:
        """Return what is remembered of a key."""
        known = self._values.get(key)
        if known is None:
            known = self._before.get(key)
            if known is not None:
                self._values[key] = known
        return known

    def put(self, key: K, value: T) -> None:
        """Remember something."""
        now_s = time.monotonic()
        if now_s >= self._ends_at or len(self._values) >= KEPT_MAX:
            self._before, self._values = self._values, {}
            self._ends_at = now_s + ROUND_S
        self._values[key] = value


class Kept(Generic[T]):
    """One value per key, each with the objects that it was made from."""

    def __init__(self) -> None:
        self._recent: Recent[str, tuple[tuple[Any, ...], T]] = Recent()

    def get(self, key: str, sources: tuple[Any, ...], make: Callable[..., T]) -> T:
        """Return `make(*sources)`."""
        known = self._recent.get(key)
        if known is not None and known[0] == sources:  # the same objects need no look inside
            return known[1]
        made = make(*sources)
        self._recent.put(key, (sources, made))
        return made

    def get_each(
        self, items: Iterable[tuple[str, tuple[Any, ...]]], make: Callable[..., T]
    ) -> list[T]:
        """Return the same for many keys and their sources."""
        return [self.get(key, sources, make) for key, sources in items]


class Followed(Generic[S]):
    """A whole of which most stays the very same: what went and what came, told by identity.

    Mostly something comes behind the rest: a thousand sources then take some microseconds.
    """

    def __init__(self) -> None:
        self._last: tuple[S, ...] = ()
        self._sources: dict[int, S] = {}

    @property
    def sources(self) -> Mapping[int, S]:
        """Return the sources in their order, by what tells them apart."""
        return self._sources

    def follow(self, sources: Iterable[S]) -> tuple[list[int], list[int]]:
        """Take `sources` in; return the keys of those that went, and of those that came."""
        now, known = tuple(sources), self._sources
        went: list[int] = []
        if now[: len(self._last)] == self._last:  # the same objects need no look inside
            came = {id(each): each for each in now[len(self._last) :]}
            self._sources = known | came if came else known
        else:
            self._sources = dict(zip(map(id, now), now, strict=True))
            went = [key for key in known if key not in self._sources]
            came = {key: each for key, each in self._sources.items() if key not in known}
        self._last = now
        return went, list(came)
