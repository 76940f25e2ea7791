"""The holder's own log by way of the disk's thread: its file may lie on a disk that hangs."""

from __future__ import annotations

import io
import sys
from collections import deque
from contextlib import suppress
from typing import IO, cast

from chv.agent.console.disk import Disk
from chv.common.log_rotation import rotate_if_full

LINES_MAX = 256  # waiting; the log counts what is refused


class LogStream(io.TextIOBase):
    """A text stream that never blocks: OSError where too much waits already."""

    def __init__(self, disk: Disk, target: IO[str], name: str) -> None:
        """`name`: the file that is rotated, where `target` is one of that name."""
        self._disk = disk
        self._target = target
        self._name = name
        self._lines: deque[str] = deque()

    def write(self, line: str) -> int:
        """Queue one line."""
        if len(self._lines) >= LINES_MAX:
            raise BlockingIOError("the disk does not take the log")
        self._lines.append(line)
        self._disk.ready(self)
        return len(line)

    def drain(self) -> None:
        """Write what waits; what the disk refuses is lost, as nobody is left to be told."""
        while self._lines:
            line = self._lines.popleft()
            with suppress(OSError, ValueError):
                self._target.write(line)
                self._target.flush()
                rotate_if_full(self._target.fileno(), self._name)


def log_stream(disk: Disk, name: str) -> IO[str]:
    """Return standard error by way of the thread; `name`: see `LogStream`."""
    return cast(IO[str], LogStream(disk, sys.stderr, name))
