"""Who refers to whom among the objects, read from their specs. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from chv.agent.records import StoredObject
from chv.agent.tables import Tables
from chv.common.wire.resources import Resource, VirtualMachine, Volume

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
        case Volume(spec=spec) if spec.source is not None:
            key = ("Image", resource.metadata.namespace, spec.source.image)
            return [Reference("spec.source.image", key)]
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
