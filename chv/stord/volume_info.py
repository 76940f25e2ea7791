"""What is told of a volume: its record, its files, and who has it. Reads only."""

from __future__ import annotations

import contextlib
from functools import partial

import anyio

from chv.common.errors import ChvError, FailedPrecondition, NotFound
from chv.common.wire.stord import (
    CloneMode,
    Limits,
    SnapshotInfo,
    SpaceLevel,
    VolumeClass,
    VolumeInfo,
)
from chv.stord.backends.base import Inspection, Space
from chv.stord.confinement import needs_network
from chv.stord.disks import Disks
from chv.stord.levels import Levels
from chv.stord.looks import Look, Looks
from chv.stord.records import Records, Snapshot, Volume, VolumeState

LOOKS_PARALLEL = 16
ON_SERVERS = (VolumeClass.NBD, VolumeClass.ISCSI, VolumeClass.RBD)


class Describer:
    """Describes volumes."""

    def __init__(self, records: Records, disks: Disks, levels: Levels) -> None:
        self._records = records
        self._disks = disks
        self._levels = levels
        self.looks: Looks | None = None  # set once, before the first call

    async def info(
        self, row: Volume, *, created: bool = False, live: Limits | None = None
    ) -> VolumeInfo:
        """Return the volume as it is on disk now. `live`: limits that were read back."""
        look = await self._look_at(row)
        if self.looks is not None:
            self.looks.remember(row.volume_id, look)
        return self._told(row, look, created=created, live=live)

    async def listed(self) -> list[VolumeInfo]:
        """Return all volumes; those that only a slow server could tell of as seen last."""
        if self.looks is not None:
            self.looks.keep(self._records.volumes)
        ids = sorted(self._records.volumes)
        found: dict[str, VolumeInfo] = {}
        limiter = anyio.CapacityLimiter(LOOKS_PARALLEL)

        async def describe(volume_id: str) -> None:
            async with limiter:
                row = self._records.volumes.get(volume_id)
                if row is not None:
                    found[volume_id] = await self._listed(row)

        async with anyio.create_task_group() as describing:
            for volume_id in ids:
                describing.start_soon(describe, volume_id)
        return [found[volume_id] for volume_id in ids if volume_id in found]

    async def _listed(self, row: Volume) -> VolumeInfo:
        if self.looks is None or not self._may_be_slow(row):
            return await self.info(row)
        return self._told(row, await self.looks.recent(row.volume_id, partial(self._look_at, row)))

    def _may_be_slow(self, row: Volume) -> bool:
        served = self._records.holders(row.volume_id)
        return row.backend.class_name in ON_SERVERS and not served

    async def _look_at(self, row: Volume) -> Look:
        found = await self._look(row)
        return Look(found=found, space=await self._space(row) if found.state == "open" else None)

    def _told(
        self, row: Volume, look: Look, *, created: bool = False, live: Limits | None = None
    ) -> VolumeInfo:
        found, space = look.found, look.space
        holders = self._records.holders(row.volume_id)
        held = self._records.holder(row.volume_id)
        job = self._records.job_of(row.volume_id)
        wanted = row.backend.size_bytes
        pending = row.made_size_bytes and found.size_bytes < wanted
        return VolumeInfo(
            volume_id=row.volume_id,
            generation=row.generation,
            format=row.backend.format,
            size_bytes=found.size_bytes,
            allocated_bytes=found.allocated_bytes,
            path=found.location,
            created=created,
            attached_to="" if held is None else held.vm_id,
            last_error=row.last_error or _problem(row, found),
            state=state_of(row, found),
            cache="direct" if found.direct else "page cache",
            class_name=row.backend.class_name,
            pool=row.backend.pool,
            readers=sorted(each.vm_id for each in holders if each is not held),
            pending_size_bytes=wanted if pending else 0,
            applied=row.applied,
            limits=row.backend.limits if live is None else live,
            limits_live=live is not None,
            encryption_key=row.key,
            snapshots=[self.snapshot(row, each) for each in row.snapshots],
            layers=len(row.layers),
            parent=parent_of(row),
            space=self._level(row, space),
            space_policy=row.backend.space_policy,
            free_bytes=0 if space is None else space.free_bytes,
            location=found.location,
            job="" if job is None else job.info.job_id,
            network=needs_network(self._records.volumes, row.volume_id),
            backend=row.backend,
            seen_s=look.age_s,
        )

    def snapshot(self, row: Volume, snapshot: Snapshot) -> SnapshotInfo:
        """Describe one snapshot. What it holds alone is known only where its layer is a file."""
        return SnapshotInfo(
            snapshot_id=snapshot.snapshot_id,
            volume_id=row.volume_id,
            created_at=snapshot.created_at,
            size_bytes=snapshot.size_bytes,
            used_by=self._records.clones(row.volume_id, snapshot.snapshot_id),
            deleting=snapshot.deleting,
        )

    async def _look(self, row: Volume) -> Inspection:
        """Inspect; a class whose module is gone is told as a problem of the volume."""
        try:
            return await self._disks.inspect(row.volume_id)
        except ChvError as error:
            location = row.backend.class_name.value
            return Inspection(location=location, state="broken", problem=error.message)

    def _level(self, row: Volume, space: Space | None) -> SpaceLevel:
        """Return the level as it was judged; as it is measured where nobody has judged yet."""
        judged = self._levels.get(row.volume_id)
        if judged is not SpaceLevel.UNKNOWN or space is None:
            return judged
        return space.level

    async def _space(self, row: Volume) -> Space | None:
        backend = self._disks.backend(row.backend)
        with contextlib.suppress(NotFound, FileNotFoundError, FailedPrecondition):
            return await backend.space(row.volume_id, row.backend)
        return None


def _problem(row: Volume, found: Inspection) -> str:
    """Return what is wrong with the files; of a volume that is being made, nothing is."""
    return "" if row.state is VolumeState.CREATING else found.problem


def state_of(row: Volume, found: Inspection) -> str:
    """Return the outward state: what is wrong with the files comes before what is recorded."""
    if row.state is VolumeState.CREATING:
        return VolumeState.CREATING.value
    if found.state == "open" and row.state is VolumeState.CLOSED:
        return VolumeState.CLOSED.value
    return found.state


def parent_of(row: Volume) -> str:
    """Return the volume that a linked clone rests on."""
    source = row.backend.snapshot
    return source.volume_id if source is not None and source.mode is CloneMode.LINKED else ""
