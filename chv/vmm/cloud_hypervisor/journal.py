"""Reads and appends to the events file of one VMM; the file outlives the agent, this does not.

It lies on a tmpfs, so that nothing here waits for a disk. What was read is folded once; beyond
`KEPT_BYTES_MAX` a summary is appended and what it stands for is given back to the file system, so
that a guest that reboots for ever fills nothing. Fails with Unavailable where the file is gone.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from chv.common.errors import ChvError, Unavailable
from chv.vmm.cloud_hypervisor import events
from chv.vmm.cloud_hypervisor.events import History

KEPT_BYTES_MAX = 1 << 20
READ_BYTES = 1 << 18
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


class Journal:
    """What happened to the VM of the events file at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._history = History()
        self._offset = 0  # folded so far
        self._kept_from = 0
        self._inode = 0

    def read(self) -> History:
        """Return the history up to now."""
        with self._open(os.O_RDWR) as fd:
            self._catch_up(fd)
        return self._history

    def mark(self, event: str, properties: dict[str, Any] | None = None) -> None:
        """Append a record of ours."""
        with self._open(os.O_WRONLY | os.O_APPEND) as fd:
            os.write(fd, events.mark(event, properties))

    @contextmanager
    def announced(self, event: str) -> Iterator[None]:
        """Mark what is about to be asked for; taken back where the VMM refuses it."""
        self.mark(event)
        refused: ChvError | None = None
        try:
            yield
        except ChvError as error:
            refused = error
        if refused is not None:
            if refused.code not in ("OUTCOME_UNKNOWN", "UNAVAILABLE"):
                self.mark("undone")
            raise refused

    def _catch_up(self, fd: int) -> None:
        status = os.fstat(fd)
        if status.st_ino != self._inode or status.st_size < self._offset:
            self._inode = status.st_ino
            self._begin(fd, status.st_size)  # the file of another VMM
        while self._offset < status.st_size:
            data = os.pread(fd, READ_BYTES, self._offset)
            whole = events.complete(data)
            if not whole:
                if len(data) < READ_BYTES:
                    return  # the rest is still to come
                whole = len(data)  # no record is as long as that
            for event in events.parse(data[:whole]):
                self._history.fold(event)
            self._offset += whole
        if self._offset - self._kept_from > KEPT_BYTES_MAX:
            self._forget(fd)

    def _begin(self, fd: int, size: int) -> None:
        """Start with the last summary, where there is one, and go on where it ends."""
        start = _first_data(fd, size)
        data = os.pread(fd, max(0, size - start), start)
        self._history, self._offset, self._kept_from = History(), start, start
        for event in events.parse(data):
            if event.name == events.SUMMARY:
                self._history.restore(event.properties["history"])
                self._offset = self._kept_from = int(event.properties["until"])

    def _forget(self, fd: int) -> None:
        # The VMM may have appended since: the summary says how far it goes.
        self.mark("summary", {"until": self._offset, "history": self._history.summary()})
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        # From the beginning: only whole pages are given back, and earlier holes ended within one.
        if _libc.fallocate(fd, mode, ctypes.c_long(0), ctypes.c_long(self._offset)) == 0:
            self._kept_from = self._offset

    @contextmanager
    def _open(self, flags: int) -> Iterator[int]:
        try:
            fd = os.open(self.path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise Unavailable(f"{self.path}: {error.strerror}") from error
        try:
            yield fd
        finally:
            os.close(fd)


def _first_data(fd: int, size: int) -> int:
    try:
        return os.lseek(fd, 0, os.SEEK_DATA) if size else 0
    except OSError:
        return 0
