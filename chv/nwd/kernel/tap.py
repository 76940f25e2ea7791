"""Taps: made persistent, opened for a VMM. A tap belongs to the namespace of the opening thread.

Call these through `netns.inside`. A single-queue tap that somebody holds open answers EBUSY.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from chv.common.errors import InUse, NotFound
from chv.nwd.kernel import links
from chv.nwd.kernel.errors import translated

_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETPERSIST, _TUNSETOWNER = 0x400454CA, 0x400454CB, 0x400454CC
_TUNGETIFF = 0x800454D2
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_IFF_PERSIST, _IFF_MULTI_QUEUE = 0x0800, 0x0100
_FLAGS = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR


def make(name: str, owner_uid: int, *, is_multi_queue: bool = False) -> None:
    """Make a persistent tap, or give an existing one that nobody holds this owner."""
    with translated(f"making tap {name}"):
        if is_multi_queue:
            _refuse_held(name)  # the kernel would take one queue more
        fd = _open(name, is_multi_queue=is_multi_queue)
        try:
            fcntl.ioctl(fd, _TUNSETOWNER, owner_uid)
            fcntl.ioctl(fd, _TUNSETPERSIST, 1)
        finally:
            os.close(fd)


def open_for_vmm(name: str, queues: int = 1) -> list[int]:
    """Return a descriptor for each queue of an existing tap; InUse while another is open."""
    fds: list[int] = []
    try:
        with translated(f"opening tap {name}"):
            if queues > 1:
                _refuse_held(name)
            for _ in range(queues):
                fds.append(_open(name, is_multi_queue=queues > 1))
                if not _is_persistent(fds[0]):  # the open has made it, and closing removes it
                    raise NotFound(f"there is no tap {name}", resource=name)
    except InUse as error:
        _close(fds)
        raise InUse(
            f"tap {name} is held open by a VMM",
            resource=name,
            hint="end the VMM that has this NIC",
        ) from error
    except BaseException:
        _close(fds)
        raise
    return fds


def drop_idle(name: str) -> None:
    """Remove a tap that nobody holds open; InUse otherwise."""
    with translated(f"removing tap {name}"):
        found = links.read([name])
        if name not in found:
            return
        _refuse_held(name)
        fd = _open(name, is_multi_queue=found[name].multi_queue)
        try:
            fcntl.ioctl(fd, _TUNSETPERSIST, 0)
        finally:
            os.close(fd)


def _refuse_held(name: str) -> None:
    found = links.read([name])
    if name in found and found[name].carrier:
        raise InUse(
            f"tap {name} is held open by a VMM",
            resource=name,
            hint="end the VMM that has this NIC",
        )


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _open(name: str, *, is_multi_queue: bool = False) -> int:
    fd = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    flags = _FLAGS | (_IFF_MULTI_QUEUE if is_multi_queue else 0)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    except OSError as error:
        os.close(fd)
        if error.errno == errno.EINVAL:
            raise OSError(errno.EEXIST, f"{name} is another kind of link") from error
        raise
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_persistent(fd: int) -> bool:
    answer = fcntl.ioctl(fd, _TUNGETIFF, struct.pack("16sH22x", b"", 0))
    return bool(struct.unpack("16sH22x", answer)[1] & _IFF_PERSIST)
