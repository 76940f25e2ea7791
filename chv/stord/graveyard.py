"""What was deleted, so that a late call does not bring it back. Bounded in number and in age."""

from __future__ import annotations

from datetime import timedelta

from chv.common.clock import Clock, timestamp
from chv.common.errors import StaleGeneration
from chv.stord.records import Records, Tombstone

TOMBSTONES_MAX = 4096
AGE_MAX = timedelta(days=30)  # no call is under way for longer


class Graveyard:
    """The tombstones of this node."""

    def __init__(self, records: Records, clock: Clock) -> None:
        self._records = records
        self._clock = clock

    def stone(self, volume_id: str, generation: int) -> Tombstone:
        """Return the tombstone of a volume that is deleted now."""
        before = self._records.tombstones.get(volume_id)
        newest = max(generation, 0 if before is None else before.generation)
        return Tombstone(volume_id=volume_id, generation=newest, at=timestamp(self._clock.now()))

    def refuse_late(self, volume_id: str, generation: int) -> None:
        """Refuse a caller that speaks of a generation older than the deletion."""
        stone = self._records.tombstones.get(volume_id)
        if stone is not None and generation < stone.generation:
            raise StaleGeneration(
                f"the volume was deleted at generation {stone.generation}, {stone.at};"
                f" {generation} is older",
                resource=volume_id,
            )

    async def tend(self) -> None:
        """Forget the old ones, and the oldest of too many."""
        stones = sorted(self._records.tombstones.values(), key=lambda stone: stone.at)
        limit = timestamp(self._clock.now() - AGE_MAX)
        surplus = max(len(stones) - TOMBSTONES_MAX, 0)
        gone = [s.volume_id for i, s in enumerate(stones) if i < surplus or s.at < limit]
        if gone:
            await self._records.drop_tombstones(gone)
