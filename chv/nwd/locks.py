"""One lock per network, made on demand and forgotten when nobody holds or awaits it."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio


class NetworkLocks:
    """Work on one network is one after the other; networks do not wait for each other."""

    def __init__(self, released: Callable[[], None] = lambda: None) -> None:
        self.released = released
        self._locks: dict[str, anyio.Lock] = {}
        self._users: Counter[str] = Counter()

    @asynccontextmanager
    async def hold(self, network_id: str) -> AsyncIterator[None]:
        """Hold the lock of a network in the block."""
        lock = self._locks.setdefault(network_id, anyio.Lock())
        self._users[network_id] += 1
        try:
            async with lock:
                yield
        finally:
            self.released()
            self._users[network_id] -= 1
            if not self._users[network_id]:
                del self._users[network_id], self._locks[network_id]
