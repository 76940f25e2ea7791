"""The effects of a VM's rebuild: one transaction each.

At no time is the VM without a root disk: one transaction swaps the names of the present one and
of the new one, and the former one goes once the VM has run from the new one. Whatever an effect
finds changed since it was planned is a Conflict.
"""

from __future__ import annotations

import msgspec

from chv.agent.cascade import marked_deleting
from chv.agent.context import Context
from chv.agent.generations import Author
from chv.agent.operations import SYSTEM
from chv.agent.rebuild_record import Rebuild
from chv.agent.records import Change, PutFacts, PutObject, StoredObject
from chv.agent.tables import Tables
from chv.agent.vm.crashes import forgiven
from chv.agent.vm.model import RebuildStage
from chv.agent.vm.rebuild_rules import (
    FORMER,
    Standing,
    boot_image,
    owned_by,
    source_image,
    standing,
    users,
    volume_of,
)
from chv.common.errors import Conflict
from chv.common.wire.agent import OperationState
from chv.common.wire.resources import ObjectMeta, VirtualMachine

_replace = msgspec.structs.replace


async def swap(context: Context, vm_uid: str) -> None:
    """Give the VM its new root disk, under the name of the former one."""
    async with context.ledger.writing() as tables:
        stored, wish = _required(tables, vm_uid)
        if standing(tables, stored) != Standing(RebuildStage.DUE) or vm_uid in tables.workers:
            raise Conflict("the VM was changed while it was rebuilt", resource=stored.title)
        old, new = tables.objects[wish.old_uid], tables.objects[wish.new_uid]
        author = Author(requester=SYSTEM, reason=f"{stored.title} is rebuilt", verb="rebuild")
        await context.ledger.commit_held(
            PutObject(object=_as_former(context, old, stored, wish), author=author),
            PutObject(object=_as_root(context, old, new), author=author),
            PutObject(object=_rebuilt(context, stored, old, new, wish), author=author),
        )
    for uid in (wish.old_uid, wish.new_uid):
        context.wake(uid)


def _as_former(
    context: Context, old: StoredObject, vm: StoredObject, wish: Rebuild
) -> StoredObject:
    metadata = old.resource.metadata
    owners = metadata.owner_references
    if not wish.keep_old and all(each.uid != vm.uid for each in owners):
        owners = [*owners, owned_by(vm)]
    return _with(
        old,
        _replace(
            metadata,
            name=f"{metadata.name}{FORMER}",
            owner_references=owners,
            resource_version=str(context.ledger.next_revision(1)),
        ),
    )


def _as_root(context: Context, old: StoredObject, new: StoredObject) -> StoredObject:
    """The new volume as the former one is by now, but for what it was made from."""
    made, wanted = volume_of(new), volume_of(old)
    spec = _replace(wanted.spec, source=made.spec.source)
    metadata: ObjectMeta = _replace(
        made.metadata,
        name=wanted.metadata.name,
        labels=wanted.metadata.labels,
        annotations=wanted.metadata.annotations,
        finalizers=wanted.metadata.finalizers,
        owner_references=wanted.metadata.owner_references,
        generation=made.metadata.generation + (spec != made.spec),
        resource_version=str(context.ledger.next_revision(2)),
    )
    return _replace(new, resource=_replace(made, metadata=metadata, spec=spec))


def _rebuilt(
    context: Context, vm: StoredObject, old: StoredObject, new: StoredObject, wish: Rebuild
) -> StoredObject:
    resource, facts = vm.resource, vm.facts
    assert isinstance(resource, VirtualMachine) and facts is not None
    image = boot_image(resource, volume_of(old), source_image(volume_of(new)))
    spec = _replace(resource.spec, boot=_replace(resource.spec.boot, image=image))
    metadata = _replace(
        resource.metadata,
        generation=resource.metadata.generation + (spec != resource.spec),
        resource_version=str(context.ledger.next_revision(3)),
    )
    # It was given up on with the former disk.
    facts = _replace(
        forgiven(facts),
        rebuild=None if wish.keep_old else _replace(wish, swapped=True),
        rebuilds=facts.rebuilds + 1,
    )
    return _replace(vm, resource=_replace(resource, metadata=metadata, spec=spec), facts=facts)


async def drop(context: Context, vm_uid: str) -> None:
    """Let the former root disk go: the VM has run from the new one."""
    async with context.ledger.writing() as tables:
        stored, wish = _required(tables, vm_uid)
        assert stored.facts is not None
        changes: list[Change] = [PutFacts(uid=vm_uid, facts=_replace(stored.facts, rebuild=None))]
        former = tables.objects.get(wish.old_uid)
        if former is not None and not former.deleting:
            why = f"{stored.title} has run from its new root disk"
            changes += _going(context, tables, former, stored, why)
        await context.ledger.commit_held(*changes)
    context.wake(wish.old_uid)


def _going(
    context: Context, tables: Tables, volume: StoredObject, vm: StoredObject, why: str
) -> list[Change]:
    """Delete a volume; one that somebody has taken into use meanwhile stays, and is theirs."""
    revision = context.ledger.next_revision()
    if users(tables, volume, vm):
        metadata = volume.resource.metadata
        owners = [each for each in metadata.owner_references if each.uid != vm.uid]
        freed = _replace(metadata, owner_references=owners, resource_version=str(revision))
        return [PutObject(object=_with(volume, freed))]
    marked = marked_deleting(volume, context.now(), revision)
    operation = context.operations.new("delete", marked, SYSTEM, why[:256])
    return [PutObject(object=marked), *context.operations.superseding(operation)]


async def abandon(context: Context, vm_uid: str) -> None:
    """Take back a rebuild before the swap: the VM keeps the disk that it has."""
    async with context.ledger.writing() as tables:
        stored, wish = _required(tables, vm_uid)
        found = standing(tables, stored)
        if found is None or found.stage is not RebuildStage.OFF:
            raise Conflict("the rebuild goes on", resource=stored.title)
        assert stored.facts is not None
        operation = tables.operations.get(wish.operation_id)
        message = f"not rebuilt: {found.why}"
        changes: list[Change] = [
            PutFacts(uid=vm_uid, facts=_replace(stored.facts, rebuild=None)),
            *context.operations.ending_open(operation, OperationState.FAILED, message),
        ]
        new = tables.objects.get(wish.new_uid)
        if new is not None and not new.deleting:
            changes += _going(context, tables, new, stored, f"{stored.title} is {message}")
        await context.ledger.commit_held(*changes)
    context.wake(wish.new_uid)


def _required(tables: Tables, vm_uid: str) -> tuple[StoredObject, Rebuild]:
    stored = tables.objects.get(vm_uid)
    wish = stored.facts.rebuild if stored is not None and stored.facts is not None else None
    if stored is None or wish is None:
        raise Conflict("there is no rebuild", resource=vm_uid)
    return stored, wish


def _with(stored: StoredObject, metadata: ObjectMeta) -> StoredObject:
    return _replace(stored, resource=_replace(stored.resource, metadata=metadata))
