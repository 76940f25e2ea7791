"""Relative paths that come from outside, kept inside their directory.

Whatever leads out (absolute, `..`, a symbolic link, NUL, too long) is InvalidArgument; a path
that stays inside and is not there is the kernel's own OSError. `chv.common.files` exports both
functions too.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from chv.common.errors import InvalidArgument
from chv.common.names import shown

PATH_BYTES_MAX = 4096

_SYS_OPENAT2 = 437  # one number on every architecture (syscalls(2))
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_NO_SYMLINKS = 0x04
_RESOLVE_BENEATH = 0x08


def resolve_inside(base: Path, relative: str) -> Path:
    """Return the real path of `relative` below `base`; symbolic links may not lead out of it.

    The answer is checked now and not later: to use it against someone who can change the
    directory meanwhile, open it with `open_beneath`.
    """
    _check_relative(relative)
    try:
        real_base = base.resolve()
        real = (real_base / relative).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links; RuntimeError before Python 3.13
        raise _outside(relative, "does not resolve") from error
    if real == real_base or not real.is_relative_to(real_base):
        raise _outside(relative, "leads out of its directory")
    # What is resolved has no link left, unless it goes in circles (Python 3.13 says nothing).
    if any(step.is_symlink() for step in (real, *real.parents) if step.is_relative_to(real_base)):
        raise _outside(relative, "does not resolve")
    return real


def open_beneath(root_fd: int, path: str, flags: int, *, mode: int = 0o600) -> int:
    """Open a relative path below an open directory, following no symbolic link anywhere."""
    _check_relative(path)
    flags |= os.O_CLOEXEC
    try:
        try:
            return _openat2(root_fd, path, flags, mode)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EPERM):  # old kernel, seccomp filter
                raise
        return _walk(root_fd, path, flags, mode)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EXDEV):
            raise
        raise _outside(path, "passes a symbolic link") from error


def _openat2(root_fd: int, path: str, flags: int, mode: int) -> int:
    import ctypes  # not everybody who names a path opens one

    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    how = (ctypes.c_uint64 * 3)(
        # O_NOFOLLOW would lift RESOLVE_NO_SYMLINKS from the last component for O_PATH.
        flags & ~os.O_NOFOLLOW,
        mode if flags & os.O_CREAT else 0,
        _RESOLVE_BENEATH | _RESOLVE_NO_SYMLINKS | _RESOLVE_NO_MAGICLINKS,
    )
    arguments = (
        ctypes.c_long(_SYS_OPENAT2),
        ctypes.c_int(root_fd),
        ctypes.c_char_p(os.fsencode(path)),
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )
    fd = int(libc.syscall(*arguments))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    return fd


def _walk(root_fd: int, path: str, flags: int, mode: int) -> int:
    """Open component by component, for kernels without openat2."""
    *parents, last = [part for part in path.split("/") if part not in ("", ".")]
    directory = os.dup(root_fd)
    try:
        for part in parents:
            inner = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
            os.close(directory)
            directory = inner
            _refuse_link(directory, part)
        fd = os.open(last, flags | os.O_NOFOLLOW, mode, dir_fd=directory)
        try:
            _refuse_link(fd, last)
        except OSError:
            os.close(fd)
            raise
        return fd
    finally:
        os.close(directory)


def _refuse_link(fd: int, part: str) -> None:
    """O_PATH opens a symbolic link itself, where any other open fails with ELOOP."""
    if stat.S_ISLNK(os.fstat(fd).st_mode):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), part)


def _check_relative(relative: str) -> None:
    try:
        length = len(os.fsencode(relative))
    except UnicodeEncodeError as error:
        raise _outside(relative, "is not a file name") from error
    parts = relative.split("/")
    if length > PATH_BYTES_MAX:
        raise _outside(relative, f"is longer than {PATH_BYTES_MAX} bytes")
    if "\0" in relative:
        raise _outside(relative, "holds a NUL")
    if relative.startswith("/"):
        raise _outside(relative, "is absolute")
    if ".." in parts:
        raise _outside(relative, "holds '..'")
    if all(part in ("", ".") for part in parts):
        raise _outside(relative, "names nothing")


def _outside(relative: str, problem: str) -> InvalidArgument:
    return InvalidArgument(
        f"path {shown(relative)} {problem}",
        field="path",
        hint="give a relative path that stays inside its directory",
    )
