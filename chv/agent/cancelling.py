"""Cancelling operations: one table of what may be cancelled, until when, and what remains.

Where a verb is not in the table, or it is too late, it is refused with the reason and with what to
do instead. A request to cancel is durable before anything is ended; that the operation has ended
is seen on it. Fails with NotFound, FailedPrecondition, and Conflict for a key used otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from chv.agent import idempotency
from chv.agent.actors import Workers
from chv.agent.cascade import marked_deleting
from chv.agent.chores import Chores
from chv.agent.context import Context
from chv.agent.draining import NodeDesk
from chv.agent.generations import Author
from chv.agent.node_record import NODE_UID
from chv.agent.records import FINAL_STATES, Change, PutObject, PutOperation, StoredObject
from chv.agent.references import referrers
from chv.agent.side_verbs import CHORE_VERBS, IMPORT
from chv.agent.tables import Tables
from chv.agent.verbs import as_before_start
from chv.agent.vm.cloning import made_for
from chv.agent.volume.verbs import cancelled
from chv.common.errors import Cancelled, FailedPrecondition, NotFound
from chv.common.wire import agent as api
from chv.common.wire.agent import Operation, OperationState
from chv.common.wire.agent_node import ActOnNode, NodeVerb

_replace = msgspec.structs.replace


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the table, as docs/operations.md has it."""

    what: str
    until: str
    remains: str


RULES = (
    Rule("`import` of an image", "its artifact is stored", "no Image, or as it was; what came of a download is kept a day, and the next one goes on there"),  # noqa: E501
    Rule("`backup` of a volume or a VM", "it has ended", "no part of it at its target; earlier backups stay"),  # noqa: E501
    Rule("`check` of a volume", "it has ended", "the volume, untouched"),
    Rule("`update` of a volume that moves it", "the move has ended", "the volume where it was; its spec says so again, as a new generation"),  # noqa: E501
    Rule("`delete` of a snapshot", "a part of its data is merged", "the snapshot, as a new generation"),  # noqa: E501
    Rule("`clone`", "the new VM has a VMM", "nothing of the clone: its VM and volumes are deleted"),
    Rule("`start`", "the VM has a VMM", "the VM as before: `runStrategy` is what it was, as a new generation"),  # noqa: E501
    Rule("`drain`, `maintenance`", "the last VM has stopped", "what was stopped starts again, where it is wanted"),  # noqa: E501
)  # fmt: skip
INSTEAD = {
    "create": "chv delete {what}",
    "start": "it has a VMM: chv stop {name}",
    "stop": "wait for it, then chv start {name}",
    "restart": "chv stop {name}",
    "resume": "chv pause {name}",
    "pause": "chv resume {name}",
    "restore": "chv stop {name}",
    "clone": "it has a VMM: chv delete {what}",
    "rebuild": "chv stop {name} takes it back, while the new disk is being made",
    "reset_node": "wait for it",
    "restart_daemon": "wait for it: the daemon comes back by itself",
    "reap_leak": "what is removed does not come back",
    "adopt_leak": "wait for it, then chv stop the VM",
    "create_key": "wait for it, then chv key rm {name}",
    "delete_key": "what is destroyed does not come back",
    "collect_images": "wait for it",
}


class Cancelling:
    """See the module."""

    def __init__(self, context: Context, workers: Workers, chores: Chores, desk: NodeDesk) -> None:
        self._context = context
        self._workers = workers
        self._chores = chores
        self._desk = desk

    async def cancel(self, request: api.CancelOperation) -> api.OperationReply:
        """Ask for the end of an operation."""
        self._context.world.gate.check("cancel")
        ledger, digest = self._context.ledger, idempotency.digest_of("cancel", request)
        known = await idempotency.recorded(ledger, request.idempotency_key, digest)
        if known is not None:
            first = msgspec.json.decode(known.reply, type=api.OperationReply).operation
            return api.OperationReply(
                operation=await ledger.operation(first.id) or first, joined=True
            )
        operation = await ledger.operation(request.operation_id)
        if operation is None:
            raise NotFound(f"there is no operation {request.operation_id!r}")
        if operation.uid == NODE_UID and operation.state not in FINAL_STATES:
            return await self._serve_again(operation, request)
        return await self._cancel(request, digest)

    async def _cancel(self, request: api.CancelOperation, digest: str) -> api.OperationReply:
        ledger = self._context.ledger
        async with ledger.writing() as tables:
            operation = await ledger.operation(request.operation_id)
            assert operation is not None
            if operation.state is OperationState.CANCELLED or operation.cancelled_by:
                self._chores.cancel(operation.id)  # the reply of the first may have been lost
                return api.OperationReply(operation=operation, joined=True)
            if operation.state in FINAL_STATES:
                raise FailedPrecondition(
                    f"it has ended: {operation.state.value}", resource=operation.id
                )
            noted = _replace(operation, cancelled_by=_words(request))
            touched, changes = self._changes(tables, noted, request)
            reply = api.OperationReply(operation=noted)
            await ledger.commit_held(
                *changes, *idempotency.remembered(request.idempotency_key, digest, reply)
            )
        self._chores.cancel(operation.id)
        for uid in touched:
            stored = self._context.stored(uid)
            if stored is not None:
                self._workers.ensure(stored)
                self._context.wake_referrers(stored)
        return api.OperationReply(operation=await ledger.operation(operation.id) or noted)

    def _changes(
        self, tables: Tables, noted: Operation, request: api.CancelOperation
    ) -> tuple[list[str], list[Change]]:
        """Return whom it concerns and what is recorded, or say why it cannot be."""
        stored = tables.objects.get(noted.uid)
        if noted.verb in CHORE_VERBS:
            if noted.verb != IMPORT:
                raise _refusal(noted)
            return [], [_being_cancelled(noted)]
        if noted.kind == "VirtualMachine" and stored is not None:
            if noted.verb == "start":
                return [noted.uid], self._start_taken_back(tables, stored, noted, request)
            if noted.verb == "clone":
                return self._clone_taken_back(tables, stored, noted, request)
        try:
            change = cancelled(tables, noted)
        except FailedPrecondition as error:
            if noted.verb in INSTEAD:
                error.hint = _instead(noted)
            raise
        return [change.uid], [change, _being_cancelled(noted)]

    async def _serve_again(
        self, operation: Operation, request: api.CancelOperation
    ) -> api.OperationReply:
        """A drain: cancelled by what takes it back."""
        verb = NodeVerb.CANCEL_DRAIN
        act = ActOnNode(verb=verb, requester=request.requester, reason=request.reason)
        await self._desk.act(act)
        ended = await self._context.ledger.operation(operation.id)
        return api.OperationReply(operation=ended or operation)

    # --- a VM that has not begun to run

    def _start_taken_back(
        self,
        tables: Tables,
        stored: StoredObject,
        noted: Operation,
        request: api.CancelOperation,
    ) -> list[Change]:
        self._refuse_begun(tables, stored, noted)
        before = as_before_start(stored, noted)
        after = self._next_generation(stored, before)
        message = f"cancelled {noted.cancelled_by}; it is as it was before"
        ended = self._ended(noted, message)
        author = Author(requester=request.requester, reason=request.reason, verb="cancel")
        return [PutObject(object=after, author=author), *ended]

    def _next_generation(self, before: StoredObject, after: StoredObject) -> StoredObject:
        if before.resource.spec == after.resource.spec:
            return after
        metadata = _replace(
            before.resource.metadata,
            generation=before.resource.metadata.generation + 1,
            resource_version=str(self._context.ledger.next_revision()),
        )
        return _replace(after, resource=_replace(after.resource, metadata=metadata))

    def _clone_taken_back(
        self,
        tables: Tables,
        stored: StoredObject,
        noted: Operation,
        request: api.CancelOperation,
    ) -> tuple[list[str], list[Change]]:
        """Its VM and volumes go; the snapshot that they start from goes after them by itself."""
        self._refuse_begun(tables, stored, noted)
        made = made_for(tables, stored)
        mine = {stored.uid, *(each.uid for each in made)}
        for each in (stored, *made):
            others = [other for other in referrers(tables, each.key) if other.uid not in mine]
            if others:
                raise FailedPrecondition(
                    f"{others[0].title} needs {each.title} by now", resource=noted.id
                )
        changes: list[Change] = list(self._ended(noted, f"cancelled {noted.cancelled_by}"))
        for ahead, each in enumerate((stored, *made), start=1):
            revision = self._context.ledger.next_revision(ahead)
            marked = marked_deleting(each, self._context.now(), revision)
            reason = f"the clone was cancelled: {request.reason}".removesuffix(": ")
            operation = self._context.operations.new("delete", marked, request.requester, reason)
            own = each.uid == stored.uid
            told: list[Change] = (
                [PutOperation(operation=operation)]
                if own
                else self._context.operations.superseding(operation)
            )
            changes += [PutObject(object=marked), *told]
        return sorted(mine), changes

    def _refuse_begun(self, tables: Tables, stored: StoredObject, noted: Operation) -> None:
        if stored.deleting:
            raise FailedPrecondition(f"{stored.title} is being deleted", resource=noted.id)
        if stored.uid in tables.workers or self._context.operations.current_id(stored.uid) != (
            noted.id
        ):
            raise _refusal(noted)

    def _ended(self, noted: Operation, message: str) -> list[Change]:
        error = Cancelled(message, resource=noted.id).data()
        return self._context.operations.ending(noted, OperationState.CANCELLED, message, error)


def _being_cancelled(noted: Operation) -> PutOperation:
    return PutOperation(
        operation=_replace(noted, message=f"is being cancelled {noted.cancelled_by}")
    )


def _words(request: api.CancelOperation) -> str:
    return f"by {request.requester}" + (f": {request.reason}" if request.reason else "")


def _refusal(operation: Operation) -> FailedPrecondition:
    return FailedPrecondition(
        f"{operation.verb} of {operation.kind} {operation.name} cannot be cancelled safely",
        resource=operation.id,
        hint=_instead(operation),
    )


def _instead(operation: Operation) -> str:
    fallback = "wait for it, or apply what is wanted instead"
    what = f"{operation.kind.lower()} {operation.name}"
    return INSTEAD.get(operation.verb, fallback).format(name=operation.name, what=what)
