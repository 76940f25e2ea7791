"""Who refers to whom among the objects, read from their specs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from chv.agent.records import StoredObject
from chv.agent.tables import Tables
from chv.common.wire.resources import (
    CloneModeName,
    Resource,
    VirtualMachine,
    Volume,
    VolumeSnapshot,
)

Key = tuple[str, str, str]  # kind, namespace, name


@dataclass(frozen=True, slots=True)
class Reference:
    """A field of one object that names another."""

    field: str
    key: Key


def references(resource: Resource) -> list[Reference]:
    """Return what an object refers to, in the order of its spec."""
    match resource:
        case VirtualMachine():
            return _of_vm(resource)
        case Volume():
            return _of_volume(resource)
        case VolumeSnapshot():
            return _of_snapshot(resource)
        case _:
            return []


def referrers(tables: Tables, key: Key) -> list[StoredObject]:
    """Return the objects that refer to `key`."""
    namespace = key[1]
    return [
        stored
        for stored in tables.objects.values()
        if stored.resource.metadata.namespace == namespace
        and any(reference.key == key for reference in references(stored.resource))
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
