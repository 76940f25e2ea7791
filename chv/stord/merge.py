"""Deletion of snapshots: a job that merges the layer above a snapshot's own into it.

While a VM writes the volume, its storage daemon merges; otherwise qemu-img does. Either may be cut
short anywhere, and the VM may come and go meanwhile: until the merge is recorded the layer stays in
the chain, and a chain with it is whole however much of it was merged. One moment is different:
when the layer that is written has been merged and the storage daemon holds the guest's writes
back, the record says PIVOT, and only then the layer is left. From there on the guest writes to
the layer below, and the merged one must never be opened on top of it again.

A merge that was begun has spoilt its snapshot: a cancelled job leaves the volume whole and the
snapshot marked as being deleted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import msgspec

from chv.common import logs
from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    FailedPrecondition,
    InUse,
    NotFound,
    Unavailable,
)
from chv.common.failpoint import failpoint
from chv.common.wire.stord import JobInfo, JobKind, SnapshotRef
from chv.stord import layers
from chv.stord.backends import disk_files
from chv.stord.clones import users_of
from chv.stord.disks import local_paths
from chv.stord.jobs import JobControl, Jobs
from chv.stord.keeper import Keeper
from chv.stord.live import close_node, live_monitor
from chv.stord.locks import KeyedLocks
from chv.stord.merge_online import WORD, OnlineMerge, give_up, make_room, sync
from chv.stord.overlays import Overlays, read_keys
from chv.stord.qsd import block_jobs, graph
from chv.stord.qsd.hold import release
from chv.stord.records import BackendPhase, ChangeKind, Volume, VolumeState
from chv.stord.tools import Call, json_image

log = logs.get(__name__)
LOOK_S = 0.2
STOP_LOOK_S = 0.005
Piece = Callable[[JobControl], Awaitable[bool]]
Sound = Callable[[str], Awaitable[None]]


class MergeParameters(msgspec.Struct, frozen=True, kw_only=True):
    """What a merge job was begun with: the snapshot that goes, the layer that is merged."""

    snapshot_id: str
    layer: int


class Merges:
    """Merge jobs of all volumes. `locks` are the volumes' own."""

    def __init__(
        self, keeper: Keeper, locks: KeyedLocks, jobs: Jobs, overlays: Overlays, sound: Sound
    ) -> None:
        self._keeper = keeper
        self._parts = keeper.parts
        self._records = keeper.parts.records
        self._locks = locks
        self._jobs = jobs
        self._overlays = overlays
        self._sound = sound
        self._online = OnlineMerge(keeper, locks)
        self._offline: dict[str, anyio.CancelScope] = {}
        self._attaching: set[str] = set()

    # --- the call
    async def delete(self, request: SnapshotRef) -> JobInfo:
        """Begin the job; the caller holds the volume's lock."""
        job_id = request.meta.operation_id
        known = self._records.jobs.get(job_id)
        if known is not None:
            parameters = msgspec.json.decode(known.parameters, type=MergeParameters)
        else:
            parameters = self._admit(request)
        return await self._jobs.start(
            request.volume_id, JobKind.DELETE_SNAPSHOT, job_id, parameters, self.run
        )

    def _admit(self, request: SnapshotRef) -> MergeParameters:
        row = self._records.volumes.get(request.volume_id)
        if row is None:
            raise NotFound(f"there is no volume {request.volume_id}", resource=request.volume_id)
        self._jobs.refuse_busy(row.volume_id)
        snapshot = layers.require_snapshot(row, request.snapshot_id)
        change = row.change
        if change is not None and change.snapshot_id == request.snapshot_id:
            # A job that an error ended in the middle: this one goes on from there.
            return MergeParameters(snapshot_id=request.snapshot_id, layer=change.layer)
        if row.state is not VolumeState.OPEN or change is not None:
            what = row.state.value if change is None else f"in a {change.kind.value}"
            raise FailedPrecondition(f"the volume is {what}", resource=row.volume_id)
        for later in layers.from_on(row, request.snapshot_id):
            # A clone of a later snapshot has both layers open, too.
            if users := users_of(self._records, row.volume_id, later):
                raise InUse(
                    f"volumes rest on snapshot {later}: {', '.join(users)}",
                    resource=row.volume_id,
                    hint="delete those clones first, or keep the snapshot",
                )
        held = self._records.holder(row.volume_id)
        if held is not None and held.read_only:
            raise FailedPrecondition(
                f"the volume is attached read only to VM {held.vm_id}",
                resource=row.volume_id,
                hint="layers are merged while it is written or while it is attached to nothing",
            )
        return MergeParameters(
            snapshot_id=request.snapshot_id, layer=layers.above(row, snapshot.layer)
        )

    @asynccontextmanager
    async def step_aside(self, volume_id: str) -> AsyncIterator[None]:
        """Keep the files of a volume free for an attach; its merge goes on afterwards, online."""
        self._attaching.add(volume_id)
        try:
            while (scope := self._offline.get(volume_id)) is not None:
                scope.cancel()
                await anyio.sleep(STOP_LOOK_S)
            await self._settle_detached_pivot(volume_id)
            yield
        finally:
            self._attaching.discard(volume_id)

    # --- the job
    async def run(self, control: JobControl) -> dict[str, str]:
        """Merge, whatever happens to the VM meanwhile. Restartable."""
        parameters = control.parameters(MergeParameters)
        volume_id = control.volume_id
        async with self._locks.hold(volume_id):
            row = self._records.volumes[volume_id]
            if row.change is None and layers.find_snapshot(row, parameters.snapshot_id):
                await self._records.put_volume(layers.begin_merge(row, parameters.snapshot_id))
                await failpoint("stord.merge.after_intent")
        while self._is_open(volume_id, parameters):
            if not await self._try(self._go_on, control):
                await self._parts.clock.sleep(LOOK_S)
        while not await self._try(self._clean_up, control):
            await self._parts.clock.sleep(LOOK_S)
        log.info("layers_merged", volume_id=volume_id, layer=parameters.layer)
        return {"snapshot_id": parameters.snapshot_id}

    async def _try(self, piece: Piece, control: JobControl) -> bool:
        """Do a piece of the work; a storage daemon that dies or hangs is not the end of it."""
        try:
            return await piece(control)
        except (Unavailable, DeadlineExceeded) as error:
            log.warning("merge_interrupted", volume_id=control.volume_id, error=error)
            return False

    def _is_open(self, volume_id: str, parameters: MergeParameters) -> bool:
        row = self._records.volumes.get(volume_id)
        if row is None:
            raise NotFound("the volume is gone", resource=volume_id)
        return row.change is not None and row.change.layer == parameters.layer

    async def _go_on(self, control: JobControl) -> bool:
        """Do a piece of the work where it can be done now; True: look again at once."""
        volume_id = control.volume_id
        holder = self._records.holder(volume_id)
        if holder is None:
            return volume_id not in self._attaching and await self._merge_offline(control)
        backend = self._records.backends.get(holder.vm_id)
        served = backend is not None and backend.phase is BackendPhase.SERVING
        if served and holder.wanted and holder.published and not holder.read_only:
            return await self._online.go_on(control, holder.vm_id)
        if control.cancelling.is_set():
            async with self._locks.hold(volume_id):
                await give_up(self._records, control)
        return False

    # --- without the VM's storage daemon
    async def _merge_offline(self, control: JobControl) -> bool:
        """Run qemu-img; False where an attach or a cancel made it stop."""
        volume_id = control.volume_id
        row = self._row(control)
        assert row.change is not None
        if row.change.kind is ChangeKind.MERGE and not await self._commit_until_stopped(control):
            if control.cancelling.is_set():
                async with self._locks.hold(volume_id):
                    await give_up(self._records, control)
            return False
        async with self._locks.hold(volume_id):
            if self._records.holder(volume_id) is None:
                await sync(self._parts, self._row(control))
                await self._records.put_volume(layers.finish_merge(self._row(control)))
                await failpoint("stord.merge.after_record")
        return True

    async def _commit_until_stopped(self, control: JobControl) -> bool:
        """Merge by qemu-img; False where a cancel or an attach stopped it."""
        row, failures = self._row(control), list[ChvError]()
        with anyio.CancelScope() as scope:
            self._offline[row.volume_id] = scope
            try:
                async with anyio.create_task_group() as work:
                    work.start_soon(_cancel_with, control, scope)
                    try:
                        await self._commit(control, row)
                    except ChvError as error:  # raised below, outside the group
                        failures.append(error)
                    work.cancel_scope.cancel()
            finally:
                del self._offline[row.volume_id]
        if failures:
            async with self._locks.hold(row.volume_id):
                await self._records.put_volume(layers.abandon(self._row(control)))
            raise failures[0]
        return not scope.cancelled_caught

    async def _commit(self, control: JobControl, row: Volume) -> None:
        assert row.change is not None
        await self._sound(row.volume_id)
        await make_room(self._parts, row)
        disk = await anyio.to_thread.run_sync(self._lower_part, row)
        pair = disk.own[-2:]
        await control.progress(0, row.backend.size_bytes, "qemu-img merges the layers")
        call = Call(
            owns=tuple(local_paths(pair)),
            reads=tuple(local_paths((*disk.below, *disk.own[:-2]))),
            keys=await read_keys(self._parts.layout, row.volume_id, disk.keys),
            volume_id=row.volume_id,
        )
        with disk_files.exclusively(self._parts.disks.lock_path(row.volume_id)):
            await failpoint("stord.merge.before_qemu_img")
            await self._parts.tools.run(
                ["commit", "-p", "-d", json_image(graph.chain(disk))], call, control.percent
            )
            await failpoint("stord.merge.after_qemu_img")

    def _lower_part(self, row: Volume) -> graph.Disk:
        """Describe the chain with the layer that is merged as its top."""
        assert row.change is not None
        disk = self._parts.disks.disk(row.volume_id, read_only=False)
        count = len(layers.upto(row, row.change.layer))
        return msgspec.structs.replace(disk, own=disk.own[:count])

    # --- the end
    async def _clean_up(self, control: JobControl) -> bool:
        """Remove the file of the layer, and its node where one is left. True."""
        volume_id, number = control.volume_id, control.parameters(MergeParameters).layer
        holder = self._records.holder(volume_id)
        if holder is not None:
            async with (
                self._locks.hold(volume_id),
                self._keeper.locks.hold(holder.vm_id),
                live_monitor(self._parts, holder.vm_id, "merge") as monitor,
            ):
                if monitor is not None:
                    await block_jobs.cancel(monitor, block_jobs.job_name(WORD, volume_id))
                    await release(monitor, volume_id)
                    await close_node(monitor, volume_id, number)
        await self._overlays.remove(volume_id, number)
        await failpoint("stord.merge.after_remove")
        return True

    async def settle_pivots(self, vm_id: str) -> None:
        """Record the pivots that the death of a VM's storage daemon has decided.

        To be called before anything opens the volumes again; the VM's lock is held.
        """
        attached = [
            self._records.volumes.get(each.volume_id) for each in self._records.of_vm(vm_id)
        ]
        open_pivots = [row for row in attached if row is not None and _is_pivot(row)]
        if not open_pivots:
            return
        async with live_monitor(self._parts, vm_id, "merge") as monitor:
            if monitor is None:
                await self._records.put_volumes([layers.finish_merge(row) for row in open_pivots])

    async def _settle_detached_pivot(self, volume_id: str) -> None:
        row = self._records.volumes.get(volume_id)
        if row is not None and _is_pivot(row) and self._records.holder(volume_id) is None:
            await self._records.put_volume(layers.finish_merge(row))

    def _row(self, control: JobControl) -> Volume:
        return self._records.volumes[control.volume_id]


def _is_pivot(row: Volume) -> bool:
    return row.change is not None and row.change.kind is ChangeKind.PIVOT


async def _cancel_with(control: JobControl, scope: anyio.CancelScope) -> None:
    await control.cancelling.wait()
    scope.cancel()
