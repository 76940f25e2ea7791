"""Verbs on a volume: begun once under the id of their operation, watched, cancelled, ended.

A verb is done at most once: what its job (or its call) came to ends the operation and clears the
request in one transaction. Only what certainly was not done, or may be done twice without harm,
is asked for again. A restore is: no VM starts on the volume while one is recorded.
"""

from __future__ import annotations

import msgspec

from chv.agent.context import Context
from chv.agent.records import (
    FINAL_STATES,
    Change,
    PutFacts,
    StoredObject,
    VolumeFacts,
    VolumeRequest,
)
from chv.agent.references import referrers
from chv.agent.volume.jobs import cancel_job, find_job, progress_of, result_of
from chv.agent.volume.verbs import leads
from chv.common.errors import (
    Cancelled,
    ChvError,
    Conflict,
    DeadlineExceeded,
    ErrorData,
    FailedPrecondition,
    OutcomeUnknown,
    Unavailable,
)
from chv.common.failpoint import failpoint
from chv.common.quantity import format_bytes
from chv.common.rpc import Method
from chv.common.wire import stord
from chv.common.wire.agent import OperationState, VolumeVerb
from chv.common.wire.stord import JobInfo, JobState
from chv.common.wire.types import CallMeta

AGAIN = (Unavailable, DeadlineExceeded, OutcomeUnknown, Conflict)
WAIT_S_MAX = 900.0  # for whatever is in the way of its beginning
GROW_S_MAX = 120.0  # for a guest to let go of its disk and have it again

_replace = msgspec.structs.replace


class Requests:
    """The verb under way on one volume."""

    def __init__(self, context: Context, uid: str) -> None:
        self._context = context
        self._uid = uid
        self._since: tuple[str, float] = ("", 0.0)

    async def tend(self, stored: StoredObject, seen: stord.VolumeInfo) -> bool:
        """Make one pass; True: something is under way, look again soon."""
        request = _request(stored)
        if request is None:
            return False
        try:
            return await self._tend(stored, request, seen)
        except AGAIN as error:
            await self._note(request, f"tries again: {error.message}")
            return not await self._expired(request, error)
        except ChvError as error:
            await self._end(request, OperationState.FAILED, str(error), error.data())
            return False

    async def give_up(self, stored: StoredObject, why: str) -> None:
        """The verb can no longer be done."""
        request = _request(stored)
        if request is not None:
            await cancel_job(self._context, request.operation_id)
            error = FailedPrecondition(why, resource=stored.title)
            await self._end(request, OperationState.FAILED, why, error.data())

    async def _tend(
        self, stored: StoredObject, request: VolumeRequest, seen: stord.VolumeInfo
    ) -> bool:
        if not leads(request, self._uid):
            return await self._follow(request)
        match VolumeVerb(request.verb):
            case VolumeVerb.RESTORE:
                return await self._restore(stored, request, seen)
            case VolumeVerb.GROW_NOW:
                return await self._grow(stored, request, seen)
            case _:
                return await self._job(stored, request)

    async def _follow(self, request: VolumeRequest) -> bool:
        """Keep the request of a VM's backup, which another volume leads, until that has ended."""
        operation = await self._context.ledger.operation(request.operation_id)
        if operation is not None and operation.state not in FINAL_STATES:
            return True
        await self._end(request, OperationState.FAILED, "")  # it has: the request alone goes
        return False

    # --- check, repair, backup: a job

    async def _job(self, stored: StoredObject, request: VolumeRequest) -> bool:
        job = await find_job(self._context, request.operation_id)
        if job is None and request.cancelling:
            await self._end(request, OperationState.CANCELLED, "before it had begun")
            return False
        if job is None:
            await self._begin(stored, request)
            return True
        if job.state is not JobState.RUNNING:
            await self._finish(request, job)
            return False
        if request.cancelling:
            await cancel_job(self._context, job.job_id)
        await self._note(request, progress_of(job))
        return True

    async def _begin(self, stored: StoredObject, request: VolumeRequest) -> None:
        meta = self._context.meta(request.operation_id, stored.resource.metadata.generation)
        if request.parts:
            await self._step(request, stord.BACKUP_VM, _backup_of_vm(request, meta))
            return
        if request.verb == VolumeVerb.BACKUP.value:
            backup = stord.BackupVolume(
                meta=meta,
                volume_id=self._uid,
                target=request.target,
                incremental=request.incremental,
                bps_max=request.bps_max,
            )
            await self._step(request, stord.BACKUP_VOLUME, backup)
            return
        repair = request.verb == VolumeVerb.REPAIR.value
        check = stord.CheckVolume(meta=meta, volume_id=self._uid, repair=repair)
        await self._step(request, stord.CHECK_VOLUME, check)

    async def _finish(self, request: VolumeRequest, job: JobInfo) -> None:
        if job.state is JobState.DONE:
            await self._end(request, OperationState.SUCCEEDED, result_of(job))
            return
        error = job.error or Cancelled("the job was cancelled").data()
        cancelled = job.state is JobState.CANCELLED
        state = OperationState.CANCELLED if cancelled else OperationState.FAILED
        await self._end(request, state, error.message, error)

    # --- restore

    async def _restore(
        self, stored: StoredObject, request: VolumeRequest, seen: stord.VolumeInfo
    ) -> bool:
        self._refuse_later(stored, request, seen)
        snapshot = stord.SnapshotRef(
            meta=self._context.meta(request.operation_id, stored.resource.metadata.generation),
            volume_id=self._uid,
            snapshot_id=request.snapshot,
        )
        await self._step(request, stord.RESTORE_SNAPSHOT, snapshot)
        name = self._context.stored(request.snapshot)
        words = f"as in {name.title}" if name is not None else "done"
        await self._end(request, OperationState.SUCCEEDED, words)
        return False

    def _refuse_later(
        self, stored: StoredObject, request: VolumeRequest, seen: stord.VolumeInfo
    ) -> None:
        """Refuse where snapshots would be lost: name them, the newest first, and what to do."""
        ids = [each.snapshot_id for each in seen.snapshots]
        later = ids[ids.index(request.snapshot) + 1 :] if request.snapshot in ids else []
        if not later:
            return
        known = [self._context.stored(uid) for uid in reversed(later)]
        names = [each.key[2] for each in known if each is not None]
        wanted = self._context.stored(request.snapshot)
        again = f"chv volume restore {stored.key[2]} --snapshot {wanted.key[2] if wanted else ''}"
        raise FailedPrecondition(
            f"it has later snapshots, which would be lost: {', '.join(names or later)}",
            resource=stored.title,
            field="snapshot",
            hint="; ".join([*(f"chv snapshot rm {name}" for name in names), again]),
        )

    # --- grow now: the VM's plan does it, this is how it is seen to be done

    async def _grow(
        self, stored: StoredObject, request: VolumeRequest, seen: stord.VolumeInfo
    ) -> bool:
        if not seen.pending_size_bytes and seen.generation >= stored.resource.metadata.generation:
            message = f"the guest sees {format_bytes(seen.size_bytes)}"
            await self._end(request, OperationState.SUCCEEDED, message)
            return False
        tables = self._context.ledger.tables
        if not any(vm.uid in tables.workers for vm in referrers(tables, stored.key)):
            message = "no VM runs on it: the next one sees the new size"
            await self._end(request, OperationState.SUCCEEDED, message)
            return False
        self._context.wake_referrers(stored)
        await self._note(request, "waits for the guest to let go of the disk")
        why = f"it has not grown: {seen.last_error}" if seen.last_error else ""
        kept = DeadlineExceeded(why or "the guest has kept the disk")
        return not await self._expired(request, kept, GROW_S_MAX)

    # --- journal

    async def _step(
        self,
        request: VolumeRequest,
        method: Method[msgspec.Struct, msgspec.Struct] | object,
        params: msgspec.Struct,
    ) -> None:
        await self._context.operations.begin_step(request.operation_id, request.verb)
        await failpoint("agent.volume.verb.before")
        failure: ChvError | None = None
        try:
            await self._context.stord.call(method, params)  # type: ignore[arg-type]
        except ChvError as error:
            failure = error
        if failure is not None:
            await self._context.operations.fail_step(request.operation_id, failure)
            raise failure
        await failpoint("agent.volume.verb.after")

    async def _note(self, request: VolumeRequest, message: str) -> None:
        await self._context.operations.note_of(request.operation_id, message)

    async def _expired(
        self, request: VolumeRequest, error: ChvError, limit_s: float = WAIT_S_MAX
    ) -> bool:
        """End a verb that does not come to anything; True: it has ended."""
        now = self._context.world.clock.monotonic()
        if self._since[0] != request.operation_id:
            self._since = (request.operation_id, now)
        if now - self._since[1] < limit_s:
            return False
        message = f"no success within {limit_s:.0f} s: {error.message}"
        await self._end(request, OperationState.FAILED, message, error.data())
        return True

    async def _end(
        self,
        request: VolumeRequest,
        state: OperationState,
        message: str,
        error: ErrorData | None = None,
    ) -> None:
        ledger = self._context.ledger
        async with ledger.writing() as tables:
            stored, changes = tables.objects.get(self._uid), list[Change]()
            if stored is not None and stored.volume_facts is not None:
                current = stored.volume_facts.request
                if current is not None and current.operation_id == request.operation_id:
                    facts = _replace(stored.volume_facts, request=None)
                    changes.append(PutFacts(uid=self._uid, facts=facts))
            operation = tables.operations.get(request.operation_id)
            changes += self._context.operations.ending_open(operation, state, message, error)
            if changes:
                await ledger.commit_held(*changes)
        if stored is not None:
            self._context.wake_referrers(stored)  # a VM may wait for the end of it


def _backup_of_vm(request: VolumeRequest, meta: CallMeta) -> stord.BackupVm:
    return stord.BackupVm(
        meta=meta,
        vm_id=request.vm_uid,
        volumes=[
            stord.BackupPart(volume_id=part.volume_uid, target=part.target)
            for part in request.parts
        ],
        incremental=request.incremental,
        bps_max=request.bps_max,
    )


def _request(stored: StoredObject) -> VolumeRequest | None:
    return (stored.volume_facts or VolumeFacts()).request
