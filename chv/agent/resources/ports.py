"""A network takes so many NICs as a bridge has ports: refused when one more is asked for. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from chv.agent.records import StoredObject
from chv.agent.tables import Tables
from chv.common.errors import ResourceExhausted
from chv.common.wire.nwd import BRIDGE_PORTS_MAX
from chv.common.wire.resources import VirtualMachine

Key = tuple[str, str]  # namespace and name of a network


def used(vms: Iterable[StoredObject]) -> Counter[Key]:
    """Return how many NICs each network has; those of stopped VMs keep their ports."""
    counted: Counter[Key] = Counter()
    for stored in vms:
        if isinstance(stored.resource, VirtualMachine):
            namespace = stored.resource.metadata.namespace
            for interface in stored.resource.spec.interfaces:
                counted[namespace, interface.network] += 1
    return counted


def refuse_full(tables: Tables, after: Mapping[str, StoredObject]) -> None:
    """Refuse NICs for which their network has no port."""
    more = used(after.values())
    if not more:
        return
    before = used(stored for stored in tables.objects.values() if stored.uid in after)
    others = used(stored for stored in tables.objects.values() if stored.uid not in after)
    for key, count in more.items():
        total = others[key] + count
        if total > BRIDGE_PORTS_MAX and count > before[key]:
            stored, index = _first(after, key)
            raise ResourceExhausted(
                f"network {key[1]} would have {total} NICs, and a bridge takes {BRIDGE_PORTS_MAX}",
                resource=stored.title,
                field=f"spec.interfaces[{index}].network",
                hint="put the NIC on another network, or delete VMs that are on this one",
            )


def _first(after: Mapping[str, StoredObject], key: Key) -> tuple[StoredObject, int]:
    for stored in after.values():
        vm = stored.resource
        if isinstance(vm, VirtualMachine) and vm.metadata.namespace == key[0]:
            for index, interface in enumerate(vm.spec.interfaces):
                if interface.network == key[1]:
                    return stored, index
    raise AssertionError("a NIC was counted that nobody has")
