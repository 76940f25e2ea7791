"""The bound over all recordings of a node: rotated parts go when there are too many bytes.

The VMs that use most lose theirs first, among equals the oldest. What is current of a VM stays,
and is bounded by itself (recording.py). All of this is the disk's thread's.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chv.agent.console.disk import Disk
from chv.agent.console.recording import FILE_NAME
from chv.common import logs

log = logs.get("chv.console")
CHECK_BYTES = 1 << 20  # written between two looks
MARGIN_BYTES = 2 * CHECK_BYTES  # so that what is written between two looks fits as well


@dataclass(frozen=True, slots=True)
class _Use:
    older: Path
    older_bytes: int
    older_ns: int
    bytes: int


class RecordingsBound:
    """Keeps the recordings below a directory of VMs' directories within a number of bytes."""

    def __init__(self, disk: Disk, vms: Path) -> None:
        """Without a bound until `set`."""
        self._disk = disk
        self._vms = vms
        self._bytes_max: int | None = None
        self._written = 0
        disk.wrote = self._wrote

    def set(self, bytes_max: int) -> None:
        """Have it kept from now on; returns before it is."""
        self._bytes_max = bytes_max
        self._disk.ready(self)

    def _wrote(self, count: int) -> None:
        self._written += count
        if self._written >= CHECK_BYTES:
            self.drain()

    def drain(self) -> None:
        """Look, and make room where there is too much."""
        self._written = 0
        if self._bytes_max is None:
            return
        try:
            removed = make_room(self._vms, self._bytes_max - MARGIN_BYTES)
        except OSError as error:
            log.error("console.bound_failed", error=os.strerror(error.errno or 0))
            return
        if removed:
            log.info("console.recordings_removed", files=removed)


def make_room(vms: Path, bytes_max: int) -> int:
    """Remove rotated parts until what is left fits or none is left; returns how many. OSError."""
    uses = _uses(vms)
    excess = sum(use.bytes for use in uses) - bytes_max
    removed = 0
    for use in sorted(uses, key=lambda use: (-use.bytes, use.older_ns)):
        if excess <= 0:
            break
        if use.older_bytes:
            use.older.unlink(missing_ok=True)
            excess -= use.older_bytes
            removed += 1
    return removed


def _uses(vms: Path) -> list[_Use]:
    with suppress(FileNotFoundError), os.scandir(vms) as entries:
        return [_use(Path(entry.path)) for entry in entries]
    return []  # no VM yet


def _use(directory: Path) -> _Use:
    current, _ = _status(directory / FILE_NAME)
    older = directory / f"{FILE_NAME}.1"
    older_bytes, older_ns = _status(older)
    return _Use(older, older_bytes, older_ns, current + older_bytes)


def _status(path: Path) -> tuple[int, int]:
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):  # rotated or deleted this moment
        return 0, 0
    return status.st_size, status.st_mtime_ns
