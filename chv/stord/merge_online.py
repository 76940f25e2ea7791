"""The part of a merge that a VM's storage daemon does, while the VM writes the volume.

Each look at it takes the locks of volume and VM, asks for the job, and does what comes next: begin,
tell a ready job to end, and, once it holds the guest's writes back, record the pivot and let it
happen; then record the outcome. Nothing is remembered between two looks but the records.

The guest is held for that end: some 20 ms (see `chv.stord.qsd.hold`). One that writes faster than
is copied would keep the copy from its end as well (seen: 120 GiB copied for a disk of 256 MiB).
Once twice of what the disk holds was copied, each look holds the guest for a second at most.
"""

from __future__ import annotations

from contextlib import AsyncExitStack

import anyio
import anyio.to_thread

from chv.common.errors import Cancelled, ChvError, DeadlineExceeded, Unavailable
from chv.common.failpoint import failpoint
from chv.stord import layers
from chv.stord.backends import disk_files
from chv.stord.disks import local_paths
from chv.stord.jobs import JobControl
from chv.stord.keeper import Keeper
from chv.stord.live import close_node, live_monitor
from chv.stord.locks import KeyedLocks
from chv.stord.qsd import block_jobs, graph
from chv.stord.qsd.block_jobs import BlockJob
from chv.stord.qsd.hold import hold, release
from chv.stord.qsd.monitor import Monitor
from chv.stord.records import ChangeKind, Records, Volume
from chv.stord.work import Parts

WORD = "merge"
# How long a job that was told to end is waited for before the locks are let go in between.
END_WAIT_S = 1.0
PATIENCE = 2  # sizes of the disk that are copied before the guest has to wait for the copy


async def give_up(records: Records, control: JobControl) -> None:
    """Leave the chain as it is, which is whole, and end the job; not after a pivot.

    The volume's lock is held.
    """
    row = records.volumes[control.volume_id]
    if row.change is not None and row.change.kind is ChangeKind.MERGE:
        await records.put_volume(layers.abandon(row))
        await failpoint("stord.merge.after_abandon")
        raise Cancelled(
            "cancelled on request; the volume is whole, the snapshot is not",
            resource=control.volume_id,
        )


async def make_room(parts: Parts, row: Volume) -> None:
    """Let the base become as large as what is merged into it, where it is a device of ours."""
    assert row.change is not None
    if layers.below(row, row.change.layer) == 0:
        backend = parts.disks.backend(row.backend)
        await backend.extend_device(row.volume_id, row.backend)


async def sync(parts: Parts, row: Volume) -> None:
    """Have what was merged on the medium before the record forgets where it came from."""
    assert row.change is not None
    heir = await anyio.to_thread.run_sync(
        parts.disks.layer, row.volume_id, layers.below(row, row.change.layer)
    )
    for path in local_paths((heir,)):
        await anyio.to_thread.run_sync(disk_files.sync, path)


class OnlineMerge:
    """Merges in storage daemons of VMs."""

    def __init__(self, keeper: Keeper, locks: KeyedLocks) -> None:
        self._keeper = keeper
        self._parts = keeper.parts
        self._records = keeper.parts.records
        self._locks = locks

    async def go_on(self, control: JobControl, vm_id: str) -> bool:
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
            try:
                await self._begin_online(control, monitor)
                return await self._push(control, monitor)
            except (Unavailable, DeadlineExceeded):
                raise  # it died, or hangs and is killed: no guest waits for it
            except ChvError as error:
                refusal = error
            await self._let_go(control, monitor)
            await release(monitor, volume_id)
            raise refusal

    async def _let_go(self, control: JobControl, monitor: Monitor) -> None:
        """After an error: no job may stay that would hold the guest's writes back for ever."""
        name, row = block_jobs.job_name(WORD, control.volume_id), self._row(control)
        job = await block_jobs.find(monitor, name)
        if job is None or (job.status == block_jobs.CONCLUDED and not job.error):
            return
        if row.change is not None and row.change.kind is ChangeKind.PIVOT:
            await self._records.put_volume(layers.unpivot(row))
        await block_jobs.cancel(monitor, name)

    async def _begin_online(self, control: JobControl, monitor: Monitor) -> None:
        row, name = self._row(control), block_jobs.job_name(WORD, control.volume_id)
        assert row.change is not None
        if await block_jobs.find(monitor, name) is not None:
            return
        if graph.format_node(row.volume_id, row.change.layer) not in await monitor.nodes():
            return  # it was left already, by a storage daemon that has ended since
        if control.cancelling.is_set():
            await give_up(self._records, control)
        await make_room(self._parts, row)
        pair = (row.change.layer, layers.below(row, row.change.layer))
        await block_jobs.commit(monitor, row.volume_id, pair, name)
        await failpoint("stord.merge.after_commit")

    async def _push(self, control: JobControl, monitor: Monitor) -> bool:
        name = block_jobs.job_name(WORD, control.volume_id)
        job = await block_jobs.find(monitor, name)
        if job is not None:
            await control.progress(job.done, job.total, "the storage daemon merges the layers")
        if job is not None and control.cancelling.is_set():
            job = await self._cancel_online(control, monitor, job)
        if job is not None and self._to_be_left(control, job):
            # A stop of ours must not leave a guest behind whose writes are held back.
            with anyio.CancelScope(shield=True):
                job = await self._leave(control, monitor, job)
        if job is not None and job.status != block_jobs.CONCLUDED:
            return False
        await self._conclude(control, monitor, job)
        return True

    def _to_be_left(self, control: JobControl, job: BlockJob) -> bool:
        """Tell whether the time has come to hold the guest: all is copied, or never will be."""
        row = self._row(control)
        if job.status == block_jobs.RUNNING:
            written = row.change is not None and row.change.layer == row.top.number
            return written and job.done >= PATIENCE * row.size_bytes
        return job.status in (block_jobs.READY, block_jobs.PENDING)

    async def _leave(self, control: JobControl, monitor: Monitor, job: BlockJob) -> BlockJob | None:
        """Let the layer that is written be left as soon as everything of it is below."""
        row = self._row(control)
        if job.status != block_jobs.PENDING:
            await hold(monitor, row.volume_id, row.size_bytes)
            await failpoint("stord.merge.after_hold")
        found = await block_jobs.settled(
            monitor, job.name, END_WAIT_S, block_jobs.READY, block_jobs.PENDING
        )
        if found is not None and found.status == block_jobs.READY:
            await block_jobs.complete(monitor, job.name)
            await failpoint("stord.merge.after_complete")
            found = await block_jobs.settled(monitor, job.name, END_WAIT_S, block_jobs.PENDING)
        if found is not None and found.status == block_jobs.PENDING:
            found = await self._pivot(control, monitor)
        if found is None or found.status in (block_jobs.RUNNING, block_jobs.CONCLUDED):
            await release(monitor, row.volume_id)
        return found

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
        await release(monitor, control.volume_id)
        await failpoint("stord.merge.after_cancel")
        if ended is not None and not ended.error:
            return ended  # it came to its end just before
        await give_up(self._records, control)
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
        await sync(self._parts, row)
        await self._records.put_volume(layers.finish_merge(row))
        await failpoint("stord.merge.after_record")
        if job is not None:
            await block_jobs.dismiss(monitor, job.name)
        await close_node(monitor, row.volume_id, row.change.layer)
        await failpoint("stord.merge.after_close")

    def _row(self, control: JobControl) -> Volume:
        return self._records.volumes[control.volume_id]
