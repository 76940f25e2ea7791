"""How much is left where the bytes of volumes go: measured each second, judged, told, and refused.

A place is a file system, a volume group (or thin pool), or an RBD pool; a device or a remote
export that is ours whole has none. A level that was reached is left only when there is clearly
more again, so that a disk at the threshold does not flap. Volumes promise more than there is on
purpose (thin provisioning): what all of a place promise together is counted beside it.

A place that cannot be measured keeps its last level for the time being; why is logged once.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from chv.common import logs
from chv.common.clock import timestamp
from chv.common.errors import ChvError, ResourceExhausted
from chv.common.wire.stord import (
    PlaceSpace,
    SpaceLevel,
    StorageEvent,
    VolumeBackend,
    VolumeClass,
)
from chv.stord.backends.base import PERCENT, Space, space_of
from chv.stord.events import Events
from chv.stord.records import Volume, VolumeState
from chv.stord.work import Parts

log = logs.get(__name__)
LOOK_S = 1.0
REMOTE_LOOK_S = 15.0  # asking LVM or Ceph starts a process
EASE_PERCENT = 2  # so much more must be free before a level is left
EASE_FACTOR = 1.25
ORDER = (SpaceLevel.UNKNOWN, SpaceLevel.OK, SpaceLevel.WARN, SpaceLevel.CRITICAL)
Measure = Callable[[], Awaitable[Space | None]]


@dataclass
class Place:
    """One place, and what is there of volumes."""

    key: str
    location: str
    measure: Measure
    every_s: float
    volume_ids: set[str] = field(default_factory=set)
    promised_bytes: int = 0


@dataclass
class _Seen:
    """What was measured last."""

    space: Space
    at: float


class SpaceMonitor:
    """Looks at every place of this node."""

    def __init__(self, parts: Parts, events: Events) -> None:
        self._records = parts.records
        self._disks = parts.disks
        self._storage = parts.storage
        self._events = events
        self._clock = parts.clock
        self._seen: dict[str, _Seen] = {}
        self._silent: set[str] = set()  # places that could not be measured
        self._levels = parts.levels

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            try:
                await self.look()
            except (ChvError, OSError) as error:
                log.warning("space_unknown", error=error, next="tried again")
            await self._clock.sleep(LOOK_S)

    async def look(self) -> None:
        """Measure what is due, judge every volume, tell what changed."""
        found = await anyio.to_thread.run_sync(self._places)
        async with anyio.create_task_group() as measuring:
            for place in found:
                measuring.start_soon(self._measure, place)
        for key in set(self._seen) - {place.key for place in found}:
            del self._seen[key]
        for volume_id, before, now in self._levels.change(self._judged(found)):
            self._tell(volume_id, before, now)

    def places(self) -> list[PlaceSpace]:
        """Return every place with what it has and what its volumes promise. Blocks."""
        return [
            PlaceSpace(
                location=place.location,
                total_bytes=seen.space.total_bytes,
                free_bytes=seen.space.free_bytes,
                promised_bytes=place.promised_bytes,
                volumes=len(place.volume_ids),
                level=seen.space.level,
            )
            for place in self._places()
            if (seen := self._seen.get(place.key)) is not None
        ]

    async def admit(self, volume_id: str, spec: VolumeBackend) -> None:
        """Refuse a new or larger volume where the space is critical already."""
        row = self._records.volumes.get(volume_id)
        if row is not None and spec.size_bytes <= row.backend.size_bytes:
            return
        wanted = Volume(volume_id=volume_id, generation=1, backend=spec, state=VolumeState.OPEN)
        for place in await anyio.to_thread.run_sync(lambda: list(self._of(wanted))):
            space = await place.measure()
            if space is None or space.level is not SpaceLevel.CRITICAL:
                continue
            more_bytes = spec.size_bytes - (0 if row is None else row.backend.size_bytes)
            raise ResourceExhausted(
                f"{more_bytes} bytes more are asked for, and {place.location} has only"
                f" {space.free_bytes} of {space.total_bytes} bytes free;"
                f" {self._floor_bytes(space)} must stay free",
                resource=volume_id,
                field="backend.size_bytes",
                hint="free space there, or choose another pool",
            )

    def _floor_bytes(self, space: Space) -> int:
        share = space.total_bytes * (PERCENT - self._storage.space_critical_percent) // PERCENT
        return max(share, self._storage.space_critical_bytes)

    # --- places
    def _places(self) -> list[Place]:
        """Return the places of all volumes with what is promised there. Blocks."""
        found: dict[str, Place] = {}
        for row in self._records.volumes.values():
            for place in self._of(row):
                known = found.setdefault(place.key, place)
                known.volume_ids.add(row.volume_id)
                known.promised_bytes += row.backend.size_bytes
        return list(found.values())

    def _of(self, row: Volume) -> Iterator[Place]:
        """Yield where the volume's base is, and where its overlays are if that is elsewhere."""
        spec = row.backend
        backend = self._disks.backend(spec)
        directory = backend.directory(row.volume_id, spec).parent
        if spec.class_name is VolumeClass.FILE:
            yield from self._file_system(directory)
            return
        if key := _remote_key(spec):
            yield Place(key, key, lambda: backend.space(row.volume_id, spec), REMOTE_LOOK_S)
        if len(row.layers) > 1:
            yield from self._file_system(directory)

    def _file_system(self, directory: Path) -> Iterator[Place]:
        there = next((each for each in (directory, *directory.parents) if each.exists()), None)
        if there is not None:
            key = f"fs:{there.stat().st_dev}"
            yield Place(key, str(there), lambda: self._statvfs(there), 0.0)

    async def _statvfs(self, directory: Path) -> Space | None:
        status = await anyio.to_thread.run_sync(os.statvfs, directory)
        block_bytes = status.f_frsize
        # As df does: what is reserved for root counts as used.
        usable = (status.f_blocks - status.f_bfree + status.f_bavail) * block_bytes
        return space_of(status.f_bavail * block_bytes, usable, self._storage)

    async def _measure(self, place: Place) -> None:
        seen, now = self._seen.get(place.key), self._clock.monotonic()
        if seen is not None and now - seen.at < place.every_s:
            return
        try:
            space = await place.measure()
        except (ChvError, OSError) as error:
            if place.key not in self._silent:
                log.warning("space_unknown", place=place.location, error=error)
            self._silent.add(place.key)
            return
        self._silent.discard(place.key)
        if space is not None:
            level = space.level if seen is None else self._eased(space, seen.space.level)
            self._seen[place.key] = _Seen(msgspec.structs.replace(space, level=level), now)

    def _eased(self, space: Space, before: SpaceLevel) -> SpaceLevel:
        """Return the level now: worse at once, better only when there is clearly more."""
        if ORDER.index(space.level) >= ORDER.index(before):
            return space.level
        storage = self._storage
        strict = msgspec.structs.replace(
            storage,
            space_warn_percent=max(1, storage.space_warn_percent - EASE_PERCENT),
            space_critical_percent=max(1, storage.space_critical_percent - EASE_PERCENT),
            space_critical_bytes=int(storage.space_critical_bytes * EASE_FACTOR),
        )
        strictly = space_of(space.free_bytes, space.total_bytes, strict).level
        return min(before, strictly, key=ORDER.index)

    # --- volumes
    def _judged(self, places: list[Place]) -> dict[str, SpaceLevel]:
        levels: dict[str, SpaceLevel] = {}
        for place in places:
            seen = self._seen.get(place.key)
            if seen is None:
                continue
            for volume_id in place.volume_ids:
                known = levels.get(volume_id, SpaceLevel.UNKNOWN)
                levels[volume_id] = max(known, seen.space.level, key=ORDER.index)
        return levels

    def _tell(self, volume_id: str, before: SpaceLevel, now: SpaceLevel) -> None:
        if before is SpaceLevel.UNKNOWN and now is SpaceLevel.OK:
            return
        holder = self._records.holder(volume_id)
        vm_id = "" if holder is None else holder.vm_id
        tell = log.info if now is SpaceLevel.OK else log.warning
        tell("space", volume_id=volume_id, before=before.value, now=now.value)
        self._events.publish(
            StorageEvent(
                kind="space",
                vm_id=vm_id,
                volume_id=volume_id,
                space=now,
                message=f"space is {now.value} where the volume is, it was {before.value}",
                at=timestamp(self._clock.now()),
            )
        )


def _remote_key(spec: VolumeBackend) -> str:
    if spec.lvm is not None:
        return f"lvm:{spec.lvm.volume_group}/{spec.lvm.thin_pool}".rstrip("/")
    if spec.rbd is not None:
        return f"rbd:{spec.rbd.pool}"
    return ""
