"""The verb `clone`: all objects of a clone, checked and stored in one transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from chv.agent import idempotency, queries
from chv.agent.actors import Workers
from chv.agent.admission import Admitted, admit, ordered
from chv.agent.cascade import marked_deleting
from chv.agent.context import Context
from chv.agent.operations import SYSTEM
from chv.agent.records import Change, PutObject, PutOperation, RequestRow
from chv.agent.references import referrers
from chv.agent.tables import Tables
from chv.agent.vm.cloning import HELPER, cloned
from chv.common.wire.agent import Operation
from chv.common.wire.agent_clone import CloneVm, CloneVmReply
from chv.common.wire.manifest import parse
from chv.common.wire.resources import CloneModeName

VERB = "clone"
_replace = msgspec.structs.replace


class Cloning:
    """`refuse_when_short` refuses new objects where the store has no space."""

    def __init__(
        self, context: Context, workers: Workers, refuse_when_short: Callable[[], Awaitable[None]]
    ) -> None:
        self._context = context
        self._workers = workers
        self._refuse_when_short = refuse_when_short

    async def clone(self, request: CloneVm) -> CloneVmReply:
        """Store the clone; the operation is the new VM's. Whatever is refused changes nothing."""
        context, ledger = self._context, self._context.ledger
        context.world.gate.check(VERB)
        digest = idempotency.digest_of(VERB, request)
        async with ledger.writing() as tables:
            known = await idempotency.recorded(ledger, request.idempotency_key, digest)
            if known is not None:
                return await self._as_it_is_now(known)
            context.world.gate.check(VERB)  # it may have changed meanwhile
            current = _under_way(tables, request)
            if current is not None:
                reply = _reply(current)
                await idempotency.remember(ledger, request.idempotency_key, digest, reply)
                return reply
            source = queries.require(context, "VirtualMachine", request.namespace, request.name)
            clone = cloned(tables, source, request)
            parsed = [parse(msgspec.json.encode(each)) for each in clone.resources]
            admitted = admit(context, ordered(parsed), request.requester, _why(request))
            await self._refuse_when_short()
            changes, operation = _as_clone(admitted, request, list(clone.left_out))
            reply = CloneVmReply(operation=operation, left_out=list(clone.left_out))
            remembered = idempotency.remembered(request.idempotency_key, digest, reply)
            await ledger.commit_held(*changes, *remembered)
        for stored in admitted.stored:
            self._workers.ensure(stored)
            context.wake_referrers(stored)
        return reply

    async def _as_it_is_now(self, known: RequestRow) -> CloneVmReply:
        reply = msgspec.json.decode(known.reply, type=CloneVmReply)
        now = await self._context.ledger.operation(reply.operation.id)
        return _replace(reply, operation=now or reply.operation, joined=True)


def _asked(request: CloneVm) -> dict[str, str | int | bool | None]:
    """Return what tells a clone from another of that name."""
    return {
        "source": request.name,
        "mode": CloneModeName(request.mode).value,
        "start": request.start,
        "freeze": request.freeze,
    }


def _under_way(tables: Tables, request: CloneVm) -> Operation | None:
    """Return the operation of the very same clone, where it is under way."""
    clone = tables.find("VirtualMachine", request.namespace, request.new_name)
    current = tables.active_operation(clone.uid) if clone is not None else None
    same = current is not None and current.verb == VERB and current.request == _asked(request)
    return current if same else None


def _reply(operation: Operation) -> CloneVmReply:
    left_out = operation.result.get("left_out", [])
    return CloneVmReply(operation=operation, left_out=left_out, joined=True)


def _as_clone(
    admitted: Admitted, request: CloneVm, left_out: list[str]
) -> tuple[list[Change], Operation]:
    """Return the changes, with the creation of the VM as a clone."""
    changes: list[Change] = []
    found: Operation | None = None
    for change in admitted.changes:
        if isinstance(change, PutOperation) and change.operation.kind == "VirtualMachine":
            found = _replace(
                change.operation,
                verb=VERB,
                request=_asked(request),
                result={"left_out": left_out},
            )
            changes.append(PutOperation(operation=found))
        else:
            changes.append(change)
    assert found is not None
    return changes, found


def _why(request: CloneVm) -> str:
    words = f"clone of {request.name}"
    return f"{words}: {request.reason}"[:256] if request.reason else words


async def collect_helper(context: Context, uid: str) -> bool:
    """Mark the snapshot of a clone for deletion once nothing needs it; tell whether it was."""
    if not _is_idle_helper(context.ledger.tables, uid):
        return False  # nearly always, and without the lock
    async with context.ledger.writing() as tables:
        if not _is_idle_helper(tables, uid):
            return False
        stored = tables.objects[uid]
        marked = marked_deleting(stored, context.now(), context.ledger.next_revision())
        why = "no volume of the clone needs it any more"
        operation = context.operations.new("delete", marked, SYSTEM, why)
        changes = context.operations.superseding(operation)
        await context.ledger.commit_held(PutObject(object=marked), *changes)
    return True


def _is_idle_helper(tables: Tables, uid: str) -> bool:
    stored = tables.objects.get(uid)
    if stored is None or stored.deleting:
        return False
    is_helper = HELPER in stored.resource.metadata.annotations
    return is_helper and not referrers(tables, stored.key)
