"""`Server`: a method table on a Unix socket. Who may connect and call, and how many at once.

Knows no method of its own. `serve` fails with a ChvError when it cannot listen; after that no
peer can make it fail. Cancelling `serve` ends the sessions and removes the socket.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.abc

from chv.common.errors import ChvError, PermissionDenied, ResourceExhausted
from chv.common.rpc.channel import Channel, Peer, peer_of
from chv.common.rpc.dispatch import CallContext, Dispatcher, Entry, Stamp, WithFds, wants_context
from chv.common.rpc.envelope import encode_error
from chv.common.rpc.listener import Listener, listen_unix
from chv.common.rpc.method import Method, P, R
from chv.common.rpc.session import Session

HELLO = "Hello"


class Server:
    """Serves every method of a table to the uids that may connect."""

    def __init__(
        self,
        name: str,
        methods: Sequence[Method[Any, Any]],
        *,
        allow_uids: frozenset[int],
        connections_max: int = 256,
        calls_max: int = 64,
        stamp: Stamp | None = None,
    ) -> None:
        self._methods = {method.name: method for method in methods}
        assert len(self._methods) == len(methods), f"{name}: a method name occurs twice"
        self._allow_uids = allow_uids
        self._connections_max = connections_max
        self._connections = 0
        self._dispatcher = Dispatcher(name, calls_max, stamp=stamp)

    @property
    def recovering(self) -> str | None:
        """While it is text, all but Hello and the like answer UNAVAILABLE `recovering: <text>`."""
        return self._dispatcher.recovering

    @recovering.setter
    def recovering(self, what: str | None) -> None:
        self._dispatcher.recovering = what

    @property
    def connections(self) -> int:
        """How many peers are connected."""
        return self._connections

    def add(
        self,
        method: Method[P, R],
        handler: Callable[[P], Awaitable[R | WithFds[R]]]
        | Callable[[P, CallContext], Awaitable[R | WithFds[R]]],
        *,
        during_recovery: bool = False,
    ) -> None:
        """Serve `method` by `handler(params)`, or `handler(params, context)` if it takes two."""
        assert self._methods.get(method.name) is method, f"{method.name} is not in the table"
        assert method.name not in self._dispatcher.entries, f"{method.name} has a handler already"
        self._dispatcher.entries[method.name] = Entry(
            method,
            handler,
            during_recovery=during_recovery or method.name == HELLO,
            wants_context=wants_context(handler),
        )

    def restrict(self, method: Method[Any, Any], uids: frozenset[int]) -> None:
        """Let only `uids` call `method`; they need to be in `allow_uids` as well."""
        self._dispatcher.entries[method.name].uids = uids

    async def serve(
        self,
        path: Path,
        *,
        mode: int = 0o660,
        gid: int | None = None,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until cancelled. The caller holds the daemon's lock, see `listen_unix`."""
        missing = self._methods.keys() - self._dispatcher.entries.keys()
        assert not missing, f"no handler for {sorted(missing)}"
        listener = listen_unix(path, mode=mode, gid=gid)
        try:
            async with anyio.create_task_group() as sessions:
                task_status.started()
                await self._accept_all(listener, sessions)
        finally:
            listener.close()

    async def _accept_all(self, listener: Listener, sessions: anyio.abc.TaskGroup) -> None:
        while True:
            connection = await listener.accept()
            peer = peer_of(connection)
            refusal = self._refusal(peer)
            if refusal is None:
                self._connections += 1
                sessions.start_soon(self._session, connection, peer)
            else:
                _refuse(connection, refusal)

    def _refusal(self, peer: Peer) -> ChvError | None:
        """Say why this peer may not connect, before a byte of it is read."""
        name = self._dispatcher.name
        if peer.uid not in self._allow_uids:
            return PermissionDenied(f"uid {peer.uid} may not use {name}")
        if self._connections >= self._connections_max:
            return ResourceExhausted(f"{name} has {self._connections} connections, its limit")
        return None

    async def _session(self, connection: socket.socket, peer: Peer) -> None:
        try:
            await Session(Channel(connection), peer, self._dispatcher).run()
        finally:
            self._connections -= 1


def _refuse(connection: socket.socket, error: ChvError) -> None:
    """Tell the peer why, as far as that goes without waiting, and close."""
    with connection, contextlib.suppress(OSError):
        connection.setblocking(False)
        connection.send(encode_error(None, error))
