"""What `chv fit` takes: `20x(2c,4Gi,40Gi,net=lan)`, or VMs of a manifest. Pure.

In brackets: CPUs as `2c`, then the memory, then a size for each disk, with `@POOL` where it is not
to be in the node's own place, and `net=NAME` for each NIC. Fails with InvalidArgument that names
the part, its value and what to write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from chv.common.errors import InvalidArgument
from chv.common.names import check_name, shown
from chv.common.quantity import parse_bytes, parse_cpus
from chv.common.wire.agent_inventory import COUNT_MAX, FitDisk, FitGroup
from chv.common.wire.resources import (
    DISKS_MAX,
    INTERFACES_MAX,
    ImageFormat,
    Resource,
    VirtualMachine,
    Volume,
    VolumeClass,
)

EXAMPLE = "such as '20x(2c,4Gi,40Gi)', quoted"
_WHOLE = re.compile(r"(?:([^x()]*)x)?\(([^()]*)\)\Z")
_CPUS = re.compile(r"([^c]*)c\Z")


def parse_group(text: str) -> FitGroup:
    """Return the VMs that a text means."""
    match = _WHOLE.match("".join(text.split()))
    if match is None:
        raise InvalidArgument(f"{shown(text)} are no VMs", field="VMS", hint=EXAMPLE)
    count = _count(match.group(1))
    cpus, memory, disks, networks = _parts(match.group(2).split(","))
    return FitGroup(count=count, cpus=cpus, memory_bytes=memory, disks=disks, networks=networks)


def _count(text: str | None) -> int:
    if text is None:
        return 1
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= COUNT_MAX:
        raise InvalidArgument(
            f"{shown(text)} is not a number of VMs",
            field="count",
            hint=f"a whole number from 1 to {COUNT_MAX} before the x",
        )
    return int(text)


def _parts(parts: list[str]) -> tuple[int, int, list[FitDisk], list[str]]:
    networks = [part.removeprefix("net=") for part in parts if part.startswith("net=")]
    sizes = [part for part in parts if not part.startswith("net=")]
    match = _CPUS.match(sizes[0]) if sizes else None
    if match is None:
        raise InvalidArgument(
            f"{shown(sizes[0] if sizes else '')} are no CPUs", field="cpus", hint="write 2c first"
        )
    if len(sizes) < 2:
        raise InvalidArgument("no memory is given", field="memory", hint=EXAMPLE)
    for network in networks:
        check_name(network, field="net")
    _refuse_many(len(sizes) - 2, DISKS_MAX, "disks")
    _refuse_many(len(networks), INTERFACES_MAX, "net")
    memory = _positive(sizes[1], "memory")
    disks = [_disk(part, f"disks[{index}]") for index, part in enumerate(sizes[2:])]
    return parse_cpus(match.group(1), field="cpus"), memory, disks, networks


def _disk(text: str, field: str) -> FitDisk:
    size, at, pool = text.partition("@")
    if at:
        check_name(pool, field=f"{field}.pool")
    return FitDisk(size_bytes=_positive(size, field), pool=pool)


def _positive(text: str, field: str) -> int:
    size = parse_bytes(text, field=field)
    if not size:
        raise InvalidArgument(f"{shown(text)} is nothing", field=field, hint="such as 4Gi")
    return size


def _refuse_many(count: int, most: int, field: str) -> None:
    if count > most:
        raise InvalidArgument(f"{count} are more than {most}", field=field)


def groups_of(resources: Iterable[Resource], count: int) -> list[FitGroup]:
    """Return so many of each VM of a manifest; volumes that it does not define take no space."""
    known = list(resources)
    volumes = {
        (each.metadata.namespace, each.metadata.name): each
        for each in known
        if isinstance(each, Volume)
    }
    found = [_group(each, volumes, count) for each in known if isinstance(each, VirtualMachine)]
    if not found:
        raise InvalidArgument("the file has no VirtualMachine", field="--vm")
    return found


def _group(vm: VirtualMachine, volumes: dict[tuple[str, str], Volume], count: int) -> FitGroup:
    namespace = vm.metadata.namespace
    own = [volumes.get((namespace, disk.volume)) for disk in vm.spec.disks]
    new = [each for each in own if each is not None and each.spec.class_ is VolumeClass.FILE]
    return FitGroup(
        count=count,
        cpus=vm.spec.cpus,
        memory_bytes=parse_bytes(vm.spec.memory, field="spec.memory"),
        disks=[
            FitDisk(
                size_bytes=parse_bytes(each.spec.size, field="spec.size"),
                pool=each.spec.pool,
                raw=each.spec.format is ImageFormat.RAW,
            )
            for each in new
        ],
        kept_disks=len(own) - len(new),
        networks=[interface.network for interface in vm.spec.interfaces],
        vmm=vm.spec.vmm,
    )
