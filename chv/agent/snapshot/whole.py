"""One pass over a VirtualMachineSnapshot: memory, devices and disks of one instant, or nothing.

The VM stands still from before its memory is written until its disks were taken as well. That is
recorded in one transaction on the snapshot and on the VM, so that whoever comes after a crash
leaves the VM alone until this is decided: it was whole, or it has failed. Either way the VM runs
on. An attempt that has begun is never repeated, and what it left is removed.
"""

from __future__ import annotations

from dataclasses import dataclass

import anyio
import msgspec

from chv.agent.actors import Again, Done, Outcome, Waiting
from chv.agent.conditions import condition, merge
from chv.agent.ports import VmHandle
from chv.agent.records import (
    Change,
    PutFacts,
    SavedVm,
    SaveStage,
    SnapshotFacts,
    SnapshotPart,
    StoredObject,
)
from chv.agent.snapshot import saving
from chv.agent.snapshot.facts import Seen, Volumes, holder_of, snapshot_facts
from chv.agent.snapshot.reconciler import SnapshotReconciler
from chv.agent.tables import Tables
from chv.agent.vm.desired import facts_of, handle_of
from chv.agent.volume.jobs import POLL_S
from chv.agent.volume.view import short_name
from chv.common.errors import ChvError, Conflict, DeadlineExceeded, Unavailable
from chv.common.failpoint import failpoint
from chv.common.wire import stord
from chv.common.wire.resources import (
    Condition,
    SnapshotPartStatus,
    VirtualMachineSnapshot,
    VirtualMachineSnapshotStatus,
    VmmIdentity,
)

MAY_PASS = (Unavailable, DeadlineExceeded, Conflict)
# How long a VM stands at most until it is known what an agent that died left of its snapshot.
JUDGE_S_MAX = 15.0
JUDGE_EVERY_S = 0.2
FAILPOINTS = tuple(
    f"agent.vm_snapshot.{name}"
    for name in ("begin", "save", "written", "kept", "saved", "disks", "taken", "resumed", "remove")
)

_replace = msgspec.structs.replace


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is saved, as it was found before anything was touched."""

    vm: VmHandle
    saved: SavedVm
    parts: tuple[SnapshotPart, ...]


class VmSnapshotReconciler(SnapshotReconciler):
    """The reconciler of one snapshot of a whole VM."""

    _undecided_since = 0.0  # monotonic; since when it could not be told what an agent had left

    async def look_and_act(self, stored: StoredObject) -> Outcome:
        """Decide first what an agent has left that ended in the middle of it."""
        if snapshot_facts(stored).stage is not SaveStage.NONE:
            return await self._judge(stored)
        return await super().look_and_act(stored)

    async def _judge(self, stored: StoredObject) -> Outcome:
        """The VM has stood still since: where all is there, it is of one instant."""
        facts = snapshot_facts(stored)
        assert facts.saved is not None
        failure: ChvError = Unavailable("the agent ended while it was being taken")
        try:
            whole = await self._is_whole(facts, facts.saved)
        except MAY_PASS as error:
            now = self._context.world.clock.monotonic()
            self._undecided_since = self._undecided_since or now
            if now - self._undecided_since < JUDGE_S_MAX:  # the daemons may be starting, too
                return Waiting(JUDGE_EVERY_S)
            whole, failure = False, error
        except ChvError as error:
            whole, failure = False, error
        if whole:
            await self._record(taken=True, stage=SaveStage.NONE)
        else:
            await self._fail(failure)
        self._context.wake(facts.saved.vm_uid)
        return Again()

    async def _is_whole(self, facts: SnapshotFacts, saved: SavedVm) -> bool:
        if facts.stage is not SaveStage.SAVED:
            return False
        if not await self._context.world.saves.is_kept(self._uid):
            return False
        await saving.require_still(self._context, saved)
        listed = {each.volume_id: each for each in (await self._context.volumes.fresh()).volumes}
        return all(
            any(each.snapshot_id == self._uid for each in listed[part.volume_uid].snapshots)
            for part in facts.parts
            if part.volume_uid in listed
        ) and all(part.volume_uid in listed for part in facts.parts)

    # --- take

    async def _take(self, stored: StoredObject, volumes: Volumes) -> Outcome:
        try:
            attempt = await self._prepared(stored, volumes)
            await self._begin(attempt)
        except MAY_PASS as error:
            await self.wait(f"tries again: {error.message}")
            await self._show(stored, {}, condition("Ready", False, "Waiting", error.message))
            return Waiting(POLL_S)
        except ChvError as error:
            await self._fail(error)
            return Again()
        await self._attempt(stored, attempt)
        return Again()

    async def _prepared(self, stored: StoredObject, volumes: Volumes) -> Attempt:
        vm = saving.vm_named(self._context, _snapshot(stored))
        saved, parts = await saving.saveable(self._context, vm)
        if parts and holder_of(parts, volumes) != vm.uid:
            raise Conflict("its volumes are being attached or detached")
        return Attempt(handle_of(vm), saved, parts)

    async def _attempt(self, stored: StoredObject, attempt: Attempt) -> None:
        failure: ChvError | None = None
        try:
            await self._save(stored, attempt)
        except ChvError as error:
            failure = error
        except TimeoutError:
            failure = DeadlineExceeded("it could not be saved in time")
        finally:
            with anyio.CancelScope(shield=True):
                if failure is not None:
                    await self._fail(failure)
                await saving.let_run(self._context, attempt.vm)
        await failpoint("agent.vm_snapshot.resumed")

    async def _begin(self, attempt: Attempt) -> None:
        """Record the intent on both objects: from here on the VM is left alone."""
        ledger = self._context.ledger
        async with ledger.writing() as tables:
            stored, vm = tables.objects.get(self._uid), tables.objects.get(attempt.vm.uid)
            if stored is None or stored.deleting or vm is None or vm.deleting:
                raise Conflict("it is being deleted")
            if facts_of(vm).saving or facts_of(vm).restore is not None:
                raise Conflict("the VM is being saved or restored already", resource=vm.title)
            facts = _replace(
                snapshot_facts(stored),
                stage=SaveStage.SAVING, saved=attempt.saved, parts=attempt.parts,
            )  # fmt: skip
            await ledger.commit_held(
                PutFacts(uid=self._uid, facts=facts),
                PutFacts(uid=vm.uid, facts=_replace(facts_of(vm), saving=self._uid)),
            )
        await failpoint("agent.vm_snapshot.begin")

    async def _save(self, stored: StoredObject, attempt: Attempt) -> None:
        saved = attempt.saved

        async def write(_: str) -> None:
            nonlocal saved
            size_bytes = await saving.write(self._context, attempt.vm, saved, self._uid)
            saved = _replace(saved, size_bytes=size_bytes, created_at=self._context.now())

        async def take_disks(operation_id: str) -> None:
            request = stord.CreateSnapshot(
                meta=self._context.meta(operation_id, 0),
                snapshot_id=self._uid,
                volume_ids=[part.volume_uid for part in attempt.parts],
                vm_id=attempt.vm.uid,
            )
            await self._context.stord.call(stord.CREATE_SNAPSHOT, request)

        await self.effect(stored, "save", write)
        await self._record(stage=SaveStage.SAVED, saved=saved)
        await failpoint("agent.vm_snapshot.saved")
        if attempt.parts:
            await self.effect(stored, "snapshot", take_disks)
        await failpoint("agent.vm_snapshot.disks")
        await saving.require_still(self._context, saved)
        await self._record(taken=True, stage=SaveStage.NONE)
        await failpoint("agent.vm_snapshot.taken")
        for part in attempt.parts:
            self._context.wake(part.volume_uid)

    def _letting_go(self, tables: Tables, facts: SnapshotFacts) -> list[Change]:
        """Once it is decided the VM is free."""
        if facts.stage is not SaveStage.NONE or facts.saved is None:
            return []
        vm = tables.objects.get(facts.saved.vm_uid)
        if vm is None or facts_of(vm).saving != self._uid:
            return []
        return [PutFacts(uid=vm.uid, facts=_replace(facts_of(vm), saving=""))]

    async def _found(self, stored: StoredObject) -> Outcome:
        """Disks without the memory of that instant are of no use."""
        del stored
        await self._fail(Unavailable("only its disks were taken"))
        return Again()

    # --- what is left

    async def _after_failure(self, stored: StoredObject, seen: Seen) -> Outcome:
        """Nothing of a failed attempt is of use: memory goes at once, disks are merged."""
        await self._remove_files(stored)
        return await self._merge_away(stored, seen) if seen else Done()

    async def _remove_files(self, stored: StoredObject) -> None:
        saved = snapshot_facts(stored).saved
        if saved is not None:
            await failpoint("agent.vm_snapshot.remove")
            await self._context.world.saves.remove(saved.vm_uid, self._uid)

    # --- status

    async def show_error(self, stored: StoredObject, ready: Condition, *, permanent: bool) -> None:
        """Publish a status that shows the error."""
        before = _snapshot(stored).status or VirtualMachineSnapshotStatus()
        phase = "Failed" if permanent else before.phase
        await self._publish_vm(stored, _replace(before, phase=phase), ready)

    async def _show(
        self, stored: StoredObject, seen: Seen, ready: Condition, progress: str = ""
    ) -> None:
        facts, tables = snapshot_facts(stored), self._context.ledger.tables
        status = VirtualMachineSnapshotStatus(phase=_phase(stored, facts), progress=progress)
        if facts.saved is not None:
            status = _with(status, facts.saved)
        shown = [
            SnapshotPartStatus(
                volume=short_name(tables, part.volume_id),
                size_bytes=part.size_bytes,
                allocated_bytes=part.allocated_bytes,
                used_by=[short_name(tables, uid) for uid in part.used_by],
            )
            for _, part in sorted(seen.values(), key=lambda each: each[0].volume_id)
        ]
        await self._publish_vm(stored, _replace(status, volumes=shown), ready)

    async def _publish_vm(
        self, stored: StoredObject, status: VirtualMachineSnapshotStatus, ready: Condition
    ) -> None:
        generation, before = stored.resource.metadata.generation, _snapshot(stored).status
        earlier = before.conditions if before is not None else []
        conditions = merge(earlier, [ready], generation, self._context.now())
        shown = _replace(status, observed_generation=generation, conditions=conditions)
        await self._context.publish(stored, shown)


def _with(status: VirtualMachineSnapshotStatus, saved: SavedVm) -> VirtualMachineSnapshotStatus:
    return _replace(
        status,
        created_at=saved.created_at,
        vmm=VmmIdentity(name=saved.driver, version=saved.version, sha256=saved.sha256),
        cpus=saved.config.cpus,
        memory=saved.spec.memory,
        size_bytes=saved.size_bytes,
        spec=saved.spec,
    )


def _snapshot(stored: StoredObject) -> VirtualMachineSnapshot:
    assert isinstance(stored.resource, VirtualMachineSnapshot)
    return stored.resource


def _phase(stored: StoredObject, facts: SnapshotFacts) -> str:
    if stored.deleting:
        return "Deleting"
    if facts.failed:
        return "Failed"
    if facts.taken:
        return "Ready"
    return "Saving" if facts.stage is not SaveStage.NONE else "Pending"
