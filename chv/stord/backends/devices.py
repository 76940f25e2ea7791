"""Block devices: what one is, who else has it, and the node by which a storage daemon opens it.

The storage daemon gets a node of our own (`/dev/chv-<instance>/<volume>`, of its uid alone): the
host's node keeps owner and mode whatever udev or a kill does, and a reboot takes ours away.
Everything blocks. A device that is gone is NotFound, one that somebody has is InUse.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from chv.common.errors import InUse, InvalidArgument, NotFound, PermissionDenied, Unavailable
from chv.common.files import ensure_dir

NODE_MODE = 0o600
FIELD = "backend.block.device"
_BLKROGET = 0x125E  # linux/fs.h: is the device read-only
_GONE = (errno.ENXIO, errno.ENODEV, errno.ENOMEDIUM)


def resolve(device: str) -> Path:
    """Return the real name of a device; symbolic links are followed."""
    try:
        return Path(device).resolve(strict=True)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"device {device!r} does not exist", field=FIELD) from error
    except (OSError, RuntimeError) as error:  # a loop of links; RuntimeError before Python 3.13
        raise InvalidArgument(
            f"device {device!r} does not resolve: {error}", field=FIELD
        ) from error


def number(path: Path) -> int:
    """Return the device number; InvalidArgument where it is no block device."""
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise NotFound(f"device {str(path)!r} does not exist", field=FIELD) from error
    if not stat.S_ISBLK(status.st_mode):
        raise InvalidArgument(f"{str(path)!r} is not a block device", field=FIELD)
    return status.st_rdev


def size_bytes(path: Path) -> int:
    """Return the size of the device now."""
    fd = _open(path, os.O_RDONLY)
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    finally:
        os.close(fd)


def check_free(path: Path, *, writable: bool) -> None:
    """Refuse a device that is mounted, part of another, swap, or held in any such way."""
    fd = _open(path, os.O_RDONLY | os.O_EXCL)
    try:
        answer = fcntl.ioctl(fd, _BLKROGET, b"\0\0\0\0")
    finally:
        os.close(fd)
    if writable and any(answer):
        raise InvalidArgument(
            f"device {str(path)!r} is read-only", field=FIELD, hint="use access mode rox"
        )


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"device {str(path)!r} does not exist", field=FIELD) from error
    except OSError as error:
        if error.errno == errno.EBUSY:
            raise InUse(
                f"the host uses device {str(path)!r}: {_users(path) or 'it is held exclusively'}",
                field=FIELD,
                hint="lsblk shows what is on it",
            ) from error
        if error.errno in _GONE:
            raise Unavailable(f"device {str(path)!r} does not answer: {error.strerror}") from error
        raise


def _users(path: Path) -> str:
    """Say what the kernel knows of who holds a device, for the error text."""
    device = path.stat().st_rdev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    found = [f"mounted at {fields[4]}" for fields in mounts if fields[2] == wanted]
    with contextlib.suppress(FileNotFoundError):
        holders = (Path("/sys/dev/block") / wanted / "holders").iterdir()
        found += [f"part of {holder.name}" for holder in holders]
    return ", ".join(found[:4])


def overlapping(device: int) -> frozenset[int]:
    """Return the numbers of the devices that share bytes with this one, itself included."""
    entry = Path("/sys/dev/block") / f"{os.major(device)}:{os.minor(device)}"
    shared = {device}
    with contextlib.suppress(FileNotFoundError):
        real = entry.resolve(strict=True)
        neighbours = [real.parent] if (real / "partition").exists() else list(real.iterdir())
        for neighbour in neighbours:
            if neighbour == real.parent or (neighbour / "partition").exists():
                major, minor = (neighbour / "dev").read_text().split(":")
                shared.add(os.makedev(int(major), int(minor)))
    return frozenset(shared)


def taken(device: str, volume_id: str) -> InUse:
    """Return the error of a device that another volume has."""
    return InUse(f"device {device!r} is the disk of volume {volume_id}", field=FIELD)


def is_node(node: Path, device: int) -> bool:
    """Tell whether our node is there and is of this device."""
    try:
        status = node.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISBLK(status.st_mode) and status.st_rdev == device


def put_node(node: Path, device: int, uid: int) -> None:
    """Make our node of the device, or correct it, for `uid` alone."""
    ensure_dir(node.parent, mode=0o711)
    if is_node(node, device):
        os.chown(node, uid, uid, follow_symlinks=False)
        return
    building = node.with_name(f"{node.name}.new")
    building.unlink(missing_ok=True)
    try:
        os.mknod(building, stat.S_IFBLK | NODE_MODE, device)
    except PermissionError as error:
        raise PermissionDenied(
            f"the kernel lets us make no device node {str(node)!r}",
            hint="stord needs CAP_MKNOD and, in a container, the device allowed",
        ) from error
    os.chown(building, uid, uid, follow_symlinks=False)
    building.rename(node)


def drop_node(node: Path) -> None:
    """Remove our node; the last one takes the directory with it."""
    node.with_name(f"{node.name}.new").unlink(missing_ok=True)
    node.unlink(missing_ok=True)
    try:
        node.parent.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
            raise
