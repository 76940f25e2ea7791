"""Durable identity of a worker, and the judgement whether it is still that process.

A record is checked against the kernel: boot id, pid, start time, executable and our id in argv.
Pid, start time and boot id alone say which process it is, so signals rest on them; the others
catch a process that turned into something else. In doubt the verdict is UNKNOWN, and nobody may
start a second worker on UNKNOWN.

Protocol of a start that survives a kill at any point: (1) the caller makes a new worker id and
records the intent durably; (2) `spawn`; (3) the caller records the returned WorkerRecord. After
a crash between 1 and 3 `scan` finds the worker by its id, or proves that there is none: until
its exec the new process dies with the spawner and holds the spawner's descriptors, so whoever
gets the daemon's flock lock sees each worker either running under its id or not at all.
A process of any user can carry our id in its argv: judge `FoundWorker.uid` and `executable`.
"""

from __future__ import annotations

import enum

import msgspec

from chv.common.errors import PermissionDenied
from chv.common.process import procfs


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the store keeps of a running worker."""

    worker_id: str
    pid: int
    start_time: int
    boot_id: str
    executable: str
    cgroup: str = ""


class FoundWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A live process whose argv carries a worker id."""

    worker_id: str
    pid: int
    start_time: int
    boot_id: str
    executable: str
    uid: int
    cgroup: str = ""

    def record(self) -> WorkerRecord:
        """Return the record to keep when the caller decides that this is its worker."""
        return WorkerRecord(
            worker_id=self.worker_id,
            pid=self.pid,
            start_time=self.start_time,
            boot_id=self.boot_id,
            executable=self.executable,
            cgroup=self.cgroup,
        )


class AdoptVerdict(enum.Enum):
    """What became of a recorded worker."""

    ALIVE = "alive"
    GONE = "gone"  # proven dead; a zombie counts as dead
    OTHER = "other"  # dead, and its pid belongs to somebody else
    UNKNOWN = "unknown"  # cannot tell; never start a second one

    @property
    def dead(self) -> bool:
        """Tell whether the recorded process is proven dead."""
        return self in (AdoptVerdict.GONE, AdoptVerdict.OTHER)


class Adoption(msgspec.Struct, frozen=True):
    """A verdict and the evidence for it, in words."""

    verdict: AdoptVerdict
    reason: str


def verify(record: WorkerRecord) -> AdoptVerdict:
    """Return what became of the recorded worker."""
    return examine(record).verdict


def examine(record: WorkerRecord) -> Adoption:
    """Return what became of the recorded worker, and why we think so."""
    if record.boot_id != procfs.boot_id():
        return Adoption(AdoptVerdict.GONE, "the host has booted since")
    try:
        return _examine_process(record)
    except PermissionError as error:
        return Adoption(AdoptVerdict.UNKNOWN, f"/proc hides process {record.pid}: {error.strerror}")


def _examine_process(record: WorkerRecord) -> Adoption:
    stat = procfs.stat(record.pid)
    if stat is None:
        return Adoption(AdoptVerdict.GONE, f"no process {record.pid}")
    if stat.start_time != record.start_time:
        return Adoption(AdoptVerdict.OTHER, f"pid {record.pid} was used again")
    if stat.dead:
        return Adoption(AdoptVerdict.GONE, f"process {record.pid} has exited and is not reaped")
    return _examine_program(record)


def _examine_program(record: WorkerRecord) -> Adoption:
    executable = procfs.executable(record.pid)
    identifiers = procfs.worker_ids(procfs.argv(record.pid))
    if executable is None:
        return Adoption(AdoptVerdict.UNKNOWN, f"process {record.pid} is exiting or hidden")
    if executable != record.executable:
        return Adoption(AdoptVerdict.UNKNOWN, f"process {record.pid} now runs {executable}")
    if record.worker_id not in identifiers:
        return Adoption(AdoptVerdict.UNKNOWN, f"process {record.pid} does not carry our id")
    return Adoption(AdoptVerdict.ALIVE, f"process {record.pid} is ours")


def is_same_process(record: WorkerRecord) -> bool:
    """Tell whether the pid still belongs to the recorded process, dead or alive."""
    if record.boot_id != procfs.boot_id():
        return False
    stat = procfs.stat(record.pid)
    return stat is not None and stat.start_time == record.start_time


def scan(prefix: str) -> list[FoundWorker]:
    """Return every live process whose argv carries a worker id that starts with `prefix`."""
    boot_id = procfs.boot_id()
    try:
        return [
            worker
            for pid in procfs.pids()
            for worker_id in dict.fromkeys(procfs.worker_ids(procfs.argv(pid)))
            if worker_id.startswith(prefix)
            for worker in _describe(pid, worker_id, boot_id)
        ]
    except PermissionError as error:
        raise PermissionDenied(
            f"/proc hides processes from us: {error}", hint="mount /proc without hidepid"
        ) from error


def _describe(pid: int, worker_id: str, boot_id: str) -> list[FoundWorker]:
    stat, uid = procfs.stat(pid), procfs.uid(pid)
    if stat is None or stat.dead or uid is None:
        return []
    worker = FoundWorker(
        worker_id=worker_id,
        pid=pid,
        start_time=stat.start_time,
        boot_id=boot_id,
        executable=procfs.executable(pid) or "",
        uid=uid,
        cgroup=procfs.cgroup(pid),
    )
    return [worker]
