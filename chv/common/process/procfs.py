"""What /proc says about one process. Reads only; a process that is not there is None.

Nothing here judges: `records` does. A worker id in an argv element must stand alone, that is,
it may be followed and preceded only by characters that cannot be part of an id.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from chv.common.boot import boot_id as boot_id

_ID = re.compile(r"(?<![A-Za-z0-9:_-])chv(?::[A-Za-z0-9_-]+){4}(?![A-Za-z0-9:_-])")
_DELETED = " (deleted)"
_READ_BYTES = 65536
_EXEC_POLLS_MAX = 10
_EXEC_POLL_S = 0.0005
CMDLINE_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The fields of /proc/PID/stat that identify a process and tell whether it lives."""

    state: str
    parent_pid: int
    threads: int
    start_time: int

    @property
    def dead(self) -> bool:
        """A zombie whose other threads still run is not dead: it holds files and memory."""
        return self.state in "ZX" and self.threads <= 1


def stat(pid: int) -> ProcessStat | None:
    """Return the state and start time of `pid`."""
    data = _read(f"/proc/{pid}/stat")
    return None if data is None else parse_stat(data)


def parse_stat(data: bytes) -> ProcessStat:
    """Parse a stat line; the command name may hold blanks and parentheses."""
    fields = data[data.rindex(b")") + 2 :].split()
    return ProcessStat(
        state=fields[0].decode(),
        parent_pid=int(fields[1]),
        threads=int(fields[17]),
        start_time=int(fields[19]),
    )


def cmdline(pid: int) -> tuple[str, ...]:
    """Return argv, empty for a process that is gone or has let go of its memory."""
    data = _read(f"/proc/{pid}/cmdline")
    if not data:
        return ()
    return tuple(part.decode(errors="surrogateescape") for part in data.split(b"\0"))


def argv(pid: int) -> tuple[str, ...]:
    """Return argv, also of a process in the middle of its exec.

    The kernel closes descriptors, which tells the parent, some microseconds before it sets argv.
    A program and no argv is that moment; kernel threads and the dying have neither.
    """
    for _ in range(_EXEC_POLLS_MAX):
        seen = cmdline(pid)
        if seen or executable(pid) is None:
            return seen
        time.sleep(_EXEC_POLL_S)
    return ()


def executable(pid: int) -> str | None:
    """Return the real path of the program, without the mark of a replaced file."""
    try:
        path = os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    return path.removesuffix(_DELETED)


def uid(pid: int) -> int | None:
    """Return the owner's uid."""
    try:
        return os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
    except (FileNotFoundError, ProcessLookupError):
        return None


def cgroup(pid: int) -> str:
    """Return the path in the unified hierarchy, "" where there is none."""
    data = _read(f"/proc/{pid}/cgroup") or b""
    for line in data.decode(errors="surrogateescape").splitlines():
        if line.startswith("0::"):
            return line[3:].removesuffix(_DELETED)
    return ""


def pids() -> list[int]:
    """Return the pids of all processes that can be seen."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def worker_ids(argv: tuple[str, ...]) -> list[str]:
    """Return the worker ids that stand alone in elements of `argv`."""
    return [match for element in argv if "chv:" in element for match in _ID.findall(element)]


def is_worker_id(text: str) -> bool:
    """Tell whether `text` as a whole is a worker id."""
    return _ID.fullmatch(text) is not None


def _read(path: str) -> bytes | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        return _read_all(fd)
    except ProcessLookupError:
        return None  # ended between open and read
    finally:
        os.close(fd)


def _read_all(fd: int) -> bytes:
    data = b""
    while len(data) < CMDLINE_BYTES_MAX and (part := os.read(fd, _READ_BYTES)):
        data += part
    return data
