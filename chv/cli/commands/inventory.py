"""`chv node inventory`."""

from __future__ import annotations

import argparse

from chv.cli import connect, output
from chv.cli.sizes import about
from chv.common.wire.agent_inventory import (
    GET_INVENTORY,
    Commitment,
    CpuInventory,
    GetInventory,
    InventoryReply,
)


def inventory(arguments: argparse.Namespace) -> int:
    """Show what the machine has; what cannot be read is `-`."""
    with connect.client(arguments.socket) as client:
        found = client.call(GET_INVENTORY, GetInventory(fresh=arguments.fresh))
    if arguments.json:
        output.document(found, "json")
        return 0
    print(f"Linux {found.kernel} on {found.architecture}, looked at {found.age_s:.0f} s ago")
    _cpu(found.cpu)
    print(f"  KVM: {found.kvm or '-'}")
    print(f"  cgroup {found.cgroup.mode}; limits of VMs: {found.cgroup.limits}")
    _memory(found)
    _commitment(found.commitment)
    _tables(found)
    return 0


def _cpu(cpu: CpuInventory) -> None:
    counts = (cpu.sockets, cpu.cores, cpu.threads)
    sockets, cores, threads = ("-" if each is None else each for each in counts)
    print(f"  CPU: {cpu.model or '-'}; {sockets} sockets, {cores} cores, {threads} threads")
    print(f"  online {cpu.online or '-'}; {' '.join(cpu.flags) or 'no flags of interest'}")
    if cpu.nested:
        print(f"  nested: {cpu.nested}")


def _memory(found: InventoryReply) -> None:
    memory = found.memory
    line = f"  memory: {about(memory.total_bytes)}, {about(memory.available_bytes)} available"
    if memory.limit_bytes is not None:
        line += f", limited to {about(memory.limit_bytes)}"
    print(line)
    for pages in memory.hugepages:
        total = "-" if pages.total is None else pages.total
        print(f"  huge pages of {about(pages.page_bytes)}: {total}, {pages.free} free")


def _commitment(commitment: Commitment) -> None:
    most = about(commitment.capacity_bytes) if commitment.capacity_bytes is not None else "no limit"
    vcpus = commitment.vcpus_max if commitment.vcpus_max is not None else "no limit"
    print(
        f"  committed to {commitment.vms} VMs: {about(commitment.memory_bytes)} of {most} "
        f"({about(commitment.overhead_bytes)} of it around the guests), "
        f"{commitment.vcpus} vCPUs of {vcpus}"
    )
    print(
        f"  reserved for the host: {about(commitment.reserve_bytes)}; "
        f"overcommit {commitment.memory_overcommit:g}\n"
    )


def _tables(found: InventoryReply) -> None:
    output.table(
        ["NUMA", "CPUS", "MEMORY", "FREE"],
        [
            [str(each.node), each.cpus or "-", about(each.total_bytes), about(each.free_bytes)]
            for each in found.numa
        ],
    )
    print()
    output.table(
        ["DISK", "SIZE", "KIND", "MODEL", "MOUNTED"],
        [
            [
                each.name,
                about(each.size_bytes),
                {True: "rotates", False: "solid", None: "-"}[each.rotational],
                each.model or "-",
                ", ".join(each.mounted) or "-",
            ]
            for each in found.disks
        ],
    )
    print()
    output.table(
        ["PLACE", "PATH", "TYPE", "SIZE", "FREE"],
        [
            [
                each.purpose,
                each.path,
                each.type or "-",
                about(each.total_bytes),
                about(each.free_bytes),
            ]
            for each in found.places
        ],
    )
    print()
    programs = [(each.name, each.version, each.path, each.sha256) for each in found.programs]
    programs += [(e.name, e.version, e.binary, e.sha256) for e in found.vmms if e.binary]
    output.table(
        ["PROGRAM", "VERSION", "PATH", "SHA-256"],
        [[each or "-" for each in program] for program in programs],
    )
    print()
    output.table(
        ["FEATURE", "PRESENT"],
        [[each.name, "yes" if each.present else "no"] for each in found.features],
    )
