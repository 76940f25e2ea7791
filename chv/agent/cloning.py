"""The verb `clone`: all objects of a clone, checked and stored in one transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable

import msgspec

from chv.agent import queries
from chv.agent.actors import Workers
from chv.agent.admission import Admitted, admit, ordered
from chv.agent.cascade import marked_deleting
from chv.agent.context import Context
from chv.agent.operations import SYSTEM
from chv.agent.records import Change, PutObject, PutOperation, PutRequest, RequestRow
from chv.agent.references import referrers
from chv.agent.vm.cloning import HELPER, cloned
from chv.common.errors import Conflict
from chv.common.wire.agent import Operation
from chv.common.wire.agent_clone import CloneVm, CloneVmReply
from chv.common.wire.manifest import parse

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
        digest = _digest(request)
        async with ledger.writing() as tables:
            known = await self._recorded(request.idempotency_key, digest)
            if known is not None:
                return known
            context.world.gate.check(VERB)  # it may have changed meanwhile
            source = queries.require(context, "VirtualMachine", request.namespace, request.name)
            clone = cloned(tables, source, request)
            parsed = [parse(msgspec.json.encode(each)) for each in clone.resources]
            admitted = admit(context, ordered(parsed), request.requester, _why(request))
            await self._refuse_when_short()
            changes, operation = _as_clone(admitted)
            reply = CloneVmReply(operation=operation, left_out=list(clone.left_out))
            if request.idempotency_key:
                row = RequestRow(
                    key=request.idempotency_key, digest=digest, reply=msgspec.json.encode(reply)
                )
                changes.append(PutRequest(request=row))
            await ledger.commit_held(*changes)
        for stored in admitted.stored:
            self._workers.ensure(stored)
            context.wake_referrers(stored)
        return reply

    async def _recorded(self, key: str, digest: str) -> CloneVmReply | None:
        known = await self._context.ledger.store.request(key) if key else None
        if known is None:
            return None
        if known.digest != digest:
            raise Conflict(
                f"the key {key!r} was used for another request",
                field="idempotency_key",
                hint="use a new key for a new request",
            )
        reply = msgspec.json.decode(known.reply, type=CloneVmReply)
        now = await self._context.ledger.operation(reply.operation.id)
        return _replace(reply, operation=now or reply.operation)


def _digest(request: CloneVm) -> str:
    """The key apart: the same request under another key is another request."""
    body = msgspec.json.encode(_replace(request, idempotency_key=""))
    return hashlib.sha256(VERB.encode() + body).hexdigest()


def _as_clone(admitted: Admitted) -> tuple[list[Change], Operation]:
    """Return the changes, with the creation of the VM as a clone."""
    changes: list[Change] = []
    found: Operation | None = None
    for change in admitted.changes:
        if isinstance(change, PutOperation) and change.operation.kind == "VirtualMachine":
            found = _replace(change.operation, verb=VERB)
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
    async with context.ledger.writing() as tables:
        stored = tables.objects.get(uid)
        if stored is None or stored.deleting:
            return False
        if HELPER not in stored.resource.metadata.annotations or referrers(tables, stored.key):
            return False
        marked = marked_deleting(stored, context.now(), context.ledger.next_revision())
        why = "no volume of the clone needs it any more"
        operation = context.operations.new("delete", marked, SYSTEM, why)
        changes = context.operations.superseding(operation)
        await context.ledger.commit_held(PutObject(object=marked), *changes)
    return True
