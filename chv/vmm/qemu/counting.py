"""What QEMU counts of a VM's devices: the disks that it serves itself.

A vhost-user disk is counted by its back end, a NIC by its tap: neither is QEMU's to tell.
"""

from __future__ import annotations

from typing import Any

from chv.vmm import spec
from chv.vmm.driver import Counters
from chv.vmm.qemu.qmp import Monitor

_NAMES = {
    "rd_bytes": "read_bytes",
    "rd_operations": "read_ops",
    "wr_bytes": "write_bytes",
    "wr_operations": "write_ops",
    "flush_operations": "flush_ops",
    "failed_rd_operations": "failed_read_ops",
    "failed_wr_operations": "failed_write_ops",
}


async def counters(monitor: Monitor) -> Counters:
    """Return the counters of disks by their own ids."""
    answer: list[dict[str, Any]] = await monitor.ask("query-blockstats")
    return {
        disk_id: {ours: int(entry["stats"][theirs]) for theirs, ours in _NAMES.items()}
        for entry in answer
        if (disk_id := _disk_id(str(entry.get("qdev", ""))))
    }


def _disk_id(path: str) -> str:
    """`/machine/peripheral/disk-seed/virtio-backend`, or without its last part."""
    for part in path.split("/"):
        if part.startswith(spec.DISK_PREFIX):
            return part.removeprefix(spec.DISK_PREFIX)
    return ""
