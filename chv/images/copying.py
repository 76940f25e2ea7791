"""Copies one file while hashing it. Blocking; runs in a worker thread of anyio, whose caller's
cancellation is noticed between blocks. OSErrors go up as they are, apart from a source that is
not a readable regular file, which is InvalidArgument.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio.from_thread

from chv.common.errors import InvalidArgument
from chv.common.files import fsync

BLOCK_BYTES = 1 << 20
PROGRESS_BYTES = 32 << 20
Progress = Callable[[str], None]
ByteProgress = Callable[[int, int], None]  # bytes done, bytes in all; called in the worker thread


@contextmanager
def open_source(path: Path) -> Iterator[int]:
    """Open a regular file for reading; a link, device, FIFO or directory is refused."""
    try:
        # O_NONBLOCK: the open of a FIFO must not wait for a writer.
        source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = "is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise InvalidArgument(
            f"{path}: {reason}", field="source.path", hint="the path of a regular file"
        ) from error
    try:
        _refuse_unfit(path, os.fstat(source))
        yield source
    finally:
        os.close(source)


def _refuse_unfit(path: Path, status: os.stat_result) -> None:
    """Refuse what holds no image: no regular file, a file that the kernel makes up, no byte."""
    reason = ""
    if not stat.S_ISREG(status.st_mode):
        reason = "is not a regular file"
    elif status.st_dev in _kernel_devices():
        reason = "is made up by the kernel and not stored anywhere"
    elif status.st_size == 0:
        reason = "is empty"
    if reason:
        raise InvalidArgument(
            f"{path} {reason}", field="source.path", hint="the path of a regular file"
        )


def _kernel_devices() -> frozenset[int]:
    found = (Path("/proc"), Path("/sys"))
    return frozenset(path.stat().st_dev for path in found if path.is_mount())


def copy_hashed(source: int, target: Path, progress: ByteProgress) -> tuple[str, int]:
    """Copy `source` to the new file `target`; return sha256 and size of what was written.

    Blocks of zeros become holes.
    """
    total_bytes = os.fstat(source).st_size
    digest = hashlib.sha256()
    copied_bytes = 0
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    out = os.open(target, flags, 0o600)
    try:
        while block := os.read(source, BLOCK_BYTES):
            anyio.from_thread.check_cancelled()
            digest.update(block)
            if any(block):
                write_at(out, block, copied_bytes)
            copied_bytes += len(block)
            if copied_bytes % PROGRESS_BYTES == 0:
                progress(copied_bytes, max(copied_bytes, total_bytes))
        os.ftruncate(out, copied_bytes)
        fsync(out, target)
    finally:
        os.close(out)
    return digest.hexdigest(), copied_bytes


def write_at(out: int, block: bytes, offset: int) -> None:
    """Write a whole block."""
    view = memoryview(block)
    while view:
        written = os.pwrite(out, view, offset)
        view = view[written:]
        offset += written


def hash_file(path: Path) -> tuple[str, int]:
    """Return sha256 and size of a file of ours; stops when its caller is cancelled."""
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            anyio.from_thread.check_cancelled()
            digest.update(block)
            size_bytes += len(block)
    return digest.hexdigest(), size_bytes


def read_header(path: Path, size_bytes: int) -> bytes:
    """Return the first bytes of a file of ours."""
    with path.open("rb") as file:
        return file.read(size_bytes)


def sync_file(path: Path) -> None:
    """Wait until a file is on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(descriptor, path)
    finally:
        os.close(descriptor)
