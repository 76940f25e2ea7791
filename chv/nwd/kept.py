"""What was made from records is kept as long as they are the same ones: a change makes one anew.

Records are never changed in place, so the very same object means the very same content. Bounded;
forgetting costs time only.
"""

from __future__ import annotations

from collections.abc import Callable
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
