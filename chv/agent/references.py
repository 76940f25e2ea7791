"""Who refers to whom among the objects, read from their specs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from chv.agent.records import StoredObject
from chv.agent.tables import Tables
from chv.common.wire.resources import (
    CloneModeName,
    Exposure,
    Resource,
    SecurityGroup,
    VirtualMachine,
    VirtualMachineSnapshot,
    Volume,
    VolumeSnapshot,
)

Key = tuple[str, str, str]  # kind, namespace, name


@dataclass(frozen=True, slots=True)
class Reference:
    """A field of one object that names another.

    `holds`: the other is in use. Else it may go: whoever names it is told and does without it.
    """

    field: str
    key: Key
    holds: bool = True


def references(resource: Resource) -> list[Reference]:
    """Return what an object refers to, in the order of its spec."""
    match resource:
        case VirtualMachine():
            return _of_vm(resource)
        case Volume():
            return _of_volume(resource)
        case VirtualMachineSnapshot():
            return _of_vm_snapshot(resource)
        case VolumeSnapshot():
            return _of_snapshot(resource)
        case SecurityGroup():
            return _of_group(resource)
        case Exposure():
            return _of_exposure(resource)
        case _:
            return []


def referrers(tables: Tables, key: Key) -> list[StoredObject]:
    """Return the objects that name `key`."""
    return _naming(tables, key, held_only=False)


def holders(tables: Tables, key: Key) -> list[StoredObject]:
    """Return the objects that name `key` and cannot do without it."""
    return _naming(tables, key, held_only=True)


def _naming(tables: Tables, key: Key, *, held_only: bool) -> list[StoredObject]:
    namespace = key[1]
    return [
        stored
        for stored in tables.objects.values()
        if stored.resource.metadata.namespace == namespace
        and any(
            each.key == key and (each.holds or not held_only)
            for each in references(stored.resource)
        )
    ]


def _of_vm(vm: VirtualMachine) -> list[Reference]:
    namespace = vm.metadata.namespace
    found = []
    if vm.spec.boot.image:
        found.append(Reference("spec.boot.image", ("Image", namespace, vm.spec.boot.image)))
    for index, disk in enumerate(vm.spec.disks):
        key = ("Volume", namespace, disk.volume)
        found.append(Reference(f"spec.disks[{index}].volume", key))
    for index, interface in enumerate(vm.spec.interfaces):
        key = ("Network", namespace, interface.network)
        found.append(Reference(f"spec.interfaces[{index}].network", key))
        for number, group in enumerate(interface.security_groups):
            field = f"spec.interfaces[{index}].securityGroups[{number}]"
            found.append(Reference(field, ("SecurityGroup", namespace, group)))
    return found


def _of_group(group: SecurityGroup) -> list[Reference]:
    """Groups name each other and themselves: a rule without its peer allows less, and no more."""
    namespace, found = group.metadata.namespace, []
    for direction in ("ingress", "egress"):
        for index, rule in enumerate(getattr(group.spec, direction)):
            for number, name in enumerate(rule.security_groups):
                field = f"spec.{direction}[{index}].securityGroups[{number}]"
                key = ("SecurityGroup", namespace, name)
                found.append(Reference(field, key, holds=False))
    return found


def _of_exposure(exposure: Exposure) -> list[Reference]:
    """It outlives its targets: those that are gone are shown as absent."""
    namespace, spec = exposure.metadata.namespace, exposure.spec
    found = [Reference("spec.network", ("Network", namespace, spec.network))]
    for index, target in enumerate(spec.targets):
        key = ("VirtualMachine", namespace, target.virtual_machine)
        found.append(Reference(f"spec.targets[{index}].virtualMachine", key, holds=False))
    return found


def _of_volume(volume: Volume) -> list[Reference]:
    """A full copy needs its snapshot no longer once it is made; a linked clone always does."""
    namespace, source = volume.metadata.namespace, volume.spec.source
    if source is None:
        return []
    if source.image:
        return [Reference("spec.source.image", ("Image", namespace, source.image))]
    if source.snapshot and not (source.mode is CloneModeName.FULL and _is_made(volume)):
        key = ("VolumeSnapshot", namespace, source.snapshot)
        return [Reference("spec.source.snapshot", key)]
    return []


def _is_made(volume: Volume) -> bool:
    status = volume.status
    return status is not None and status.phase in ("Ready", "Attached", "Deleting")


def _of_snapshot(snapshot: VolumeSnapshot) -> list[Reference]:
    """Once it is taken it needs its volumes, and the VM no more."""
    namespace, spec = snapshot.metadata.namespace, snapshot.spec
    if spec.volume:
        return [Reference("spec.volume", ("Volume", namespace, spec.volume))]
    if snapshot.status is not None and snapshot.status.volumes:
        names = [part.volume for part in snapshot.status.volumes]
        return [Reference("spec.virtualMachine", ("Volume", namespace, name)) for name in names]
    key = ("VirtualMachine", namespace, spec.virtual_machine)
    return [Reference("spec.virtualMachine", key)]


def _of_vm_snapshot(snapshot: VirtualMachineSnapshot) -> list[Reference]:
    """It is of no use without its VM and all its volumes; one that failed is of none anyway."""
    namespace, status = snapshot.metadata.namespace, snapshot.status
    if status is not None and status.phase == "Failed":
        return []
    key = ("VirtualMachine", namespace, snapshot.spec.virtual_machine)
    field, found = "spec.virtualMachine", [Reference("spec.virtualMachine", key)]
    for part in status.volumes if status is not None else ():
        found.append(Reference(field, ("Volume", namespace, part.volume)))
    return found
