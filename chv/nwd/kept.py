"""What was made from records is kept as long as they are the same ones: a change makes one anew.

Records are never changed in place, so the very same object means the very same content. Bounded;
forgetting costs time only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

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
        """Return the same for many keys and their sources: a thousand, for every change of one."""
        known, found = self._values.get, []
        for key, sources in items:
            value = known(key)
            if value is not None and value[0] == sources:
                found.append(value[1])
            else:
                found.append(self.get(key, sources, make))
        return found
