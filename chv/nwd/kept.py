"""What was made from records is kept as long as they are the same ones: a change makes one anew.

Records are never changed in place, so the very same object means the very same content. Bounded;
forgetting costs time only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")
KEPT_MAX = 16384


class Kept(Generic[T]):
    """One value per key, each with the objects that it was made from."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[tuple[Any, ...], T]] = {}

    def get(self, key: str, sources: tuple[Any, ...], make: Callable[..., T]) -> T:
        """Return `make(*sources)`."""
        known = self._values.get(key)
        if known is not None and known[0] == sources:  # the same objects need no look inside
            return known[1]
        if len(self._values) >= KEPT_MAX:
            self._values.clear()
        made = make(*sources)
        self._values[key] = (sources, made)
        return made

    def get_each(
        self, items: Iterable[tuple[str, tuple[Any, ...]]], make: Callable[..., T]
    ) -> list[T]:
        """Return the same for many keys and their sources."""
        return [self.get(key, sources, make) for key, sources in items]


class Followed(Generic[S]):
    """A whole of which most stays the very same: what went and what came is told by identity.

    A thousand sources take some microseconds, for none of them is looked at.
    """

    def __init__(self) -> None:
        self._sources: dict[int, S] = {}

    @property
    def sources(self) -> Mapping[int, S]:
        """Return the sources in their order, by what tells them apart."""
        return self._sources

    def follow(self, sources: Sequence[S]) -> tuple[list[int], list[int]]:
        """Take `sources` in; return the keys of those that went, and of those that came."""
        now = dict(zip(map(id, sources), sources, strict=True))
        went = list(self._sources.keys() - now.keys())
        new = now.keys() - self._sources.keys()
        came = [key for key in now if key in new] if len(new) > 1 else list(new)
        self._sources = now
        return went, came
