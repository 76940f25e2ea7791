"""Connections to the monitors of storage daemons, kept from one piece of work to the next.

To connect costs three times what a command does. One is kept per VM, for as long as the same
incarnation lives, every command was answered and nobody else waits for it: a storage daemon
serves one client at a time. Errors are those of `monitor`; a connection that is in doubt is closed.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from chv.stord.qsd.monitor import Monitor, connect


class _Kept(NamedTuple):
    path: Path  # of the socket; it carries the incarnation
    monitor: Monitor


class Monitors:
    """The connections of all VMs."""

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}
        self._users: Counter[str] = Counter()
        # Of the storage daemon of each VM that was connected to last.
        self.versions: dict[str, str] = {}

    async def take(self, vm_id: str, path: Path, uid: int) -> Monitor:
        """Return a connection; whoever gets one gives it back, whatever became of it."""
        self._users[vm_id] += 1
        try:
            kept = self._kept.pop(vm_id, None)
            if kept is not None and kept.path == path and kept.monitor.usable:
                return kept.monitor
            if kept is not None:
                await kept.monitor.close()
            monitor = await connect(path, uid)
            self.versions[vm_id] = monitor.version
            return monitor
        except BaseException:
            self._leave(vm_id)
            raise

    async def give_back(self, vm_id: str, path: Path, monitor: Monitor) -> None:
        """Keep a connection for the next, or close it."""
        self._leave(vm_id)
        if monitor.usable and not self._users[vm_id] and vm_id not in self._kept:
            self._kept[vm_id] = _Kept(path, monitor)
        else:
            await monitor.close()

    def _leave(self, vm_id: str) -> None:
        self._users[vm_id] -= 1
        if not self._users[vm_id]:
            del self._users[vm_id]

    async def drop(self, vm_id: str) -> None:
        """Close what is kept for a VM: its storage daemon has ended, or is about to."""
        self.versions.pop(vm_id, None)
        kept = self._kept.pop(vm_id, None)
        if kept is not None:
            await kept.monitor.close()

    async def close(self) -> None:
        """Close them all; at the end."""
        for vm_id in list(self._kept):
            await self.drop(vm_id)
