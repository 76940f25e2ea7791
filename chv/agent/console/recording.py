"""The recording of a serial console: timestamped lines in two rotated files.

Standard library only: the holder process must stay small. Files are `console.log` and
`console.log.1` in the VM's state directory; each grows to FILE_BYTES_MAX at most.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path

FILE_NAME = "console.log"
FILE_BYTES_MAX = 4 << 20
LINE_BYTES_MAX = 4096
MARK_ATTACHED = "--- console attached"


class Recording:
    """Appends serial output; a line is written when it is whole, too long, or at close."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._fd).st_size
        self._partial = b""
        self._last = datetime.min.replace(tzinfo=UTC)

    def mark(self, text: str) -> None:
        """Write a line of our own."""
        self._write_line(text.encode())

    def write(self, data: bytes) -> None:
        """Take bytes from the guest."""
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            self._write_line(line)
        while len(self._partial) > LINE_BYTES_MAX:
            self._write_line(self._partial[:LINE_BYTES_MAX])
            self._partial = self._partial[LINE_BYTES_MAX:]

    def close(self) -> None:
        """Write what is left and close."""
        if self._partial:
            self._write_line(self._partial)
        os.close(self._fd)

    def _write_line(self, line: bytes) -> None:
        # A clock that is set back must not put a line before one that it followed.
        self._last = max(self._last, datetime.now(UTC))
        stamp = self._last.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        record = stamp.encode() + b" " + line.rstrip(b"\r") + b"\n"
        if self._size + len(record) > FILE_BYTES_MAX:
            self._rotate()
        # A full disk must not end the holder: output is lost then, and the guest goes on.
        try:
            self._size += os.write(self._fd, record)
        except OSError:
            self._size = os.fstat(self._fd).st_size

    def _rotate(self) -> None:
        self._path.replace(self._path.with_name(f"{FILE_NAME}.1"))
        os.close(self._fd)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = 0


def tail_lines(directory: Path, count: int) -> list[str]:
    """Return the last `count` lines of a recording; raises FileNotFoundError without one."""
    data = (directory / FILE_NAME).read_bytes()
    older = directory / f"{FILE_NAME}.1"
    if data.count(b"\n") < count and older.exists():
        data = older.read_bytes() + data
    return data.decode("utf-8", "replace").splitlines()[-count:] if count else []
