"""MoveVolume: the bytes of a volume come to another place, also while its VM runs. A job.

Attached: a mirror in the VM's storage daemon, which the guest's writes go to as well, then a
pivot: at `pending` nothing is written, so the intention (MOVE_PIVOT) is recorded, then the graph
changes, then the volume's place is recorded, then the old place is removed. If everything dies
while the record says MOVE_PIVOT the copy is right, before that the source is. Detached: a copy.
The new base has a number of its own, for the name of a block node cannot change.
"""

from __future__ import annotations

from functools import partial

import anyio
import anyio.to_thread
import msgspec

from chv.common import logs
from chv.common.errors import (
    ChvError,
    FailedPrecondition,
    InUse,
    NotFound,
)
from chv.common.failpoint import failpoint
from chv.common.wire.stord import AccessMode, JobInfo, JobKind, MoveVolume, VolumeBackend
from chv.stord import confinement, luks
from chv.stord.backends import disk_files
from chv.stord.bench import Bench, Benches, follow
from chv.stord.cancelling import cancellable
from chv.stord.clones import users_of
from chv.stord.disks import local_paths
from chv.stord.jobs import JobControl, Jobs
from chv.stord.keeper import Keeper
from chv.stord.live import close_node, live_monitor
from chv.stord.locks import KeyedLocks
from chv.stord.move_rules import check_target, empty, is_at, limited, needs_network, placed
from chv.stord.overlays import read_keys
from chv.stord.qsd import block_jobs, graph, mirrors
from chv.stord.qsd.monitor import Monitor
from chv.stord.records import ChangeKind, Layer, LayerChange, Volume, VolumeState
from chv.stord.restarting import Restarting
from chv.stord.takeover import Takeover, reads_zeros
from chv.stord.tools import Call, Fresh

log = logs.get(__name__)
JOB_WORD = "move"
PIVOT_TIMEOUT_S = 10.0
CLEAN_TIMEOUT_S = 30.0


class Moves:
    """Moves of all volumes. `locks` are the volumes' own."""

    def __init__(self, keeper: Keeper, jobs: Jobs, locks: KeyedLocks, benches: Benches) -> None:
        self._parts = keeper.parts
        self._records = keeper.parts.records
        self._disks = keeper.parts.disks
        self._jobs = jobs
        self._locks = locks
        self._benches = benches
        self._restarting = Restarting(keeper)

    # --- the call
    async def begin(self, request: MoveVolume) -> JobInfo:
        """Check, then begin the job; the volume's lock is held."""
        job_id = request.meta.operation_id
        if job_id not in self._records.jobs:
            self._jobs.refuse_busy(request.volume_id)
            if self._row(request.volume_id).change is not None:
                await self._abandon(request.volume_id)
            await self._admit(self._row(request.volume_id), request)
        return await self._jobs.start(request.volume_id, JobKind.MOVE, job_id, request, self.run)

    def _row(self, volume_id: str) -> Volume:
        row = self._records.volumes.get(volume_id)
        if row is None:
            raise NotFound(f"there is no volume {volume_id}", resource=volume_id)
        return row

    async def _admit(self, row: Volume, request: MoveVolume) -> None:
        target = request.backend
        if users := users_of(self._records, row.volume_id):
            raise InUse(
                f"volumes {', '.join(users)} rest on snapshots of volume {row.volume_id}",
                resource=row.volume_id,
                hint="delete those clones first",
            )
        if row.state not in (VolumeState.OPEN, VolumeState.CLOSED) or row.change or row.old_key:
            raise FailedPrecondition(f"the volume is {row.state.value}", resource=row.volume_id)
        if len(row.layers) > 1 or row.snapshots:
            raise FailedPrecondition(
                "the volume has snapshots, which stay where they are",
                resource=row.volume_id,
                hint="delete its snapshots first",
            )
        held = self._records.holder(row.volume_id)
        if row.backend.access is AccessMode.READ_ONLY_MANY or (held and held.read_only):
            raise FailedPrecondition(
                "the volume is read by VMs that would not follow it",
                resource=row.volume_id,
                hint="stop them, or make a clone at the new place",
            )
        check_target(row, target)
        backend = self._disks.backend(target)
        await backend.check(empty(target))
        if held is not None and needs_network(target) and not request.replace_backend:
            confinement.require_network(self._records.backends[held.vm_id], "the new place")

    # --- the job
    async def run(self, control: JobControl) -> dict[str, str]:
        """Move, or go on where an earlier daemon was cut short."""
        request = control.parameters(MoveVolume)
        volume_id = request.volume_id
        await self._settle(volume_id)
        if not is_at(self._row(volume_id), request.backend):
            await self._abandon(volume_id)
            await self._admit(self._row(volume_id), request)
            await self._reach(control, request)
            try:
                await self._begin(volume_id, request.backend)
                await self._copy(control, request)
            except BaseException as error:
                with anyio.move_on_after(CLEAN_TIMEOUT_S, shield=True):
                    await self._abandon_after(error, volume_id)
                raise
        await self._finish(volume_id)
        found = await self._disks.inspect(volume_id)
        return {"location": found.location, "bytes": str(found.size_bytes)}

    async def _reach(self, control: JobControl, request: MoveVolume) -> None:
        """See that the VM's storage daemon has the network that the new place needs.

        It has one from its start or never, so one that has none is replaced under the guest.
        """
        held = self._records.holder(request.volume_id)
        if held is None or not needs_network(request.backend):
            return
        await control.progress(0, 0, "the VM's storage daemon is given a network")
        await self._restarting.give_network(held.vm_id, control.job_id)

    async def _begin(self, volume_id: str, target: VolumeBackend) -> None:
        row = self._row(volume_id)
        change = LayerChange(kind=ChangeKind.MOVE, layer=row.next_layer, target=target)
        await self._put(volume_id, change=change, next_layer=row.next_layer + 1)
        await failpoint("stord.move.after_intent")
        spec = msgspec.structs.replace(
            empty(placed(row.backend, target)), size_bytes=await self._seen_bytes(row)
        )
        await self._disks.backend(target).make_base(volume_id, spec)
        await failpoint("stord.move.after_make")
        await Takeover(self._parts).format(volume_id, spec)

    async def _seen_bytes(self, row: Volume) -> int:
        """Return what a guest has of the volume: a device can be more than was asked for."""
        if self._records.holder(row.volume_id) is None:
            return max(row.size_bytes, (await self._disks.inspect(row.volume_id)).size_bytes)
        async with self._benches.of(row) as bench, bench.monitor() as monitor:
            return await block_jobs.size_bytes(monitor, graph.throttle_node(row.volume_id))

    async def _put(self, volume_id: str, **changes: object) -> None:
        row = self._row(volume_id)
        await self._records.put_volume(msgspec.structs.replace(row, **changes))

    async def _copy(self, control: JobControl, request: MoveVolume) -> None:
        row = self._row(request.volume_id)
        if self._records.holder(row.volume_id) is None:
            await self._copy_detached(control, row)
            async with self._locks.hold(row.volume_id):
                await self._record_place(row.volume_id)
            return
        async with self._benches.of(row) as bench:
            if request.waits:
                await control.await_word()
            await self._mirror(control, row, bench, request.bps_max)
            control.require_stillness()
            control.heed_word()
            await follow(bench, control, _job(row), block_jobs.READY)
            async with self._locks.hold(row.volume_id), bench.monitor() as monitor:
                control.refuse_cancelled()
                await self._pivot(monitor, row.volume_id)

    def _target_layer(self, row: Volume) -> graph.LayerNode:
        assert row.change is not None
        assert row.change.target is not None
        spec = empty(placed(row.backend, row.change.target))
        return graph.LayerNode(
            number=row.change.layer,
            format=spec.format.value,
            protocol=self._disks.backend(spec).protocol(row.volume_id, spec),
            key=row.key,
        )

    async def _copy_detached(self, control: JobControl, row: Volume) -> None:
        assert row.change is not None
        assert row.change.target is not None
        spec = empty(placed(row.backend, row.change.target))
        layer = await anyio.to_thread.run_sync(self._target_layer, row)
        disk = await anyio.to_thread.run_sync(
            partial(self._disks.disk, row.volume_id, read_only=True)
        )
        target = graph.image_node(layer, graph.secret_id(row.volume_id, layer.key))
        if layer.format == "qcow2":
            target["backing"] = None
        call = Call(
            owns=(*local_paths(disk.own), *local_paths((layer,))),
            reads=tuple(local_paths(disk.below)),
            keys=await read_keys(self._parts.layout, row.volume_id, disk.keys),
            volume_id=row.volume_id,
        )
        control.total_bytes = row.size_bytes
        nodes = graph.chain(disk), target
        fresh = Fresh(zeros=reads_zeros(spec))
        copying = partial(self._parts.tools.convert, *nodes, call, control.percent, fresh=fresh)
        with disk_files.exclusively(self._disks.lock_path(row.volume_id)):
            async with (
                self._disks.reach(row.volume_id),
                self._disks.backend(spec).reach(row.volume_id, spec),
            ):
                await cancellable(control, copying)
        await failpoint("stord.move.after_copy")

    # --- attached
    async def _mirror(self, control: JobControl, row: Volume, bench: Bench, bps_max: int) -> None:
        control.refuse_cancelled()
        layer = await anyio.to_thread.run_sync(self._target_layer, row)
        assert row.change is not None
        assert row.change.target is not None
        spec = empty(placed(row.backend, row.change.target))
        lend = self._disks.backend(spec).lend_base
        await anyio.to_thread.run_sync(lend, row.volume_id, spec, bench.uid)
        keys = {row.key} if row.key else set()
        found = await self._disks.backend(spec).inspect(row.volume_id, spec)
        async with bench.monitor() as monitor:
            seen = await block_jobs.size_bytes(monitor, graph.throttle_node(row.volume_id))
            if found.size_bytes > seen:
                layer = limited(layer, seen)
            async with luks.secrets(monitor, self._parts.layout, row.volume_id, keys):
                await mirrors.start(monitor, row, layer, _job(row))
            await block_jobs.set_speed(monitor, _job(row), bps_max)
        await failpoint("stord.move.after_start")

    async def _pivot(self, monitor: Monitor, volume_id: str) -> None:
        """Let the guest go on at the new place. Under the locks of volume and VM."""
        row = self._row(volume_id)
        assert row.change is not None
        await block_jobs.complete(monitor, _job(row))
        job = await block_jobs.settled(monitor, _job(row), PIVOT_TIMEOUT_S, block_jobs.PENDING)
        if job is None or job.status != block_jobs.PENDING:
            raise FailedPrecondition(
                f"the mirror did not come to its end: {job.error or job.status if job else 'gone'}",
                resource=volume_id,
                hint="move it again",
            )
        change = msgspec.structs.replace(row.change, kind=ChangeKind.MOVE_PIVOT)
        await self._put(volume_id, change=change)
        await failpoint("stord.move.after_pivot_intent")
        await self._finalize(monitor, volume_id)

    async def _finalize(self, monitor: Monitor, volume_id: str) -> None:
        """Change the graph, and record what it is then."""
        row = self._row(volume_id)
        assert row.change is not None
        job = await block_jobs.find(monitor, _job(row))
        if job is not None and job.status == block_jobs.PENDING:
            await block_jobs.finalize(monitor, _job(row))
            await block_jobs.settled(monitor, _job(row), PIVOT_TIMEOUT_S)
        await failpoint("stord.move.after_finalize")
        if await block_jobs.is_on_top(monitor, volume_id, row.change.layer):
            await self._record_place(volume_id)
            await block_jobs.cancel_of(monitor, volume_id)
            await close_node(monitor, volume_id, row.base)
        else:
            await self._put(
                volume_id, change=msgspec.structs.replace(row.change, kind=ChangeKind.MOVE)
            )

    async def _record_place(self, volume_id: str) -> None:
        """From here on the copy is the volume; the change now names the old place."""
        row = self._row(volume_id)
        assert row.change is not None
        assert row.change.target is not None
        old = LayerChange(kind=ChangeKind.MOVE_PIVOT, layer=row.change.layer, target=row.backend)
        await self._put(
            volume_id,
            backend=placed(row.backend, row.change.target),
            layers=(Layer(number=row.change.layer),),
            flat=True,
            change=old,
            backup_bitmap="",
        )
        await failpoint("stord.move.after_record")

    # --- the end, and what a kill left
    async def settle_vm(self, vm_id: str) -> None:
        """Decide pivots that were cut short, before anything is opened. The VM's lock is held."""
        for attachment in self._records.of_vm(vm_id):
            row = self._records.volumes.get(attachment.volume_id)
            if row is not None and _is_undecided(row):
                async with live_monitor(self._parts, vm_id, "move") as monitor:
                    if monitor is None:
                        await self._record_place(row.volume_id)
                    else:
                        await self._finalize(monitor, row.volume_id)

    async def _settle(self, volume_id: str) -> None:
        row = self._row(volume_id)
        if _is_undecided(row) and self._records.holder(volume_id) is None:
            await self._record_place(volume_id)

    async def _finish(self, volume_id: str) -> None:
        """Remove the old place; the record names it until it is gone."""
        row = self._row(volume_id)
        if row.change is None or row.change.target is None:
            return
        home = self._parts.layout.volume(volume_id)
        await anyio.to_thread.run_sync(disk_files.describe, home, empty(row.backend))
        old = row.change.target
        await self._disks.backend(old).drop_base(volume_id, old)
        await failpoint("stord.move.after_drop")
        await self._put(volume_id, change=None)
        log.info("volume_moved", volume_id=volume_id, place=row.backend.class_name.value)

    async def _abandon(self, volume_id: str) -> None:
        """Leave the old place as it is and nothing of the new one; or finish what is decided."""
        row = self._row(volume_id)
        if row.change is None or row.change.target is None:
            return
        if row.change.kind is ChangeKind.MOVE_PIVOT:
            await self._finish(volume_id)
            return
        target = empty(placed(row.backend, row.change.target))
        held = self._records.holder(volume_id)
        if held is not None:
            try:
                async with self._benches.of(row) as bench, bench.monitor() as monitor:
                    await block_jobs.cancel_of(monitor, volume_id)
                    await close_node(monitor, volume_id, row.change.layer)
            except ChvError as error:  # nothing of it is open in a storage daemon that is gone
                log.warning("move_not_cleaned", volume_id=volume_id, error=error)
        await self._disks.backend(target).drop_base(volume_id, target)
        await self._put(volume_id, change=None)

    async def _abandon_after(self, error: BaseException, volume_id: str) -> None:
        try:
            await self._abandon(volume_id)
        except ChvError as second:  # the next move or start tries again
            log.warning("move_not_abandoned", volume_id=volume_id, error=second, after=str(error))


def _job(row: Volume) -> str:
    return block_jobs.job_name(JOB_WORD, row.volume_id)


def _is_undecided(row: Volume) -> bool:
    """Tell whether a pivot was begun and the place not recorded."""
    change = row.change
    pivot = change is not None and change.kind is ChangeKind.MOVE_PIVOT
    return pivot and change is not None and change.layer != row.base
