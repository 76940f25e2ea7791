"""One pass over a Volume: open it in stord as wanted, tend moves and verbs, delete it at the end.

A volume that exists is never made anew: what is missing or broken is told, not hidden. A verb
(`requests`) goes on beside the spec: neither waits for the other unless stord says so.
"""

from __future__ import annotations

import msgspec

from chv.agent.actors import Again, Done, Gone, Outcome, Waiting
from chv.agent.cascade import finish_delete
from chv.agent.conditions import condition, merge
from chv.agent.context import Context
from chv.agent.records import StoredObject
from chv.agent.references import referrers
from chv.agent.simple import SimpleReconciler
from chv.agent.vm.clients import connected_client
from chv.agent.volume.jobs import POLL_S, cancel_job, find_job, progress_of
from chv.agent.volume.move import Mover
from chv.agent.volume.requests import Requests
from chv.agent.volume.source import Unready, resolve
from chv.agent.volume.view import conditions, growth, is_served, size_refused, volume_status
from chv.agent.volume.wish import (
    Source,
    at_the_place_of,
    backend_of,
    key_name,
    same_place,
    with_the_source_of,
)
from chv.common.errors import (
    ChvError,
    Conflict,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutcomeUnknown,
    Unavailable,
    from_data,
)
from chv.common.failpoint import failpoint
from chv.common.wire import stord
from chv.common.wire.agent import OperationState
from chv.common.wire.resources import Condition, ConditionStatus, Volume, VolumeStatus
from chv.common.wire.stord import JobState

LOST = ("missing", "broken")
BUSY = Waiting(2.0)  # stord does something else with the volume
FAILPOINTS = tuple(
    f"agent.volume.{name}.{moment}"
    for name in ("open", "close", "delete", "move", "verb")
    for moment in ("before", "after")
)
# The VM stands still, and the mirror has not begun.
STANDING_POINT = "agent.volume.move.standing"


class VolumeReconciler(SimpleReconciler):
    """The reconciler of one volume."""

    def __init__(self, context: Context, uid: str) -> None:
        super().__init__(context, uid)
        self._seen: stord.VolumeInfo | None = None  # by the last pass
        self._grows = ("", 0)  # operation and generation that make it larger
        self._requests = Requests(context, uid)
        self._mover = Mover(context, uid, self.step)

    async def look_and_act(self, stored: StoredObject) -> Outcome:
        """Make one pass."""
        listed = (await self._context.volumes.fresh()).volumes
        seen = next((each for each in listed if each.volume_id == self._uid), None)
        self._seen = seen
        self._context.looked_at(self._uid)
        if stored.deleting:
            return await self._delete(stored, seen)
        if seen is not None and seen.state in LOST:
            await self._requests.give_up(stored, f"the volume is {seen.state}")
            raise _unusable(stored, seen)
        waits = await self._requests.tend(stored, seen) if seen is not None else False
        outcome = await self._as_wanted(stored, seen)
        return Waiting(POLL_S) if waits and isinstance(outcome, Done) else outcome

    async def _as_wanted(self, stored: StoredObject, seen: stord.VolumeInfo | None) -> Outcome:
        volume = _volume(stored)
        if seen is not None and seen.state == "creating" and seen.job:
            return await self._creating(stored, seen)
        if seen is None or not _is_open(seen, volume):
            return await self._open(stored, volume, seen)
        moved = await self._mover.tend(stored, seen, backend_of(volume, None))
        if isinstance(moved, Again):
            return moved
        progress = await self._progress(seen)
        ready = condition("Ready", True, "Open", self._mover.problem(stored), evidence=seen.path)
        if progress:
            ready = msgspec.structs.replace(ready, message=progress)
        await self._show(stored, seen, ready, progress)
        if moved is not None:
            await self.progress(progress or "waits for the move")
            return moved
        problem = self._mover.problem(stored)
        if problem:
            error = FailedPrecondition(problem, resource=stored.title)
            await self._context.operations.end(
                self._serving, OperationState.FAILED, problem, error.data()
            )
        await self.settle(self._opened(seen))
        return Waiting(POLL_S) if seen.job else Done()

    def _opened(self, seen: stord.VolumeInfo) -> str:
        """Say that it is open, and of a growth when the guest sees it."""
        if seen.pending_size_bytes or self._grows == (self._serving, seen.generation):
            return f"open, {growth(self._context.ledger.tables, seen)}"
        return "open"

    async def _progress(self, seen: stord.VolumeInfo) -> str:
        return progress_of(await find_job(self._context, seen.job)) if seen.job else ""

    # --- create and change

    async def _creating(self, stored: StoredObject, seen: stord.VolumeInfo) -> Outcome:
        progress = await self._progress(seen) or "is being made"
        await self.progress(progress)
        ready = condition("Ready", False, "Creating", progress)
        await self._show(stored, seen, ready, progress)
        return Waiting(POLL_S)

    async def _open(
        self, stored: StoredObject, volume: Volume, seen: stord.VolumeInfo | None
    ) -> Outcome:
        asked = seen is not None and seen.generation >= volume.metadata.generation
        if seen is not None and seen.job and asked:  # stord is at it, with another key perhaps
            return await self._busy(stored, seen)
        source = resolve(self._context.ledger.tables, volume) if _is_new(seen) else None
        if isinstance(source, Unready):
            await self.wait(source.message)
            await self._show(stored, seen, condition("Ready", False, source.reason, source.message))
            return Waiting(30.0)
        await self._refuse_failed_job()
        backend = _wanted(volume, source, seen)
        if seen is not None and seen.state == "open" and backend.size_bytes > seen.size_bytes:
            self._grows = (self._serving, volume.metadata.generation)
        client = stord.VmmClient.NONE
        if seen is not None and seen.attached_to:
            client = await connected_client(self._context, self._uid)

        async def act(operation_id: str) -> None:
            await failpoint("agent.volume.open.before")
            request = stord.OpenVolume(
                meta=self._context.meta(operation_id, volume.metadata.generation),
                volume_id=self._uid,
                backend=backend,
                client=client,
            )
            await self._context.stord.call(stord.OPEN_VOLUME, request)
            await failpoint("agent.volume.open.after")

        refusal: InvalidArgument | Conflict | None = None
        try:
            await self.effect(stored, "open", act)
        except (InvalidArgument, Conflict) as error:
            refusal = error
        if refusal is not None:
            return await self._refused(stored, seen, refusal)
        return BUSY if asked and seen is not None and seen.state == "open" else Again()

    async def _refused(
        self,
        stored: StoredObject,
        seen: stord.VolumeInfo | None,
        refusal: InvalidArgument | Conflict,
    ) -> Outcome:
        if seen is not None and seen.job and isinstance(refusal, Conflict):
            return await self._busy(stored, seen)
        if seen is not None and await self._has_arrived(seen):
            return Again()  # a move has ended since it was looked at
        raise refusal

    async def _has_arrived(self, before: stord.VolumeInfo) -> bool:
        """Tell whether the volume is at another place than it was seen at."""
        listed = (await self._context.volumes.fresh()).volumes
        now = next((each for each in listed if each.volume_id == self._uid), before)
        if now.backend is None or before.backend is None:
            return False
        return not same_place(now.backend, before.backend)

    async def _busy(self, stored: StoredObject, seen: stord.VolumeInfo) -> Outcome:
        job = await find_job(self._context, seen.job) if seen.job else None
        if job is not None:  # wanted or not: it holds up the rest
            await self._mover.let_begin(job, seen.attached_to)
        progress = await self._progress(seen)
        await self.progress(f"waits for {progress or 'a job'}")
        ready = condition("Ready", False, "Busy", f"waits for {progress or 'a job'}")
        await self._show(stored, seen, ready, progress)
        return BUSY

    async def _refuse_failed_job(self) -> None:
        """End an operation whose job has failed: the next try is another operation, another job."""
        operation_id = self._context.operations.current_id(self._uid)
        job = await find_job(self._context, operation_id) if operation_id else None
        if job is None or job.state not in (JobState.FAILED, JobState.CANCELLED):
            return
        error = from_data(job.error) if job.error is not None else OutcomeUnknown("the job ended")
        await self._context.operations.end(
            operation_id, OperationState.FAILED, str(error), error.data()
        )
        raise error

    # --- delete

    async def _delete(self, stored: StoredObject, seen: stord.VolumeInfo | None) -> Outcome:
        await self._requests.give_up(stored, "the volume is deleted")
        holders = referrers(self._context.ledger.tables, stored.key)
        if holders or (seen is not None and (seen.attached_to or seen.readers)):
            names = ", ".join(holder.title for holder in holders) or "a VM that is being stopped"
            await self.wait(f"waits until {names} lets go of it")
            await self._show(
                stored, seen, condition("Ready", False, "Deleting", f"held by {names}")
            )
            return Waiting(10.0)
        if seen is not None and seen.job:
            await cancel_job(self._context, seen.job)
            await self.progress(f"waits for the end of {await self._progress(seen) or seen.job}")
            return BUSY
        if seen is not None:
            await self.effect(
                stored, "close", lambda operation_id: self._close(stored, operation_id)
            )
            await self.effect(
                stored, "delete", lambda operation_id: self._drop(stored, operation_id)
            )
        await finish_delete(self._context, self._uid)
        return Gone()

    async def _close(self, stored: StoredObject, operation_id: str) -> None:
        await failpoint("agent.volume.close.before")
        try:
            await self._context.stord.call(stord.CLOSE_VOLUME, self._ref(stored, operation_id))
        except NotFound:
            return
        await failpoint("agent.volume.close.after")

    async def _drop(self, stored: StoredObject, operation_id: str) -> None:
        await failpoint("agent.volume.delete.before")
        try:
            await self._context.stord.call(stord.DELETE_VOLUME, self._ref(stored, operation_id))
        except NotFound:
            return
        await failpoint("agent.volume.delete.after")

    def _ref(self, stored: StoredObject, operation_id: str) -> stord.VolumeRef:
        generation = stored.resource.metadata.generation
        return stord.VolumeRef(
            meta=self._context.meta(operation_id, generation), volume_id=self._uid
        )

    # --- status

    async def show_error(self, stored: StoredObject, ready: Condition, *, permanent: bool) -> None:
        """Publish a status that shows the error; what was known of the volume stays."""
        before = _volume(stored).status or VolumeStatus()
        if self._seen is not None:
            before = msgspec.structs.replace(
                volume_status(self._context.ledger.tables, stored, self._seen, before.progress),
                observed_generation=before.observed_generation,
                conditions=before.conditions,
            )
        served = is_served(self._seen)
        shown = "Failed" if permanent and not served else before.phase
        others = [each for each in before.conditions if each.type != "Ready"]
        if ready.status is ConditionStatus.UNKNOWN:
            others = [condition(each.type, None, ready.reason, ready.message) for each in others]
        if self._seen is not None and served and permanent:
            others = size_refused(_volume(stored), self._seen, others, ready.message)
            ready = msgspec.structs.replace(
                ready, message=f"its VM goes on with it as it was: {ready.message}"
            )
        await self._publish(stored, msgspec.structs.replace(before, phase=shown), [ready, *others])

    async def _show(
        self,
        stored: StoredObject,
        seen: stord.VolumeInfo | None,
        ready: Condition,
        progress: str = "",
    ) -> None:
        status = volume_status(self._context.ledger.tables, stored, seen, progress)
        await self._publish(stored, status, conditions(self._context.ledger.tables, seen, ready))

    async def _publish(
        self, stored: StoredObject, status: VolumeStatus, now: list[Condition]
    ) -> None:
        generation = stored.resource.metadata.generation
        before = _volume(stored).status
        earlier = before.conditions if before is not None else []
        shown = msgspec.structs.replace(
            status,
            observed_generation=generation,
            conditions=merge(earlier, now, generation, self._context.now()),
        )
        await self._context.publish(stored, shown)


def _volume(stored: StoredObject) -> Volume:
    assert isinstance(stored.resource, Volume)
    return stored.resource


def _unusable(stored: StoredObject, seen: stord.VolumeInfo) -> ChvError:
    """Return the error of a volume whose bytes are not in order; a server may come back."""
    message = f"the volume is {seen.state}: {seen.last_error}"
    if seen.class_name is stord.VolumeClass.FILE:
        return DataLoss(message, resource=stored.title)
    return Unavailable(message, resource=stored.title)


def _is_new(seen: stord.VolumeInfo | None) -> bool:
    return seen is None or seen.backend is None or seen.state == "creating"


def _is_open(seen: stord.VolumeInfo, volume: Volume) -> bool:
    """Tell whether stord has the volume open in its newest form, but perhaps at an older place."""
    current = seen.generation >= volume.metadata.generation and seen.state == "open"
    return current and seen.encryption_key in ("", key_name(volume))


def _wanted(
    volume: Volume, source: Source | None, seen: stord.VolumeInfo | None
) -> stord.VolumeBackend:
    """Return what stord is asked for: what a volume was made from and where it is stay, for now."""
    wanted = backend_of(volume, source)
    if seen is None or seen.backend is None or seen.state == "creating":
        return wanted
    if same_place(wanted, seen.backend):
        return with_the_source_of(wanted, seen.backend)
    return at_the_place_of(wanted, seen.backend)
