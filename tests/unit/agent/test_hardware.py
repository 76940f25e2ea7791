"""The inventory says what /proc and /sys say, and nothing where they say nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from chv.agent.resources import cgroups, hardware, machine
from chv.common.config import LimitsConfig
from chv.common.layout import Layout
from chv.common.process import PlainProvider
from chv.common.wire.agent_inventory import HugePages, NumaNode

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CPU = """processor\t: {n}
model name\t: Tester 9000
physical id\t: {socket}
core id\t\t: {core}
flags\t\t: fpu vmx ept aes nonsense
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_cpus_are_counted_by_socket_core_and_thread(tmp_path: Path) -> None:
    places = [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1), (1, 1)]
    blocks = [CPU.format(n=n, socket=s, core=c) for n, (s, c) in enumerate(places)]
    root = write(
        tmp_path,
        {
            "proc/cpuinfo": "\n".join(blocks),
            "sys/devices/system/cpu/online": "0-7\n",
            "sys/module/kvm_intel/parameters/nested": "Y\n",
        },
    )
    found = hardware.cpu(root)
    assert (found.model, found.sockets, found.cores, found.threads) == ("Tester 9000", 2, 4, 8)
    assert (found.online, found.nested) == ("0-7", "kvm_intel: Y")
    assert set(found.flags) == {"vmx", "ept", "aes"}


def test_nothing_is_guessed_of_a_machine_that_shows_nothing(tmp_path: Path) -> None:
    found = hardware.cpu(tmp_path)
    assert (found.model, found.sockets, found.cores, found.threads) == ("", None, None, None)
    assert hardware.numa(tmp_path) == []
    assert hardware.disks([], tmp_path) == []
    assert hardware.mounts(tmp_path) == []
    memory = hardware.memory_inventory(tmp_path)
    assert (memory.total_bytes, memory.available_bytes, memory.hugepages) == (None, None, [])
    assert machine.capacity(LimitsConfig(), tmp_path).memory_bytes is None


def test_numa_and_huge_pages(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "sys/devices/system/node/node0/cpulist": "0-3\n",
            "sys/devices/system/node/node0/meminfo": (
                "Node 0 MemTotal:       1024 kB\nNode 0 MemFree:         512 kB\n"
            ),
            "sys/devices/system/node/node10/cpulist": "4-7\n",
            "sys/devices/system/node/online": "0,10\n",
            "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "8\n",
            "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "5\n",
            "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0\n",
        },
    )
    assert hardware.numa(root) == [
        NumaNode(node=0, cpus="0-3", total_bytes=MIB, free_bytes=MIB // 2),
        NumaNode(node=10, cpus="4-7"),
    ]
    assert hardware.memory_inventory(root).hugepages == [
        HugePages(page_bytes=2 * MIB, total=8, free=5),
        HugePages(page_bytes=GIB, total=0, free=None),
    ]


def test_disks_are_those_with_a_size_and_show_what_is_mounted(tmp_path: Path) -> None:
    mountinfo = (
        "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        "22 21 8:1 /x /with\\040space rw - ext4 /dev/sda1 rw\n"
        "23 21 0:5 / /tmp rw - tmpfs tmpfs rw\n"
    )
    root = write(
        tmp_path,
        {
            "proc/self/mountinfo": mountinfo,
            "sys/block/sda/size": "2097152\n",
            "sys/block/sda/dev": "8:0\n",
            "sys/block/sda/queue/rotational": "1\n",
            "sys/block/sda/device/model": "DISK 1   \n",
            "sys/block/sda/sda1/dev": "8:1\n",
            "sys/block/sr0/size": "0\n",
            "sys/block/ram0/size": "8192\n",
        },
    )
    mounted = hardware.mounts(root)
    (disk,) = hardware.disks(mounted, root)
    assert (disk.name, disk.size_bytes, disk.rotational) == ("sda", GIB, True)
    assert (disk.model, disk.mounted) == ("DISK 1", ["/", "/with space"])
    place = hardware.place("state", Path("/tmp/not/there"), mounted)
    assert (place.type, place.path) == ("tmpfs", "/tmp/not/there")
    assert place.total_bytes is not None and place.free_bytes is not None


def test_the_capacity_is_the_machine_less_huge_pages_or_the_containers_limit(
    tmp_path: Path,
) -> None:
    meminfo = "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nHugetlb: 2097152 kB\nHugePages: 9\n"
    root = write(tmp_path, {"proc/meminfo": meminfo})
    limits = LimitsConfig(memory_reserve_bytes=GIB, memory_overcommit=1.5)
    capacity = machine.capacity(limits, root)
    assert capacity.memory_bytes == int((8 - 2 - 1) * 1.5 * GIB)
    write(root, {"sys/fs/cgroup/memory.max": f"{4 * GIB}\n"})
    assert machine.capacity(limits, root).machine_bytes == 4 * GIB
    write(root, {"sys/fs/cgroup/memory.max": "max\n"})
    write(root, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert machine.capacity(limits, root) == replace(capacity)


def test_a_small_vm_fits_on_a_small_machine(tmp_path: Path) -> None:
    root = write(tmp_path, {"proc/meminfo": f"MemTotal: {2 * GIB // KIB} kB\n"})
    left = machine.capacity(LimitsConfig(), root).memory_bytes
    assert left is not None and left > 4 * 256 * MIB


def test_it_is_said_why_vms_have_no_limits_of_their_own(tmp_path: Path) -> None:
    provider = PlainProvider(Layout(instance="aaaaaa"))
    assert cgroups.inventory(provider, tmp_path).limits.startswith("unsupported: no cgroup v2")
    root = write(tmp_path, {"sys/fs/cgroup/unified/cgroup.controllers": "\n"})
    hybrid = cgroups.inventory(provider, root)
    assert (hybrid.mode, hybrid.controllers) == ("hybrid", [])
    assert hybrid.limits == "unsupported: no memory controller in cgroup v2 (hybrid)"
    write(root, {"sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n"})
    whole = cgroups.inventory(provider, root)
    assert (whole.mode, whole.controllers) == ("v2", ["cpu", "memory", "pids"])
    assert "cannot be passed on" in whole.limits


def test_what_is_limited_is_what_was_switched_on(tmp_path: Path) -> None:
    provider = PlainProvider(Layout(instance="aaaaaa"))
    provider.controllers = frozenset({"memory", "cpu"})
    assert cgroups.limits_words(provider, "v2", ["memory", "cpu"]) == "cpu, memory"
