"""Generations of what was deleted, in memory: as many as the store keeps, the newest."""

from __future__ import annotations

TOMBSTONES_MAX = 20_000


class Graves(dict[str, int]):
    """Generation by uid; the one that was deleted longest ago makes room."""

    def __setitem__(self, uid: str, generation: int) -> None:
        """Bury, or bury again: as the newest."""
        self.pop(uid, None)
        super().__setitem__(uid, generation)
        while len(self) > TOMBSTONES_MAX:
            del self[next(iter(self))]
