"""`DaemonLink`: stord or nwd as the engine sees it, across every restart of that daemon.

The supervisor attaches a connected client when the daemon is ready and detaches it when it is
lost or hangs; in between every call is `Unavailable`, so nobody can hold on to a dead connection.
Questions under way end with the detachment. Changes under way run on to their own deadline: their
outcome may still come. While the daemon is restarted on purpose calls are held back (`hold`): they
wait for the next incarnation instead of failing, and those under way are let finish first (`idle`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

import anyio

from chv.common.errors import Unavailable
from chv.common.rpc import Client, Method
from chv.common.rpc.method import P, R

T = TypeVar("T")
HELD_S_MAX = 15.0  # that a call waits for a daemon that is restarted on purpose


class DaemonLink:
    """Implements the engine's `Caller` port."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._client: Client | None = None
        self._questions: set[anyio.CancelScope] = set()
        self._held: anyio.Event | None = None
        self._under_way = 0
        self._finished = anyio.Event()

    def attach(self, client: Client) -> None:
        """The daemon is ready on this connection."""
        self._client = client
        self.release()

    def detach(self) -> None:
        """The daemon is gone, going, or does not answer."""
        self._client = None
        for scope in self._questions:
            scope.cancel()

    def hold(self) -> None:
        """From here on calls wait for the next `attach`, HELD_S_MAX at the most."""
        if self._held is None:
            self._held = anyio.Event()

    def release(self) -> None:
        """Calls wait no more: they find the daemon there or not."""
        if self._held is not None:
            self._held.set()
            self._held = None

    async def idle(self) -> None:
        """Return when no call is under way."""
        while self._under_way:
            await self._finished.wait()

    async def call(self, method: Method[P, R], params: P) -> R:
        """Call the daemon; Unavailable while it is not there."""
        with await self._enter() as client:
            answer = client.call(method, params)
            return await (answer if method.mutating else self._while_attached(answer))

    async def call_fds(self, method: Method[P, R], params: P) -> tuple[R, list[int]]:
        """As `call`, with the descriptors of the reply; the caller owns these."""
        with await self._enter() as client:
            answer = client.call_fds(method, params)
            return await (answer if method.mutating else self._while_attached(answer))

    async def _enter(self) -> AbstractContextManager[Client]:
        if self._held is not None:
            with anyio.move_on_after(HELD_S_MAX):
                await self._held.wait()
        return self._call_under_way(self._connected())

    @contextmanager
    def _call_under_way(self, client: Client) -> Iterator[Client]:
        self._under_way += 1
        try:
            yield client
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._finished.set()
                self._finished = anyio.Event()

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
