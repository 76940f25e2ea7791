"""What a Volume's status says of stord's VolumeInfo. Pure but for names looked up in the tables."""

from __future__ import annotations

import msgspec

from chv.agent.conditions import condition
from chv.agent.naming import named
from chv.agent.records import StoredObject
from chv.agent.tables import Tables
from chv.agent.vm.clients import CLIENTS
from chv.agent.volume.wish import NO_LIMITS, shown_limits
from chv.common.quantity import format_bytes, parse_bytes
from chv.common.wire import stord
from chv.common.wire.resources import Condition, Volume, VolumeSnapshotPart, VolumeStatus
from chv.vmm.driver import HOT_PLUG

APPLIED = {"online": "Online", "detached": "Detached", "on_next_start": "OnNextStart"}
MIB = 1 << 20


def volume_status(
    tables: Tables, stored: StoredObject, seen: stord.VolumeInfo | None, progress: str
) -> VolumeStatus:
    """Return the status but for its conditions."""
    if seen is None:
        return VolumeStatus(phase=phase(stored, seen), progress=progress)
    applied = APPLIED.get(seen.applied, "")
    status = VolumeStatus(
        phase=phase(stored, seen),
        size_bytes=seen.size_bytes,
        allocated_bytes=seen.allocated_bytes,
        pending_size_bytes=seen.pending_size_bytes,
        size_applied="OnNextStart" if seen.pending_size_bytes else applied,
        attached_to=name_of(tables, seen.attached_to),
        readers=[name_of(tables, uid) for uid in seen.readers],
        location=seen.location or seen.path,
        cache=seen.cache,
        encrypted=bool(seen.encryption_key),
        encryption_key=seen.encryption_key.rpartition("/")[2],
        layers=seen.layers,
        snapshots=[_part(tables, each) for each in seen.snapshots],
        free_bytes=_rough(seen.free_bytes),
        space=seen.space.value,
        progress=progress,
        last_error=named(tables, seen.last_error),
    )
    limits = shown_limits(seen.limits)
    return status if limits == NO_LIMITS else msgspec.structs.replace(status, limits=limits)


def phase(stored: StoredObject, seen: stord.VolumeInfo | None) -> str:
    """Return the word for the table."""
    if stored.deleting:
        return "Deleting"
    if seen is None:
        return "Pending"
    if seen.state == "creating":
        return "Creating"
    return "Attached" if seen.attached_to or seen.readers else "Ready"


def conditions(tables: Tables, seen: stord.VolumeInfo | None, ready: Condition) -> list[Condition]:
    """Return all conditions of a volume."""
    if seen is None:
        return [ready]
    return [ready, _size_applied(tables, seen), _space_available(seen)]


def growth(tables: Tables, seen: stord.VolumeInfo) -> str:
    """Say when the guest sees the size that was asked for last, and why not at once."""
    if not seen.pending_size_bytes:
        at_once = (
            "its guest sees that at once" if seen.applied == "online" else "nobody had it open"
        )
        return f"{format_bytes(seen.size_bytes)}: {at_once}"
    row = tables.workers.get(seen.attached_to)
    driver = row.driver if row is not None else ""
    why, sooner = "its VMM could not be told", "chv restart the VM"
    if driver in CLIENTS:
        why = "its storage daemon (QEMU before 8) or a disk not connected could not tell the guest"
    elif driver:
        why = f"{driver} takes up no new size while it runs"
    if driver in HOT_PLUG:
        sooner = "`chv volume grow --now` unplugs the disk and plugs it again"
    return (
        f"the guest sees {format_bytes(seen.size_bytes)} until its next start, "
        f"then {format_bytes(seen.pending_size_bytes)}: {why}; sooner: {sooner}"
    )


def _size_applied(tables: Tables, seen: stord.VolumeInfo) -> Condition:
    if seen.pending_size_bytes:
        return condition("SizeApplied", False, "OnNextStart", growth(tables, seen))
    reason = APPLIED.get(seen.applied, "AsCreated")
    return condition("SizeApplied", True, reason, evidence=f"{seen.size_bytes} bytes")


def is_served(seen: stord.VolumeInfo | None) -> bool:
    """Tell whether a VM has the volume, and it is in order: no change refused can alter that."""
    return seen is not None and seen.state == "open" and bool(seen.attached_to or seen.readers)


def size_refused(
    volume: Volume, seen: stord.VolumeInfo, conditions: list[Condition], why: str
) -> list[Condition]:
    """Return the conditions of a volume that stays as large as it was, where more is wanted."""
    wanted = parse_bytes(volume.spec.size, field="spec.size")
    if wanted <= seen.size_bytes or seen.pending_size_bytes:
        return conditions
    message = f"the guest sees {format_bytes(seen.size_bytes)}: {why}"
    refused = condition("SizeApplied", False, "Refused", message)
    return [each for each in conditions if each.type != refused.type] + [refused]


def _space_available(seen: stord.VolumeInfo) -> Condition:
    free = f"{format_bytes(_rough(seen.free_bytes))} free" if seen.free_bytes else ""
    match seen.space:
        case stord.SpaceLevel.OK:
            return condition("SpaceAvailable", True, "Enough", evidence=free)
        case stord.SpaceLevel.WARN:
            return condition("SpaceAvailable", True, "Low", "space is getting short", free)
        case stord.SpaceLevel.CRITICAL:
            message = "hardly any space is left where the volume is"
            if seen.space_policy is stord.SpacePolicy.STOP:
                message += "; its VM is paused until there is some"
            return condition("SpaceAvailable", False, "Critical", message, free)
        case _:
            return condition("SpaceAvailable", None, "NotMeasured")


def _rough(count: int) -> int:
    """Round down to about 2 %: a status is stored where it differs, and this always would."""
    granule = max(MIB, 1 << max(0, count.bit_length() - 6))
    return count // granule * granule


def name_of(tables: Tables, uid: str) -> str:
    """Return `namespace/name` of an object, its uid where it is not known."""
    stored = tables.objects.get(uid) if uid else None
    return f"{stored.key[1]}/{stored.key[2]}" if stored is not None else uid


def short_name(tables: Tables, uid: str) -> str:
    """Return the name of an object of the same namespace, its uid where it is not known."""
    stored = tables.objects.get(uid)
    return stored.key[2] if stored is not None else uid


def _part(tables: Tables, info: stord.SnapshotInfo) -> VolumeSnapshotPart:
    return VolumeSnapshotPart(
        snapshot=short_name(tables, info.snapshot_id),
        created_at=info.created_at,
        size_bytes=info.size_bytes,
        allocated_bytes=info.allocated_bytes,
        used_by=[short_name(tables, uid) for uid in info.used_by],
    )
