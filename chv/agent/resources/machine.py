"""The machine's memory and CPUs, read from /proc and /sys: what cannot be read is not known.

Blocks for well under a millisecond. `root` stands in for `/` in tests.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from chv.agent.resources.capacity import Capacity
from chv.common.config import LimitsConfig

MEMINFO = "proc/meminfo"
# Of a container whose own part of the hierarchy is mounted here; at the real root there is none.
CONTAINER_LIMITS = (
    "sys/fs/cgroup/memory.max",
    "sys/fs/cgroup/memory/memory.limit_in_bytes",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """In bytes; None: the kernel does not tell. `limit_bytes`: of the container we are in."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    hugepage_bytes: int | None = None
    limit_bytes: int | None = None


def memory(root: Path = Path("/")) -> Memory:
    """Read what there is."""
    fields = meminfo(root)
    total = fields.get("MemTotal")
    limits = [number for path in CONTAINER_LIMITS if (number := _number(root / path))]
    # Without a limit version 1 shows a number beyond every machine.
    limit = min((each for each in limits if total and each < total), default=None)
    return Memory(
        total_bytes=total,
        available_bytes=fields.get("MemAvailable"),
        hugepage_bytes=fields.get("Hugetlb"),
        limit_bytes=limit,
    )


def meminfo(root: Path = Path("/")) -> dict[str, int]:
    """Return the fields of /proc/meminfo that are sizes, in bytes; empty where it is not there."""
    found: dict[str, int] = {}
    for line in read_text(root / MEMINFO).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[name] = int(words[0]) << 10
    return found


def capacity(limits: LimitsConfig, root: Path = Path("/")) -> Capacity:
    """Return what VMs may be promised of this machine."""
    seen = memory(root)
    total = seen.total_bytes or 0
    return Capacity(
        machine_bytes=min(total, seen.limit_bytes or total),
        hugepage_bytes=seen.hugepage_bytes or 0,
        reserve_bytes=limits.memory_reserve_bytes,
        memory_overcommit=limits.memory_overcommit,
        cpus=len(os.sched_getaffinity(0)),
        vcpu_overcommit=limits.vcpu_overcommit,
    )


def read_text(path: Path) -> str:
    """Return a file of the kernel's; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None
