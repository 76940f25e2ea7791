"""The news that a name of a namespace was removed, by whomever. One watch for the whole machine.

A namespace whose name is gone lives on with what is open in it, and tells of nothing. The watch
never blocks; what it could not keep is told of as a name that is empty.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from chv.nwd.kernel.netns import ROOT

BUFFER_BYTES = 1 << 16
_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_MOVED_FROM, _DELETE, _OVERFLOW = 0x40, 0x200, 0x4000
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name
_libc = ctypes.CDLL(None, use_errno=True)


def open_watch() -> int:
    """Return the descriptor of the watch; OSError where names have no place yet."""
    fd = _checked(_libc.inotify_init1(_NONBLOCK | _CLOEXEC))
    try:
        _checked(_libc.inotify_add_watch(fd, os.fsencode(ROOT), _MOVED_FROM | _DELETE))
    except BaseException:
        os.close(fd)
        raise
    return fd


def receive(fd: int) -> list[str]:
    """Return the names that are gone; an empty one stands for those that were not kept."""
    try:
        return _parse(os.read(fd, BUFFER_BYTES))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EINTR):
            return []
        raise


def _parse(data: bytes) -> list[str]:
    found: list[str] = []
    offset = 0
    while offset + _EVENT.size <= len(data):
        _, mask, _, length = _EVENT.unpack_from(data, offset)
        offset += _EVENT.size
        name = data[offset : offset + length].split(b"\0", 1)[0].decode(errors="replace")
        offset += length
        if mask & (_MOVED_FROM | _DELETE | _OVERFLOW):
            found.append("" if mask & _OVERFLOW else name)
    return found


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(ROOT))
    return result
