"""The files of a volume of class `file`: made, looked at and removed, each change whole or not.

Everything blocks; called in threads by `file`. A volume is a directory with `lock`,
`volume.json` (what it is, for a store that was lost) and, unless a pool or a device has the
bytes, `disk.<format>`. The parts that any class needs: `begin`, `finish`, `matches`,
`remove_volume`, `exclusively`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from chv.common.errors import (
    DataLoss,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    OwnershipConflict,
)
from chv.common.files import (
    atomic_write,
    copy_file,
    ensure_dir,
    fsync,
    no_space_is_exhausted,
    sync_directory,
)
from chv.common.wire.stord import Encryption, VolumeBackend, VolumeFormat
from chv.stord import luks, qcow2
from chv.stord.backends.base import Inspection
from chv.stord.qsd import graph

SECTOR_BYTES = 512
STAT_BLOCK_BYTES = 512
LOCK_FILE_BYTES = 4096
NEW, OLD = ".new", ".old"
ANY_KEY = Encryption(key="any/key")  # a volume may change its key, not whether it has one
# struct flock: type, whence, start, length (0: to the end), pid (0: lock of the open file).
_LOCK = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_UNLOCK = struct.pack("hhqqi0q", fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)


@contextmanager
def exclusively(lock_path: Path) -> Iterator[None]:
    """Hold the volume against any storage daemon: the same locks of open files as QEMU's."""
    try:
        fd = os.open(lock_path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"the volume has no lock file {str(lock_path)!r}") from error
    try:
        try:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            raise InUse(
                f"a process holds the volume: {str(lock_path)!r} is locked",
                hint="no record explains it; see /proc/locks",
            ) from error
        try:
            yield
        finally:
            # A child that was forked meanwhile shares the open file until it runs its program:
            # closing ours alone would leave the volume locked for that long.
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _UNLOCK)
    finally:
        os.close(fd)


@contextmanager
def read_only_is_told(path: Path) -> Iterator[None]:
    """Turn EROFS of the block into FailedPrecondition with the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        raise FailedPrecondition(
            f"the file system of {str(path)!r} is read-only",
            hint="see dmesg for errors of its device; then mount -o remount,rw",
        ) from error


def takes_direct(path: Path) -> bool:
    """Tell whether the file system opens `path` with O_DIRECT."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True


def protocol(path: Path, aio: str) -> graph.Protocol:
    """Describe a file as the storage daemon opens it."""
    return graph.Protocol(
        driver="file", options={"filename": str(path)}, direct=takes_direct(path), aio=aio
    )


def begin(building: Path) -> None:
    with read_only_is_told(building), no_space_is_exhausted(building):
        ensure_dir(building.parent, mode=0o711)
        remove_tree(building)
        building.mkdir(mode=0o711)


def touch(path: Path) -> None:
    """Make an empty file for root alone."""
    with no_space_is_exhausted(path):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))


def build_raw(disk: Path, spec: VolumeBackend) -> None:
    """Make a raw disk; the content of a raw image is copied, of another one it is not."""
    if spec.source is not None and spec.source.format is VolumeFormat.RAW:
        copy_file(Path(spec.source.path), disk)
    extend_raw(disk, spec.size_bytes)


def extend_raw(disk: Path, size_bytes: int) -> None:
    with no_space_is_exhausted(disk):
        fd = os.open(disk, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            try:
                os.ftruncate(fd, size_bytes)
            except OSError as error:
                if error.errno != errno.EFBIG:
                    raise
                raise InvalidArgument(
                    f"the file system takes no file of {size_bytes} bytes",
                    field="backend.size_bytes",
                ) from error
            fsync(fd, disk)
        finally:
            os.close(fd)


def describe(directory: Path, spec: VolumeBackend) -> None:
    atomic_write(directory / "volume.json", msgspec.json.encode(spec))


def settle(disk: Path) -> None:
    """Put a finished disk on the medium, for root alone."""
    disk.chmod(0o600)
    sync(disk)


def sync(disk: Path) -> None:
    """Put what was written to a file or device on the medium."""
    fd = os.open(disk, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fsync(fd, disk)
    finally:
        os.close(fd)


def finish(building: Path, directory: Path, spec: VolumeBackend) -> None:
    """Add lock and description to what was built, then give the volume its name."""
    extend_raw(building / "lock", LOCK_FILE_BYTES)
    describe(building, spec)
    give_name(building, directory)


def give_name(building: Path, directory: Path) -> None:
    """Rename a directory whose files are on the medium."""
    building.chmod(0o711)
    sync_directory(building)
    building.rename(directory)
    sync_directory(directory.parent)


def matches(directory: Path, spec: VolumeBackend) -> bool:
    """Tell whether the volume is there; raise where it is another one."""
    try:
        data = (directory / "volume.json").read_bytes()
    except FileNotFoundError:
        if directory.exists():
            raise OwnershipConflict(f"{str(directory)!r} is not a volume; left alone") from None
        return False
    there = msgspec.json.decode(data, type=VolumeBackend)
    if identity(there) != identity(spec):
        raise OwnershipConflict(
            f"{str(directory)!r} holds another volume"
            f" ({there.class_name.value}, {there.format.value})",
            hint="delete the volume first",
        )
    return True


def identity(spec: VolumeBackend) -> VolumeBackend:
    """Return what of a description never changes: not size, limits, key and policies."""
    return VolumeBackend(
        class_name=spec.class_name,
        format=spec.format,
        size_bytes=SECTOR_BYTES,
        pool=spec.pool,
        block=spec.block,
        lvm=spec.lvm,
        nbd=spec.nbd,
        iscsi=spec.iscsi,
        rbd=spec.rbd,
        source=spec.source,
        snapshot=spec.snapshot,
        backup=spec.backup,
        access=spec.access,
        encryption=None if spec.encryption is None else ANY_KEY,
    )


def remove_volume(directory: Path) -> None:
    """Rename first: a removal that was cut short leaves nothing under the volume's name."""
    leaving = directory.with_name(directory.name + OLD)
    remove_tree(leaving)
    with contextlib.suppress(FileNotFoundError):
        directory.rename(leaving)
        sync_directory(directory.parent)
        remove_tree(leaving)


def remove_tree(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)


def inspect(disk: Path, home: Path, spec: VolumeBackend) -> Inspection:
    """Look at the disk of a volume that is described in `home`; it may go at any moment."""
    try:
        return _inspect(disk, home, spec)
    except FileNotFoundError as error:
        return Inspection(
            location=str(disk), state="missing", problem=f"{str(error.filename)!r} does not exist"
        )
    except (DataLoss, InvalidArgument) as error:
        return Inspection(location=str(disk), state="broken", problem=error.message)


def _inspect(disk: Path, home: Path, spec: VolumeBackend) -> Inspection:
    status = disk.lstat()
    home.lstat()  # made last: without it the volume was never whole
    size_bytes = virtual_size_bytes(disk, spec.format, encrypted=spec.encryption is not None)
    if size_bytes < (described := described_bytes(home)):
        # A guest on a disk that was cut short would read zeros for its data, or worse.
        problem = f"{str(disk)!r} holds {size_bytes} bytes of the {described} that it had"
        return Inspection(location=str(disk), state="broken", problem=problem)
    return Inspection(
        location=str(disk),
        state="open",
        size_bytes=size_bytes,
        allocated_bytes=status.st_blocks * STAT_BLOCK_BYTES,
        direct=takes_direct(disk),
    )


def described_bytes(directory: Path) -> int:
    """Return the size that the volume has reached; written only after each growth."""
    try:
        described = msgspec.json.decode(
            (directory / "volume.json").read_bytes(), type=VolumeBackend
        )
    except (FileNotFoundError, msgspec.DecodeError):
        return 0
    return described.size_bytes


def guest_size_bytes(disk: Path, spec: VolumeBackend) -> int:
    """Return the size that the guest sees of a base, encrypted or not."""
    if spec.encryption is not None and spec.format is VolumeFormat.RAW:
        return max(disk.lstat().st_size - luks.payload_offset_bytes(disk), 0)
    return virtual_size_bytes(disk, spec.format)


def virtual_size_bytes(disk: Path, volume_format: VolumeFormat, *, encrypted: bool = False) -> int:
    """Return the size that the guest sees; refuse a volume whose header was tampered with."""
    if volume_format is VolumeFormat.RAW:
        payload = luks.payload_offset_bytes(disk) if encrypted else 0
        return max(disk.lstat().st_size - payload, 0)
    header = qcow2.read_header(disk)
    if header.has_external_data or header.corrupt:
        raise DataLoss(
            f"the header of {str(disk)!r} is damaged or names another file",
            hint="qemu-img check, or restore it",
        )
    return header.size_bytes


def image_size_bytes(path: Path, image_format: VolumeFormat) -> int:
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise NotFound(
            f"image {str(path)!r} does not exist", field="backend.source.path"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument(
            f"image {str(path)!r} is not a regular file", field="backend.source.path"
        )
    if image_format is VolumeFormat.RAW:
        return -(-status.st_size // SECTOR_BYTES) * SECTOR_BYTES
    header = qcow2.read_header(path)
    if header.has_backing or header.has_external_data:
        raise InvalidArgument(
            f"image {str(path)!r} refers to another file",
            field="backend.source",
            hint="flatten it with qemu-img convert",
        )
    return header.size_bytes
