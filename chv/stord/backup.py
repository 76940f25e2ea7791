"""Backups: of what a guest writes meanwhile, of what is detached, whole or only what changed.

A job, of one volume or of several as they were in one instant. Each is read in its own storage
daemon (`bench`), the target is opened in one of ours, under the tools uid, so a VM's storage
daemon never gets at a directory of backups. Copied first, then kept, then listed, recorded last:
from the first that is listed on, a daemon that finds it goes on with all of them; what is cut
short before that is taken back and made again, of a later instant. Errors: as of `backup_piece`;
InvalidArgument and FailedPrecondition where volumes do not go together.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import anyio
import anyio.to_thread
import msgspec

from chv.common.clock import timestamp
from chv.common.errors import ChvError, FailedPrecondition, InvalidArgument, NotFound
from chv.common.failpoint import failpoint
from chv.common.wire.stord import BackupPart, BackupVm, BackupVolume, JobInfo, JobKind
from chv.stord import backup_target, bitmaps, fleece
from chv.stord.backup_piece import Piece
from chv.stord.backup_target import Plan
from chv.stord.bench import Benches, Followed, follow_all
from chv.stord.jobs import JobControl, Jobs
from chv.stord.locks import KeyedLocks
from chv.stord.work import Parts

CLEAN_TIMEOUT_S = 30.0
Request = BackupVolume | BackupVm


class Backups:
    """Backups of all volumes. `locks` are the volumes' own."""

    def __init__(self, parts: Parts, jobs: Jobs, locks: KeyedLocks, benches: Benches) -> None:
        self._parts = parts
        self._records = parts.records
        self._jobs = jobs
        self._locks = locks
        self._benches = benches

    @asynccontextmanager
    async def holding(self, volume_ids: Sequence[str]) -> AsyncIterator[None]:
        """Hold the locks of several volumes, in an order that all have in common."""
        async with AsyncExitStack() as stack:
            for volume_id in sorted(set(volume_ids)):
                await stack.enter_async_context(self._locks.hold(volume_id))
            yield

    # --- the call
    async def begin(self, request: Request) -> JobInfo:
        """Check what can be checked at once, then begin the job; the volumes' locks are held."""
        job_id = request.meta.operation_id
        if job_id not in self._records.jobs:
            for piece in await self._pieces(request, job_id):
                piece.check()
        volume_ids = [part.volume_id for part in parts_of(request)]
        return await self._jobs.start_on(volume_ids, JobKind.BACKUP, job_id, request, self.run)

    async def _pieces(self, request: Request, job_id: str) -> list[Piece]:
        if isinstance(request, BackupVm):
            _refuse_twice(request)
            self._refuse_apart(request)
        created_at = timestamp(self._parts.clock.now())
        pieces = []
        for part in parts_of(request):
            row = self._records.volumes.get(part.volume_id)
            if row is None:
                raise NotFound(f"there is no volume {part.volume_id}", resource=part.volume_id)
            plan = Plan(
                row=row,
                bitmap=bitmaps.bitmap_name(job_id),
                incremental=request.incremental,
                created_at=created_at,
            )
            find = partial(backup_target.find, part.target, row, self._parts)
            pieces.append(Piece(self._parts, plan, await anyio.to_thread.run_sync(find)))
        return pieces

    def _refuse_apart(self, request: BackupVm) -> None:
        """Refuse volumes that do not stop in one instant: of no other VM, nor some of none."""
        held = [self._records.holder(part.volume_id) for part in request.volumes]
        holders = {None if each is None else each.vm_id for each in held}
        if holders in ({None}, {request.vm_id}):
            return
        for part, holder in zip(request.volumes, held, strict=True):
            if holder is None or holder.vm_id != request.vm_id:
                where = "to nothing" if holder is None else f"to VM {holder.vm_id}"
                raise FailedPrecondition(
                    f"volume {part.volume_id} is attached {where}, others are not",
                    resource=part.volume_id,
                    hint="wait until the VM has all its disks, or has ended",
                )

    # --- the job
    async def run(self, control: JobControl) -> dict[str, str]:
        """Make the backup, or find that it was made."""
        request = _request(control)
        pieces = await self._pieces(request, control.job_id)
        # `done` gives a target the number that it has.
        made = [piece.target.done(piece.plan) or piece.recorded for piece in pieces]
        if any(made):
            return await self._finish(pieces)
        for piece in pieces:
            piece.check()
            await piece.remove()
        try:
            async with AsyncExitStack() as stack:
                for piece in pieces:
                    await piece.open(self._benches, stack)
                return await self._make(control, pieces, request.bps_max // len(pieces))
        finally:
            with anyio.move_on_after(CLEAN_TIMEOUT_S, shield=True):
                for piece in pieces:
                    await piece.remove()

    async def _finish(self, pieces: list[Piece]) -> dict[str, str]:
        """Go on with a backup that was whole when its daemon was killed."""
        for piece in pieces:
            if piece.recorded:
                piece.target.sequence = piece.row.backup_sequence
            else:
                await piece.target.enter(piece.plan)
        await self._record(pieces)
        for piece in pieces:
            await piece.remove()
            await piece.clean_finished(self._benches)
        return await _told(pieces)

    async def _make(self, control: JobControl, pieces: list[Piece], bps_max: int) -> dict[str, str]:
        try:
            async with AsyncExitStack() as servers:
                for piece in pieces:
                    await piece.make(self._benches, servers)
                await failpoint("stord.backup.after_target")
                await self._copy(control, pieces, bps_max)
            await control.progress(control.total_bytes, control.total_bytes, "checksum")
            await self._keep(pieces)
        except BaseException as error:
            with anyio.move_on_after(CLEAN_TIMEOUT_S, shield=True):
                for piece in pieces:
                    await piece.try_to_clean(piece.row.backup_bitmap, str(error))
            raise
        for piece in pieces:
            await piece.clean(piece.plan.bitmap)
        return await _told(pieces)

    async def _copy(self, control: JobControl, pieces: list[Piece], bps_max: int) -> None:
        """Copy from one instant on; after an error the caller cleans up."""
        # Detached volumes have a storage daemon each, and stand still anyway.
        together = [pieces] if pieces[0].bench.vm_id else [[piece] for piece in pieces]
        for some in together:
            async with some[0].bench.monitor() as monitor:
                for piece in some:
                    await piece.connect(monitor)
                # A write between the new bitmaps and the instant is in both backups, which
                # costs a block in the next one.
                writable = [piece for piece in some if not piece.bench.read_only]
                actions = [bitmaps.begin_action(each.row, each.plan.bitmap) for each in writable]
                if actions:
                    await monitor.call("transaction", {"actions": actions})
                fleeced = [piece.row for piece in some if piece.fleeced]
                if fleeced:
                    await fleece.insert(monitor, fleeced)
                for piece in some:
                    await piece.start(monitor, bps_max)
        await failpoint("stord.backup.after_start")
        followed = [
            Followed(
                bench=piece.bench,
                name=fleece.job(piece.row.volume_id),
                volume_id=piece.row.volume_id,
            )
            for piece in pieces
        ]
        await follow_all(followed, control)
        await failpoint("stord.backup.after_copy")
        # The targets are closed before their servers end, or they would not be whole.
        for piece in pieces:
            await piece.close()

    async def _keep(self, pieces: list[Piece]) -> None:
        """Keep all, list all, record all; a failure before the last is listed leaves none listed.

        From the first that is listed on a stopping daemon waits: the next one would go on.
        """
        for piece in pieces:
            await piece.target.keep(piece.plan, piece.size_bytes)
        with anyio.CancelScope(shield=True):
            failure: ChvError | OSError | None = None
            try:
                for piece in pieces:
                    await piece.target.enter(piece.plan)
                    await failpoint("stord.backup.after_manifest")
            except (ChvError, OSError) as error:
                failure = error
            if failure is not None:
                for piece in pieces:
                    await piece.target.take_back(piece.plan)
                raise failure
            await self._record(pieces)
            await failpoint("stord.backup.after_record")

    async def _record(self, pieces: list[Piece]) -> None:
        async with self.holding([piece.row.volume_id for piece in pieces]):
            rows = []
            for piece in pieces:
                row = self._records.volumes.get(piece.row.volume_id)
                if row is None:
                    raise NotFound("the volume is gone", resource=piece.row.volume_id)
                rows.append(
                    msgspec.structs.replace(
                        row,
                        backup_target=piece.target.name,
                        backup_sequence=piece.target.sequence,
                        backup_bitmap=piece.plan.bitmap,
                    )
                )
            await self._records.put_volumes(rows)


def parts_of(request: Request) -> list[BackupPart]:
    """Return the volumes of a backup and where each goes."""
    if isinstance(request, BackupVm):
        return request.volumes
    return [BackupPart(volume_id=request.volume_id, target=request.target)]


def _request(control: JobControl) -> Request:
    """Return what the job was begun with: no field of the one is optional in the other."""
    try:
        return control.parameters(BackupVm)
    except msgspec.ValidationError:
        return control.parameters(BackupVolume)


def _refuse_twice(request: BackupVm) -> None:
    for name in ("volume_id", "target"):
        values = [getattr(part, name) for part in request.volumes]
        for value in values:
            if values.count(value) > 1:
                raise InvalidArgument(f"{value!r} is named twice", field=f"volumes.{name}")


async def _told(pieces: list[Piece]) -> dict[str, str]:
    told = [await piece.target.told(piece.plan) for piece in pieces]
    if len(told) == 1:
        return told[0]
    return {
        "volumes": str(len(told)),
        "path": ", ".join(each["path"] for each in told),
        "sequence": ", ".join(each["sequence"] for each in told),
        "bytes": str(sum(int(each.get("bytes", 0)) for each in told)),
    }
