"""Landlock: a new process may touch the listed paths and no others, whatever its uid may do.

The rule set is made before the fork, in the parent, and handed on as a descriptor; the child only
restricts itself. It binds to what the paths are now: a directory that is replaced later is another
one. `abi` tells whether the kernel has it; where it has not, `make_ruleset` returns -1 and nothing
is restricted: who asks for it reports that (`abi() == 0`). A path that is missing is NotFound
unless it may be. Looking up and passing through directories is never restricted, nor are sockets
that have a path: file modes stay as important as they were.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
from enum import StrEnum

import msgspec

from chv.common.errors import NotFound

_NR_CREATE_RULESET = 444  # one number each on every architecture
_NR_ADD_RULE = 445
_NR_RESTRICT_SELF = 446
_CREATE_VERSION = 1
_RULE_PATH_BENEATH = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_FILE, _MAKE_REG, _MAKE_SOCK = 1 << 5, 1 << 8, 1 << 9
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_ABI_1 = (1 << 13) - 1
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_SCOPE_ABI, _SCOPES = 6, 0b11  # no abstract sockets of others, no signals to others

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long


class Access(StrEnum):
    """What may be done with a path and everything below it."""

    READ = "read"
    EXECUTE = "execute"  # and read
    WRITE = "write"  # existing files, and read
    OWN = "own"  # also make and remove files and sockets
    DEVICE = "device"  # read, write and device controls


_RIGHTS: dict[Access, int] = {
    Access.READ: _READ_FILE | _READ_DIR,
    Access.EXECUTE: _READ_FILE | _READ_DIR | _EXECUTE,
    Access.WRITE: _READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE,
    Access.OWN: (
        _READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE | _MAKE_REG | _MAKE_SOCK | _REMOVE_FILE
    ),
    Access.DEVICE: _READ_FILE | _READ_DIR | _WRITE_FILE | _TRUNCATE | _IOCTL_DEV,
}


class PathAccess(msgspec.Struct, frozen=True):
    """One allowed path. Symbolic links in it are followed now. `optional`: it may be missing."""

    path: str
    access: Access
    optional: bool = False


class _RulesetAttributes(ctypes.Structure):
    _fields_ = [
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    ]


class _PathBeneath(ctypes.Structure):
    _layout_ = "ms"  # what `_pack_` has always meant; newer Pythons want it said
    _pack_ = 1
    _fields_ = [("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


@functools.cache
def abi() -> int:
    """Return the kernel's Landlock version; 0: there is none, or it is switched off."""
    version = _syscall(_NR_CREATE_RULESET, None, ctypes.c_size_t(0), _CREATE_VERSION)
    return max(0, int(version))


def make_ruleset(rules: tuple[PathAccess, ...]) -> int:
    """Return a descriptor of the rules, close-on-exec; -1 where the kernel has no Landlock."""
    version = abi()
    if not version:
        return -1
    attributes = _RulesetAttributes(_handled(version), 0, 0)
    size_bytes = 8 if version < 4 else 16
    if version >= _SCOPE_ABI:
        attributes.scoped, size_bytes = _SCOPES, ctypes.sizeof(attributes)
    ruleset = _checked(
        _syscall(_NR_CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size_bytes), 0)
    )
    try:
        for rule in rules:
            _add(ruleset, rule, _handled(version))
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def restrict_self(ruleset: int) -> None:
    """Obey a rule set from here on, in all that follows an exec too. Needs no-new-privileges."""
    _checked(_syscall(_NR_RESTRICT_SELF, ctypes.c_int(ruleset), 0))


def _handled(version: int) -> int:
    """Return every right that this kernel can withhold: what is not listed is then refused."""
    newer = ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV))
    return _ABI_1 | sum(right for since, right in newer if version >= since)


def _add(ruleset: int, rule: PathAccess, handled: int) -> None:
    try:
        parent = os.open(rule.path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        if rule.optional:
            return
        raise NotFound(f"{rule.path!r} is to be allowed, but is not there") from error
    try:
        rights = _RIGHTS[rule.access] & handled
        if not stat.S_ISDIR(os.fstat(parent).st_mode):
            rights &= _FILE_RIGHTS
        beneath = _PathBeneath(rights, parent)
        _checked(
            _syscall(_NR_ADD_RULE, ctypes.c_int(ruleset), _RULE_PATH_BENEATH,
                     ctypes.byref(beneath), 0)
        )  # fmt: skip
    finally:
        os.close(parent)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno() or errno.EINVAL
        raise OSError(number, os.strerror(number))
    return result
