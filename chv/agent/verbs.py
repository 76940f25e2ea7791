"""The verbs on a VM: what each changes in spec and facts. Pure.

`stop` sets runStrategy Halted and `start` the last other value; `restart` names the incarnation
that has to go; `reset` asks for the button, `restart_storage` for another storage daemon; `pause`
and `resume` hold the vCPUs and let go of them. Fails with FailedPrecondition where a verb makes
no sense.
"""

from __future__ import annotations

import msgspec

from chv.agent.records import StoredObject, VmFacts, WorkerRow
from chv.agent.vm.crashes import forgiven
from chv.agent.vm.desired import facts_of, vm_of
from chv.common.errors import Conflict, FailedPrecondition
from chv.common.wire.agent import ActOnVm, Operation, VmVerb
from chv.common.wire.resources import RunStrategy

_replace = msgspec.structs.replace


def acted(
    stored: StoredObject, row: WorkerRow | None, request: ActOnVm, operation_id: str
) -> StoredObject:
    """Return the VM with what the verb wants; generation and revision are the caller's."""
    if stored.deleting:
        raise FailedPrecondition(
            f"it is being deleted, so it cannot {request.verb.value}", resource=stored.title
        )
    restoring = facts_of(stored).restore is not None
    if restoring and request.verb is not VmVerb.STOP:
        raise Conflict(
            f"it is being restored, so it cannot {request.verb.value}",
            resource=stored.title,
            hint="wait for it, or chv stop it",
        )
    match request.verb:
        case VmVerb.RESTORE:
            raise AssertionError("a restore needs more than the VM")
        case VmVerb.START:
            return started(stored)
        case VmVerb.STOP:
            return _stop(stored, request)
        case VmVerb.RESTART:
            return _restart(stored, row, request)
        case VmVerb.RESET:
            _refuse_not_running(stored, row, "be reset")
            return _replace(stored, facts=_replace(facts_of(stored), reset_request=operation_id))
        case VmVerb.PAUSE | VmVerb.RESUME as verb:
            _refuse_not_running(stored, row, f"be {verb.value}d")
            paused = verb is VmVerb.PAUSE
            return _replace(stored, facts=_replace(facts_of(stored), paused=paused))
        case VmVerb.RESTART_STORAGE:
            return _restart_storage(stored, row, operation_id)


def started(stored: StoredObject) -> StoredObject:
    """Return the VM with the wish that it runs."""
    facts = _replace(
        forgiven(facts_of(stored)),
        started=True,
        stop_reason="",
        force_stop=False,
        paused=False,
    )
    strategy = vm_of(stored).spec.run_strategy
    if strategy is RunStrategy.HALTED:
        strategy = facts.last_strategy
    return _with(stored, strategy, facts)


def joins(current: Operation, request: ActOnVm, before: StoredObject, after: StoredObject) -> bool:
    """Tell whether this very request is under way: then it is joined, not begun again."""
    if current.verb != request.verb.value:
        return False
    if request.verb is VmVerb.RESET:
        return before.facts is not None and bool(before.facts.reset_request)
    if request.verb in (VmVerb.PAUSE, VmVerb.RESUME):
        return before.facts == after.facts
    if request.verb is VmVerb.RESTORE:
        return _restores(before) == _restores(after)
    if request.verb is VmVerb.RESTART_STORAGE:
        return before.facts is not None and bool(before.facts.storage_request)
    facts, wanted = before.facts, after.facts
    assert facts is not None and wanted is not None
    forced = wanted.force_stop and not facts.force_stop
    return before.resource.spec == after.resource.spec and not forced


def _restores(stored: StoredObject) -> str:
    """Return the snapshot that a VM is being brought back to; empty: none."""
    request = facts_of(stored).restore
    return request.snapshot_uid if request is not None else ""


def before_start(stored: StoredObject) -> dict[str, str | int | bool | None]:
    """Return what a start changes, to be recorded with its operation."""
    facts = facts_of(stored)
    return {
        "runStrategy": vm_of(stored).spec.run_strategy.value,
        "started": facts.started,
        "given_up": facts.given_up,
        "stop_reason": facts.stop_reason,
    }


def as_before_start(stored: StoredObject, operation: Operation) -> StoredObject:
    """Return the VM as a start has found it."""
    known = operation.request
    facts = _replace(
        facts_of(stored),
        started=bool(known["started"]),
        given_up=str(known["given_up"]),
        stop_reason=str(known["stop_reason"]),
    )
    return _with(stored, RunStrategy(str(known["runStrategy"])), facts)


def _stop(stored: StoredObject, request: ActOnVm) -> StoredObject:
    facts, strategy = facts_of(stored), vm_of(stored).spec.run_strategy
    last = facts.last_strategy if strategy is RunStrategy.HALTED else strategy
    facts = _replace(
        forgiven(facts),
        last_strategy=last,
        started=False,
        replace_worker="",
        reset_request="",
        storage_request="",
        restore=None,
        force_stop=request.force,
        stop_reason=_words(request),
    )
    return _with(stored, RunStrategy.HALTED, facts)


def _restart(stored: StoredObject, row: WorkerRow | None, request: ActOnVm) -> StoredObject:
    after = started(stored)
    facts = _replace(
        facts_of(after),
        replace_worker=row.worker_id if row is not None else "",
        reset_request="",
        storage_request="",
        force_stop=request.force and row is not None,
        stop_reason=_words(request),
    )
    return _replace(after, facts=facts)


def _restart_storage(
    stored: StoredObject, row: WorkerRow | None, operation_id: str
) -> StoredObject:
    if not vm_of(stored).spec.disks:
        raise FailedPrecondition(
            "it has no volumes, so no storage daemon", resource=stored.title, field="spec.disks"
        )
    _refuse_not_running(stored, row, "have its storage daemon restarted: every start has a new one")
    return _replace(stored, facts=_replace(facts_of(stored), storage_request=operation_id))


def _refuse_not_running(stored: StoredObject, row: WorkerRow | None, what: str) -> None:
    if row is None or not row.booted or row.ending is not None:
        raise FailedPrecondition(
            f"it does not run, so it cannot {what}", resource=stored.title, hint="start it"
        )


def _with(stored: StoredObject, strategy: RunStrategy, facts: VmFacts) -> StoredObject:
    vm = vm_of(stored)
    spec = _replace(vm.spec, run_strategy=strategy)
    return _replace(stored, resource=_replace(vm, spec=spec), facts=facts)


def _words(request: ActOnVm) -> str:
    return f"by {request.requester}" + (f": {request.reason}" if request.reason else "")
