"""POSIX access lists of files: one more uid that may read, without a change of owner.

Entries are those of acl(5), little endian as the kernel takes them. Errors: Unsupported where the
file system has no access lists; other system errors pass. Everything blocks.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from pathlib import Path

from chv.common.errors import Unsupported

ATTRIBUTE = "system.posix_acl_access"
VERSION = struct.pack("<I", 2)
ENTRY = struct.Struct("<HHI")
USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
NOBODY = 0xFFFFFFFF
READ, WRITE = 4, 2
Entry = tuple[int, int, int]  # tag, permissions, id


def allow_read(path: Path, uid: int) -> None:
    """Let `uid` read the file, whatever its mode says."""
    _allow(path, uid, READ)


def allow_connect(path: Path, uid: int) -> None:
    """Let `uid` connect to the socket, which takes writing; `forbid_read` takes it back."""
    _allow(path, uid, READ | WRITE)


def _allow(path: Path, uid: int, permissions: int) -> None:
    entries = [entry for entry in _entries(path) if not _is_of(entry, uid)]
    entries.append((USER, permissions, uid))
    _write(path, entries)


def forbid_read(path: Path, uid: int) -> None:
    """Take the entry of `uid` away; fine when there is none."""
    entries = _entries(path)
    kept = [entry for entry in entries if not _is_of(entry, uid)]
    if kept != entries:
        _write(path, kept)


def readers(path: Path) -> list[int]:
    """Return the uids that have an entry."""
    return [uid for tag, _permissions, uid in _entries(path) if tag == USER]


def _is_of(entry: Entry, uid: int) -> bool:
    return entry[0] == USER and entry[2] == uid


def _entries(path: Path) -> list[Entry]:
    try:
        data = os.getxattr(path, ATTRIBUTE, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise _unsupported(path) from error
        if error.errno != errno.ENODATA:
            raise
        return _of_mode(path.lstat().st_mode)
    return [ENTRY.unpack_from(data, offset) for offset in range(4, len(data), ENTRY.size)]


def _of_mode(mode: int) -> list[Entry]:
    bits = stat.S_IMODE(mode)
    return [
        (USER_OBJ, bits >> 6 & 7, NOBODY),
        (GROUP_OBJ, bits >> 3 & 7, NOBODY),
        (OTHER, bits & 7, NOBODY),
    ]


def _write(path: Path, entries: list[Entry]) -> None:
    """Set the list with a mask that keeps none of its entries back; the kernel wants an order."""
    named = [entry for entry in entries if entry[0] != MASK]
    if all(tag in (USER_OBJ, GROUP_OBJ, OTHER) for tag, _permissions, _uid in named):
        try:
            os.removexattr(path, ATTRIBUTE, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.ENODATA:
                raise
        _restore_group(path, named)
        return
    mask = 0
    for tag, permissions, _uid in named:
        if tag in (USER, GROUP_OBJ, GROUP):
            mask |= permissions
    data = VERSION + b"".join(
        ENTRY.pack(*entry) for entry in sorted([*named, (MASK, mask, NOBODY)])
    )
    try:
        os.setxattr(path, ATTRIBUTE, data, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise _unsupported(path) from error
        raise


def _restore_group(path: Path, entries: list[Entry]) -> None:
    """Without a list the mode's group bits, which were the mask, are the group's again."""
    bits = {tag: permissions for tag, permissions, _uid in entries}
    mode = bits[USER_OBJ] << 6 | bits[GROUP_OBJ] << 3 | bits[OTHER]
    path.chmod(mode)


def _unsupported(path: Path) -> Unsupported:
    return Unsupported(
        f"the file system of {str(path)!r} has no access control lists",
        hint="mount it with acl, or keep its volumes on another file system",
    )
