"""The census before the first action: what became of every VMM that was recorded or intended.

Nothing is started, stopped or removed here. A process found by its intent is recorded; a VMM
that no record explains is remembered, and its VM is not started while it lives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio
import msgspec

from chv.agent.context import Context
from chv.agent.records import PutWorker, WorkerRow
from chv.agent.vm.model import (
    Life,
)
from chv.agent.vm.observe import judge
from chv.common import logs

log = logs.get(__name__)

JUDGES_MAX = 16


@dataclass(kw_only=True)
class RecoveryReport:
    """What the census before the first action found. Names are `namespace/name`."""

    adopted: list[str] = field(default_factory=list)  # a VMM that lives, intent or record
    gone: list[str] = field(default_factory=list)  # recorded, proven dead
    unknown: list[str] = field(default_factory=list)  # in doubt: phase Unknown, never spawned
    orphans: list[str] = field(default_factory=list)  # worker ids that no record explains


async def take_census(context: Context) -> RecoveryReport:
    """Judge all; see the module."""
    report = RecoveryReport()
    limiter = anyio.Semaphore(JUDGES_MAX)
    async with anyio.create_task_group() as group:
        for row in list(context.ledger.tables.workers.values()):
            group.start_soon(_judge, context, row, report, limiter)
    await _find_strangers(context, report)
    for names in (report.adopted, report.gone, report.unknown, report.orphans):
        names.sort()
    log.info(
        "agent.recovered",
        adopted=len(report.adopted),
        gone=len(report.gone),
        unknown=len(report.unknown),
        orphans=report.orphans,
    )
    return report


async def _judge(
    context: Context, row: WorkerRow, report: RecoveryReport, limiter: anyio.Semaphore
) -> None:
    async with limiter:
        process = await judge(context, row)
        if process.life is Life.ALIVE and row.record is None:
            found = msgspec.structs.replace(row, record=process.record)
            await context.ledger.commit(PutWorker(row=found))
    stored = context.stored(row.vm_uid)
    name = f"{stored.key[1]}/{stored.key[2]}" if stored is not None else row.vm_uid
    lists = {Life.ALIVE: report.adopted, Life.DEAD: report.gone, Life.UNKNOWN: report.unknown}
    lists[process.life].append(name)


async def _find_strangers(context: Context, report: RecoveryReport) -> None:
    known = {row.worker_id for row in context.ledger.tables.workers.values()}
    for record in await context.world.vmm.find_all():
        if record.worker_id in known:
            continue
        report.orphans.append(record.worker_id)
        short = record.worker_id.split(":")[-2]  # Layout.worker_id: chv:instance:kind:short:nonce
        context.strangers[short] = record.worker_id
