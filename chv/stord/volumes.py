"""Open, close, grow and delete volumes: records first, then files, then records again.

The caller holds the volume's lock. `finish` at start completes or takes back whatever a kill cut
short. A generation older than the record is refused, an equal one changes nothing.
"""

from __future__ import annotations

import anyio
import msgspec

from chv.common import logs
from chv.common.clock import Clock, timestamp
from chv.common.errors import (
    ChvError,
    DataLoss,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    StaleGeneration,
)
from chv.common.failpoint import failpoint
from chv.common.wire.stord import VolumeBackend, VolumeInfo
from chv.stord.backends import disk_files
from chv.stord.backends.base import Backend
from chv.stord.disks import Disks
from chv.stord.records import Records, Volume, VolumeState

log = logs.get(__name__)
UNDO_TIMEOUT_S = 10.0


class Volumes:
    """All volumes of this node."""

    def __init__(self, records: Records, disks: Disks, clock: Clock) -> None:
        self._records = records
        self._disks = disks
        self._clock = clock

    def _backend(self, spec: VolumeBackend) -> Backend:
        return self._disks.backend(spec)

    async def open(self, volume_id: str, generation: int, spec: VolumeBackend) -> VolumeInfo:
        """Make the volume what the spec says and return what it is."""
        row = await self._finished(volume_id)
        if row is None:
            spec = await self._backend(spec).check(spec)
            return await self.info(
                volume_id, created=await self._create(volume_id, generation, spec)
            )
        check_generation(row, generation)
        if generation > row.generation:
            await self._change(row, generation, spec)
        elif row.state is VolumeState.CLOSED:
            await self._put(row, state=VolumeState.OPEN)
        return await self.info(volume_id)

    async def _finished(self, volume_id: str) -> Volume | None:
        """Return the record after completing whatever an earlier call did not."""
        row = self._records.volumes.get(volume_id)
        if row is None or row.state in (VolumeState.OPEN, VolumeState.CLOSED):
            return row
        await self._finish_one(row)
        return self._records.volumes.get(volume_id)

    async def _create(self, volume_id: str, generation: int, spec: VolumeBackend) -> bool:
        row = Volume(
            volume_id=volume_id, generation=generation, backend=spec, state=VolumeState.CREATING
        )
        await self._records.put_volume(row)
        await failpoint("stord.open.after_intent")
        try:
            created = await self._backend(spec).create(volume_id, spec)
        except ChvError:
            with anyio.move_on_after(UNDO_TIMEOUT_S, shield=True):
                await self._records.drop_volume(volume_id)
            raise
        if not created:  # found without a record
            found = await self._disks.inspect(volume_id)
            if found.state != "open":
                raise DataLoss(f"the volume is {found.state}: {found.problem}", resource=volume_id)
            if found.size_bytes < spec.size_bytes:
                await self._backend(spec).grow(volume_id, spec)
        await failpoint("stord.open.after_create")
        await self._put(row, state=VolumeState.OPEN)
        await failpoint("stord.open.after_record")
        log.info("volume_opened", volume_id=volume_id, generation=generation, created=created)
        return created

    async def _change(self, row: Volume, generation: int, spec: VolumeBackend) -> None:
        spec = await self._backend(spec).check(spec)
        _check_change(row, spec)
        if spec.size_bytes == row.backend.size_bytes:
            await self._put(row, generation=generation, state=VolumeState.OPEN)
            return
        held = self._records.holder(row.volume_id)
        if held is not None:
            raise FailedPrecondition(
                f"the volume is attached to VM {held.vm_id} and grows only when it is not",
                resource=row.volume_id,
                hint="stop the VM, then open the volume again",
            )
        await self._put(row, generation=generation, backend=spec, state=VolumeState.GROWING)
        await failpoint("stord.grow.after_intent")
        await self._grow(self._records.volumes[row.volume_id])

    async def _grow(self, row: Volume) -> None:
        await self._backend(row.backend).grow(row.volume_id, row.backend)
        await failpoint("stord.grow.after_resize")
        await self._put(row, state=VolumeState.OPEN)
        log.info("volume_grown", volume_id=row.volume_id, size_bytes=row.backend.size_bytes)

    async def close(self, volume_id: str, generation: int) -> None:
        """Refuse attaches until it is opened again; the data stays."""
        row = self._records.volumes.get(volume_id)
        if row is None:
            return
        check_generation(row, generation)
        self._refuse_held(volume_id)
        await self._put(row, state=VolumeState.CLOSED)

    async def delete(self, volume_id: str, generation: int) -> None:
        """Remove the volume, its files and its record; fine when there is none."""
        row = self._records.volumes.get(volume_id)
        if row is not None:
            check_generation(row, generation)
            self._refuse_held(volume_id)
            await self._put(row, state=VolumeState.DELETING)
            await failpoint("stord.delete.after_intent")
            await self._backend(row.backend).delete(volume_id, row.backend)
        await failpoint("stord.delete.after_remove")
        await self._records.drop_volume(volume_id)
        log.info("volume_deleted", volume_id=volume_id)

    def _refuse_held(self, volume_id: str) -> None:
        held = self._records.holder(volume_id)
        if held is not None:
            raise InUse(
                f"volume {volume_id} is attached to VM {held.vm_id}",
                resource=volume_id,
                hint="detach it first",
            )

    async def finish(self) -> None:
        """Complete or take back what was cut short. One bad volume does not keep others away."""
        for row in list(self._records.volumes.values()):
            try:
                await self._finish_one(row)
            except (ChvError, OSError) as error:
                await self.note_error(row.volume_id, error)
                log.warning("volume_unfinished", volume_id=row.volume_id, error=error)

    async def _finish_one(self, row: Volume) -> None:
        match row.state:
            case VolumeState.CREATING:
                found = await self._disks.inspect(row.volume_id)
                if found.state == "missing":
                    await self._records.drop_volume(row.volume_id)
                else:
                    await self._put(row, state=VolumeState.OPEN)
            case VolumeState.GROWING:
                await self._grow(row)
            case VolumeState.DELETING:
                await self.delete(row.volume_id, row.generation)
            case VolumeState.OPEN | VolumeState.CLOSED:
                return

    async def note_error(self, volume_id: str, error: Exception) -> None:
        """Keep the last error of a volume for its health."""
        row = self._records.volumes.get(volume_id)
        if row is not None:
            now = timestamp(self._clock.now())
            await self._put(row, last_error=str(error), last_error_at=now)

    async def servable(self, volume_id: str, generation: int) -> None:
        """Raise unless the volume is open at this generation and in order on disk."""
        row = self.require(volume_id)
        check_generation(row, generation)
        if generation > row.generation or row.state is not VolumeState.OPEN:
            raise FailedPrecondition(
                f"the volume is {row.state.value} at generation {row.generation}",
                resource=volume_id,
                hint=f"OpenVolume with generation {generation} first",
            )
        found = await self._disks.inspect(volume_id)
        if found.state != "open":
            raise FailedPrecondition(
                f"the volume is {found.state}: {found.problem}", resource=volume_id
            )

    def refuse_stale(self, volume_id: str, generation: int) -> None:
        """Refuse an older generation than the recorded one; no record, nothing to refuse."""
        row = self._records.volumes.get(volume_id)
        if row is not None:
            check_generation(row, generation)

    def require(self, volume_id: str) -> Volume:
        """Return the record or raise NotFound."""
        row = self._records.volumes.get(volume_id)
        if row is None:
            raise NotFound(
                f"there is no volume {volume_id}", resource=volume_id, hint="OpenVolume first"
            )
        return row

    async def info(self, volume_id: str, *, created: bool = False) -> VolumeInfo:
        """Return the volume as it is on disk now."""
        row = self.require(volume_id)
        found = await self._disks.inspect(volume_id)
        held = self._records.holder(volume_id)
        closed = found.state == "open" and row.state is VolumeState.CLOSED
        return VolumeInfo(
            volume_id=volume_id,
            generation=row.generation,
            format=row.backend.format,
            size_bytes=found.size_bytes,
            allocated_bytes=found.allocated_bytes,
            path=found.location,
            created=created,
            attached_to="" if held is None else held.vm_id,
            last_error=row.last_error or found.problem,
            state="closed" if closed else found.state,
            cache="direct" if found.direct else "page cache",
            backend=row.backend,
        )

    async def _put(self, row: Volume, **changes: object) -> None:
        current = self._records.volumes.get(row.volume_id, row)
        await self._records.put_volume(msgspec.structs.replace(current, **changes))


def check_generation(row: Volume, generation: int) -> None:
    """Refuse a caller that has not seen the newest generation."""
    if generation < row.generation:
        raise StaleGeneration(
            f"generation {generation} of the volume is older than {row.generation}",
            resource=row.volume_id,
        )


def _check_change(row: Volume, spec: VolumeBackend) -> None:
    there = row.backend
    if disk_files.identity(spec) != disk_files.identity(there):
        raise InvalidArgument(
            f"the volume is {there.format.value} and keeps its class, place, format and source",
            resource=row.volume_id,
            field="backend",
            hint="make a new volume",
        )
    if spec.size_bytes < there.size_bytes:
        raise InvalidArgument(
            f"{spec.size_bytes} bytes are less than the {there.size_bytes} that the volume has",
            resource=row.volume_id,
            field="backend.size_bytes",
            hint="a volume never becomes smaller",
        )
