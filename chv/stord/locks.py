"""One lock per name, made on demand and forgotten when nobody holds or awaits it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio


class KeyedLocks:
    """Locks by name. Order of names across kinds is the caller's: volume first, then VM."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[anyio.Lock, int]] = {}

    @asynccontextmanager
    async def hold(self, name: str) -> AsyncIterator[None]:
        """Hold the lock called `name`."""
        lock, users = self._locks.get(name, (anyio.Lock(), 0))
        self._locks[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(name)
            if users > 1:
                self._locks[name] = (lock, users - 1)

    def busy(self, name: str) -> bool:
        """Tell whether somebody holds the lock."""
        return name in self._locks
