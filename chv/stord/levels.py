"""What stord knows of each volume for as long as it runs: space level, errors seen.

Memory alone; nothing here can fail.
"""

from __future__ import annotations

from collections import Counter

from chv.common.wire.stord import SpaceLevel


class Levels:
    """What callers are shown; the space monitor alone changes it."""

    def __init__(self) -> None:
        self._levels: dict[str, SpaceLevel] = {}

    def get(self, volume_id: str) -> SpaceLevel:
        """Return the level of a volume, UNKNOWN before the first look."""
        return self._levels.get(volume_id, SpaceLevel.UNKNOWN)

    def change(self, levels: dict[str, SpaceLevel]) -> list[tuple[str, SpaceLevel, SpaceLevel]]:
        """Take the levels of all volumes; return what changed: volume, before, now."""
        before, self._levels = self._levels, levels
        pairs = ((item, before.get(item, SpaceLevel.UNKNOWN), now) for item, now in levels.items())
        return [(item, old, new) for item, old, new in pairs if old is not new]


class Errors:
    """How many errors stord has seen per volume since it started."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def seen(self, volume_id: str) -> None:
        """Count one."""
        self._counts[volume_id] += 1

    def forget(self, volume_id: str) -> None:
        """The volume is gone."""
        self._counts.pop(volume_id, None)

    def of(self, volume_id: str) -> int:
        """Return the count of a volume."""
        return self._counts[volume_id]
