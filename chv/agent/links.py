"""`DaemonLink`: stord or nwd as the engine sees it, across every restart of that daemon.

The supervisor attaches a connected client when the daemon is ready and detaches it when it is
lost; in between every call is `Unavailable`, so nobody can hold on to a dead connection.
"""

from __future__ import annotations

from chv.common.errors import Unavailable
from chv.common.rpc import Client, Method
from chv.common.rpc.method import P, R


class DaemonLink:
    """Implements the engine's `Caller` port."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._client: Client | None = None

    def attach(self, client: Client) -> None:
        """The daemon is ready on this connection."""
        self._client = client

    def detach(self) -> None:
        """The daemon is gone or going."""
        self._client = None

    async def call(self, method: Method[P, R], params: P) -> R:
        """Call the daemon; Unavailable while it is not there."""
        return await self._connected().call(method, params)

    async def call_fds(self, method: Method[P, R], params: P) -> tuple[R, list[int]]:
        """As `call`, with the descriptors of the reply; the caller owns these."""
        return await self._connected().call_fds(method, params)

    def _connected(self) -> Client:
        if self._client is None:
            raise Unavailable(f"chv-{self.name} is not ready", resource=f"daemon/{self.name}")
        return self._client
