"""Which verbs an apply amounts to, for the node's table of verbs. Pure.

A file that stops a VM, takes a disk away or asks for a snapshot is what `chv stop` and their like
are, and is admitted where they are.
"""

from __future__ import annotations

import msgspec

from chv.agent.ports import Gate
from chv.agent.records import StoredObject
from chv.agent.tables import Tables
from chv.agent.upstream.rules import applies_desired
from chv.common.wire.resources import (
    Resource,
    RunStrategy,
    VirtualMachine,
    VirtualMachineSnapshot,
    VirtualMachineSpec,
    VolumeSnapshot,
)

_SIZES = ("cpus", "max_cpus", "memory", "max_memory")
_LISTS = ("disks", "interfaces")
_OWN = frozenset({"run_strategy", *_SIZES, *_LISTS})


def check_verbs(gate: Gate, tables: Tables, resources: list[Resource]) -> None:
    """Refuse what the node's state forbids: FailedPrecondition."""
    for resource in resources:
        metadata = resource.metadata
        before = tables.find(resource.kind, metadata.namespace, metadata.name)
        desired = applies_desired(tables, before, resource)
        for verb in sorted(verbs_of(before, resource)):
            gate.check(verb, desired=desired)


def verbs_of(before: StoredObject | None, after: Resource) -> set[str]:
    """Return the verbs; none where the spec stays as it is."""
    if before is None:
        if isinstance(after, VirtualMachine):
            return {"create"}
        return {"snapshot" if isinstance(after, _SNAPSHOTS) else "define"}
    old = before.resource
    if isinstance(old, VirtualMachine) and isinstance(after, VirtualMachine):
        return _of_vm(old.spec, after.spec)
    return {"update"} if old.spec != after.spec else set()


_SNAPSHOTS = VolumeSnapshot | VirtualMachineSnapshot


def _of_vm(old: VirtualMachineSpec, new: VirtualMachineSpec) -> set[str]:
    found = _of_strategy(old.run_strategy, new.run_strategy)
    if any(getattr(old, name) != getattr(new, name) for name in _SIZES):
        found.add("resize")
    for name in _LISTS:
        found |= _of_devices(getattr(old, name), getattr(new, name))
    others = (name for name in msgspec.structs.asdict(new) if name not in _OWN)
    if any(getattr(old, name) != getattr(new, name) for name in others):
        found.add("update")
    return found


def _of_strategy(old: RunStrategy, new: RunStrategy) -> set[str]:
    if old is new:
        return set()
    if new is RunStrategy.HALTED:
        return {"stop"}
    return {"start" if old is RunStrategy.HALTED else "update"}


def _of_devices(old: list[msgspec.Struct], new: list[msgspec.Struct]) -> set[str]:
    """Removed ones are detached; a new or another one is attached."""
    found = set()
    if any(each not in old for each in new):
        found.add("attach")
    if any(each not in new for each in old):
        found.add("detach")
    if not found and old != new:
        found.add("update")  # another order
    return found
