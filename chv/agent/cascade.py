"""The end of an object for good, and what goes with it by ownerReferences."""

from __future__ import annotations

import msgspec

from chv.agent.context import Context
from chv.agent.generations import Author
from chv.agent.operations import SYSTEM
from chv.agent.records import Change, PutObject, RemoveObject, StoredObject, Tombstone
from chv.common.wire.agent import OperationState

_replace = msgspec.structs.replace


async def finish_delete(context: Context, uid: str) -> None:
    """Replace an object by its tombstone, end its operation, let its dependents go."""
    async with context.ledger.writing() as tables:
        stored = tables.objects.get(uid)
        if stored is None:
            return
        dependents = _dependents(context, stored)  # afterwards they are all being deleted
        await context.ledger.commit_held(*_removal(context, stored, dependents))
    context.seen_at.pop(uid, None)
    context.encoded.pop(uid, None)
    context.wake_referred(stored)
    context.wake_referrers(stored)
    for dependent in dependents:
        context.wake(dependent.uid)


def _removal(
    context: Context, stored: StoredObject, dependents: list[StoredObject]
) -> list[Change]:
    kind, namespace, name = stored.key
    tombstone = Tombstone(
        uid=stored.uid,
        kind=kind,
        namespace=namespace,
        name=name,
        generation=stored.resource.metadata.generation,
        revision=context.ledger.next_revision(),
        deleted_at=context.now(),
    )
    operation = context.operations.current(stored.uid)
    ended: list[Change] = []
    if operation is not None:
        ended = context.operations.ending(operation, OperationState.SUCCEEDED, "deleted")
    going = _deleting_dependents(context, stored, dependents)
    return [RemoveObject(tombstone=tombstone), *ended, *going]


def _deleting_dependents(
    context: Context, owner: StoredObject, dependents: list[StoredObject]
) -> list[Change]:
    changes: list[Change] = []
    for ahead, dependent in enumerate(dependents, start=2):
        revision = context.ledger.next_revision(ahead)
        marked = marked_deleting(dependent, context.now(), revision)
        operation = context.operations.new(
            "delete", dependent, "system", f"its owner {owner.title} is deleted"
        )
        changes += [PutObject(object=marked), *context.operations.superseding(operation)]
    return changes


def _dependents(context: Context, owner: StoredObject) -> list[StoredObject]:
    return [
        stored
        for stored in context.ledger.tables.objects.values()
        if not stored.deleting
        and any(ref.uid == owner.uid for ref in stored.resource.metadata.owner_references)
    ]


async def taken_back(context: Context, uid: str) -> None:
    """Let an object whose deletion was cancelled stay; that is a new generation."""
    async with context.ledger.writing() as tables:
        stored = tables.objects.get(uid)
        if stored is None or not stored.deleting:
            return
        metadata = _replace(
            stored.resource.metadata,
            deletion_timestamp="",
            generation=stored.resource.metadata.generation + 1,
            resource_version=str(context.ledger.next_revision()),
        )
        kept = _replace(stored, resource=_replace(stored.resource, metadata=metadata))
        if kept.snapshot_facts is not None:
            facts = _replace(kept.snapshot_facts, cancelling=False)
            kept = _replace(kept, snapshot_facts=facts)
        operation = context.operations.current(uid)
        message = "the deletion was cancelled"
        said = operation.message if operation is not None else ""
        author = Author(requester=SYSTEM, reason=said or message, verb="cancel")
        await context.ledger.commit_held(
            PutObject(object=kept, author=author),
            *context.operations.ending_open(operation, OperationState.CANCELLED, message),
        )


def marked_deleting(stored: StoredObject, moment: str, revision: int) -> StoredObject:
    """Return the object with its deletion asked for; that is a new generation."""
    metadata = stored.resource.metadata
    marked = _replace(
        metadata,
        deletion_timestamp=moment,
        generation=metadata.generation + 1,
        resource_version=str(revision),
    )
    return _replace(stored, resource=_replace(stored.resource, metadata=marked))
