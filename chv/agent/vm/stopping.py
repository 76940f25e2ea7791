"""The end of a VMM that is wanted, or follows from what its guest did: recorded, then walked.

What is recorded before anything is done says why it ends, since when its deadline runs and which
rung of the ladder was begun last. An agent that is killed in the middle is followed by one that
goes on at the rung that is due by then: the deadline does not begin anew.
"""

from __future__ import annotations

from functools import partial

import msgspec

from chv.agent.context import Context
from chv.agent.moments import age_s
from chv.agent.records import Ending, EndKind, PutWorker, WorkerRow
from chv.agent.vm import holding
from chv.agent.vm.crashes import ASKED_FOR
from chv.agent.vm.desired import facts_of, handle_of, vm_of
from chv.agent.vm.ladder import Ladder, Rung
from chv.agent.vm.steps import StopStep
from chv.common.errors import Conflict
from chv.common.failpoint import failpoint
from chv.common.process.records import WorkerRecord
from chv.common.quantity import parse_duration_s

_replace = msgspec.structs.replace


async def stop(context: Context, uid: str, record: WorkerRecord, step: StopStep) -> None:
    """End the VMM; DeadlineExceeded where even SIGKILL leaves a process."""
    ending = await _begin(context, uid, record, step)
    stored = context.stored(uid)
    assert stored is not None and ending.since is not None
    timeout_s = parse_duration_s(vm_of(stored).spec.shutdown_timeout, field="spec.shutdownTimeout")
    spent_s = age_s(ending.since, context.world.moment())
    handle = handle_of(stored)
    ladder = Ladder(
        context.world.vmm,
        context.world.clock,
        handle,
        record,
        partial(holding.run_on, context, handle),
        partial(_note, context, uid),
    )
    rung = await ladder.walk(timeout_s, spent_s, lambda: not step.ask or _forced(context, uid))
    await _change(context, uid, rung=rung.value)
    await context.operations.note(uid, f"stopped by {rung.value}")


async def _begin(context: Context, uid: str, record: WorkerRecord, step: StopStep) -> Ending:
    """Record why it ends, unless that is recorded; a request comes before what was seen."""
    async with context.ledger.writing() as tables:
        row, stored = _row(context, uid), tables.objects[uid]
        reason = facts_of(stored).stop_reason
        if step.kind is EndKind.DRAIN:
            reason = tables.node.who
        earlier = row.ending
        ending = Ending(kind=step.kind, reason=reason)
        if earlier is not None and step.kind not in ASKED_FOR:
            ending = earlier
        since = earlier.since if earlier is not None else None
        tried = earlier.tried if earlier is not None else ""
        if step.ask and not tried and not _forced(context, uid):
            tried = Rung.ACPI.value  # one commit for both
        ending = _replace(ending, since=since or context.world.moment(), tried=tried)
        if (ending, record) != (row.ending, row.record):
            row = _replace(row, ending=ending, record=record)
            await context.ledger.commit_held(PutWorker(row=row))
        return ending


async def _note(context: Context, uid: str, rung: Rung) -> None:
    """Record a rung before it is begun."""
    await _change(context, uid, tried=rung.value)
    await failpoint(f"agent.vm.stop_{rung.value}.before")


async def _change(context: Context, uid: str, **changes: str) -> None:
    async with context.ledger.writing():
        row = _row(context, uid)
        assert row.ending is not None  # recorded before the first rung
        ending = _replace(row.ending, **changes)
        if ending != row.ending:
            await context.ledger.commit_held(PutWorker(row=_replace(row, ending=ending)))


def _row(context: Context, uid: str) -> WorkerRow:
    row = context.ledger.tables.workers.get(uid)
    if row is None or context.stored(uid) is None:
        raise Conflict("the VMM was forgotten", resource=uid)
    return row


def _forced(context: Context, uid: str) -> bool:
    stored = context.stored(uid)
    return stored is not None and facts_of(stored).force_stop
