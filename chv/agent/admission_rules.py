"""Rules of admission that look at more than one object. Pure: no ids, no clock, no calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from chv.agent.network.admission import (
    check_exposure,
    check_interfaces_change,
    check_interfaces_plug,
    check_network_change,
    check_on_network,
    guest_addresses,
)
from chv.agent.records import StoredObject
from chv.agent.references import holders as holders_of
from chv.agent.references import references, referrers
from chv.agent.tables import Tables
from chv.common.errors import FailedPrecondition, InUse, InvalidArgument
from chv.common.names import shown
from chv.common.quantity import format_bytes, parse_bytes
from chv.common.wire.resources import (
    Exposure,
    Image,
    Network,
    Resource,
    SecurityGroup,
    VirtualMachine,
    VirtualMachineSnapshot,
    Volume,
    VolumeAccessMode,
    VolumeSnapshot,
)
from chv.vmm.driver import HOT_PLUG

Find = Callable[[str, str, str], StoredObject | None]
# Another value of these means another place, or another format of the bytes there.
MOVING = ("class_", "format", "pool", "block", "lvm", "nbd", "iscsi", "rbd")


def check_change(tables: Tables, before: StoredObject, after: StoredObject) -> None:
    """Refuse what may not change, or not now."""
    match before.resource, after.resource:
        case Volume() as old, Volume() as new:
            _check_volume(tables, before, old, new)
        case Network() as old_network, Network() as new_network:
            for field in ("subnet", "gateway", "subnet6"):
                was, now = getattr(old_network.spec, field), getattr(new_network.spec, field)
                _refuse_changed(before, f"spec.{field}", was, now)
            check_network_change(tables, before, new_network)
        case Exposure() as old_exposure, Exposure() as new_exposure:
            was, now = old_exposure.spec.network, new_exposure.spec.network
            _refuse_changed(before, "spec.network", was, now)
        case SecurityGroup(), SecurityGroup():
            pass  # all of it changes at once
        case VirtualMachine() as old_vm, VirtualMachine() as new_vm:
            _check_vm(tables, before, old_vm, new_vm)
        case Image() as old_image, Image() as new_image:
            _check_image(tables, before, old_image, new_image)
        case VolumeSnapshot() as old_snapshot, VolumeSnapshot() as new_snapshot:
            _refuse_changed(before, "spec", old_snapshot.spec, new_snapshot.spec)
        case VirtualMachineSnapshot() as old_whole, VirtualMachineSnapshot() as new_whole:
            _refuse_changed(before, "spec", old_whole.spec, new_whole.spec)
        case _:
            raise AssertionError("an object does not change its kind")


def check_references(stored: StoredObject, find: Find) -> None:
    """Refuse names of objects that are neither there nor in the same request."""
    for reference in references(stored.resource):
        kind, namespace, name = reference.key
        found = find(*reference.key)
        if found is None:
            raise InvalidArgument(
                f"there is no {kind} {name!r} in namespace {namespace}",
                resource=stored.title,
                field=reference.field,
                hint=f"apply the {kind} before, or in the same file",
            )
        if found.deleting:
            raise FailedPrecondition(
                f"{found.title} is being deleted",
                resource=stored.title,
                field=reference.field,
                hint="wait until it is gone, then apply both",
            )
        _check_referred(stored, reference.field, found.resource)
    if isinstance(stored.resource, Exposure):
        check_exposure(stored, find)


def check_shared(tables: Tables, after: dict[str, StoredObject], find: Find) -> None:
    """Refuse a volume or an address that two VMs would have; what is only read may be shared."""
    vms = [o for o in tables.of_kind("VirtualMachine") if o.uid not in after]
    vms += [o for o in after.values() if o.resource.kind == "VirtualMachine"]
    holders: dict[tuple[str, str, str], StoredObject] = {}
    # Those that are there come first: the newcomer is the one that is refused.
    for stored in sorted(vms, key=lambda o: o.uid in after):
        for field, key, words in _exclusive(stored.resource, find):
            holder = holders.setdefault(key, stored)
            if holder is not stored:
                raise InUse(
                    f"{words} is used by {holder.title}",
                    resource=stored.title,
                    field=field,
                    hint=f"take another, or delete {holder.title} first",
                )


def check_delete(tables: Tables, stored: StoredObject) -> None:
    """Refuse to delete what an object still needs that is not being deleted itself."""
    reader = _restored_from(tables, stored)
    if reader is not None:
        raise InUse(
            f"{reader.title} is being restored from it",
            resource=stored.title,
            hint="wait for that, or stop the VM",
        )
    holders = [holder for holder in holders_of(tables, stored.key) if not _leaves(holder)]
    if holders:
        names = ", ".join(holder.title for holder in holders[:5])
        raise InUse(
            f"it is used by {names}",
            resource=stored.title,
            hint=_letting_go(stored, holders, names),
        )


def _restored_from(tables: Tables, snapshot: StoredObject) -> StoredObject | None:
    if not isinstance(snapshot.resource, VirtualMachineSnapshot):
        return None
    for vm in tables.objects.values():
        wish = vm.facts.restore if vm.facts is not None else None
        if wish is not None and wish.snapshot_uid == snapshot.uid:
            return vm
    return None


def _letting_go(stored: StoredObject, holders: list[StoredObject], names: str) -> str:
    """Say how its holders let go of it: a guest need not die for a rule."""
    guests = ", ".join(h.key[2] for h in holders if h.resource.kind == "VirtualMachine")
    if stored.resource.kind == "SecurityGroup" and guests:
        return f"take it out of securityGroups of {guests} first; that changes while they run"
    return f"delete {names} first"


def _leaves(holder: StoredObject) -> bool:
    """Tell whether it is being deleted for good: a deletion that is cancelled ends in staying."""
    facts = holder.snapshot_facts
    return holder.deleting and not (facts is not None and facts.cancelling)


# --- immutable fields


def _check_volume(tables: Tables, before: StoredObject, old: Volume, new: Volume) -> None:
    _refuse_changed(before, "spec.source", old.spec.source, new.spec.source)
    _refuse_changed(before, "spec.accessMode", old.spec.access_mode, new.spec.access_mode)
    if (old.spec.encryption is None) is not (new.spec.encryption is None):
        _refuse_changed(before, "spec.encryption", old.spec.encryption, new.spec.encryption)
    _check_rotation(before, old, new)
    if parse_bytes(new.spec.size) < parse_bytes(old.spec.size):
        raise InvalidArgument(
            f"{shown(new.spec.size)} is less than {shown(old.spec.size)}",
            resource=before.title,
            field="spec.size",
            hint="a volume only grows",
        )
    for field in MOVING:
        if getattr(old.spec, field) != getattr(new.spec, field):
            _check_move(tables, before, field.rstrip("_"))


def _check_rotation(before: StoredObject, old: Volume, new: Volume) -> None:
    """The key of layers below the top one changes only while nobody has the volume open."""
    was, now, status = old.spec.encryption, new.spec.encryption, old.status
    if was is None or now is None or was.key == now.key or status is None:
        return
    if now.key == status.encryption_key:  # takes back a rotation that was not done
        return
    holder = status.attached_to or ", ".join(status.readers)
    if holder and status.snapshots:
        raise FailedPrecondition(
            f"it is attached to {holder} and has snapshots, so its key cannot be rotated now",
            resource=before.title,
            field="spec.encryption.key",
            hint="stop the VM or delete the snapshots first",
        )


def _check_move(tables: Tables, before: StoredObject, field: str) -> None:
    """A snapshot is where its volume is: neither can go alone."""
    snapshots = [
        holder
        for holder in referrers(tables, before.key)
        if isinstance(holder.resource, VolumeSnapshot | VirtualMachineSnapshot)
    ]
    if snapshots:
        names = ", ".join(holder.title for holder in snapshots[:5])
        raise FailedPrecondition(
            f"it has snapshots, so it cannot move: {names}",
            resource=before.title,
            field=f"spec.{field}",
            hint=f"delete {names} first",
        )


def _check_image(tables: Tables, before: StoredObject, old: Image, new: Image) -> None:
    if old.spec == new.spec:
        return
    holders = referrers(tables, before.key)
    if holders:
        raise InUse(
            f"it is used by {holders[0].title}, so its files may not change",
            resource=before.title,
            field="spec",
            hint="import the new files as an Image of another name",
        )


def _check_vm(
    tables: Tables, before: StoredObject, old: VirtualMachine, new: VirtualMachine
) -> None:
    _refuse_changed(before, "spec.ephemeral", old.spec.ephemeral, new.spec.ephemeral)
    assert before.facts is not None
    if before.facts.selection is not None:
        _refuse_changed(
            before, "spec.vmm", old.spec.vmm, new.spec.vmm, since="since the first start"
        )
    if before.uid not in tables.workers:
        return
    _check_disks(before, old, new)
    check_interfaces_change(before, old, new)
    check_interfaces_plug(tables, before, old, new)
    if old.spec.boot.image != new.spec.boot.image:
        raise FailedPrecondition(
            "it cannot change while the VM runs",
            resource=before.title,
            field="spec.boot.image",
            hint=f"chv stop {new.metadata.name}, then apply again",
        )


def _check_disks(before: StoredObject, old: VirtualMachine, new: VirtualMachine) -> None:
    """A running VM takes up disks and lets go of them where its VMM can."""
    was, now = old.spec.disks, new.spec.disks
    if was == now:
        return
    assert before.facts is not None
    selection, name = before.facts.selection, new.metadata.name
    problem, field = "", "spec.disks"
    if selection is None or selection.name not in HOT_PLUG:
        problem = "they cannot change while the VM runs"
    elif not new.spec.boot.image and was[:1] != now[:1]:
        problem, field = "it cannot change while the VM runs: it has booted from it", f"{field}[0]"
    elif changed := [
        disk.name
        for disk in was
        for after in now
        if (disk.name, disk.volume) == (after.name, after.volume) and disk != after
    ]:
        problem = f"readOnly of {', '.join(changed)} cannot change while the VM runs"
    if problem:
        raise FailedPrecondition(
            problem,
            resource=before.title,
            field=field,
            hint=f"chv stop {name}, then apply again",
        )


def _refuse_changed(
    before: StoredObject, field: str, was: object, now: object, since: str = "at creation"
) -> None:
    if was != now:
        raise InvalidArgument(
            f"{_plain(now)} instead of {_plain(was)}: it is fixed {since}",
            resource=before.title,
            field=field,
            hint="delete the object and make it anew, or take another name",
        )


def _plain(value: object) -> str:
    """Return a value as a manifest has it."""
    return shown(msgspec.to_builtins(value)) if value is not None else "none"


# --- what only one may have


def _exclusive(resource: Resource, find: Find) -> Iterable[tuple[str, tuple[str, str, str], str]]:
    if not isinstance(resource, VirtualMachine):
        return
    namespace = resource.metadata.namespace
    for index, disk in enumerate(resource.spec.disks):
        field = f"spec.disks[{index}].volume"
        if _is_only_read(find("Volume", namespace, disk.volume)):
            continue
        yield field, ("volume", namespace, disk.volume), f"volume {disk.volume!r}"
    yield from guest_addresses(resource)


def _is_only_read(stored: StoredObject | None) -> bool:
    volume = stored.resource if stored is not None else None
    return isinstance(volume, Volume) and volume.spec.access_mode is VolumeAccessMode.READ_ONLY_MANY


def _check_referred(stored: StoredObject, field: str, found: Resource) -> None:
    """Refuse a reference that can never work."""
    if isinstance(found, Image) and found.spec.builtin != "tiny":
        needs_disk = isinstance(stored.resource, Volume)
        if needs_disk and found.spec.disk is None:
            raise InvalidArgument(
                f"image {found.metadata.name!r} has no disk", resource=stored.title, field=field
            )
        if not needs_disk and not found.spec.builtin and found.spec.kernel is None:
            raise InvalidArgument(
                f"image {found.metadata.name!r} has no kernel",
                resource=stored.title,
                field=field,
                hint="leave spec.boot.image empty to boot from the first disk",
            )
    if isinstance(found, Network) and isinstance(stored.resource, VirtualMachine):
        check_on_network(stored, found, field)
    if isinstance(found, Volume):
        _check_reader(stored, found, field)
    if isinstance(found, VolumeSnapshot) and isinstance(stored.resource, Volume):
        _check_clone(stored, stored.resource, found)


def _check_reader(stored: StoredObject, volume: Volume, field: str) -> None:
    """A volume that many may read is written by none, so it has no snapshots either."""
    if volume.spec.access_mode is not VolumeAccessMode.READ_ONLY_MANY:
        return
    if isinstance(stored.resource, VolumeSnapshot):
        raise InvalidArgument(
            f"volume {volume.metadata.name!r} is ReadOnlyMany: it never changes",
            resource=stored.title,
            field=field,
            hint="use the volume itself",
        )
    if isinstance(stored.resource, VirtualMachine):
        for index, disk in enumerate(stored.resource.spec.disks):
            if disk.volume == volume.metadata.name and not disk.read_only:
                raise InvalidArgument(
                    f"volume {disk.volume!r} is ReadOnlyMany",
                    resource=stored.title,
                    field=f"spec.disks[{index}].readOnly",
                    hint="write readOnly: true",
                )


def _check_clone(stored: StoredObject, clone: Volume, snapshot: VolumeSnapshot) -> None:
    source = clone.spec.source
    if source is None or snapshot.status is None or not snapshot.status.volumes:
        return  # what it has is not known yet
    parts = {part.volume: part for part in snapshot.status.volumes}
    if source.snapshot_volume not in parts and (source.snapshot_volume or len(parts) > 1):
        raise InvalidArgument(
            f"{shown(source.snapshot_volume)} is not a volume of snapshot {source.snapshot}",
            resource=stored.title,
            field="spec.source.snapshotVolume",
            hint=f"one of {', '.join(sorted(parts))}",
        )
    part = parts[source.snapshot_volume or next(iter(parts))]
    if parse_bytes(clone.spec.size) < part.size_bytes:
        raise InvalidArgument(
            f"{shown(clone.spec.size)} is less than the snapshot's {part.size_bytes} bytes",
            resource=stored.title,
            field="spec.size",
            hint=f"at least {format_bytes(part.size_bytes)}",
        )
