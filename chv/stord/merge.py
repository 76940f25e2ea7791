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

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import anyio.to_thread
import msgspec

from chv.common import logs
from chv.common.errors import Cancelled, ChvError, FailedPrecondition, InUse, NotFound
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
from chv.stord.overlays import Overlays, read_keys
from chv.stord.qsd import block_jobs, graph
from chv.stord.qsd.block_jobs import BlockJob
from chv.stord.qsd.monitor import Monitor
from chv.stord.records import BackendPhase, ChangeKind, Volume, VolumeState
from chv.stord.tools import Call, json_image

log = logs.get(__name__)
WORD = "merge"
LOOK_S = 0.2
STOP_LOOK_S = 0.005
# How long a job that was told to end is waited for before the locks are let go in between.
END_WAIT_S = 1.0


class MergeParameters(msgspec.Struct, frozen=True, kw_only=True):
    """What a merge job was begun with: the snapshot that goes, the layer that is merged."""

    snapshot_id: str
    layer: int


class Merges:
    """Merge jobs of all volumes. `locks` are the volumes' own."""

    def __init__(self, keeper: Keeper, locks: KeyedLocks, jobs: Jobs, overlays: Overlays) -> None:
        self._keeper = keeper
        self._parts = keeper.parts
        self._records = keeper.parts.records
        self._locks = locks
        self._jobs = jobs
        self._overlays = overlays
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
        if row.state is not VolumeState.OPEN or row.change is not None:
            raise FailedPrecondition(f"the volume is {row.state.value}", resource=row.volume_id)
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
            if not await self._go_on(control):
                await self._parts.clock.sleep(LOOK_S)
        await self._clean_up(volume_id, parameters.layer)
        log.info("layers_merged", volume_id=volume_id, layer=parameters.layer)
        return {"snapshot_id": parameters.snapshot_id}

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
            return await self._merge_online(control, holder.vm_id)
        if control.cancelling.is_set():
            async with self._locks.hold(volume_id):
                await self._give_up(control)
        return False

    async def _give_up(self, control: JobControl) -> None:
        """Leave the chain as it is, which is whole, and end; not after a pivot."""
        row = self._records.volumes[control.volume_id]
        if row.change is not None and row.change.kind is ChangeKind.MERGE:
            await self._records.put_volume(layers.abandon(row))
            await failpoint("stord.merge.after_abandon")
            raise Cancelled(
                "cancelled on request; the volume is whole, the snapshot is not",
                resource=control.volume_id,
            )

    # --- in the VM's storage daemon
    async def _merge_online(self, control: JobControl, vm_id: str) -> bool:
        """Look at the job in the storage daemon and do what comes next. True: it is merged."""
        volume_id = control.volume_id
        async with AsyncExitStack() as held:
            await held.enter_async_context(self._locks.hold(volume_id))
            await held.enter_async_context(self._keeper.locks.hold(vm_id))
            if self._records.attachment(volume_id, vm_id) is None:
                return True  # it has gone meanwhile: look again
            monitor = await held.enter_async_context(live_monitor(self._parts, vm_id, "merge"))
            if monitor is None or graph.throttle_node(volume_id) not in await monitor.nodes():
                return False  # lost: the VM's recovery or detach comes first
            await self._begin_online(control, monitor)
            return await self._push(control, monitor)

    async def _begin_online(self, control: JobControl, monitor: Monitor) -> None:
        row, name = self._row(control), block_jobs.job_name(WORD, control.volume_id)
        assert row.change is not None
        if await block_jobs.find(monitor, name) is not None:
            return
        if graph.format_node(row.volume_id, row.change.layer) not in await monitor.nodes():
            return  # it was left already, by a storage daemon that has ended since
        if control.cancelling.is_set():
            await self._give_up(control)
        await self._make_room(row)
        pair = (row.change.layer, layers.below(row, row.change.layer))
        await block_jobs.commit(monitor, row.volume_id, pair, name)
        await failpoint("stord.merge.after_commit")

    async def _make_room(self, row: Volume) -> None:
        """Let the base become as large as what is merged into it, where it is a device of ours."""
        assert row.change is not None
        if layers.below(row, row.change.layer) == 0:
            backend = self._parts.disks.backend(row.backend)
            await backend.extend_device(row.volume_id, row.backend)

    async def _push(self, control: JobControl, monitor: Monitor) -> bool:
        name = block_jobs.job_name(WORD, control.volume_id)
        job = await block_jobs.find(monitor, name)
        if job is not None:
            await control.progress(job.done, job.total, "the storage daemon merges the layers")
        if job is not None and control.cancelling.is_set():
            job = await self._cancel_online(control, monitor, job)
        if job is not None and job.status == block_jobs.READY:
            await block_jobs.complete(monitor, name)
            await failpoint("stord.merge.after_complete")
            job = await block_jobs.settled(monitor, name, END_WAIT_S, block_jobs.PENDING)
        if job is not None and job.status == block_jobs.PENDING:
            job = await self._pivot(control, monitor)
        if job is not None and job.status != block_jobs.CONCLUDED:
            return False
        await self._conclude(control, monitor, job)
        return True

    async def _cancel_online(
        self, control: JobControl, monitor: Monitor, job: BlockJob
    ) -> BlockJob:
        """End the job and give up, unless the pivot has begun or it is done already."""
        change = self._row(control).change
        if change is not None and change.kind is ChangeKind.PIVOT:
            return job
        if job.status == block_jobs.CONCLUDED and not job.error:
            return job
        ended = await block_jobs.cancel(monitor, job.name)
        await failpoint("stord.merge.after_cancel")
        if ended is not None and not ended.error:
            return ended  # it came to its end just before
        await self._give_up(control)
        return job

    async def _pivot(self, control: JobControl, monitor: Monitor) -> BlockJob | None:
        """The guest's writes are held back: say so durably, then leave the layer."""
        name = block_jobs.job_name(WORD, control.volume_id)
        await failpoint("stord.merge.at_pending")
        await self._records.put_volume(layers.pivot(self._row(control)))
        await failpoint("stord.merge.after_pivot")
        await block_jobs.finalize(monitor, name)
        await failpoint("stord.merge.after_finalize")
        return await block_jobs.settled(monitor, name, END_WAIT_S)

    async def _conclude(self, control: JobControl, monitor: Monitor, job: BlockJob | None) -> None:
        """Record what the job has led to, then forget it and close what it has left."""
        row = self._row(control)
        assert row.change is not None
        if job is not None and job.error:
            await self._records.put_volume(layers.abandon(row))
            await block_jobs.dismiss(monitor, job.name)
            raise block_jobs.failure(job, row.volume_id)
        await self._records.put_volume(layers.finish_merge(row))
        await failpoint("stord.merge.after_record")
        if job is not None:
            await block_jobs.dismiss(monitor, job.name)
        await close_node(monitor, row.volume_id, row.change.layer)
        await failpoint("stord.merge.after_close")

    # --- without a storage daemon
    async def _merge_offline(self, control: JobControl) -> bool:
        """Run qemu-img; False where an attach or a cancel made it stop."""
        volume_id = control.volume_id
        row = self._row(control)
        assert row.change is not None
        if row.change.kind is ChangeKind.MERGE and not await self._commit_until_stopped(control):
            if control.cancelling.is_set():
                async with self._locks.hold(volume_id):
                    await self._give_up(control)
            return False
        async with self._locks.hold(volume_id):
            if self._records.holder(volume_id) is None:
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
        await self._make_room(row)
        disk = await anyio.to_thread.run_sync(self._lower_part, row)
        pair = disk.own[-2:]
        total = row.backend.size_bytes

        def told(percent: float) -> None:
            control.done_bytes, control.total_bytes = int(total * percent / 100), total

        await control.progress(0, total, "qemu-img merges the layers")
        call = Call(
            owns=tuple(local_paths(pair)),
            reads=tuple(local_paths((*disk.below, *disk.own[:-2]))),
            keys=await read_keys(self._parts.layout, row.volume_id, disk.keys),
            volume_id=row.volume_id,
        )
        with disk_files.exclusively(self._parts.disks.lock_path(row.volume_id)):
            await failpoint("stord.merge.before_qemu_img")
            await self._parts.tools.run(
                ["commit", "-p", "-d", json_image(graph.chain(disk))], call, told
            )
            await failpoint("stord.merge.after_qemu_img")

    def _lower_part(self, row: Volume) -> graph.Disk:
        """Describe the chain with the layer that is merged as its top."""
        assert row.change is not None
        disk = self._parts.disks.disk(row.volume_id, read_only=False)
        count = len(layers.upto(row, row.change.layer))
        return msgspec.structs.replace(disk, own=disk.own[:count])

    # --- the end
    async def _clean_up(self, volume_id: str, number: int) -> None:
        """Remove the file of the layer, and its node where one is left."""
        holder = self._records.holder(volume_id)
        if holder is not None:
            async with (
                self._locks.hold(volume_id),
                self._keeper.locks.hold(holder.vm_id),
                live_monitor(self._parts, holder.vm_id, "merge") as monitor,
            ):
                if monitor is not None:
                    await block_jobs.cancel(monitor, block_jobs.job_name(WORD, volume_id))
                    await close_node(monitor, volume_id, number)
        await self._overlays.remove(volume_id, number)
        await failpoint("stord.merge.after_remove")

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
