"""Planted bugs: each must be caught by the simulation, or the simulation proves nothing.

A mutant is a context manager that breaks one rule of the real agent and puts it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from unittest.mock import patch

from chv.agent import admission, cascade, recovery, tables
from chv.agent.ledger import Ledger
from chv.agent.network.policy import PolicyReconciler
from chv.agent.records import Change
from chv.agent.simple import SimpleReconciler
from chv.agent.snapshot.reconciler import SnapshotReconciler
from chv.agent.vm import apply, freeze, model, observe, plan, plugging, reconciler
from chv.agent.vm.model import (
    DesiredVm,
    ObservedVm,
)
from chv.agent.vm.steps import (
    DetachNicStep,
    DetachVolumeStep,
    MarkRecoveringStep,
    RemoveDiskStep,
    ResetStep,
    Step,
    StopStep,
)
from chv.agent.volume.requests import Requests
from chv.common.errors import DeadlineExceeded
from chv.common.wire.agent import OperationState
from chv.common.wire.stord import BackendState

Planner = Callable[[DesiredVm, ObservedVm], list[Step]]


@contextmanager
def _planner(change: Callable[[Planner], Planner]) -> Iterator[None]:
    with patch.object(reconciler, "plan", change(plan.plan)):
        yield


@contextmanager
def spawn_without_asking_for_the_intent() -> Iterator[None]:
    """A spawn intent without a pid counts as a process that never came to be."""

    async def judge(context: Any, row: Any) -> Any:
        if row.record is None:
            return observe._Process(model.Life.DEAD, None)
        return await real(context, row)

    real = observe.judge
    with patch.object(observe, "judge", judge), patch.object(recovery, "judge", judge):
        yield


@contextmanager
def close_volumes_before_the_vmm_is_gone() -> Iterator[None]:
    """Volumes are detached as soon as a stop is wanted."""

    def change(real: Planner) -> Planner:
        def planner(desired: DesiredVm, observed: ObservedVm) -> list[Step]:
            steps = real(desired, observed)
            if any(isinstance(step, StopStep) for step in steps):
                return [*(DetachVolumeStep(uid) for uid in sorted(observed.attached)), *steps]
            return steps

        return planner

    with _planner(change):
        yield


@contextmanager
def forget_nics_at_delete() -> Iterator[None]:
    """A deleted VM leaves its NICs."""

    def change(real: Planner) -> Planner:
        def planner(desired: DesiredVm, observed: ObservedVm) -> list[Step]:
            steps = real(desired, observed)
            return [step for step in steps if not isinstance(step, DetachNicStep)]

        return planner

    with _planner(change):
        yield


@contextmanager
def run_on_without_a_reset() -> Iterator[None]:
    """After a storage loss the guest goes on as if nothing had happened."""

    def change(real: Planner) -> Planner:
        def planner(desired: DesiredVm, observed: ObservedVm) -> list[Step]:
            steps = real(desired, observed)
            lost = observed.worker is not None and observed.backend is model.Backend.LOST
            return [s for s in steps if not (lost and isinstance(s, ResetStep))]

        return planner

    with _planner(change):
        yield


@contextmanager
def forget_that_a_reset_is_due() -> Iterator[None]:
    """That a recovery is under way is not written down: a killed agent does not know."""

    def change(real: Planner) -> Planner:
        def planner(desired: DesiredVm, observed: ObservedVm) -> list[Step]:
            steps = real(desired, observed)
            return [step for step in steps if not isinstance(step, MarkRecoveringStep)]

        return planner

    with _planner(change):
        yield


@contextmanager
def memory_leads_the_store() -> Iterator[None]:
    """Memory is changed though the commit failed."""

    async def commit_held(self: Ledger, *changes: Change) -> None:
        try:
            await self.store.commit(changes)
        finally:
            self.tables.apply(changes)
            self._doubtful = False
            self._tell(changes)

    with patch.object(Ledger, "commit_held", commit_held):
        yield


@contextmanager
def never_read_again_after_a_lost_reply() -> Iterator[None]:
    """A commit that failed in its reply only is taken for one that was not done."""

    async def commit_held(self: Ledger, *changes: Change) -> None:
        await self.store.commit(changes)
        self.tables.apply(changes)
        self._tell(changes)

    real_load = Ledger.load

    async def load(self: Ledger) -> None:
        await real_load(self)
        self._doubtful = False

    with patch.object(Ledger, "commit_held", commit_held), patch.object(Ledger, "load", load):
        yield


@contextmanager
def no_operation_ends_with_a_delete() -> Iterator[None]:
    """The object goes, its operation stays under way."""

    def removal(context: Any, stored: Any, dependents: Any) -> list[Any]:
        changes = real(context, stored, dependents)
        return [change for change in changes if "Operation" not in str(type(change))]

    real = cascade._removal
    with patch.object(cascade, "_removal", removal):
        yield


@contextmanager
def delete_without_a_tombstone() -> Iterator[None]:
    """The object goes without a trace."""
    real = tables.Tables._remove_object

    def remove(self: tables.Tables, tombstone: Any, undo: Any) -> None:
        real(self, tombstone, undo)
        self.tombstones.pop(tombstone.uid, None)

    with patch.object(tables.Tables, "_remove_object", remove):
        yield


@contextmanager
def leave_the_seed() -> Iterator[None]:
    """A deleted VM leaves its seed disk with the keys."""

    async def remove_files(self: apply.Applier) -> None:
        await self._context.world.vmm.remove(self._handle)
        await self._put_facts(files_made=False, seed_path="")

    with patch.object(apply.Applier, "_remove_files", remove_files):
        yield


@contextmanager
def no_resync() -> Iterator[None]:
    """Objects are looked at only when somebody tells that something happened."""

    async def sleep(self: Any, rest_s: float) -> None:
        await self._woken.wait()

    from chv.agent import actors

    with patch.object(actors.Worker, "_sleep", sleep):
        yield


@contextmanager
def a_crash_is_a_stop() -> Iterator[None]:
    """Nothing follows from a crash: the record is dropped under another kind."""

    def left_s(facts: Any, now: Any) -> float:
        return float("inf") if facts.crashes else 0.0

    with patch.object(observe, "backoff_left_s", left_s):
        yield


@contextmanager
def a_pass_ends_a_newer_operation() -> Iterator[None]:
    """What a pass began for one operation ends the one that came meanwhile."""

    async def settle(self: SimpleReconciler, message: str) -> None:
        current = self._context.operations.current_id(self._uid)
        await self._context.operations.end(current, OperationState.SUCCEEDED, message)

    with patch.object(SimpleReconciler, "settle", settle):
        yield


@contextmanager
def detach_before_the_guest_lets_go() -> Iterator[None]:
    """Volumes of a running VM are detached before their disks are unplugged."""

    def change(real: Planner) -> Planner:
        def planner(desired: DesiredVm, observed: ObservedVm) -> list[Step]:
            steps = real(desired, observed)
            return sorted(steps, key=lambda step: isinstance(step, RemoveDiskStep))

        return planner

    with _planner(change):
        yield


@contextmanager
def plug_before_it_is_written_down() -> Iterator[None]:
    """A disk is recorded only after it was plugged."""

    async def plug(context: Any, *arguments: Any) -> None:
        records: list[Any] = []

        async def record(*arguments: Any) -> None:
            records.append(arguments)

        with patch.object(plugging, "record", record):
            await real(context, *arguments)
        await plugging.record(*records[0])

    real = plugging.plug
    with patch.object(plugging, "plug", plug):
        yield


@contextmanager
def take_an_unplug_for_done() -> Iterator[None]:
    """A guest that has not let go of its disk in time counts as one that has."""

    async def unplug(context: Any, vm: Any, disk_id: str) -> None:
        with suppress(DeadlineExceeded):
            await context.world.vmm.remove_disk(vm, disk_id)
        row = context.ledger.tables.workers[vm.uid]
        left = tuple(d for d in row.config.disks if d.id != disk_id)
        await plugging.record(context, vm.uid, left)

    with patch.object(plugging, "unplug", unplug):
        yield


@contextmanager
def freeze_without_a_mark() -> Iterator[None]:
    """That a guest is about to be frozen is not written down: a killed agent does not know."""

    async def mark(context: Any, vm_uid: str, *, frozen: bool) -> None:
        if not frozen:
            await real(context, vm_uid, frozen=frozen)

    real = freeze._mark
    with patch.object(freeze, "_mark", mark):
        yield


@contextmanager
def a_restart_is_a_loss() -> Iterator[None]:
    """A VM waits for a reset where its storage daemon comes back by itself."""
    backends = {**observe._BACKENDS, BackendState.RESTARTING: model.Backend.LOST}
    with patch.object(observe, "_BACKENDS", backends):
        yield


@contextmanager
def forget_that_a_snapshot_was_taken() -> Iterator[None]:
    """That a snapshot was taken is not remembered."""

    async def record(self: SnapshotReconciler, **changes: object) -> None:
        changes.pop("taken", None)
        await real(self, **changes)

    real = SnapshotReconciler._record
    with patch.object(SnapshotReconciler, "_record", record):
        yield


@contextmanager
def a_verb_that_has_ended_stays_recorded() -> Iterator[None]:
    """The operation of a verb ends and its request stays: it would be done over and over."""

    async def end(
        self: Requests, request: Any, state: Any, message: str, error: Any = None
    ) -> None:
        await self._context.operations.end(request.operation_id, state, message, error)

    with patch.object(Requests, "_end", end):
        yield


@contextmanager
def what_names_lead_to_is_looked_up_once() -> Iterator[None]:
    """A group or exposure that nwd has is as wanted: names may lead elsewhere by now."""

    async def bring(self: Any, stored: Any, wanted: Any, seen: Any, send: Any) -> Any:
        return await real(self, stored, wanted, seen, send) if seen is None else None

    real = PolicyReconciler.bring
    with patch.object(PolicyReconciler, "bring", bring):
        yield


@contextmanager
def a_network_says_nothing_to_its_nics() -> Iterator[None]:
    """A network that begins to serve metadata changes none of its NICs."""
    with patch.object(admission, "_tells_otherwise", lambda before, after: False):
        yield


MUTANTS = (
    what_names_lead_to_is_looked_up_once,
    a_network_says_nothing_to_its_nics,
    forget_that_a_snapshot_was_taken,
    a_verb_that_has_ended_stays_recorded,
    detach_before_the_guest_lets_go,
    plug_before_it_is_written_down,
    take_an_unplug_for_done,
    freeze_without_a_mark,
    a_restart_is_a_loss,
    a_pass_ends_a_newer_operation,
    spawn_without_asking_for_the_intent,
    close_volumes_before_the_vmm_is_gone,
    forget_nics_at_delete,
    run_on_without_a_reset,
    forget_that_a_reset_is_due,
    memory_leads_the_store,
    never_read_again_after_a_lost_reply,
    no_operation_ends_with_a_delete,
    delete_without_a_tombstone,
    leave_the_seed,
    no_resync,
    a_crash_is_a_stop,
)
