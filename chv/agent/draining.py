"""The operator's verbs on the node: recorded first, then followed; and the end of a drain.

What is wanted of the node is one row of the store, changed under the lock under which a VMM's
spawn is intended: from the commit of a drain on none is. VMs are stopped by their own workers,
who read the row; here is only watched until none is left. Fails with FailedPrecondition where
the node's table has no such event, and as the store does.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec

from chv.agent import idempotency
from chv.agent.context import Context, phase_of
from chv.agent.node import NodeEvent
from chv.agent.node_record import NODE_UID, Hold, NodeIntent, NodeRecord, PutNode
from chv.agent.records import Change, PutOperation, StoredObject, WorkerRow
from chv.common import logs
from chv.common.errors import ChvError, InvalidArgument
from chv.common.failpoint import failpoint
from chv.common.wire import agent_node as api
from chv.common.wire.agent import Operation, OperationReply, OperationState
from chv.common.wire.agent_node import NodeVerb
from chv.common.wire.resources import ConditionStatus

log = logs.get(__name__)

LOOK_S = 0.5
SHOWN_MAX = 50  # VMs in a progress
EVENTS = {
    NodeVerb.DRAIN: NodeEvent.DRAIN,
    NodeVerb.MAINTENANCE: NodeEvent.DRAIN,
    NodeVerb.CANCEL_DRAIN: NodeEvent.DRAIN_CANCELLED,
    NodeVerb.RESUME: NodeEvent.RESUME,
}
FAILPOINTS = tuple(
    f"agent.node.{name}.{moment}"
    for name in (*(verb.value for verb in NodeVerb), "drained")
    for moment in ("before", "after")
)

_replace = msgspec.structs.replace


class NodeDesk:
    """See the module. One per engine."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._changed = anyio.Event()

    @property
    def record(self) -> NodeRecord:
        """What is recorded of the node."""
        return self._context.ledger.tables.node

    async def act(self, request: api.ActOnNode) -> tuple[str, bool]:
        """Record a verb and follow it; return its operation and whether it was so already."""
        if request.verb is NodeVerb.MAINTENANCE and not request.reason:
            raise InvalidArgument("maintenance wants a reason", field="reason", hint="--reason")
        ledger, digest = self._context.ledger, idempotency.digest_of("node", request)
        async with ledger.writing() as tables:
            known = await idempotency.recorded(ledger, request.idempotency_key, digest)
            if known is not None:
                first = msgspec.json.decode(known.reply, type=OperationReply).operation
                return first.id, True
            joined = _joined(tables.node, request.verb)
            if joined is not None:
                await self._remember(request, digest, joined)
                return joined, True
            if request.verb in EVENTS:
                self._context.world.gate.allow(EVENTS[request.verb])
            operation = self._operation(request)
            after = self._after(tables.node, request, operation)
            reply = OperationReply(operation=operation)
            remembered = idempotency.remembered(request.idempotency_key, digest, reply)
            told = self._told(tables.node, after, operation)
            changes: list[Change] = [PutNode(record=after), *told, *remembered]
            await self._commit(request.verb.value, changes)
        return operation.id, False

    async def _remember(self, request: api.ActOnNode, digest: str, operation_id: str) -> None:
        """Keep what a key was answered; without an operation there is nothing to be found again."""
        operation = await self._context.ledger.operation(operation_id)
        if operation is not None:
            reply = OperationReply(operation=operation, joined=True)
            ledger, key = self._context.ledger, request.idempotency_key
            await idempotency.remember(ledger, key, digest, reply)

    async def after_boot(self) -> None:
        """End what was to last until the host boots, where it has booted since."""
        async with self._context.ledger.writing() as tables:
            record = tables.node
            if not record.holds_vms or record.until_boot in ("", self._context.world.boot_id):
                return
            operation = self._context.operations.current(NODE_UID)
            message = "the host has booted"
            ended = self._context.operations.ending_open(
                operation, OperationState.SUCCEEDED, message
            )
            after = _served(record, record.hold)
            await self._commit("booted", [PutNode(record=after), *ended])

    async def run(self) -> None:
        """End each drain once no VM is left, until cancelled."""
        while True:
            self._changed = anyio.Event()
            if self.record.intent is not NodeIntent.DRAIN:
                await self._changed.wait()
                continue
            try:
                await self._look()
            except ChvError as error:  # the store: what was committed is found at the next look
                log.warning("node.drain.look_failed", error=str(error))
            await anyio.sleep(LOOK_S)

    def follow(self) -> None:
        """Let the node do what is recorded by now."""
        self._context.world.gate.follow(self.record)
        self._changed.set()

    def progress(self) -> api.DrainProgress | None:
        """Return how far a drain is; None where none is under way."""
        if self.record.intent is not NodeIntent.DRAIN:
            return None
        found = self._left()
        total = max(self.record.stopped, len(found))
        return api.DrainProgress(total=total, left=len(found), blocking=found[:SHOWN_MAX])

    # --- the record

    def _operation(self, request: api.ActOnNode) -> Operation:
        """Return what the verb is recorded as; all but a drain have ended with their commit."""
        now = self._context.now()
        open_ended = request.verb in (NodeVerb.DRAIN, NodeVerb.MAINTENANCE)
        return Operation(
            id=self._context.world.ids.operation(),
            verb=request.verb.value,
            kind="Node",
            namespace="",
            name=NODE_UID,
            uid=NODE_UID,
            generation=0,
            requester=request.requester,
            reason=request.reason,
            state=OperationState.RUNNING if open_ended else OperationState.SUCCEEDED,
            created_at=now,
            started_at=now,
            ended_at="" if open_ended else now,
        )

    def _after(self, before: NodeRecord, asked: api.ActOnNode, operation: Operation) -> NodeRecord:
        hold = Hold(
            requester=asked.requester,
            reason=asked.reason,
            since=operation.created_at,
            operation_id=operation.id,
        )
        match asked.verb:
            case NodeVerb.DRAIN | NodeVerb.MAINTENANCE:
                left = len(self._left())
                intent = NodeIntent.DRAIN if left else NodeIntent.MAINTAIN
                boot_id = self._context.world.boot_id if asked.until_boot else ""
                return _replace(before, intent=intent, hold=hold, stopped=left, until_boot=boot_id)
            case NodeVerb.CANCEL_DRAIN | NodeVerb.RESUME:
                # Who let it serve again, for the transition; the operation keeps it for good.
                return _served(before, hold)
            case NodeVerb.PAUSE_SCHEDULING:
                return _replace(before, paused=hold)
            case NodeVerb.RESUME_SCHEDULING:
                return _replace(before, paused=None)

    def _told(self, before: NodeRecord, after: NodeRecord, operation: Operation) -> list[Change]:
        """Return the operations' part of a change: the new one, and the end of a drain's."""
        if after.intent is NodeIntent.MAINTAIN and before.intent is NodeIntent.SERVE:
            operation = _replace(
                operation,
                state=OperationState.SUCCEEDED,
                message="no VM ran",
                ended_at=operation.created_at,
            )
        current = self._context.operations.current(NODE_UID)
        if after.intent is before.intent or current is None:
            return [PutOperation(operation=operation)]
        message = f"by {operation.requester}: {operation.reason}".removesuffix(": ")
        ended = self._context.operations.ending(current, OperationState.CANCELLED, message)
        return [*ended, PutOperation(operation=operation)]

    async def _commit(self, name: str, changes: Sequence[Change]) -> None:
        """Store the record, then let node and VMs follow; the caller holds `writing`."""
        held = self.record.holds_vms
        await failpoint(f"agent.node.{name}.before")
        await self._context.ledger.commit_held(*changes)
        await failpoint(f"agent.node.{name}.after")
        if self.record.holds_vms is not held:
            self._context.begin_round()
        self.follow()
        for row in self._context.ledger.tables.of_kind("VirtualMachine"):
            self._context.wake(row.uid)

    # --- the end of a drain

    async def _look(self) -> None:
        """Show how many VMs are left; with the last one gone the node is in Maintenance."""
        await self._forget_gone_strangers()
        async with self._context.ledger.writing() as tables:
            if tables.node.intent is not NodeIntent.DRAIN:
                return
            left = self._left()
            if not left:
                await self._end_drain(tables.node)
                return
        first = f"{left[0].namespace}/{left[0].name}: {left[0].why or left[0].phase}"
        await self._context.operations.note(NODE_UID, f"VMs left: {len(left)}; {first}")

    async def _end_drain(self, record: NodeRecord) -> None:
        operation = self._context.operations.current(NODE_UID)
        message = f"VMs stopped: {record.stopped}"
        ended = self._context.operations.ending_open(operation, OperationState.SUCCEEDED, message)
        after = _replace(record, intent=NodeIntent.MAINTAIN)
        await self._commit("drained", [PutNode(record=after), *ended])

    async def _forget_gone_strangers(self) -> None:
        """VMMs that no record explains count as long as they live."""
        strangers = self._context.strangers
        if not strangers or self._context.ledger.tables.workers:
            return
        alive = {record.worker_id for record in await self._context.world.vmm.find_all()}
        for short in [short for short, worker_id in strangers.items() if worker_id not in alive]:
            strangers.pop(short, None)

    def _left(self) -> list[api.DrainedVm]:
        """Return the VMs that have a VMM, or may have one, by name."""
        tables = self._context.ledger.tables
        found = [self._blocking(tables.objects[row.vm_uid], row) for row in tables.workers.values()]
        found += [
            api.DrainedVm(namespace="", name=worker_id, why="a VMM that no record explains")
            for worker_id in self._context.strangers.values()
        ]
        return sorted(found, key=lambda each: (each.namespace, each.name))

    def _blocking(self, stored: StoredObject, row: WorkerRow) -> api.DrainedVm:
        _, namespace, name = stored.key
        return api.DrainedVm(
            namespace=namespace,
            name=name,
            phase=str(phase_of(stored.resource.status)),
            why=self._why(stored, row),
        )

    def _why(self, stored: StoredObject, row: WorkerRow) -> str:
        operation = self._context.operations.current(stored.uid)
        if operation is not None and operation.message:
            return operation.message
        if row.ending is not None and not row.ending.rung:
            vm = stored.resource
            timeout = getattr(vm.spec, "shutdown_timeout", "")
            return f"its guest is asked to power off, for at most {timeout}, then it is killed"
        status = stored.resource.status
        for condition in status.conditions if status is not None else ():
            if condition.type == "VMMRunning" and condition.message:
                return condition.message
            if condition.type == "VMMRunning" and condition.status is not ConditionStatus.TRUE:
                return condition.reason
        if operation is not None and operation.steps:
            step = operation.steps[-1]
            return f"{step.name} {step.outcome} since {step.started_at}"
        return "waits for its turn to be stopped"


def _served(record: NodeRecord, hold: Hold | None) -> NodeRecord:
    return _replace(record, intent=NodeIntent.SERVE, hold=hold, stopped=0, until_boot="")


def _joined(record: NodeRecord, verb: NodeVerb) -> str | None:
    """Return the operation of a verb that is followed already, None where it is not."""
    match verb:
        case NodeVerb.DRAIN | NodeVerb.MAINTENANCE if record.holds_vms:
            return record.hold.operation_id if record.hold is not None else ""
        case NodeVerb.PAUSE_SCHEDULING if record.paused is not None:
            return record.paused.operation_id
        case NodeVerb.RESUME_SCHEDULING if record.paused is None:
            return ""
        case _:
            return None
