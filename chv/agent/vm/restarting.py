"""The storage daemon of a VM replaced under its running guest, because somebody asked for it.

stord says whether that may be, and does it once per operation. A refusal is the outcome of the
operation that asked and no trouble of the VM's; what may be asked for again is raised.
"""

from __future__ import annotations

import msgspec

from chv.agent.context import Context
from chv.agent.records import Change, PutFacts
from chv.agent.vm.desired import facts_of
from chv.common.errors import (
    ChvError,
    Conflict,
    DeadlineExceeded,
    ErrorData,
    OutcomeUnknown,
    Unavailable,
)
from chv.common.wire import stord
from chv.common.wire.agent import OperationState

AGAIN = (Unavailable, DeadlineExceeded, OutcomeUnknown, Conflict)


async def restart_storage(context: Context, vm_uid: str, operation_id: str) -> None:
    """Ask for it; end the operation with what came of it."""
    request = stord.RestartVmBackend(meta=context.meta(operation_id, 0), vm_id=vm_uid)
    try:
        info = await context.stord.call(stord.RESTART_VM_BACKEND, request)
    except AGAIN:
        raise
    except ChvError as error:
        refusal = error
    else:
        done = _Outcome(state=OperationState.SUCCEEDED, message=info.last_restart)
        await _end(context, vm_uid, operation_id, done)
        return
    failed = _Outcome(state=OperationState.FAILED, message=str(refusal), error=refusal.data())
    await _end(context, vm_uid, operation_id, failed)


class _Outcome(msgspec.Struct, frozen=True, kw_only=True):
    state: OperationState
    message: str
    error: ErrorData | None = None


async def _end(context: Context, vm_uid: str, operation_id: str, outcome: _Outcome) -> None:
    """Clear the request and end its operation in one transaction."""
    async with context.ledger.writing() as tables:
        stored, changes = tables.objects.get(vm_uid), list[Change]()
        if stored is not None and facts_of(stored).storage_request == operation_id:
            facts = msgspec.structs.replace(facts_of(stored), storage_request="")
            changes.append(PutFacts(uid=vm_uid, facts=facts))
        operation = tables.operations.get(operation_id)
        changes += context.operations.ending_open(
            operation, outcome.state, outcome.message, outcome.error
        )
        if changes:
            await context.ledger.commit_held(*changes)
