"""Open, close, grow and delete volumes: records first, then files, then records again.

The caller holds the volume's lock. `finish` at start completes or takes back whatever a kill cut
short. A generation older than the record, or than a deletion, is refused; an equal one changes
nothing.
"""

from __future__ import annotations

import anyio
import anyio.to_thread
import msgspec

from chv.common import logs
from chv.common.clock import timestamp
from chv.common.errors import (
    ChvError,
    DataLoss,
    FailedPrecondition,
    InUse,
    NotFound,
)
from chv.common.failpoint import failpoint
from chv.common.wire.stord import (
    Limits,
    OpenVolume,
    VolumeBackend,
    VolumeInfo,
)
from chv.stord import limits as limit_rules
from chv.stord.backends.base import Backend
from chv.stord.clones import refuse_used
from chv.stord.enlarge import enlarge_overlay, refuse_beyond_device
from chv.stord.filler import Filler
from chv.stord.filling import kind_of
from chv.stord.graveyard import Graveyard
from chv.stord.growth import DETACHED, NEXT_START, ONLINE
from chv.stord.looks import Looks
from chv.stord.records import Volume, VolumeState
from chv.stord.rekey import Rekeys
from chv.stord.sources import Sources
from chv.stord.tuning import Tuning, same_limits
from chv.stord.volume_info import Describer
from chv.stord.volume_rules import check_change, check_generation, key_of, unusable
from chv.stord.work import Parts

log = logs.get(__name__)
UNDO_TIMEOUT_S = 10.0


class Volumes:
    """All volumes of this node."""

    def __init__(self, parts: Parts, tuning: Tuning, filler: Filler) -> None:
        self._parts = parts
        self._records = records = parts.records
        self._disks = disks = parts.disks
        self._clock = clock = parts.clock
        self._tuning = tuning
        self._filler = filler
        self._graveyard = Graveyard(records, clock)
        self._sources = Sources(records)
        self._describer = Describer(records, disks, parts.levels)
        self.rekeys: Rekeys | None = None  # set once, before the first call

    @property
    def looks(self) -> Looks | None:
        """What was seen last; set once, before the first call."""
        return self._describer.looks

    @looks.setter
    def looks(self, looks: Looks) -> None:
        self._describer.looks = looks

    def _backend(self, spec: VolumeBackend) -> Backend:
        return self._disks.backend(spec)

    # --- open
    async def open(self, request: OpenVolume) -> VolumeInfo:
        """Make the volume what the spec says and return what it is."""
        volume_id, generation = request.volume_id, request.meta.generation
        self._graveyard.refuse_late(volume_id, generation)
        row = await self._finished(volume_id)
        if row is None:
            self._refuse_busy_parent(request.backend)
            spec = await self._checked(request.backend)
            return await self.info(volume_id, created=await self._create(request, spec))
        check_generation(row, generation)
        if row.state is VolumeState.CREATING:
            row = await self._aged(row, generation)
            await self._filler.begin(row, request.meta.operation_id)
        elif generation > row.generation:
            await self._change(row, request)
        elif row.state is VolumeState.CLOSED:
            await self._put(row, state=VolumeState.OPEN)
        await self._rotate(volume_id)
        return await self._settled(volume_id)

    async def _aged(self, row: Volume, generation: int) -> Volume:
        """Take a newer generation of a volume that is still being filled as it was asked for."""
        if generation > row.generation:
            await self._put(row, generation=generation)
        return self._records.volumes[row.volume_id]

    async def _settled(self, volume_id: str) -> VolumeInfo:
        """Describe the volume; limits that an earlier call could not set are set now."""
        live = await self._tuning.limits(volume_id)
        if live is not None and not same_limits(live, self.require(volume_id).backend.limits):
            await self._tuning.set_limits(volume_id)
            live = await self._tuning.limits(volume_id)
        return await self.info(volume_id, live=live)

    async def _checked(self, spec: VolumeBackend, *, sources: bool = True) -> VolumeBackend:
        """Return the spec with its sources resolved, or raise; nothing was made yet.

        A volume that is there needs its sources no more, or they are kept for it.
        """
        limit_rules.check(spec.limits)
        if sources:
            self._sources.check(spec)
            await self._filler.check_source(spec)
        self._filler.check(spec)
        return await self._backend(spec).check(spec)

    async def _finished(self, volume_id: str) -> Volume | None:
        """Return the record after completing whatever an earlier call did not."""
        row = self._records.volumes.get(volume_id)
        if row is None or row.state in (VolumeState.OPEN, VolumeState.CLOSED):
            return row
        await self._finish_one(row)
        return self._records.volumes.get(volume_id)

    async def _create(self, request: OpenVolume, spec: VolumeBackend) -> bool:
        volume_id, generation = request.volume_id, request.meta.generation
        row = Volume(
            volume_id=volume_id, generation=generation, backend=spec, state=VolumeState.CREATING
        )
        await self._records.put_volume(row)
        await failpoint("stord.open.after_intent")
        if kind_of(spec) is not None:
            await self._filler.begin(row, request.meta.operation_id)
            return True
        try:
            created = await self._backend(spec).create(volume_id, spec)
        except ChvError:
            with anyio.move_on_after(UNDO_TIMEOUT_S, shield=True):
                await self._records.drop_volume(volume_id)
            raise
        if not created:
            await self._accept(volume_id, spec)
        await failpoint("stord.open.after_create")
        await self._put(row, state=VolumeState.OPEN)
        await failpoint("stord.open.after_record")
        log.info("volume_opened", volume_id=volume_id, generation=generation, created=created)
        return created

    async def _accept(self, volume_id: str, spec: VolumeBackend) -> None:
        """Take a volume that was found without a record."""
        found = await self._disks.inspect(volume_id)
        if found.state != "open":
            raise DataLoss(f"the volume is {found.state}: {found.problem}", resource=volume_id)
        if found.size_bytes < spec.size_bytes:
            await self._backend(spec).grow(volume_id, spec)

    # --- change
    async def _change(self, row: Volume, request: OpenVolume) -> None:
        spec = await self._checked(request.backend, sources=False)
        check_change(row, spec)
        if self.rekeys is not None and spec.encryption != row.backend.encryption:
            await self.rekeys.finish(row.volume_id)
            row = self._records.volumes[row.volume_id]
            await self.rekeys.check(row, key_of(spec))
        larger = spec.size_bytes > row.backend.size_bytes
        if larger:
            await refuse_beyond_device(self._backend(spec), row.volume_id, spec)
            self._filler.refuse_busy(row.volume_id)
        made = row.made_size_bytes
        if larger and not made:
            made = row.backend.size_bytes
        changed = msgspec.structs.replace(
            row,
            generation=request.meta.generation,
            backend=spec,
            state=VolumeState.GROWING if larger else VolumeState.OPEN,
            made_size_bytes=made,
            old_key=row.key if key_of(spec) != row.key else row.old_key,
        )
        await self._records.put_volume(changed)
        await self._rotate(row.volume_id)
        if larger:
            await failpoint("stord.grow.after_intent")
            await self._grow(changed, request)
        if spec.limits != row.backend.limits:
            await failpoint("stord.limits.after_intent")
            await self._tuning.set_limits(row.volume_id)

    async def _rotate(self, volume_id: str) -> None:
        """Bring a rotation of the key to its end, this one or one that was cut short."""
        if self.rekeys is not None and self._records.volumes[volume_id].old_key:
            await failpoint("stord.rekey.after_intent")
            await self.rekeys.finish(volume_id)

    async def _grow(self, row: Volume, request: OpenVolume) -> None:
        if self._records.holder(row.volume_id) is None:
            await self._grow_detached(row, DETACHED)
        elif await self._tuning.grow(row.volume_id, request.client):
            # What describes the volume beside its files is written when it is attached next.
            await self._put(row, state=VolumeState.OPEN, applied=ONLINE)
            log.info("volume_grown", volume_id=row.volume_id, applied=ONLINE)
        else:
            await self._put(row, state=VolumeState.OPEN, applied=NEXT_START)
            log.info("growth_pending", volume_id=row.volume_id, size_bytes=row.backend.size_bytes)

    async def _grow_detached(self, row: Volume, applied: str) -> None:
        await self._enlarge(row)
        await failpoint("stord.grow.after_resize")
        await self._record_grown(row, applied)

    async def _record_grown(self, row: Volume, applied: str) -> None:
        await self._put(row, state=VolumeState.OPEN, made_size_bytes=0, applied=applied)
        log.info("volume_grown", volume_id=row.volume_id, size_bytes=row.backend.size_bytes)

    async def _enlarge(self, row: Volume) -> None:
        if len(row.layers) > 1:
            await enlarge_overlay(self._parts, row)
        else:
            await self._backend(row.backend).grow(row.volume_id, row.backend)

    async def grow_pending(self, volume_id: str) -> None:
        """Apply a growth that waited for the volume to be free; what fails goes on waiting."""
        row = self.require(volume_id)
        if not row.made_size_bytes or self._records.holder(volume_id) is not None:
            return
        await self._put(row, state=VolumeState.GROWING)
        await failpoint("stord.grow.before_attach")
        try:
            await self._grow_detached(self._records.volumes[volume_id], row.applied or NEXT_START)
        except ChvError as error:
            log.warning("growth_failed", volume_id=volume_id, error=error, next="at the next start")
            await self._put(row, state=VolumeState.OPEN)
            await self.note_error(volume_id, error)

    # --- close and delete
    async def close(self, volume_id: str, generation: int) -> None:
        """Refuse attaches until it is opened again; the data stays."""
        row = self._records.volumes.get(volume_id)
        if row is None:
            return
        check_generation(row, generation)
        self._refuse_held(volume_id)
        if row.state is VolumeState.OPEN:
            await self._put(row, state=VolumeState.CLOSED)

    async def delete(self, volume_id: str, generation: int) -> None:
        """Remove the volume, its files and its record; fine when there is none."""
        row = self._records.volumes.get(volume_id)
        if row is None:
            await self._delete_unrecorded(volume_id, generation)
            return
        check_generation(row, generation)
        self._refuse_held(volume_id)
        refuse_used(self._records, volume_id)
        await self._filler.abandon(row)
        await self._put(row, state=VolumeState.DELETING)
        await failpoint("stord.delete.after_intent")
        await self._backend(row.backend).delete(volume_id, row.backend)
        await failpoint("stord.delete.after_remove")
        await self._records.drop_volume(volume_id, self._graveyard.stone(volume_id, generation))
        await self._graveyard.tend()
        self._parts.errors.forget(volume_id)
        log.info("volume_deleted", volume_id=volume_id)

    async def _delete_unrecorded(self, volume_id: str, generation: int) -> None:
        """Remove what a store that was lost knew of."""
        spec = await anyio.to_thread.run_sync(self._disks.described, volume_id)
        if spec is not None:
            await self._backend(spec).delete(volume_id, spec)
        await self._records.drop_volume(volume_id, self._graveyard.stone(volume_id, generation))

    def _refuse_held(self, volume_id: str) -> None:
        held = self._records.holder(volume_id)
        if held is not None:
            raise InUse(
                f"volume {volume_id} is attached to VM {held.vm_id}",
                resource=volume_id,
                hint="detach it first",
            )

    def _refuse_busy_parent(self, spec: VolumeBackend) -> None:
        """Raise Conflict where a job is under way on the volume that this starts from."""
        if spec.snapshot is not None:
            self._filler.refuse_busy(spec.snapshot.volume_id)

    # --- after a kill
    async def finish(self) -> None:
        """Complete or take back what was cut short. One bad volume does not keep others away."""
        for row in list(self._records.volumes.values()):
            try:
                await self._finish_one(row)
            except (ChvError, OSError) as error:
                await self.note_error(row.volume_id, error)
                log.warning("volume_unfinished", volume_id=row.volume_id, error=error)
        await self._graveyard.tend()

    async def _finish_one(self, row: Volume) -> None:
        match row.state:
            case VolumeState.CREATING:
                await self._finish_creation(row)
            case VolumeState.GROWING:
                if self._records.holder(row.volume_id) is None:
                    await self._grow_detached(row, DETACHED)
                else:
                    await self._put(row, state=VolumeState.OPEN, applied=NEXT_START)
            case VolumeState.DELETING:
                await self.delete(row.volume_id, row.generation)
            case VolumeState.OPEN | VolumeState.CLOSED:
                return

    async def _finish_creation(self, row: Volume) -> None:
        if kind_of(row.backend) is not None:
            return  # a job has it, or will
        found = await self._disks.inspect(row.volume_id)
        if found.state == "missing":
            await self._backend(row.backend).delete(row.volume_id, row.backend)
            await self._records.drop_volume(row.volume_id)
        else:
            await self._put(row, state=VolumeState.OPEN)

    async def note_error(self, volume_id: str, error: Exception) -> None:
        """Keep the last error of a volume for its health."""
        row = self._records.volumes.get(volume_id)
        if row is not None:
            self._parts.errors.seen(volume_id)
            now = timestamp(self._clock.now())
            await self._put(row, last_error=str(error), last_error_at=now)

    # --- questions
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
        if found.state == "open":
            return
        error = unusable(row, found)
        await self.note_error(volume_id, error)
        raise error

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

    async def look(self, volume_id: str) -> VolumeInfo:
        """Return the volume as it is now, with the limits that its storage daemon reports."""
        return await self.info(volume_id, live=await self._tuning.limits(volume_id))

    async def info(
        self, volume_id: str, *, created: bool = False, live: Limits | None = None
    ) -> VolumeInfo:
        """Return the volume as it is on disk now."""
        return await self._describer.info(self.require(volume_id), created=created, live=live)

    async def listed(self) -> list[VolumeInfo]:
        """Return all volumes; those that only a slow server could tell of as seen last."""
        return await self._describer.listed()

    async def _put(self, row: Volume, **changes: object) -> None:
        current = self._records.volumes.get(row.volume_id, row)
        await self._records.put_volume(msgspec.structs.replace(current, **changes))
