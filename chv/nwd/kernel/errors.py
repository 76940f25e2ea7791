"""Turns what the kernel answers into typed errors that name the thing and the call."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from chv.common.errors import (
    ChvError,
    FailedPrecondition,
    Internal,
    InUse,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from chv.common.wire.nwd import BRIDGE_PORTS_MAX

_CLASSES: dict[int, type[ChvError]] = {
    errno.ENOENT: NotFound,
    errno.ENODEV: NotFound,
    errno.EBUSY: InUse,
    errno.EPERM: PermissionDenied,
    errno.EACCES: PermissionDenied,
    errno.ENOMEM: ResourceExhausted,
    errno.ENOBUFS: ResourceExhausted,
    errno.EMFILE: ResourceExhausted,
    errno.ENFILE: ResourceExhausted,
    errno.EXFULL: ResourceExhausted,
    errno.EOPNOTSUPP: FailedPrecondition,
    errno.EAGAIN: Unavailable,
}


def translate(number: int, what: str) -> ChvError:
    """Return the typed error of errno `number` while doing `what`."""
    if number == errno.EXFULL:
        return ResourceExhausted(
            f"{what}: a bridge takes {BRIDGE_PORTS_MAX} ports and all are used",
            hint="put the NIC on another network",
        )
    kind = _CLASSES.get(number, Internal)
    return kind(f"{what}: {os.strerror(number)}")


@contextmanager
def translated(what: str) -> Iterator[None]:
    """Raise the typed error for an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise translate(error.errno or errno.EIO, what) from error
