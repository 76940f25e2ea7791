"""Rotation of a daemon's own log: one older file beside it, each of at most FILE_BYTES_MAX.

The daemon does it itself, on the descriptor that it and its libraries write to, so no line is
lost and nobody must be told. Only a regular file that has the daemon's name is touched: a journal,
a terminal or a file of the user's is somebody else's to bound.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

FILE_BYTES_MAX = 8 << 20


def rotate_if_full(fd: int, name: str) -> None:
    """Put a new file under `fd` where the present one is full; OSError leaves it as it was."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_size < FILE_BYTES_MAX:
        return
    path = Path(f"/proc/self/fd/{fd}").readlink()
    if path.name != name or not os.path.samestat(path.lstat(), status):
        return
    older = path.with_name(f"{name}.1")
    path.replace(older)
    try:
        _replace_fd(fd, path, stat.S_IMODE(status.st_mode))
    except OSError:
        older.replace(path)
        raise


def _replace_fd(fd: int, path: Path, mode: int) -> None:
    fresh = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, mode)
    try:
        os.dup2(fresh, fd, inheritable=os.get_inheritable(fd))
    finally:
        os.close(fresh)
