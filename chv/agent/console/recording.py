"""The recording of a serial console: timestamped lines in two rotated files.

Standard library only: the holder process must stay small. Files are `console.log` and
`console.log.1` in the VM's state directory; each grows to FILE_BYTES_MAX at most.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

FILE_NAME = "console.log"
FILE_BYTES_MAX = 4 << 20
LINE_BYTES_MAX = 4096
MARK_ATTACHED = "--- console attached"
MARK_HOLDER_LOST = "--- the console holder ended: what the guest said since is lost"


class Recording:
    """Appends serial output; a line is written when it is whole, too long, or at close."""

    def __init__(
        self,
        directory: Path,
        on_failure: Callable[[str], None] | None = None,
        on_written: Callable[[int], None] | None = None,
    ) -> None:
        """`on_failure` is told of the first line that cannot be written, and not of the next.

        The file is opened for the first line; one that cannot be is tried again for every line.
        `on_written` counts bytes.
        """
        self._path = directory / FILE_NAME
        self._on_failure = on_failure
        self._on_written = on_written
        self._lost_lines = 0
        self._fd = -1
        self._size = 0
        self._partial = b""
        self._last = datetime.min.replace(tzinfo=UTC)

    def mark(self, text: str, when: datetime | None = None) -> None:
        """Write a line of our own, after what the guest has not ended."""
        self._flush(when)
        self._write_line(text.encode(), when)

    def write(self, data: bytes, when: datetime | None = None) -> None:
        """Take bytes that the guest said at `when` (default: now)."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._write_line(line, when)
        while len(self._partial) > LINE_BYTES_MAX:
            self._write_line(self._partial[:LINE_BYTES_MAX], when)
            self._partial = self._partial[LINE_BYTES_MAX:]

    def close(self) -> None:
        """Write what is left and close."""
        self._flush(None)
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _flush(self, when: datetime | None) -> None:
        if self._partial:
            self._write_line(self._partial, when)
            self._partial = b""

    def _write_line(self, line: bytes, when: datetime | None) -> None:
        # A clock that is set back must not put a line before one that it followed.
        self._last = max(self._last, when or datetime.now(UTC))
        stamp = self._last.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        record = stamp.encode() + b" " + line.rstrip(b"\r") + b"\n"
        # A full disk must not end the holder: output is lost then, and the guest goes on.
        try:
            self._append(self._told(stamp) + record)
        except OSError as error:
            self._lose(error)
        else:
            self._lost_lines = 0

    def _told(self, stamp: str) -> bytes:
        """Return what is said before the next line that can be written."""
        if not self._lost_lines:
            return b""
        return (
            f"{stamp} --- {self._lost_lines} lines are lost: they could not be written\n".encode()
        )

    def _append(self, record: bytes) -> None:
        """Write all of it or nothing; OSError."""
        if self._fd < 0:
            self._begin()
        if self._size + len(record) > FILE_BYTES_MAX:
            self._rotate()
        written = os.write(self._fd, record)
        if written != len(record):
            os.ftruncate(self._fd, self._size)  # no torn line before the next
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += written
        if self._on_written is not None:
            self._on_written(written)

    def _lose(self, error: OSError) -> None:
        self._lost_lines += 1
        if self._lost_lines == 1 and self._on_failure is not None:
            self._on_failure(os.strerror(error.errno or 0))

    def _begin(self) -> None:
        self._fd = self._open()
        self._size = os.fstat(self._fd).st_size

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(self._path, flags, 0o600)

    def _rotate(self) -> None:
        older = self._path.with_name(f"{FILE_NAME}.1")
        self._path.replace(older)
        try:
            fresh = self._open()
        except OSError:
            older.replace(self._path)  # the full file stays the one that is read
            raise
        os.close(self._fd)
        self._fd, self._size = fresh, 0


def was_held(directory: Path, serial: Path) -> bool:
    """Whether something was recorded since this serial socket was made."""
    try:
        recorded = (directory / FILE_NAME).stat().st_mtime_ns
        return recorded > serial.stat().st_ctime_ns
    except FileNotFoundError:
        return False


def tail_lines(directory: Path, count: int) -> list[str]:
    """Return the last `count` lines of a recording; raises FileNotFoundError without one."""
    data = (directory / FILE_NAME).read_bytes()
    if data.count(b"\n") < count:
        with suppress(FileNotFoundError):  # there was none, or room was made
            data = (directory / f"{FILE_NAME}.1").read_bytes() + data
    return data.decode("utf-8", "replace").splitlines()[-count:] if count else []
