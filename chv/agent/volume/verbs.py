"""The verbs on a volume and what they need; what may be cancelled. Pure.

Fails with InvalidArgument where a request can never work, FailedPrecondition where it cannot now.
"""

from __future__ import annotations

import msgspec

from chv.agent.records import (
    FINAL_STATES,
    PutFacts,
    SnapshotFacts,
    StoredObject,
    VolumeFacts,
    VolumeRequest,
)
from chv.agent.references import references, referrers
from chv.agent.tables import Tables
from chv.agent.volume.source import is_ready, volume_of
from chv.common.errors import (
    Conflict,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
)
from chv.common.names import shown
from chv.common.wire.agent import ActOnVolume, Operation, VolumeVerb
from chv.common.wire.resources import Volume

_replace = msgspec.structs.replace

NEEDS_REST = (VolumeVerb.CHECK, VolumeVerb.REPAIR, VolumeVerb.RESTORE)
SNAPSHOTS = ("VolumeSnapshot", "VirtualMachineSnapshot")
CANCELLABLE = (VolumeVerb.CHECK.value, VolumeVerb.BACKUP.value)


def requested(
    tables: Tables, stored: StoredObject, request: ActOnVolume, operation_id: str
) -> VolumeRequest:
    """Return what is to be recorded for a verb."""
    _refuse_alien_fields(request)
    if stored.deleting:
        raise FailedPrecondition(
            f"it is being deleted, so no {request.verb.value}", resource=stored.title
        )
    if request.verb in NEEDS_REST:
        _refuse_attached(tables, stored, request.verb)
    snapshot = ""
    match request.verb:
        case VolumeVerb.BACKUP:
            check_target(request.target)
        case VolumeVerb.RESTORE:
            snapshot = _snapshot_of(tables, stored, request.snapshot)
        case VolumeVerb.GROW_NOW:
            _refuse_nothing_pending(stored)
        case _:
            pass
    return VolumeRequest(
        operation_id=operation_id,
        verb=request.verb.value,
        snapshot=snapshot,
        target=request.target,
        incremental=request.incremental,
        bps_max=request.bps_max,
    )


def under_way(stored: StoredObject, wanted: VolumeRequest) -> str:
    """Return the operation of the very same request, '' for none; Conflict where another is."""
    current = (stored.volume_facts or VolumeFacts()).request
    if current is None:
        return ""
    if _replace(wanted, operation_id=current.operation_id) == _replace(current, cancelling=False):
        return current.operation_id
    raise Conflict(
        f"{current.verb} {current.operation_id} is under way",
        resource=stored.title,
        hint=f"wait for it, or chv ops cancel {current.operation_id}",
    )


def with_request(stored: StoredObject, request: VolumeRequest) -> PutFacts:
    """Return the change that records a verb."""
    facts = stored.volume_facts or VolumeFacts()
    return PutFacts(uid=stored.uid, facts=_replace(facts, request=request))


def _refuse_alien_fields(request: ActOnVolume) -> None:
    for name, verb in (
        ("snapshot", VolumeVerb.RESTORE),
        ("target", VolumeVerb.BACKUP),
        ("incremental", VolumeVerb.BACKUP),
        ("bps_max", VolumeVerb.BACKUP),
    ):
        if getattr(request, name) and request.verb is not verb:
            raise InvalidArgument(
                f"it belongs to {verb.value}",
                field=name,
                hint=f"no {name} for {request.verb.value}",
            )


def _refuse_attached(tables: Tables, stored: StoredObject, verb: VolumeVerb) -> None:
    running = [vm for vm in referrers(tables, stored.key) if vm.uid in tables.workers]
    if running:
        raise FailedPrecondition(
            f"{running[0].title} runs on it, so no {verb.value}",
            resource=stored.title,
            hint=f"chv stop {running[0].key[2]} first",
        )


def check_target(target: str) -> None:
    """Refuse what names no place that a backup could go to."""
    if not target.startswith(("/", "nbd://")):
        raise InvalidArgument(
            f"{shown(target)} is no place for a backup",
            field="target",
            hint="a directory below storage.backup_paths, or nbd://host:port/export",
        )


def _snapshot_of(tables: Tables, stored: StoredObject, name: str) -> str:
    if not name:
        raise InvalidArgument("restore what?", field="snapshot", hint="name a VolumeSnapshot")
    snapshot = tables.find("VolumeSnapshot", stored.key[1], name)
    if snapshot is None:
        raise NotFound(f"there is no VolumeSnapshot {name!r} in namespace {stored.key[1]}")
    if not is_ready(snapshot):
        raise FailedPrecondition(f"{snapshot.title} is not ready", resource=stored.title)
    if volume_of(snapshot, stored.key[2]) != stored.uid:
        raise InvalidArgument(
            f"{snapshot.title} is not of this volume", resource=stored.title, field="snapshot"
        )
    return snapshot.uid


def _refuse_nothing_pending(stored: StoredObject) -> None:
    assert isinstance(stored.resource, Volume)
    status = stored.resource.status
    if status is None or not status.pending_size_bytes:
        raise FailedPrecondition(
            "no growth is pending",
            resource=stored.title,
            field="status.pendingSizeBytes",
            hint="apply a larger spec.size first",
        )


# --- cancel


def cancelled(tables: Tables, operation: Operation) -> PutFacts:
    """Return the change that asks for the end of an operation, or say why it cannot be ended."""
    if operation.state in FINAL_STATES:
        raise FailedPrecondition(f"it has ended: {operation.state.value}", resource=operation.id)
    stored = _subject(tables, operation)
    if stored is None:
        raise NotFound("its object is gone", resource=operation.id)
    _refuse_needed_deletion(tables, stored, operation)
    change = _cancelled(stored, operation)
    if change is None:
        raise FailedPrecondition(
            f"{operation.verb} of {stored.title} cannot be cancelled safely",
            resource=operation.id,
            hint=_HINTS.get(operation.verb, "wait for it, or apply what is wanted instead"),
        )
    return change


def _subject(tables: Tables, operation: Operation) -> StoredObject | None:
    """Return the object that has what an operation asked for: of a VM's backup, a volume."""
    if operation.kind != "VirtualMachine" or operation.verb != VolumeVerb.BACKUP.value:
        return tables.objects.get(operation.uid)
    for stored in tables.objects.values():
        request = (stored.volume_facts or VolumeFacts()).request
        if request is None or request.operation_id != operation.id:
            continue
        if leads(request, stored.uid):
            return stored
    return None


def leads(request: VolumeRequest, volume_uid: str) -> bool:
    """Tell whether stord's job belongs to this volume: of a VM's backup, to the first."""
    return not request.parts or request.parts[0].volume_uid == volume_uid


def _refuse_needed_deletion(tables: Tables, stored: StoredObject, operation: Operation) -> None:
    """Refuse to keep a snapshot whose volume goes: the volume would wait for it for ever."""
    if operation.kind not in SNAPSHOTS or operation.verb != "delete":
        return
    named = [tables.find(*reference.key) for reference in references(stored.resource)]
    going = [each.title for each in named if each is not None and each.deleting]
    if going:
        raise FailedPrecondition(
            f"{going[0]} is being deleted and waits for it",
            resource=operation.id,
            hint="what is being deleted does not come back",
        )


_HINTS = {
    VolumeVerb.REPAIR.value: "a repair that stops half-way leaves more to repair: wait for it",
    VolumeVerb.RESTORE.value: "it takes no time: wait for it",
    VolumeVerb.GROW_NOW.value: "the disk comes back by itself: wait for it",
    "delete": "what is being deleted does not come back; only a snapshot's deletion can be",
}


def _cancelled(stored: StoredObject, operation: Operation) -> PutFacts | None:
    if operation.kind in SNAPSHOTS and operation.verb == "delete":
        facts = stored.snapshot_facts or SnapshotFacts()
        if not facts.taken:
            return None
        return PutFacts(uid=stored.uid, facts=_replace(facts, cancelling=True))
    if stored.volume_facts is None:
        return None
    request, move = stored.volume_facts.request, stored.volume_facts.move
    if request is not None and request.operation_id == operation.id:
        if operation.verb not in CANCELLABLE:
            return None
        request = _replace(request, cancelling=True)
        return PutFacts(uid=stored.uid, facts=_replace(stored.volume_facts, request=request))
    if move is not None and not move.failed and operation.verb not in ("delete", "create"):
        move = _replace(move, cancelling=True)
        return PutFacts(uid=stored.uid, facts=_replace(stored.volume_facts, move=move))
    return None
