"""The transaction that ends a VMM's record: gone for good, with all that follows from it.

One commit, on top of what is wanted by then: a stop or a deletion that came meanwhile counts.
"""

from __future__ import annotations

import msgspec

from chv.agent.context import Context
from chv.agent.generations import Author
from chv.agent.moments import Moment
from chv.agent.operations import SYSTEM
from chv.agent.records import (
    Change,
    Ending,
    EndKind,
    PutFacts,
    PutObject,
    RemoveWorker,
    StoredObject,
    VmFacts,
    WorkerRow,
)
from chv.agent.vm.crashes import ASKED_FOR, crashes_after
from chv.agent.vm.desired import facts_of, vm_of
from chv.agent.vm.ephemeral import vanishes, vanishing
from chv.agent.vm.exits import Consequence, Follow, consequence, facts_after
from chv.agent.vm.observe import Memory
from chv.common.errors import Conflict
from chv.common.wire.agent import OperationState
from chv.common.wire.resources import RunStrategy

_replace = msgspec.structs.replace


async def forget_worker(context: Context, uid: str, memory: Memory) -> None:
    """Drop the record of a VMM that is gone, and record what follows from its end."""
    async with context.ledger.writing() as tables:
        stored, row = tables.objects.get(uid), tables.workers.get(uid)
        if stored is None or row is None:
            raise Conflict("there is nothing to forget", resource=uid)
        ending = row.ending or Ending(kind=_unasked(context, row))
        ending = _of_restore(facts_of(stored), ending)
        crashes = _crashes(context, stored, ending)
        follow = _follow(context, stored, ending, len(crashes))
        facts = facts_after(facts_of(stored), ending, follow, crashes, context.now())
        changes: list[Change] = [
            RemoveWorker(vm_uid=uid, ending=ending),
            PutFacts(uid=uid, facts=facts),
        ]
        if follow.follow is Follow.HALT:
            changes = [RemoveWorker(vm_uid=uid, ending=ending), _halted(context, stored, facts)]
        changes += _told(context, stored, facts, follow)
        if vanishes(stored, row, ending):
            changes = [RemoveWorker(vm_uid=uid, ending=ending), *vanishing(context, stored, facts)]
        await context.ledger.commit_held(*changes)
        memory.recovery_failures = 0


def _unasked(context: Context, row: WorkerRow) -> EndKind:
    """Return what an end is that nobody has recorded: a process of another boot is no crash."""
    began = row.record.boot_id if row.record is not None else row.boot_id
    if began and began != context.world.boot_id:
        return EndKind.HOST_REBOOT
    return EndKind.CRASH if row.record is not None else EndKind.SPAWN_FAILED


def _of_restore(facts: VmFacts, ending: Ending) -> Ending:
    """An end before a restored guest ran: it is not booted from disks that it did not leave so."""
    request = facts.restore
    if request is None or not request.disks_touched or request.resuming:
        return ending
    if ending.kind in ASKED_FOR or ending.kind in (EndKind.RESTORE_FAILED, EndKind.HOST_REBOOT):
        return ending
    return Ending(kind=EndKind.RESTORE_FAILED, reason=f"the VMM ended ({ending.kind.value})")


def _crashes(context: Context, stored: StoredObject, ending: Ending) -> tuple[Moment, ...]:
    """Return the crashes that count, this end among them where nobody asked for it."""
    limits, now = context.world.limits, context.world.moment()
    facts = facts_of(stored)
    return crashes_after(facts, ending.kind, now, limits.restart_window_s, limits.restarts_max)


def _follow(context: Context, stored: StoredObject, ending: Ending, crashes: int) -> Consequence:
    strategy = vm_of(stored).spec.run_strategy
    if stored.deleting:
        strategy = RunStrategy.HALTED
    return consequence(ending.kind, strategy, crashes, context.world.limits.restarts_max)


def _halted(context: Context, stored: StoredObject, facts: VmFacts) -> PutObject:
    """The run strategy's consequence, the one change of desired state that a node may make."""
    vm = vm_of(stored)
    facts = _replace(facts, last_strategy=vm.spec.run_strategy)
    metadata = _replace(
        vm.metadata,
        generation=vm.metadata.generation + 1,
        resource_version=str(context.ledger.next_revision()),
    )
    spec = _replace(vm.spec, run_strategy=RunStrategy.HALTED)
    resource = _replace(vm, metadata=metadata, spec=spec)
    author = Author(requester=SYSTEM, reason=facts.last_stop, verb="halt")
    return PutObject(object=StoredObject(resource=resource, facts=facts), author=author)


def _told(
    context: Context, stored: StoredObject, facts: VmFacts, follow: Consequence
) -> list[Change]:
    """End the operation where it can no longer succeed."""
    operation = context.operations.current(stored.uid)
    if operation is not None and operation.verb == "restore" and facts.restore is None:
        message = facts.given_up or facts.last_stop
        return context.operations.ending(operation, OperationState.FAILED, message)
    if operation is None or follow.follow not in (Follow.HALT, Follow.GIVE_UP, Follow.REST):
        return []
    if operation.verb == "rebuild" and facts.rebuild is not None and not facts.rebuild.swapped:
        return []  # it gets its new root disk all the same
    if operation.verb in ("stop", "delete"):
        return []
    repaired = operation.verb == "reconcile" and follow.follow is Follow.HALT
    state = OperationState.SUCCEEDED if repaired else OperationState.FAILED
    return context.operations.ending(operation, state, facts.given_up or facts.last_stop)
