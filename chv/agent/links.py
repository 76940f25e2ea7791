"""`DaemonLink`: stord or nwd as the engine sees it, across every restart of that daemon.

The supervisor attaches a connected client when the daemon is ready and detaches it when it is
lost or hangs; in between every call is `Unavailable`, so nobody can hold on to a dead connection.
Questions under way end with the detachment. Changes under way run on to their own deadline: their
outcome may still come.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import anyio

from chv.common.errors import Unavailable
from chv.common.rpc import Client, Method
from chv.common.rpc.method import P, R

T = TypeVar("T")


class DaemonLink:
    """Implements the engine's `Caller` port."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._client: Client | None = None
        self._questions: set[anyio.CancelScope] = set()

    def attach(self, client: Client) -> None:
        """The daemon is ready on this connection."""
        self._client = client

    def detach(self) -> None:
        """The daemon is gone, going, or does not answer."""
        self._client = None
        for scope in self._questions:
            scope.cancel()

    async def call(self, method: Method[P, R], params: P) -> R:
        """Call the daemon; Unavailable while it is not there."""
        answer = self._connected().call(method, params)
        return await (answer if method.mutating else self._while_attached(answer))

    async def call_fds(self, method: Method[P, R], params: P) -> tuple[R, list[int]]:
        """As `call`, with the descriptors of the reply; the caller owns these."""
        answer = self._connected().call_fds(method, params)
        return await (answer if method.mutating else self._while_attached(answer))

    async def _while_attached(self, answer: Awaitable[T]) -> T:
        with anyio.CancelScope() as scope:
            self._questions.add(scope)
            try:
                return await answer
            finally:
                self._questions.discard(scope)
        raise self._unavailable()  # nobody else has this scope to cancel it

    def _connected(self) -> Client:
        if self._client is None:
            raise self._unavailable()
        return self._client

    def _unavailable(self) -> Unavailable:
        return Unavailable(f"chv-{self.name} is not ready", resource=f"daemon/{self.name}")
