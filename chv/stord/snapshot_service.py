"""The methods of stord's API on snapshots and jobs: locks, then the parts. No logic of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from chv.common.rpc import Server
from chv.common.wire import stord as wire
from chv.common.wire.types import Empty
from chv.stord.jobs import Jobs
from chv.stord.keeper import Keeper
from chv.stord.locks import KeyedLocks
from chv.stord.merge import Merges
from chv.stord.overlays import Overlays
from chv.stord.snapshots import Snapshots

Info = Callable[[str], Awaitable[wire.VolumeInfo]]
Require = Callable[[str], Awaitable[None]]


class SnapshotService:
    """Handlers, and what the other methods need of snapshots.

    `info` describes a volume; `sound` raises where one is damaged since an unclean end.
    """

    def __init__(
        self, keeper: Keeper, locks: KeyedLocks, jobs: Jobs, info: Info, sound: Require
    ) -> None:
        parts = keeper.parts
        self._keeper = keeper
        self._locks = locks
        self._jobs = jobs
        self._info = info
        self.overlays = Overlays(parts.layout, parts.records, parts.disks, parts.tools)
        self.snapshots = Snapshots(parts, jobs, self.overlays)
        self.merges = Merges(keeper, locks, jobs, self.overlays, sound)
        self._sound = sound

    def register(self, server: Server) -> None:
        """Add the handlers."""
        server.add(wire.CREATE_SNAPSHOT, self.create_snapshot)
        server.add(wire.DELETE_SNAPSHOT, self.delete_snapshot)
        server.add(wire.RESTORE_SNAPSHOT, self.restore_snapshot)
        server.add(wire.LIST_SNAPSHOTS, self.list_snapshots)
        server.add(wire.GET_JOB, self.get_job)
        server.add(wire.LIST_JOBS, self.list_jobs)
        server.add(wire.CANCEL_JOB, self.cancel_job)
        server.add(wire.BEGIN_MIRROR, self.begin_mirror)

    # --- what the other methods need
    async def settle_vm(self, vm_id: str) -> None:
        """Settle what was cut short, before a VM's storage daemon is looked at or started."""
        await self.snapshots.settle_vm(vm_id)
        await self.merges.settle_pivots(vm_id)

    async def settle_detached(self) -> None:
        """Settle what was cut short of volumes that no VM holds; at start."""
        await self.snapshots.settle_detached()

    @asynccontextmanager
    async def before_attach(self, volume_id: str) -> AsyncIterator[None]:
        """Make way for an attach; the volume's lock is held."""
        async with self.merges.step_aside(volume_id):
            await self.snapshots.settle(volume_id)
            yield

    @asynccontextmanager
    async def hold(self, *volume_ids: str) -> AsyncIterator[None]:
        """Hold the locks of several volumes; always in the same order."""
        async with AsyncExitStack() as held:
            for volume_id in sorted({item for item in volume_ids if item}):
                await held.enter_async_context(self._locks.hold(volume_id))
            yield

    # --- snapshots
    async def create_snapshot(self, request: wire.CreateSnapshot) -> wire.SnapshotsReply:
        """See the wire."""
        async with self.hold(*request.volume_ids):
            if not request.vm_id:
                for volume_id in request.volume_ids:
                    await self._sound(volume_id)
                return await self.snapshots.create(request)
            async with self._keeper.locks.hold(request.vm_id):
                return await self.snapshots.create(request)

    async def delete_snapshot(self, request: wire.SnapshotRef) -> wire.JobInfo:
        """See the wire."""
        async with self._locks.hold(request.volume_id):
            return await self.merges.delete(request)

    async def restore_snapshot(self, request: wire.SnapshotRef) -> wire.VolumeInfo:
        """See the wire."""
        async with self._locks.hold(request.volume_id):
            await self.snapshots.restore(request)
            return await self._info(request.volume_id)

    async def list_snapshots(self, _request: Empty) -> wire.SnapshotsReply:
        """See the wire."""
        return await self.snapshots.list()

    # --- jobs
    async def get_job(self, request: wire.JobRef) -> wire.JobInfo:
        """See the wire."""
        return self._jobs.get(request.job_id)

    async def list_jobs(self, _request: Empty) -> wire.JobsReply:
        """See the wire."""
        return wire.JobsReply(jobs=self._jobs.list())

    async def begin_mirror(self, request: wire.BeginMirror) -> wire.JobInfo:
        """Let a move that waits begin its mirror."""
        return await self._jobs.go_on(request.job_id, request.until_s)

    async def cancel_job(self, request: wire.JobRef) -> wire.JobInfo:
        """See the wire."""
        return await self._jobs.cancel(request.job_id)
