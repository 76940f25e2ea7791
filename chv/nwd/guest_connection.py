"""A TCP connection from a network's gateway into a guest, made for somebody else to use.

The socket is made inside the namespace and works anywhere; the wait happens in the event loop.
Nothing is relayed: the descriptor leaves with the reply, and the stream outlives us. Fails with
Unavailable (refused, no such host) or DeadlineExceeded, never with a half-open socket.
"""

from __future__ import annotations

import errno
import os
import socket

import anyio

from chv.common.errors import DeadlineExceeded, Internal, Unavailable
from chv.common.wire import nwd as wire
from chv.nwd.kernel import netns
from chv.nwd.kernel.errors import translated

_STARTED = (0, errno.EINPROGRESS)


async def connect(
    path: str, source: str, target: tuple[str, int], timeout_s: float
) -> tuple[socket.socket, str, str]:
    """Return a connected socket and both its ends as text."""
    with translated("making a socket in the namespace"):
        connection = await netns.inside(path, lambda: _make(target[0]))
    try:
        connection.bind((source, 0))
        await _connect(connection, target, timeout_s)
        connection.setblocking(True)
        local = connection.getsockname()
    except BaseException:
        connection.close()
        raise
    return connection, f"{local[0]}:{local[1]}", f"{target[0]}:{target[1]}"


def _make(target: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    connection.setblocking(False)
    return connection


async def _connect(connection: socket.socket, target: tuple[str, int], timeout_s: float) -> None:
    shown = f"{target[0]}:{target[1]}"
    number = connection.connect_ex(target)
    if number not in _STARTED:
        raise _refusal(number, shown)
    with anyio.move_on_after(timeout_s) as scope:
        await anyio.wait_writable(connection)
    if scope.cancelled_caught:
        raise DeadlineExceeded(
            f"no answer within {timeout_s:g} s",
            resource=f"{wire.GUEST}{shown}",
            hint="is the guest up?",
        )
    number = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if number:
        raise _refusal(number, shown)


def _refusal(number: int, shown: str) -> Unavailable | Internal:
    text = os.strerror(number)
    if number in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT):
        return Unavailable(
            text, resource=f"{wire.GUEST}{shown}", hint="nothing in the guest listens there yet"
        )
    return Internal(f"connecting to {shown}: {text}")
