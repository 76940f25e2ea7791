"""Numbers of stord: per VM from the kernel's counters of its storage daemon, per volume from files.

Nothing is invented: the storage daemon does not count operations or latency of vhost-user exports
(its block statistics stay at zero whatever the guest does), so these are named as unsupported.
What the kernel counts are bytes that the process moved to and from storage, page cache included
where a file system refuses direct I/O. Reads only; a process that ends meanwhile is left out.
"""

from __future__ import annotations

import os
from pathlib import Path

import anyio.to_thread

from chv.common.process import AdoptVerdict, Provider
from chv.common.wire.stord import (
    PlaceSpace,
    StorageMetrics,
    VmStorageMetrics,
    VolumeInfo,
    VolumeMetrics,
)
from chv.stord.levels import Errors
from chv.stord.qsd import graph
from chv.stord.records import Backend, Records

_NOT_COUNTED = "the storage daemon counts nothing for vhost-user-blk exports"
UNSUPPORTED = {
    "volume_operations": _NOT_COUNTED,
    "volume_bytes": f"{_NOT_COUNTED}; see the bytes per VM",
    "volume_latency": _NOT_COUNTED,
}


class Metrics:
    """Collects on demand."""

    def __init__(self, records: Records, provider: Provider, errors: Errors) -> None:
        self._records = records
        self._provider = provider
        self._errors = errors

    async def collect(self, volumes: list[VolumeInfo], places: list[PlaceSpace]) -> StorageMetrics:
        """Return everything; `volumes` are described by who knows them."""
        vms = await anyio.to_thread.run_sync(self._vms)
        return StorageMetrics(
            vms=vms,
            volumes=[self._volume(info) for info in volumes],
            places=places,
            unsupported=UNSUPPORTED,
        )

    def _volume(self, info: VolumeInfo) -> VolumeMetrics:
        return VolumeMetrics(
            volume_id=info.volume_id,
            size_bytes=info.size_bytes,
            allocated_bytes=info.allocated_bytes,
            snapshots=len(info.snapshots),
            limited=any(getattr(info.limits, name).limit for name in graph.RATES.values()),
            errors=self._errors.of(info.volume_id),
            attached=bool(info.attached_to or info.readers),
        )

    def _vms(self) -> list[VmStorageMetrics]:
        found = [self._vm(row) for row in self._records.backends.values()]
        return [each for each in found if each is not None]

    def _vm(self, row: Backend) -> VmStorageMetrics | None:
        worker = row.worker
        if worker is None or self._provider.adopt(worker).verdict is not AdoptVerdict.ALIVE:
            return None
        try:
            counters = read_counters(Path(f"/proc/{worker.pid}/io"))
            resident_bytes = _resident_bytes(worker.pid)
        except (FileNotFoundError, ProcessLookupError):
            return None
        return VmStorageMetrics(
            vm_id=row.vm_id,
            read_bytes=counters["read_bytes"],
            write_bytes=counters["write_bytes"],
            resident_bytes=resident_bytes,
            backend_pid=worker.pid,
        )


def read_counters(path: Path) -> dict[str, int]:
    """Return the kernel's I/O counters of a process."""
    lines = (line.split(": ", 1) for line in path.read_text(encoding="ascii").splitlines())
    return {name: int(value) for name, value in lines}


def _resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
