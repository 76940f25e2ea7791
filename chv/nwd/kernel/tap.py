"""Taps: made persistent, opened for a VMM. A tap belongs to the namespace of the opening thread.

Call these through `netns.inside`. A single-queue tap that somebody holds open answers EBUSY.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct

from chv.common.errors import InUse, NotFound
from chv.nwd.kernel.errors import translated

_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETPERSIST, _TUNSETOWNER = 0x400454CA, 0x400454CB, 0x400454CC
_TUNGETIFF = 0x800454D2
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_IFF_PERSIST = 0x0800
_FLAGS = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR


def make(name: str, owner_uid: int) -> None:
    """Make a persistent tap, or give an existing one that nobody holds this owner."""
    with translated(f"making tap {name}"):
        fd = _open(name)
        try:
            fcntl.ioctl(fd, _TUNSETOWNER, owner_uid)
            fcntl.ioctl(fd, _TUNSETPERSIST, 1)
        finally:
            os.close(fd)


def open_for_vmm(name: str) -> int:
    """Return a descriptor of an existing tap; InUse while another one is open."""
    try:
        with translated(f"opening tap {name}"):
            fd = _open(name)
    except InUse as error:
        raise InUse(
            f"tap {name} is held open by a VMM",
            resource=name,
            hint="end the VMM that has this NIC",
        ) from error
    if not _is_persistent(fd):
        os.close(fd)  # the open has made it, and this removes it again
        raise NotFound(f"there is no tap {name}", resource=name)
    return fd


def _open(name: str) -> int:
    fd = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _FLAGS))
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
