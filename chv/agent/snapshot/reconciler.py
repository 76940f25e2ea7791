"""One pass over a VolumeSnapshot: choose its volumes, take it once, show it, delete it.

A snapshot is the state of one moment, so it is never taken a second time: that it was is
recorded, and one that stord no longer has is data loss and said so. What cannot be taken as asked
for fails for good rather than being something else, or from some later time.
"""

from __future__ import annotations

import anyio
import msgspec

from chv.agent.actors import Again, Done, Gone, Outcome, Waiting
from chv.agent.cascade import finish_delete, taken_back
from chv.agent.clone_undo import lacking, undo
from chv.agent.cloning import collect_helper
from chv.agent.conditions import condition, merge
from chv.agent.records import (
    Change,
    PutFacts,
    SaveStage,
    SnapshotFacts,
    SnapshotPart,
    StoredObject,
)
from chv.agent.references import referrers
from chv.agent.simple import SimpleReconciler
from chv.agent.snapshot.facts import (
    Seen,
    Volumes,
    holder_of,
    phase_of,
    snapshot_facts,
    snapshot_of,
)
from chv.agent.snapshot.guest import quiet
from chv.agent.tables import Tables
from chv.agent.volume.jobs import POLL_S, cancel_job, find_job, progress_of
from chv.agent.volume.view import short_name
from chv.common.errors import (
    ChvError,
    Conflict,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InUse,
    NotFound,
    OutcomeUnknown,
    ResourceExhausted,
    Unavailable,
)
from chv.common.failpoint import failpoint
from chv.common.quantity import parse_duration_s
from chv.common.wire import stord
from chv.common.wire.agent import OperationState
from chv.common.wire.resources import (
    Condition,
    SnapshotPartStatus,
    VirtualMachine,
    VolumeSnapshotStatus,
)

# What may pass by itself within the time of an operation; anything else ends the attempt.
MAY_PASS = (Unavailable, DeadlineExceeded, OutcomeUnknown, Conflict, ResourceExhausted, InUse)
RETRY_MERGE_S = 5.0
UNSURE = (DeadlineExceeded, OutcomeUnknown)
FAILPOINTS = tuple(
    f"agent.snapshot.{name}.{moment}"
    for name in ("take", "delete")
    for moment in ("before", "after")
)

_replace = msgspec.structs.replace


class SnapshotReconciler(SimpleReconciler):
    """The reconciler of one snapshot."""

    _sent = False  # stord was asked to take it in this pass
    _merging = ""  # the job that was begun last
    _next_merge = 0.0  # not before

    async def look_and_act(self, stored: StoredObject) -> Outcome:
        """Make one pass."""
        volumes = (await self._context.volumes.fresh()).volumes
        seen = {
            volume.volume_id: (volume, part)
            for volume in volumes
            for part in volume.snapshots
            if part.snapshot_id == self._uid
        }
        self._context.looked_at(self._uid)
        facts = snapshot_facts(stored)
        if stored.deleting:
            return await self._delete(stored, seen)
        if facts.failed:
            await self._show(stored, seen, condition("Ready", False, "NotTaken", facts.failed))
            await self._context.operations.end(self._serving, OperationState.FAILED, facts.failed)
            return await self._after_failure(stored, seen)
        if facts.taken:
            return await self._taken(stored, seen)
        if seen and len(seen) == len(facts.parts):  # the reply was lost
            return await self._found(stored)
        if not self._serving:  # its operation has ended: much later is not what was asked for
            await self._fail(DeadlineExceeded("it could not be taken in time"))
            return Again()
        return await self._take(stored, {volume.volume_id: volume for volume in volumes})

    async def _after_failure(self, stored: StoredObject, seen: Seen) -> Outcome:
        """What was not taken as asked for is left for people to look at; a clone is undone."""
        del seen
        facts = snapshot_facts(stored)
        why = f"the snapshot of its source was not taken: {facts.failed}"
        if await undo(self._context, self._uid, why, facts.failed_code):
            return Again()
        return Again() if await collect_helper(self._context, self._uid) else Done()

    async def _taken(self, stored: StoredObject, seen: Seen) -> Outcome:
        lost = [part.volume for part in snapshot_facts(stored).parts if part.volume_uid not in seen]
        if lost:
            raise DataLoss(
                f"the snapshot is gone from volume {', '.join(lost)}",
                resource=stored.title,
                hint="it is not taken again: delete it",
            )
        await self._show(stored, seen, condition("Ready", True, "Taken"))
        await self.settle("taken")
        if missing := lacking(self._context.ledger.tables, self._uid):
            why = f"volume {missing} was taken from the VM before its disks were"
            if await undo(self._context, self._uid, why):
                return Again()
        return Again() if await collect_helper(self._context, self._uid) else Done()

    # --- take

    async def _found(self, stored: StoredObject) -> Outcome:
        """It was taken, as far as one can see; whether of a still guest cannot be seen."""
        if snapshot_of(stored).spec.freeze:
            message = "it was taken, but perhaps not while the guest was frozen"
            await self._fail(OutcomeUnknown(message))
        else:
            await self._record(taken=True)
        return Again()

    async def _take(self, stored: StoredObject, volumes: Volumes) -> Outcome:
        parts, self._sent = snapshot_facts(stored).parts, False
        try:
            chosen = self._choose(stored)
            if parts != chosen:  # for the first time, or the VM has taken or left a disk since
                await self._record(parts=chosen)
                return Again()
            await self._create(stored, parts, volumes)
        except MAY_PASS as error:
            if self._sent and snapshot_of(stored).spec.freeze and isinstance(error, UNSURE):
                await self._fail(error)  # a later try could find what was taken unfrozen
                return Again()
            await self.wait(f"tries again: {error.message}")
            await self._show(stored, {}, condition("Ready", False, "Waiting", error.message))
            return Waiting(POLL_S)
        except ChvError as error:
            if parts and await self._has_changed_hands(parts, volumes):
                return Again()  # a VM took or left a volume meanwhile
            await self._fail(error)
            return Again()
        return Again()

    async def _has_changed_hands(
        self, parts: tuple[SnapshotPart, ...], before: dict[str, stord.VolumeInfo]
    ) -> bool:
        listed = (await self._context.volumes.fresh()).volumes
        now = {volume.volume_id: volume.attached_to for volume in listed}
        return any(
            now.get(part.volume_uid) != before[part.volume_uid].attached_to
            for part in parts
            if part.volume_uid in before
        )

    def _choose(self, stored: StoredObject) -> tuple[SnapshotPart, ...]:
        """Return the volumes that are frozen together: decided once, but for what the VM has."""
        snapshot, tables = snapshot_of(stored), self._context.ledger.tables
        before = snapshot_facts(stored).parts
        if before and not snapshot.spec.virtual_machine:
            return before
        namespace = snapshot.metadata.namespace
        names = [snapshot.spec.volume]
        if snapshot.spec.virtual_machine:
            vm = tables.find("VirtualMachine", namespace, snapshot.spec.virtual_machine)
            if vm is None and before:
                return before
            if vm is None:
                raise NotFound(f"there is no VM {snapshot.spec.virtual_machine!r}")
            assert isinstance(vm.resource, VirtualMachine)
            names = [disk.volume for disk in vm.resource.spec.disks if not disk.read_only]
            if not names:
                raise FailedPrecondition("the VM has no disk that it writes", resource=vm.title)
        found = []
        for name in names:
            volume = tables.find("Volume", namespace, name)
            if volume is None:
                raise NotFound(f"there is no Volume {name!r}")
            found.append(SnapshotPart(volume_uid=volume.uid, volume=name))
        return tuple(found)

    async def _create(
        self,
        stored: StoredObject,
        parts: tuple[SnapshotPart, ...],
        volumes: dict[str, stord.VolumeInfo],
    ) -> None:
        vm_uid = holder_of(parts, volumes)
        freeze = snapshot_of(stored).spec.freeze

        async def act(operation_id: str) -> None:
            request = stord.CreateSnapshot(
                meta=self._context.meta(operation_id, 0),
                snapshot_id=self._uid,
                volume_ids=[part.volume_uid for part in parts],
                vm_id=vm_uid,
            )
            await failpoint("agent.snapshot.take.before")
            if freeze:
                freeze_s = parse_duration_s(freeze, field="spec.freeze")
                async with quiet(self._context, vm_uid, freeze_s):
                    self._sent = True
                    await self._context.stord.call(stord.CREATE_SNAPSHOT, request)
            else:
                await self._context.stord.call(stord.CREATE_SNAPSHOT, request)
            await failpoint("agent.snapshot.take.after")

        await self.effect(stored, "snapshot", act)
        await self._record(taken=True, consistency="FileSystem" if freeze else "Crash")
        for part in parts:
            self._context.wake(part.volume_uid)

    async def _fail(self, error: ChvError) -> None:
        """It was not taken, and will not be."""
        ledger = self._context.ledger
        async with ledger.writing() as tables:
            stored = tables.objects.get(self._uid)
            if stored is None:
                return
            fix = f" ({error.hint})" if error.hint else ""
            failed = f"{error.message}{fix}"
            known = snapshot_facts(stored)
            facts = _replace(known, failed=failed, failed_code=error.code, stage=SaveStage.NONE)
            operation = tables.operations.get(self._serving)
            await ledger.commit_held(
                PutFacts(uid=self._uid, facts=facts),
                *self._letting_go(tables, facts),
                *self._context.operations.ending_open(
                    operation, OperationState.FAILED, str(error), error.data()
                ),
            )

    async def _record(self, **changes: object) -> None:
        ledger = self._context.ledger
        async with ledger.writing() as tables:
            stored = tables.objects.get(self._uid)
            if stored is None:
                raise Conflict("the snapshot is gone", resource=self._uid)
            facts = _replace(snapshot_facts(stored), **changes)
            changed = PutFacts(uid=self._uid, facts=facts)
            await ledger.commit_held(changed, *self._letting_go(tables, facts))

    def _letting_go(self, tables: Tables, facts: SnapshotFacts) -> list[Change]:
        """What else changes with the facts, in the same transaction."""
        del tables, facts
        return []

    # --- delete

    async def _delete(self, stored: StoredObject, seen: Seen) -> Outcome:
        jobs = [volume.job for volume, part in seen.values() if volume.job and part.deleting]
        if snapshot_facts(stored).cancelling:
            return await self._take_back(stored, seen, jobs)
        holders = referrers(self._context.ledger.tables, stored.key)
        if holders:
            names = ", ".join(holder.title for holder in holders)
            return await self._wait_to_go(stored, seen, f"held by {names}", Waiting(10.0))
        if not seen:
            await self._remove_files(stored)
            await finish_delete(self._context, self._uid)
            return Gone()
        return await self._merge_away(stored, seen)

    async def _remove_files(self, stored: StoredObject) -> None:
        """There are none beside those of stord."""
        del stored

    async def _merge_away(self, stored: StoredObject, seen: Seen) -> Outcome:
        """Let the volumes do without it, one after the other."""
        jobs = [volume.job for volume, part in seen.values() if volume.job and part.deleting]
        if jobs:
            progress = progress_of(await find_job(self._context, jobs[0]))
            return await self._wait_to_go(stored, seen, progress, Waiting(POLL_S))
        volume, _ = min(seen.values(), key=lambda each: each[0].volume_id)
        if volume.job:
            message = f"waits for job {volume.job} of its volume"
            return await self._wait_to_go(stored, seen, message, Waiting(POLL_S))
        failure = await self._failed_merge()
        if failure:
            name = short_name(self._context.ledger.tables, volume.volume_id)
            message = f"tries again: volume {name}: {failure}"
            return await self._wait_to_go(stored, seen, message, Waiting(RETRY_MERGE_S))
        await self.effect(
            stored, "delete", lambda operation_id: self._merge(volume.volume_id, operation_id)
        )
        return Waiting(0.2)

    async def _failed_merge(self) -> str:
        """Return why the last merge failed, while it is too early for the next; empty: go on."""
        job = await find_job(self._context, self._merging) if self._merging else None
        if job is None or job.state is not stord.JobState.FAILED:
            return ""
        now = anyio.current_time()
        if not self._next_merge:
            self._next_merge = now + RETRY_MERGE_S
        if now >= self._next_merge:
            self._merging, self._next_merge = "", 0.0
            return ""
        return "the job failed" if job.error is None else job.error.message

    async def _merge(self, volume_uid: str, operation_id: str) -> None:
        """Begin the job; each try is a job of its own, found again by its volume."""
        await failpoint("agent.snapshot.delete.before")
        job_id = f"{operation_id}.{self._context.world.ids.nonce()}"
        request = stord.SnapshotRef(
            meta=self._context.meta(job_id, 0), volume_id=volume_uid, snapshot_id=self._uid
        )
        try:
            await self._context.stord.call(stord.DELETE_SNAPSHOT, request)
        except NotFound:
            return
        self._merging = job_id
        await failpoint("agent.snapshot.delete.after")
        self._context.wake(volume_uid)

    async def _wait_to_go(
        self, stored: StoredObject, seen: Seen, message: str, outcome: Outcome
    ) -> Outcome:
        await self.progress(message)
        await self._show(stored, seen, condition("Ready", False, "Deleting", message), message)
        return outcome

    async def _take_back(self, stored: StoredObject, seen: Seen, jobs: list[str]) -> Outcome:
        """The deletion was cancelled: keep the snapshot where all of it is still there."""
        if jobs:
            for job in jobs:
                await cancel_job(self._context, job)
            return await self._wait_to_go(stored, seen, "is being cancelled", Waiting(POLL_S))
        whole = all(part.volume_uid in seen for part in snapshot_facts(stored).parts)
        if whole and seen:
            await taken_back(self._context, self._uid)
        else:
            await self._record(cancelling=False)
            await self.progress("too late to cancel: a part is gone")
        return Again()

    # --- status

    async def show_error(self, stored: StoredObject, ready: Condition, *, permanent: bool) -> None:
        """Publish a status that shows the error."""
        before = snapshot_of(stored).status or VolumeSnapshotStatus()
        phase = "Failed" if permanent else before.phase
        await self._publish(stored, _replace(before, phase=phase), ready)

    async def _show(
        self, stored: StoredObject, seen: Seen, ready: Condition, progress: str = ""
    ) -> None:
        facts, tables = snapshot_facts(stored), self._context.ledger.tables
        shown = [
            SnapshotPartStatus(
                volume=short_name(tables, part.volume_id),
                size_bytes=part.size_bytes,
                allocated_bytes=part.allocated_bytes,
                used_by=[short_name(tables, uid) for uid in part.used_by],
            )
            for _, part in sorted(seen.values(), key=lambda each: each[0].volume_id)
        ]
        status = VolumeSnapshotStatus(
            phase=phase_of(stored, facts),
            created_at=min((part.created_at for _, part in seen.values()), default=""),
            consistency=facts.consistency or ("Crash" if facts.taken else ""),
            volumes=shown,
            progress=progress,
        )
        await self._publish(stored, status, ready)

    async def _publish(
        self, stored: StoredObject, status: VolumeSnapshotStatus, ready: Condition
    ) -> None:
        generation = stored.resource.metadata.generation
        before = snapshot_of(stored).status
        earlier = before.conditions if before is not None else []
        conditions = merge(earlier, [ready], generation, self._context.now())
        shown = _replace(status, observed_generation=generation, conditions=conditions)
        await self._context.publish(stored, shown)
