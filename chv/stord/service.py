"""The methods of stord's API: locks, then volumes, sessions, census. No logic of its own.

The lock of a volume is held across every call that names it, so two calls at once are one after
the other; the VM's lock is always taken after it.
"""

from __future__ import annotations

from operator import itemgetter

import anyio
import anyio.to_thread

from chv.common import pages
from chv.common.errors import ChvError
from chv.common.process import run
from chv.common.rpc import CallContext, Server
from chv.common.wire import stord as wire
from chv.common.wire.types import (
    CENSUS,
    REAP_UNEXPLAINED,
    CensusReply,
    Done,
    Empty,
    Feature,
    ListPage,
)
from chv.stord.attaching import Attaching, Gates
from chv.stord.backends.file import FileBackend
from chv.stord.clones import Copies
from chv.stord.events import Events
from chv.stord.filler import Filler
from chv.stord.filling import FillKind, Fills
from chv.stord.integrity import Integrity
from chv.stord.jobs import Jobs, Runner
from chv.stord.keeper import Keeper
from chv.stord.locks import KeyedLocks
from chv.stord.looks import Looks
from chv.stord.qsd import graph
from chv.stord.reaping import Reaping
from chv.stord.reports import Reports
from chv.stord.restarting import Restarting
from chv.stord.sessions import Sessions, state_of
from chv.stord.snapshot_service import SnapshotService
from chv.stord.space import SpaceMonitor
from chv.stord.tuning import Tuning
from chv.stord.volumes import Volumes
from chv.stord.work_service import WorkService

VERSION_TIMEOUT_S = 5.0


class Service:
    """Handlers of the method table."""

    def __init__(self, keeper: Keeper, files: FileBackend, events: Events, jobs: Jobs) -> None:
        parts = keeper.parts
        self._parts = parts
        self._records = parts.records
        self._keeper = keeper
        self._jobs = jobs
        self._integrity = Integrity(parts, keeper.tasks)
        self._sessions = Sessions(keeper, self._integrity)
        self._fills = Fills(parts)
        self._filler = Filler(parts, jobs, self._fills)
        self._volumes = Volumes(parts, Tuning(keeper), self._filler)
        self._runners: dict[wire.JobKind, Runner] = {wire.JobKind.CREATE: self._filler.run}
        self._files = files
        self._events = events
        self._locks = KeyedLocks()
        self._reaping = Reaping(parts, self._records, files, self._locks)
        self.space = SpaceMonitor(parts, events)
        self._reports = Reports(keeper, self._volumes, self.space)
        self._snapshots = SnapshotService(
            keeper, self._locks, jobs, self._volumes.info, self._integrity.require
        )
        self._runners[wire.JobKind.DELETE_SNAPSHOT] = self._snapshots.merges.run
        self._fills.register(FillKind.CLONE, Copies(parts).fill)
        self._work = WorkService(keeper, self._locks, jobs, self._fills)
        self._runners |= self._work.runners()
        self._volumes.rekeys = self._work.rekeys
        self._volumes.looks = Looks(parts.clock, keeper.tasks)
        self._restarting = Restarting(keeper)
        self._attaching = Attaching(
            self._records, self._sessions, self._volumes, self._integrity, self._gates()
        )
        keeper.settle = self._settle_vm

    def register(self, server: Server) -> None:
        """Add every handler but Hello's."""
        server.add(CENSUS, self.census)
        server.add(REAP_UNEXPLAINED, self._reaping.reap)
        server.add(wire.OPEN_VOLUME, self.open_volume)
        server.add(wire.CLOSE_VOLUME, self.close_volume)
        server.add(wire.DELETE_VOLUME, self.delete_volume)
        server.add(wire.ATTACH_VOLUME, self.attach)
        server.add(wire.ATTACH_VOLUMES, self.attach_all)
        server.add(wire.DETACH_VOLUME, self.detach)
        server.add(wire.RECOVER_VM_BACKEND, self.recover)
        server.add(wire.RESTART_VM_BACKEND, self.restart)
        server.add(wire.GET_VOLUME, self.get_volume)
        server.add(wire.GET_VOLUME_HEALTH, self.volume_health)
        server.add(wire.LIST_VOLUMES, self.list_volumes)
        server.add(wire.LIST_SESSIONS, self.list_sessions)
        server.add(wire.WATCH_STORAGE, self.watch)
        self._reports.register(server)
        self._snapshots.register(server)
        self._work.register(server)

    def _gates(self) -> Gates:
        return Gates(
            lock=self._locks.hold,
            before_attach=self._snapshots.before_attach,
            refuse=self._work.refuse_attach,
        )

    async def _settle_vm(self, vm_id: str) -> None:
        await self._snapshots.settle_vm(vm_id)
        await self._work.moves.settle_vm(vm_id)

    async def restore(self) -> None:
        """Re-read the world: what was cut short, then every storage daemon."""
        self._reports.binary = await probe_binary(self._parts.binary)
        await anyio.to_thread.run_sync(self._parts.tools.sweep)
        await self._work.sweep()
        await anyio.to_thread.run_sync(self._files.sweep)
        await self._parts.disks.sweep()
        await self._parts.provider.sweep()
        await self._volumes.finish()
        await self._snapshots.settle_detached()
        await self._keeper.adopt()
        await anyio.to_thread.run_sync(self._snapshots.overlays.sweep)
        await self._work.rekeys.finish_all()
        await self._jobs.resume(self._runners)

    # --- volumes
    async def open_volume(self, request: wire.OpenVolume) -> wire.VolumeInfo:
        """See the wire."""
        source = request.backend.snapshot
        parent = "" if source is None else source.volume_id
        async with self._snapshots.hold(request.volume_id, parent):
            await self.space.admit(request.volume_id, request.backend)
            return await self._volumes.open(request)

    async def close_volume(self, request: wire.VolumeRef) -> Done:
        """See the wire."""
        async with self._locks.hold(request.volume_id):
            await self._volumes.close(request.volume_id, request.meta.generation)
        return Done()

    async def delete_volume(self, request: wire.VolumeRef) -> Done:
        """See the wire."""
        async with self._locks.hold(request.volume_id):
            await self._volumes.delete(request.volume_id, request.meta.generation)
        return Done()

    async def get_volume(self, request: wire.GetVolume) -> wire.VolumeInfo:
        """See the wire."""
        return await self._volumes.look(request.volume_id)

    async def list_volumes(self, request: ListPage) -> wire.ListVolumesReply:
        """See the wire."""
        infos = ((each.volume_id, each) for each in await self._volumes.listed())
        found, after = pages.page(sorted(infos, key=itemgetter(0)), request.after)
        return wire.ListVolumesReply(volumes=found, next=after)

    async def volume_health(self, request: wire.GetVolume) -> wire.VolumeHealth:
        """See the wire."""
        row = self._volumes.require(request.volume_id)
        info = await self._volumes.info(request.volume_id)
        state = state_of(self._records.backends.get(info.attached_to))
        return wire.VolumeHealth(
            volume_id=request.volume_id,
            status=self._judge(info, state),
            backend=state,
            last_error=info.last_error,
            last_error_at=row.last_error_at,
        )

    def _judge(self, info: wire.VolumeInfo, state: wire.BackendState) -> str:
        if info.state in ("missing", "broken") or state is wire.BackendState.LOST:
            return "failed"
        if not info.attached_to:
            return "healthy"
        if self._keeper.misses.get(info.attached_to):
            return "unknown"
        return "healthy" if self._sessions.is_served(info.attached_to) else "degraded"

    # --- attachments
    async def attach(self, request: wire.AttachVolumeToVm) -> wire.AttachmentInfo:
        """See the wire."""
        return await self._attaching.attach(request)

    async def attach_all(self, request: wire.AttachVolumesToVm) -> wire.AttachVolumesReply:
        """See the wire."""
        return await self._attaching.attach_all(request)

    async def detach(self, request: wire.DetachVolumeFromVm) -> Done:
        """See the wire."""
        async with self._locks.hold(request.volume_id):
            self._volumes.refuse_stale(request.volume_id, request.meta.generation)
            await self._sessions.detach(request.volume_id, request.vm_id)
        return Done()

    async def recover(self, request: wire.RecoverVmBackend) -> wire.VmBackendInfo:
        """See the wire."""
        return await self._sessions.recover(request.vm_id)

    async def restart(self, request: wire.RestartVmBackend) -> wire.VmBackendInfo:
        """See the wire."""
        await self._restarting.restart(request.vm_id, request.meta.operation_id)
        return self._sessions.backend_info(request.vm_id)

    async def list_sessions(self, request: ListPage) -> wire.ListVolumeSessionsReply:
        """See the wire."""
        ids = sorted(self._records.backends)
        infos = ((vm_id, self._sessions.backend_info(vm_id)) for vm_id in ids)
        found, after = pages.page(infos, request.after)
        return wire.ListVolumeSessionsReply(sessions=found, next=after)

    async def watch(self, _request: Empty, context: CallContext) -> Done:
        """See the wire. Ends when the caller is too slow; it then subscribes again."""
        with self._events.subscribe() as events:
            for event in self._keeper.open_losses():
                await context.emit(event)
            async for event in events:
                await context.emit(event)
        return Done()

    # --- the daemon
    async def census(self, _request: Empty) -> CensusReply:
        """See the wire."""
        return CensusReply(items=await self._reaping.items())


async def probe_binary(binary: str) -> Feature:
    """Find out whether there is a storage daemon, and which."""
    try:
        completed = await run([binary, "--version"], timeout_s=VERSION_TIMEOUT_S)
    except ChvError as error:
        return Feature(name=graph.BINARY, present=False, detail=str(error))
    line = completed.stdout.decode(errors="replace").splitlines()[0]
    return Feature(name=graph.BINARY, present=True, detail=line.rpartition("version ")[2])
