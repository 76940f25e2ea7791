"""The end of a clone whose snapshot was not taken: nothing of it stays."""

from __future__ import annotations

from chv.agent.cascade import marked_deleting
from chv.agent.context import Context
from chv.agent.operations import SYSTEM
from chv.agent.records import Change, PutObject, PutOperation, StoredObject
from chv.agent.references import referrers
from chv.agent.tables import Tables
from chv.agent.vm.cloning import HELPER
from chv.agent.vm.desired import vm_of
from chv.common.errors import ErrorData, FailedPrecondition
from chv.common.wire.agent import OperationState
from chv.common.wire.resources import Volume


async def undo(context: Context, uid: str, why: str, code: str = "") -> bool:
    """Delete all that a clone has made whose snapshot was not taken; tell whether there was any.

    One transaction: the clone's operation fails with the reason and the code of the error, and
    deletions by the node begin.
    """
    error = ErrorData(code=code or FailedPrecondition.code, message=why)
    if not _made_with(context.ledger.tables, uid):
        return False
    async with context.ledger.writing() as tables:
        made = _made_with(tables, uid)
        changes: list[Change] = []
        for ahead, stored in enumerate(made, start=1):
            marked = marked_deleting(stored, context.now(), context.ledger.next_revision(ahead))
            reason = f"the clone was not made: {why}"[:256]
            operation = context.operations.new("delete", marked, SYSTEM, reason)
            current = context.operations.current(stored.uid)
            changes += [
                PutObject(object=marked),
                *context.operations.ending_open(current, OperationState.FAILED, why, error),
                PutOperation(operation=operation),
            ]
        await context.ledger.commit_held(*changes)
    for stored in made:
        context.wake(stored.uid)
    return bool(made)


def lacking(tables: Tables, uid: str) -> str:
    """Say which volume a clone needs of its snapshot that is not of it: the VM had let go of it.

    Empty: none, or the snapshot is not one of a clone.
    """
    snapshot = tables.objects.get(uid)
    if snapshot is None or HELPER not in snapshot.resource.metadata.annotations:
        return ""
    facts = snapshot.snapshot_facts
    has = {part.volume for part in facts.parts} if facts is not None else set()
    for each in referrers(tables, snapshot.key):
        source = each.resource.spec.source if isinstance(each.resource, Volume) else None
        if source is not None and source.snapshot_volume not in ("", *has):
            return source.snapshot_volume
    return ""


def _made_with(tables: Tables, uid: str) -> list[StoredObject]:
    """Return the VM and the volumes of a clone, with its snapshot `uid`; none: it is no helper."""
    snapshot = tables.objects.get(uid)
    if snapshot is None or snapshot.deleting:
        return []
    name = snapshot.resource.metadata.annotations.get(HELPER, "")
    if not name:
        return []
    volumes = [each for each in referrers(tables, snapshot.key) if not each.deleting]
    names = {each.key[2] for each in volumes}
    vm = tables.find("VirtualMachine", snapshot.key[1], name)
    has_them = vm is not None and any(disk.volume in names for disk in vm_of(vm).spec.disks)
    vms = [vm] if vm is not None and has_them and not vm.deleting else []
    return [*vms, *volumes, snapshot]
