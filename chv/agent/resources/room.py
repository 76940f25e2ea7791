"""What is left of each resource, and what VMs need of it: the numbers for `fit`.

Pure, from the tables in memory; what file systems have is measured in `places`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from chv.agent.records import StoredObject
from chv.agent.resources.commitment import Budget
from chv.agent.resources.fit import Room, Wish, fit
from chv.agent.resources.overhead import Shape, qcow2_cache_bytes
from chv.agent.resources.places import Place
from chv.agent.resources.ports import used
from chv.agent.tables import Tables
from chv.common.quantity import parse_bytes
from chv.common.wire.agent_inventory import Commitment, FitGroup, FitReply, FitVms
from chv.common.wire.nwd import BRIDGE_PORTS_MAX
from chv.common.wire.resources import Volume, VolumeClass


def commitment(tables: Tables, budget: Budget) -> Commitment:
    """Return what is promised and how much may be."""
    total, capacity = budget.committed(tables), budget.capacity
    vms = [each for each in tables.objects.values() if each.facts is not None]
    return Commitment(
        vms=sum(budget.wanted(tables, each).memory_bytes > 0 for each in vms),
        memory_bytes=total.memory_bytes,
        overhead_bytes=total.overhead_bytes,
        vcpus=total.vcpus,
        capacity_bytes=capacity.memory_bytes,
        reserve_bytes=capacity.reserve_bytes,
        hugepage_bytes=capacity.hugepage_bytes,
        memory_overcommit=capacity.memory_overcommit,
        vcpus_max=capacity.vcpus,
    )


def fitting(
    tables: Tables, budget: Budget, places: Mapping[str, Place], request: FitVms, vms_max: int
) -> FitReply:
    """Return how many VMs of each group fit beside what is there."""
    room, unlimited = _room(tables, budget, places, vms_max)
    ports = used(tables.objects.values())
    wishes = [_wish(budget, places, group, request.namespace) for group in request.groups]
    left = dict(room)
    for group in request.groups:
        for network in group.networks:
            taken = ports[request.namespace, network]
            left[_port(request.namespace, network)] = BRIDGE_PORTS_MAX - taken
    return FitReply(groups=fit(wishes, Room(left)), unlimited=unlimited)


def _room(
    tables: Tables, budget: Budget, places: Mapping[str, Place], vms_max: int
) -> tuple[dict[str, int], dict[str, str]]:
    total, capacity = budget.committed(tables), budget.capacity
    vms = sum(each.facts is not None for each in tables.objects.values())
    left = {"vms": vms_max - vms}
    unlimited: dict[str, str] = {}
    if capacity.memory_bytes is None:
        unlimited["memory"] = "the kernel does not tell how much there is"
    else:
        left["memory"] = capacity.memory_bytes - total.memory_bytes
    if capacity.vcpus is None:
        unlimited["vcpus"] = "limits.vcpu_overcommit is 0"
    else:
        left["vcpus"] = capacity.vcpus - total.vcpus
    unwritten = _unwritten(list(tables.objects.values()))
    taken: Counter[str] = Counter()
    for pool, place in places.items():
        taken[place.name] += unwritten[pool]
    for place in places.values():
        left[_disk(place)] = place.free_bytes - taken[place.name]
    return left, unlimited


def _unwritten(objects: Sequence[StoredObject]) -> Counter[str]:
    """Return, by pool, the bytes that volumes of files are promised and have not written yet."""
    found: Counter[str] = Counter()
    for stored in objects:
        volume = stored.resource
        if isinstance(volume, Volume) and volume.spec.class_ is VolumeClass.FILE:
            allocated = volume.status.allocated_bytes if volume.status is not None else 0
            found[volume.spec.pool] += max(0, parse_bytes(volume.spec.size) - allocated)
    return found


def _wish(budget: Budget, places: Mapping[str, Place], group: FitGroup, namespace: str) -> Wish:
    layered = [disk for disk in group.disks if not disk.raw]
    disks = len(group.disks) + group.kept_disks
    shape = Shape(
        vcpus=group.cpus,
        memory_bytes=group.memory_bytes,
        disks=disks,
        proxies=0 if layered else disks,
        nics=len(group.networks),
        cache_bytes=sum(qcow2_cache_bytes(disk.size_bytes) for disk in layered),
    )
    claim = budget.of_kind(shape, group.vmm)
    needs = Counter({"vms": 1, "memory": claim.memory_bytes, "vcpus": claim.vcpus})
    for disk in group.disks:
        needs[_disk(places[disk.pool])] += disk.size_bytes
    for network in group.networks:
        needs[_port(namespace, network)] += 1
    return Wish(group.count, needs)


def _disk(place: Place) -> str:
    return f"disk {place.name}"


def _port(namespace: str, network: str) -> str:
    return f"ports of network {namespace}/{network}"
