"""The keys of encrypted volumes: files of this node, read at each use and never kept.

`<ns>/<name>` is the file `keys/<ns>/<name>`, 0600 of root in directories that are root's. What is
in it is the passphrase, byte for byte. It leaves here only as a `Key`, which does not print; no
error text has more of it than its name.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NoReturn

from chv.common.errors import FailedPrecondition, InvalidArgument, NotFound, PermissionDenied
from chv.common.files import resolve_inside
from chv.common.layout import Layout
from chv.common.secret import Secret

KEY_BYTES_MIN = 16
KEY_BYTES_MAX = 4096  # QEMU's own limit for a passphrase is higher
OTHERS = 0o077


class Key(Secret):
    """A passphrase that knows its name, `<ns>/<name>`."""

    __slots__ = ("name",)

    def __init__(self, name: str, value: bytes) -> None:
        super().__init__(value)
        self.name = name


def read_key(layout: Layout, name: str) -> Key:
    """Return the key called `<ns>/<name>`; blocks."""
    path = _key_path(layout, name)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(
            f"there is no key {name!r}",
            field="backend.encryption.key",
            hint="chv key create, or put it back from where keys are kept",
        ) from error
    except OSError as error:
        raise PermissionDenied(
            f"the key {name!r} cannot be opened: {error.strerror}", field="backend.encryption.key"
        ) from error
    try:
        _check_file(os.fstat(fd), name)
        value = os.read(fd, KEY_BYTES_MAX + 1)
    finally:
        os.close(fd)
    if not KEY_BYTES_MIN <= len(value) <= KEY_BYTES_MAX:
        raise FailedPrecondition(
            f"the key {name!r} has {len(value)} bytes",
            field="backend.encryption.key",
            hint=f"from {KEY_BYTES_MIN} to {KEY_BYTES_MAX}",
        )
    return Key(name, value)


def _key_path(layout: Layout, name: str) -> Path:
    try:
        path = resolve_inside(layout.keys, name)
    except InvalidArgument as error:
        raise PermissionDenied(
            f"the key {name!r} lies outside of {str(layout.keys)!r}",
            field="backend.encryption.key",
            hint="a key is a file of its own there, no symbolic link",
        ) from error
    for directory in (layout.keys, path.parent):
        _check_directory(directory, name)
    return path


def _check_directory(directory: Path, name: str) -> None:
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return  # the open says what is missing
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        _refuse(name, f"others may write to {str(directory)!r}", f"chmod 0700 {directory}")


def _check_file(status: os.stat_result, name: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        _refuse(name, "it is not a regular file", "")
    if status.st_uid != os.geteuid():
        _refuse(name, f"it belongs to uid {status.st_uid}", "it must belong to root, mode 0600")
    if mode := stat.S_IMODE(status.st_mode) & OTHERS:
        _refuse(name, f"others have access to it (mode {mode:#o} of theirs)", "chmod 0600")


def _refuse(name: str, why: str, hint: str) -> NoReturn:
    raise PermissionDenied(
        f"the key {name!r} is not used: {why}", field="backend.encryption.key", hint=hint
    )


def wrong_key(key_name: str, volume_id: str) -> PermissionDenied:
    """Return the error of a key that opens no slot of a volume."""
    return PermissionDenied(
        f"the key {key_name} does not open volume {volume_id}",
        resource=volume_id,
        field="backend.encryption.key",
        hint="the key of its creation, or the one that it was rotated to last",
    )


def is_wrong_key(text: str) -> bool:
    """Tell whether a QEMU program says that a passphrase opens nothing."""
    return "cannot unlock any keyslot" in text
