"""What a clone of a VM consists of: the VM, its volumes, and the snapshot they start from. Pure.

All of them are ordinary objects and are stored in one transaction; their reconcilers do the rest.
The snapshot carries the annotation `HELPER` and goes once nothing starts from it any more. Fails
with InvalidArgument, Unsupported or Conflict before anything is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from chv.agent.records import StoredObject
from chv.agent.tables import Tables
from chv.agent.vm.desired import facts_of, vm_of
from chv.common.errors import Conflict, FailedPrecondition, InvalidArgument, NotFound, Unsupported
from chv.common.names import check_name
from chv.common.wire.agent_clone import CloneVm
from chv.common.wire.resources import (
    CloneModeName,
    DiskSpec,
    Exposure,
    ObjectMeta,
    Resource,
    RunStrategy,
    VirtualMachine,
    VirtualMachineSpec,
    Volume,
    VolumeAccessMode,
    VolumeClass,
    VolumeSnapshot,
    VolumeSnapshotSpec,
    VolumeSourceSpec,
)

HELPER = "compute.chv.dev/clone-helper-of"  # annotation: the name of the clone
_replace = msgspec.structs.replace


@dataclass(frozen=True, slots=True)
class Clone:
    """Objects to be created, all new, and what was not copied, in words."""

    resources: tuple[Resource, ...]
    left_out: tuple[str, ...]


def cloned(tables: Tables, source: StoredObject, request: CloneVm) -> Clone:
    """Return the objects of the clone; nothing of its names may be there."""
    if source.deleting:
        raise FailedPrecondition("it is being deleted, so no clone", resource=source.title)
    if facts_of(source).restore is not None:
        raise Conflict("it is being restored", resource=source.title, hint="wait for it")
    vm = vm_of(source)
    snapshot = f"{request.new_name}-source"
    disks, volumes = [], []
    for index, disk in enumerate(vm.spec.disks):
        made = _volume(tables, source, index, request, snapshot)
        if made is None:
            disks.append(disk)
            continue
        volumes.append(made)
        disks.append(_replace(disk, volume=made.metadata.name))
    resources: list[Resource] = [*volumes, _vm(source, disks, request)]
    if volumes:
        resources.append(_snapshot(source, snapshot, request))
    elif request.freeze:
        raise FailedPrecondition(
            "it has no disk that it writes, so there is nothing to freeze it for",
            resource=source.title,
            field="freeze",
        )
    for resource in resources:
        _refuse_taken(tables, resource)
    return Clone(tuple(resources), _left_out(tables, source))


def made_for(tables: Tables, clone: StoredObject) -> list[StoredObject]:
    """Return the volumes that were made for a clone: those that start from its helper."""
    _, namespace, name = clone.key
    helpers = {
        stored.key[2]
        for stored in tables.of_kind("VolumeSnapshot")
        if stored.key[1] == namespace and stored.resource.metadata.annotations.get(HELPER) == name
    }
    found = (tables.find("Volume", namespace, disk.volume) for disk in vm_of(clone).spec.disks)
    return [each for each in found if each is not None and _starts_from(each, helpers)]


def _starts_from(stored: StoredObject, snapshots: set[str]) -> bool:
    assert isinstance(stored.resource, Volume)
    source = stored.resource.spec.source
    return not stored.deleting and source is not None and source.snapshot in snapshots


def unmade(tables: Tables, clone: StoredObject) -> str:
    """Name a volume of a clone that does not have its data yet; empty: all have theirs."""
    for disk in vm_of(clone).spec.disks:
        stored = tables.find("Volume", clone.key[1], disk.volume)
        status = stored.resource.status if stored is not None else None
        if status is None or status.phase not in ("Ready", "Attached"):
            return disk.volume
    return ""


def _volume(
    tables: Tables, source: StoredObject, index: int, request: CloneVm, snapshot: str
) -> Volume | None:
    """Return the copy of a disk's volume; None for one that is shared by its readers."""
    disk: DiskSpec = vm_of(source).spec.disks[index]
    stored = tables.find("Volume", source.key[1], disk.volume)
    field = f"spec.disks[{index}].volume"
    if stored is None:
        raise NotFound(f"there is no Volume {disk.volume!r}", resource=source.title, field=field)
    assert isinstance(stored.resource, Volume)
    spec = stored.resource.spec
    if spec.access_mode is VolumeAccessMode.READ_ONLY_MANY:
        return None
    if disk.read_only:
        raise Unsupported(
            f"volume {disk.volume!r} is read only here, yet its accessMode is ReadWriteOnce: "
            "a clone can neither share nor freeze it",
            resource=source.title,
            field=field,
            hint="take the disk away, or keep it on a ReadOnlyMany volume",
        )
    mode = request.mode
    _refuse_class(stored, spec.class_, mode)
    linked = mode is CloneModeName.LINKED
    from_snapshot = VolumeSourceSpec(snapshot=snapshot, snapshot_volume=disk.volume, mode=mode)
    made = _replace(spec, source=from_snapshot)
    if linked:  # an overlay, whatever is below
        made = _replace(made, format=type(spec.format).QCOW2)
    metadata = stored.resource.metadata
    return Volume(
        metadata=ObjectMeta(
            name=_name(f"{request.new_name}-{disk.name}"),
            namespace=source.key[1],
            labels=metadata.labels,
        ),
        spec=made,
    )


def _refuse_class(stored: StoredObject, class_: VolumeClass, mode: CloneModeName) -> None:
    if class_ is VolumeClass.FILE:
        return
    if class_ is not VolumeClass.LVM:
        raise Unsupported(
            f"a volume of class {class_.value} has a place of its own, which a copy cannot have",
            resource=stored.title,
            field="spec.class",
            hint="move it to class file, or clone its snapshot into a volume by hand",
        )
    if mode is CloneModeName.LINKED:
        raise Unsupported(
            "a volume of class lvm has no linked clones",
            resource=stored.title,
            field="spec.class",
            hint="use --full",
        )


def _vm(source: StoredObject, disks: list[DiskSpec], request: CloneVm) -> VirtualMachine:
    vm = vm_of(source)
    interfaces = [
        _replace(each, mac="", address="", address6="", public_address="")
        for each in vm.spec.interfaces
    ]
    spec: VirtualMachineSpec = _replace(
        vm.spec,
        run_strategy=_strategy(source, request),
        disks=disks,
        interfaces=interfaces,
        cloud_init=_replace(vm.spec.cloud_init, hostname=""),
    )
    metadata = ObjectMeta(name=request.new_name, namespace=source.key[1], labels=vm.metadata.labels)
    return VirtualMachine(metadata=metadata, spec=spec)


def _strategy(source: StoredObject, request: CloneVm) -> RunStrategy:
    strategy = vm_of(source).spec.run_strategy
    if request.start is None:
        return strategy
    if not request.start:
        return RunStrategy.HALTED
    wanted = facts_of(source).last_strategy if strategy is RunStrategy.HALTED else strategy
    if wanted is RunStrategy.MANUAL:
        raise InvalidArgument(
            "its runStrategy is Manual",
            resource=source.title,
            field="start",
            hint=f"clone it without --start, then chv start {request.new_name}",
        )
    return wanted


def _snapshot(source: StoredObject, name: str, request: CloneVm) -> VolumeSnapshot:
    metadata = ObjectMeta(
        name=_name(name), namespace=source.key[1], annotations={HELPER: request.new_name}
    )
    spec = VolumeSnapshotSpec(virtual_machine=source.key[2], freeze=request.freeze)
    return VolumeSnapshot(metadata=metadata, spec=spec)


def _name(text: str) -> str:
    check_name(text, field="new_name")
    return text


def _refuse_taken(tables: Tables, resource: Resource) -> None:
    metadata = resource.metadata
    there = tables.find(resource.kind, metadata.namespace, metadata.name)
    if there is not None:
        raise Conflict(
            "it is there already, and the clone would need its name",
            resource=there.title,
            field="new_name",
            hint="take another name for the clone",
        )


def _left_out(tables: Tables, source: StoredObject) -> tuple[str, ...]:
    """Say what only one VM may have."""
    vm, namespace, name = vm_of(source), source.key[1], source.key[2]
    found = []
    for each in vm.spec.interfaces:
        for field in ("mac", "address", "address6", "public_address"):
            if value := getattr(each, field):
                found.append(f"{field.replace('_a', 'A')} {value} of interface {each.name}")
    if vm.spec.cloud_init.hostname:
        found.append(f"hostname {vm.spec.cloud_init.hostname}")
    for stored in tables.of_kind("Exposure"):
        exposure = stored.resource
        assert isinstance(exposure, Exposure)
        targets = [each.virtual_machine for each in exposure.spec.targets]
        if stored.key[1] == namespace and name in targets:
            found.append(f"{stored.title}, which goes to {name} alone")
    return tuple(found)
