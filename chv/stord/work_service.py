"""The methods of stord's API that move data: backup, check, move. Locks, then the parts."""

from __future__ import annotations

import anyio.to_thread

from chv.common.rpc import Server
from chv.common.wire import stord as wire
from chv.stord.backup import Backups
from chv.stord.bench import Benches
from chv.stord.check import Checks
from chv.stord.filling import FillKind, Fills
from chv.stord.jobs import Jobs, Runner
from chv.stord.keeper import Keeper
from chv.stord.locks import KeyedLocks
from chv.stord.move import Moves
from chv.stord.offline import Offline
from chv.stord.rekey import Rekeys
from chv.stord.restore import Restores


class WorkService:
    """Handlers, and the runners of their jobs."""

    def __init__(self, keeper: Keeper, locks: KeyedLocks, jobs: Jobs, fills: Fills) -> None:
        parts = keeper.parts
        self._locks = locks
        self.offline = Offline(parts.layout, parts.ids, parts.tools, parts.disks)
        benches = Benches(keeper, self.offline)
        self.backups = Backups(parts, jobs, locks, benches)
        self.checks = Checks(parts, jobs)
        self.moves = Moves(keeper, jobs, locks, benches)
        self.restores = Restores(parts)
        self.rekeys = Rekeys(parts, benches)
        fills.register(FillKind.BACKUP, self.restores.fill)

    def register(self, server: Server) -> None:
        """Add the handlers."""
        server.add(wire.BACKUP_VOLUME, self.backup_volume)
        server.add(wire.CHECK_VOLUME, self.check_volume)
        server.add(wire.MOVE_VOLUME, self.move_volume)

    def runners(self) -> dict[wire.JobKind, Runner]:
        """Return what goes on with jobs that a restart cut short."""
        return {
            wire.JobKind.BACKUP: self.backups.run,
            wire.JobKind.CHECK: self.checks.run,
            wire.JobKind.REPAIR: self.checks.run,
            wire.JobKind.MOVE: self.moves.run,
        }

    async def sweep(self) -> None:
        """Remove what an earlier daemon left; at start."""
        await anyio.to_thread.run_sync(self.offline.sweep)

    async def backup_volume(self, request: wire.BackupVolume) -> wire.JobInfo:
        """See the wire."""
        async with self._locks.hold(request.volume_id):
            return await self.backups.begin(request)

    async def check_volume(self, request: wire.CheckVolume) -> wire.JobInfo:
        """See the wire."""
        async with self._locks.hold(request.volume_id):
            return await self.checks.begin(request)

    async def move_volume(self, request: wire.MoveVolume) -> wire.JobInfo:
        """See the wire."""
        async with self._locks.hold(request.volume_id):
            return await self.moves.begin(request)
