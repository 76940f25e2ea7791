"""`chv why`: from what is wanted to the step that blocks it, in one answer.

Reads memory, the agent's store and the ends of log files; asks no daemon, no VMM and no guest,
so nothing that hangs can hang it. A log that cannot be read in time is left out.
"""

from __future__ import annotations

from pathlib import Path

import anyio
import msgspec

from chv.agent import log_reader, queries, why_rules
from chv.agent.console.recording import FILE_NAME
from chv.agent.context import Context, phase_of
from chv.agent.history import History
from chv.agent.records import StoredObject
from chv.agent.vm.desired import facts_of
from chv.agent.vmms import VMM_LOG
from chv.common.errors import NotFound
from chv.common.wire.agent import ObjectRef, Operation, OperationState
from chv.common.wire.agent_history import GenerationInfo, WhyReply, Words
from chv.common.wire.resources import Condition, VirtualMachine

STEPS_MAX = 5
LINES_MAX = 8
LINE_CHARACTERS_MAX = 300
SCANNED_LINES_MAX = 2000
READ_S = 1.0
DAEMON_OF = {
    "VirtualMachine": "agent",
    "VirtualMachineSnapshot": "agent",
    "Image": "agent",
    "Volume": "stord",
    "VolumeSnapshot": "stord",
    "Network": "nwd",
    "SecurityGroup": "nwd",
    "Exposure": "nwd",
}


class Why:
    """See the module."""

    def __init__(self, context: Context, history: History) -> None:
        self._context = context
        self._history = history

    async def why(self, request: ObjectRef) -> WhyReply:
        """Say why an object is as it is."""
        stored = queries.require(self._context, request.kind, request.namespace, request.name)
        conditions = why_rules.blocking(stored)
        operation = await self._operation(stored)
        under_way = operation is not None and not operation.ended_at
        as_wanted = why_rules.is_well(stored) and not conditions and not under_way
        reply = self._head(stored, await self._history.newest(stored.uid))
        verdict = _verdict(stored, reply.wanted, conditions, operation)
        reply = msgspec.structs.replace(reply, as_wanted=as_wanted, verdict=verdict)
        if as_wanted:
            return reply
        waits_for = why_rules.obstacles(self._context.ledger.tables, stored)
        return msgspec.structs.replace(
            reply,
            operation=operation,
            conditions=conditions,
            obstacles=waits_for,
            words=await self._words(stored),
            serial=await self._serial(stored),
            fixes=why_rules.fixes(stored, conditions, waits_for, operation),
        )

    def _head(self, stored: StoredObject, wanted: GenerationInfo | None) -> WhyReply:
        kind, namespace, name = stored.key
        status = stored.resource.status
        return WhyReply(
            kind=kind,
            namespace=namespace,
            name=name,
            uid=stored.uid,
            phase=phase_of(status),
            as_wanted=False,
            verdict="",
            wants=why_rules.wants(stored),
            generation=stored.resource.metadata.generation,
            observed_generation=status.observed_generation if status is not None else 0,
            wanted=wanted,
            age_s=queries.age_s(self._context, stored),
        )

    async def _operation(self, stored: StoredObject) -> Operation | None:
        """Return the operation under way, else the last one if it failed; with its last steps."""
        operation = self._context.operations.current(stored.uid)
        if operation is not None:
            place = self._context.places.get(stored.uid)
            operation = msgspec.structs.replace(operation, queue=place)
        else:
            kind, namespace, name = stored.key
            store = self._context.ledger.store
            last = await store.operations(kind=kind, namespace=namespace, name=name, limit=1)
            if not last or last[0].uid != stored.uid or last[0].state is not OperationState.FAILED:
                return None
            operation = await store.operation(last[0].id) or last[0]
        return msgspec.structs.replace(operation, steps=operation.steps[-STEPS_MAX:])

    async def _words(self, stored: StoredObject) -> list[Words]:
        layout, daemon = self._context.world.layout, DAEMON_OF[stored.key[0]]
        found = []
        if isinstance(stored.resource, VirtualMachine):
            lines = await _tail(layout.vm_state(stored.uid) / VMM_LOG, LINES_MAX)
            found.append(Words(source=VMM_LOG, lines=lines))
        said = await _tail(layout.logs / f"{daemon}.log", SCANNED_LINES_MAX)
        about = [line for line in said if _is_trouble_of(line, stored)]
        found.append(Words(source=f"daemon/{daemon}", lines=about[-LINES_MAX:]))
        return [each for each in found if each.lines]

    async def _serial(self, stored: StoredObject) -> list[str]:
        if not isinstance(stored.resource, VirtualMachine):
            return []
        return await _tail(self._context.world.layout.vm_state(stored.uid) / FILE_NAME, LINES_MAX)


async def _tail(path: Path, lines_max: int) -> list[str]:
    """Return the last lines of a file; none where there is none, or its disk hangs."""
    with anyio.move_on_after(READ_S):
        try:
            text, _ = await log_reader.read(path, lines_max, path.name)
        except (NotFound, OSError):
            return []
        return [line[:LINE_CHARACTERS_MAX] for line in text.splitlines()]
    return []


def _is_trouble_of(line: str, stored: StoredObject) -> bool:
    named = stored.uid in line or stored.title in line
    return named and ('"level":"warning"' in line or '"level":"error"' in line)


def _verdict(
    stored: StoredObject,
    wanted: GenerationInfo | None,
    conditions: list[Condition],
    operation: Operation | None,
) -> str:
    """Say it in one line: the step that blocks, the condition that is not as wanted, or nothing."""
    me = why_rules.typed(stored)
    phase = phase_of(stored.resource.status)
    if operation is not None and not operation.ended_at:
        step = operation.steps[-1].name if operation.steps else "its first step"
        said = f": {operation.message}" if operation.message else ""
        late = why_rules.overdue(stored)
        said += f"; {late}" if late else ""
        return f"{me} is {phase}: {operation.verb} is at {step}{said}"
    if conditions:
        first = conditions[0]
        said = f": {first.message}" if first.message else ""
        return f"{me} is {phase}: {first.type} is {first.status.value} ({first.reason}){said}"
    if operation is not None and not why_rules.is_well(stored):
        return f"{me} is {phase}: {operation.verb} failed: {operation.message}"
    if not why_rules.is_well(stored):
        return f"{me} is {phase}, and generation {stored.resource.metadata.generation} is due"
    by = f", as {wanted.requester} wanted" if wanted is not None and wanted.requester else ""
    why = f" ({wanted.reason})" if wanted is not None and wanted.reason else ""
    if phase == "Stopped":
        return f"{me} is stopped{by}: {facts_of(stored).last_stop or 'it was never started'}"
    return f"{me} is {phase}{by}{why}: nothing is in its way"
