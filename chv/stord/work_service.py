"""The methods of stord's API that move data: backup, check, move. Locks, then the parts."""

from __future__ import annotations

import anyio.to_thread

from chv.common.errors import InUse
from chv.common.rpc import Server
from chv.common.wire import stord as wire
from chv.common.wire.stord import JobKind
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

# Kinds that have the files of a detached volume to themselves.
DETACHED = (JobKind.BACKUP, JobKind.MOVE, JobKind.CHECK, JobKind.REPAIR)


class WorkService:
    """Handlers, and the runners of their jobs."""

    def __init__(self, keeper: Keeper, locks: KeyedLocks, jobs: Jobs, fills: Fills) -> None:
        parts = keeper.parts
        self._locks = locks
        self._records = parts.records
        self.offline = Offline(parts.layout, parts.ids, parts.tools, parts.disks, parts.binary)
        benches = Benches(keeper, self.offline)
        self.backups = Backups(parts, jobs, locks, benches)
        self.checks = Checks(parts, jobs)
        self.moves = Moves(keeper, jobs, locks, benches)
        self.restores = Restores(parts)
        self.rekeys = Rekeys(parts, benches)
        fills.register(FillKind.BACKUP, self.restores.fill, self.restores.check)

    def register(self, server: Server) -> None:
        """Add the handlers."""
        server.add(wire.BACKUP_VOLUME, self.backup_volume)
        server.add(wire.BACKUP_VM, self.backup_vm)
        server.add(wire.CHECK_VOLUME, self.check_volume)
        server.add(wire.MOVE_VOLUME, self.move_volume)

    def runners(self) -> dict[JobKind, Runner]:
        """Return what goes on with jobs that a restart cut short."""
        return {
            JobKind.BACKUP: self.backups.run,
            JobKind.CHECK: self.checks.run,
            JobKind.REPAIR: self.checks.run,
            JobKind.MOVE: self.moves.run,
        }

    def refuse_attach(self, volume_id: str) -> None:
        """Raise InUse where a job works on a volume that is attached to nothing."""
        job = self._records.job_of(volume_id)
        if job is None or job.info.kind not in DETACHED or self._records.holder(volume_id):
            return
        raise InUse(
            f"job {job.info.job_id} ({job.info.kind.value}) has the volume open",
            resource=volume_id,
            hint="wait until it ends, or cancel it",
        )

    async def sweep(self) -> None:
        """Remove what an earlier daemon left; at start."""
        await anyio.to_thread.run_sync(self.offline.sweep)

    async def backup_volume(self, request: wire.BackupVolume) -> wire.JobInfo:
        """See the wire."""
        async with self._locks.hold(request.volume_id):
            return await self.backups.begin(request)

    async def backup_vm(self, request: wire.BackupVm) -> wire.JobInfo:
        """See the wire."""
        async with self.backups.holding([part.volume_id for part in request.volumes]):
            return await self.backups.begin(request)

    async def check_volume(self, request: wire.CheckVolume) -> wire.JobInfo:
        """See the wire."""
        async with self._locks.hold(request.volume_id):
            return await self.checks.begin(request)

    async def move_volume(self, request: wire.MoveVolume) -> wire.JobInfo:
        """See the wire."""
        async with self._locks.hold(request.volume_id):
            return await self.moves.begin(request)
