"""CPUs, NUMA, huge pages, disks and file systems as /proc and /sys show them. Blocks.

`root` stands in for `/` in tests. What cannot be read is None or absent; nothing is guessed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from chv.agent.resources.machine import memory, read_text
from chv.common.wire.agent_inventory import (
    BlockDevice,
    CpuInventory,
    HugePages,
    MemoryInventory,
    NumaNode,
    PlaceInventory,
)

# Of which a guest or its VMM makes something: virtualisation, large pages, vectors, randomness.
FLAGS = (
    *("vmx", "svm", "ept", "npt", "vpid", "sev", "sev_es", "tdx_guest", "hypervisor"),
    *("pdpe1gb", "la57", "invpcid", "x2apic", "smep", "smap", "constant_tsc", "nonstop_tsc"),
    *("avx", "avx2", "avx512f", "aes", "sha_ni", "rdrand", "rdseed"),
)
KVM_MODULES = ("kvm_intel", "kvm_amd")
SECTOR_BYTES = 512
NOT_DISKS = ("ram", "loop", "zram")


def cpu(root: Path = Path("/")) -> CpuInventory:
    """Read /proc/cpuinfo and the set that is online."""
    blocks = [_fields(text) for text in read_text(root / "proc/cpuinfo").split("\n\n")]
    blocks = [block for block in blocks if "processor" in block]
    first = blocks[0] if blocks else {}
    sockets = {block["physical id"] for block in blocks if "physical id" in block}
    cores = {
        (block["physical id"], block["core id"])
        for block in blocks
        if "physical id" in block and "core id" in block
    }
    flags = set(first.get("flags", "").split())
    return CpuInventory(
        model=first.get("model name", ""),
        sockets=len(sockets) or None,
        cores=len(cores) or None,
        threads=len(blocks) or None,
        online=read_text(root / "sys/devices/system/cpu/online").strip(),
        flags=[flag for flag in FLAGS if flag in flags],
        nested=_nested(root),
    )


def numa(root: Path = Path("/")) -> list[NumaNode]:
    """Read the nodes of memory; empty where the kernel shows none."""
    found = []
    for path in _numbered(root / "sys/devices/system/node", r"node(\d+)"):
        sizes = dict(re.findall(r"(MemTotal|MemFree): +(\d+) kB", read_text(path / "meminfo")))
        found.append(
            NumaNode(
                node=int(path.name.removeprefix("node")),
                cpus=read_text(path / "cpulist").strip(),
                total_bytes=_kib(sizes.get("MemTotal")),
                free_bytes=_kib(sizes.get("MemFree")),
            )
        )
    return found


def memory_inventory(root: Path = Path("/")) -> MemoryInventory:
    """Read the machine's memory and its huge pages."""
    seen = memory(root)
    pages = [
        HugePages(
            page_bytes=int(path.name.removeprefix("hugepages-").removesuffix("kB")) << 10,
            total=_number(path / "nr_hugepages"),
            free=_number(path / "free_hugepages"),
        )
        for path in _numbered(root / "sys/kernel/mm/hugepages", r"hugepages-(\d+)kB")
    ]
    return MemoryInventory(
        total_bytes=seen.total_bytes,
        available_bytes=seen.available_bytes,
        limit_bytes=seen.limit_bytes,
        hugepages=pages,
    )


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    device: str  # major:minor
    path: str
    type: str
    source: str


def mounts(root: Path = Path("/")) -> list[Mount]:
    """Read what is mounted where."""
    found = []
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        front, _, back = line.partition(" - ")
        words, more = front.split(), back.split()
        if len(words) > 4 and len(more) > 1:
            found.append(Mount(words[2], _plain(words[4]), more[0], _plain(more[1])))
    return found


def disks(mounted: list[Mount], root: Path = Path("/")) -> list[BlockDevice]:
    """Read the block devices that have a size."""
    found = []
    for path in sorted(_entries(root / "sys/block")):
        sectors = _number(path / "size")
        if path.name.startswith(NOT_DISKS) or not sectors:
            continue
        numbers = {read_text(each / "dev").strip() for each in (path, *_parts(path))}
        rotational = read_text(path / "queue/rotational").strip()
        found.append(
            BlockDevice(
                name=path.name,
                size_bytes=sectors * SECTOR_BYTES,
                rotational=rotational == "1" if rotational in ("0", "1") else None,
                model=read_text(path / "device/model").strip(),
                mounted=sorted({each.path for each in mounted if each.device in numbers}),
            )
        )
    return found


def place(purpose: str, path: Path, mounted: list[Mount]) -> PlaceInventory:
    """Look at the file system of a directory, or of the nearest one above that is there."""
    there = next((each for each in (path, *path.parents) if each.exists()), None)
    if there is None:
        return PlaceInventory(purpose=purpose, path=str(path))
    mount = _mount_of(there.resolve(), mounted)
    try:
        status = os.statvfs(there)
    except OSError:
        return PlaceInventory(purpose=purpose, path=str(path))
    usable = status.f_blocks - status.f_bfree + status.f_bavail  # as df does
    return PlaceInventory(
        purpose=purpose,
        path=str(path),
        device=mount.source if mount is not None else "",
        type=mount.type if mount is not None else "",
        total_bytes=usable * status.f_frsize,
        free_bytes=status.f_bavail * status.f_frsize,
    )


def _mount_of(path: Path, mounted: list[Mount]) -> Mount | None:
    """Return the innermost mount; of several at one place the last one, which hides the others."""
    best: Mount | None = None
    for each in mounted:
        deeper = best is None or len(each.path) >= len(best.path)
        if path.is_relative_to(each.path) and deeper:
            best = each
    return best


def _fields(text: str) -> dict[str, str]:
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _nested(root: Path) -> str:
    for module in KVM_MODULES:
        text = read_text(root / "sys/module" / module / "parameters/nested").strip()
        if text:
            return f"{module}: {text}"
    return ""


def _parts(device: Path) -> Iterator[Path]:
    return (each for each in _entries(device) if each.name.startswith(device.name))


def _numbered(directory: Path, pattern: str) -> list[Path]:
    found = [(each, re.fullmatch(pattern, each.name)) for each in _entries(directory)]
    return [each for each, match in sorted(found, key=_by_number) if match is not None]


def _by_number(entry: tuple[Path, re.Match[str] | None]) -> int:
    return int(entry[1].group(1)) if entry[1] is not None else 0


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None


def _kib(text: str | None) -> int | None:
    return int(text) << 10 if text is not None else None


def _plain(text: str) -> str:
    """Take back the octal escapes of mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)
