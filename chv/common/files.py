"""Durable and guarded files: atomic writes, directories with exact modes, paths from outside.

Everything here blocks: call it in a thread where a loop runs. A copy appears under its name
complete and on the disk, or not at all; `progress` may raise to give up. Out of space is
ResourceExhausted and leaves no half file; a failed fsync is DataLoss, after which the caller
must not go on (the kernel may have dropped the pages). Other system errors pass as OSError.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from chv.common.errors import (
    Conflict,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    OwnershipConflict,
    ResourceExhausted,
)
from chv.common.failpoint import failpoint_sync
from chv.common.ids import Ids
from chv.common.paths import PATH_BYTES_MAX, open_beneath, resolve_inside

__all__ = [
    "PATH_BYTES_MAX",
    "FileLock",
    "atomic_create",
    "atomic_write",
    "copy_file",
    "ensure_dir",
    "free_bytes",
    "fsync",
    "no_space_is_exhausted",
    "open_beneath",
    "remove_temporaries",
    "resolve_inside",
    "sha256_file",
    "sync_directory",
    "temporary_beside",
]

LOCK_ATTEMPTS_MAX = 10
CHUNK_BYTES = 8 << 20
Progress = Callable[[int, int], None]
_OUT_OF_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TEMPORARY = re.compile(r"\.chv-[0-9a-f]{32}\.tmp(-journal|-wal|-shm)?\Z")
_IDS = Ids()
_FICLONE = 0x40049409  # ioctl_ficlone(2)


def atomic_write(
    path: Path, data: bytes, *, mode: int = 0o600, uid: int = -1, gid: int = -1
) -> None:
    """Replace `path` by a file that holds `data`: after a power loss it is the old or the new."""
    with temporary_beside(path, mode=mode, uid=uid, gid=gid) as (fd, temporary):
        _write_all(fd, data)
        fsync(fd, path)
        temporary.replace(path)
        sync_directory(path.parent)


def atomic_create(path: Path, data: bytes, *, mode: int = 0o600) -> bool:
    """Make `path` with `data` unless it is there; False: it was. Two callers: one wins."""
    with temporary_beside(path, mode=mode) as (fd, temporary):
        _write_all(fd, data)
        fsync(fd, path)
        try:
            path.hardlink_to(temporary)
        except FileExistsError:
            return False
        temporary.unlink()
        sync_directory(path.parent)
    return True


@contextmanager
def temporary_beside(
    path: Path, *, mode: int, uid: int = -1, gid: int = -1
) -> Iterator[tuple[int, Path]]:
    """Yield a new file in `path`'s directory; the block renames it, else it is removed."""
    temporary = path.parent / f".chv-{_IDS.uid().replace('-', '')}.tmp"
    with no_space_is_exhausted(path):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, 0o600)
        try:
            if (uid, gid) != (-1, -1):
                os.fchown(fd, uid, gid)
            os.fchmod(fd, mode)  # after the owner: chown clears set-id bits, umask is passed by
            yield fd, temporary
        finally:
            os.close(fd)
            temporary.unlink(missing_ok=True)


def remove_temporaries(directory: Path) -> int:
    """Remove what writers killed in the middle left; only under the lock of their daemon."""
    leftovers = [entry for entry in directory.iterdir() if _TEMPORARY.match(entry.name)]
    for leftover in leftovers:
        leftover.unlink(missing_ok=True)
    return len(leftovers)


@contextmanager
def no_space_is_exhausted(path: Path) -> Iterator[None]:
    """Turn ENOSPC and EDQUOT of the block into ResourceExhausted, naming the directory."""
    try:
        yield
    except OSError as error:
        if error.errno not in _OUT_OF_SPACE:
            raise
        raise ResourceExhausted(
            f"no space for {str(path)!r}", hint=f"free space below {path.parent}"
        ) from error


def fsync(fd: int, path: Path) -> None:
    """Wait until an open file is on the disk; a failure is final for its data."""
    try:
        failpoint_sync("common.files.fsync")
        os.fsync(fd)
    except OSError as error:
        if error.errno in _OUT_OF_SPACE:
            raise
        raise DataLoss(
            f"fsync of {str(path)!r} failed: {error.strerror}",
            hint="check the disk and the kernel log before starting again",
        ) from error


def sync_directory(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fsync(fd, directory)
    finally:
        os.close(fd)


def ensure_dir(path: Path, *, mode: int, uid: int = 0, gid: int = 0, durable: bool = True) -> None:
    """Make a directory or correct its mode and owner; missing parents are made 0755 root.

    The last component must not be a symbolic link; -1 leaves uid or gid alone. With `durable`
    it survives a loss of power; what no boot survives anyway needs no wait for that.
    """
    with no_space_is_exhausted(path):
        if not path.parent.exists():
            ensure_dir(path.parent, mode=0o755)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            if durable:
                sync_directory(path.parent)
        fd = _open_directory(path)
        try:
            status = os.fstat(fd)
            if uid not in (-1, status.st_uid) or gid not in (-1, status.st_gid):
                os.fchown(fd, uid, gid)
            if stat.S_IMODE(status.st_mode) != mode:
                os.fchmod(fd, mode)
        finally:
            os.close(fd)


def _open_directory(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        kind = "a symbolic link" if path.is_symlink() else "not a directory"
        raise OwnershipConflict(
            f"{str(path)!r} is {kind}", hint="remove it; a directory belongs here"
        ) from error


class FileLock:
    """An exclusive lock that lives as long as the process that took it; the file stays."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    @classmethod
    @contextmanager
    def acquire(cls, path: Path) -> Iterator[FileLock]:
        """Hold the lock in the block; raise Conflict with the holder's pid where it is taken."""
        fd = _lock_file(path)
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield cls(path, fd)
        finally:
            os.close(fd)


def _lock_file(path: Path) -> int:
    for _ in range(LOCK_ATTEMPTS_MAX):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise Conflict(
                f"{str(path)!r} is locked by process {holder}", hint="one at a time; stop it first"
            ) from error
        if _is_same_file(fd, path):
            return fd
        os.close(fd)  # removed and made again between open and lock: that lock guards nothing
    raise Conflict(f"{str(path)!r} is being replaced all the time")


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def copy_file(src: Path, dst: Path, *, progress: Progress | None = None) -> str:
    """Copy a regular file to `dst`, mode 0600, keeping holes; return `reflink` or `copy`."""
    source, size_bytes = _open_regular(src)
    try:
        with temporary_beside(dst, mode=0o600) as (target, temporary):
            how = "reflink" if _reflink(source, target) else "copy"
            if how == "copy":
                os.ftruncate(target, size_bytes)
                _copy_data(source, target, size_bytes, progress)
            if progress:
                progress(size_bytes, size_bytes)
            fsync(target, dst)
            temporary.replace(dst)
            sync_directory(dst.parent)
    finally:
        os.close(source)
    return how


def sha256_file(path: Path, progress: Progress | None = None) -> str:
    """Return the SHA-256 digest of a regular file in hexadecimal."""
    import hashlib  # OpenSSL: several MiB, and most processes never come here

    source, size_bytes = _open_regular(path)
    digest, buffer, done_bytes = hashlib.sha256(), bytearray(CHUNK_BYTES // 8), 0
    try:
        while count := os.readv(source, [buffer]):
            digest.update(memoryview(buffer)[:count])
            done_bytes += count
            if progress:
                progress(done_bytes, max(size_bytes, done_bytes))
    finally:
        os.close(source)
    return digest.hexdigest()


def _open_regular(path: Path) -> tuple[int, int]:
    # O_NONBLOCK: the open of a FIFO would wait for its other end.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise InvalidArgument(f"{str(path)!r} is not a regular file", field="path")
    return fd, status.st_size


def _reflink(source: int, target: int) -> bool:
    """Share the blocks where the file system can; ENOSPC and the like still are errors."""
    unable = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.EPERM, errno.ENOSYS)
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno not in unable:
            raise
        return False
    return True


def _copy_data(source: int, target: int, size_bytes: int, progress: Progress | None) -> None:
    for start, end in _data_ranges(source, size_bytes):
        os.lseek(target, start, os.SEEK_SET)
        while start < end:
            count = os.sendfile(target, source, start, min(CHUNK_BYTES, end - start))
            if count == 0:
                raise FailedPrecondition("the file became shorter while it was copied")
            start += count
            if progress:
                progress(start, size_bytes)


def _data_ranges(source: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges that are not holes."""
    end = 0
    while end < size_bytes:
        try:
            start = os.lseek(source, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # only a hole is left
        end = min(os.lseek(source, start, os.SEEK_HOLE), size_bytes)
        yield start, end


def free_bytes(path: Path) -> int:
    """Return the space that an unprivileged writer still has at `path`."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
