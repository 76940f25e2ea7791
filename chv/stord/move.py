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
    InvalidArgument,
    NotFound,
    Unsupported,
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
from chv.stord.overlays import read_keys
from chv.stord.qsd import block_jobs, graph
from chv.stord.qsd.monitor import Monitor
from chv.stord.records import ChangeKind, Layer, LayerChange, Volume, VolumeState
from chv.stord.takeover import Takeover, reads_zeros
from chv.stord.tools import Call, Fresh

log = logs.get(__name__)
JOB_WORD = "move"
PIVOT_TIMEOUT_S = 10.0
CLEAN_TIMEOUT_S = 30.0
NO_SPEC: dict[str, None] = {"source": None, "snapshot": None, "backup": None}


def placed(spec: VolumeBackend, place: VolumeBackend) -> VolumeBackend:
    """Return the spec with the place of another."""
    return msgspec.structs.replace(
        spec,
        class_name=place.class_name,
        format=place.format,
        pool=place.pool,
        block=place.block,
        lvm=place.lvm,
        nbd=place.nbd,
        iscsi=place.iscsi,
        rbd=place.rbd,
    )


def empty(spec: VolumeBackend) -> VolumeBackend:
    """Return the spec of a volume that starts from nothing."""
    return msgspec.structs.replace(spec, **NO_SPEC)


class Moves:
    """Moves of all volumes. `locks` are the volumes' own."""

    def __init__(self, keeper: Keeper, jobs: Jobs, locks: KeyedLocks, benches: Benches) -> None:
        self._parts = keeper.parts
        self._records = keeper.parts.records
        self._disks = keeper.parts.disks
        self._jobs = jobs
        self._locks = locks
        self._benches = benches

    # --- the call
    async def begin(self, request: MoveVolume) -> JobInfo:
        """Check, then begin the job; the volume's lock is held."""
        job_id = request.meta.operation_id
        if job_id not in self._records.jobs:
            self._jobs.refuse_busy(request.volume_id)
            if self._row(request.volume_id).change is not None:
                await self._abandon(request.volume_id)
            await self._admit(self._row(request.volume_id), request.backend)
        return await self._jobs.start(request.volume_id, JobKind.MOVE, job_id, request, self.run)

    def _row(self, volume_id: str) -> Volume:
        row = self._records.volumes.get(volume_id)
        if row is None:
            raise NotFound(f"there is no volume {volume_id}", resource=volume_id)
        return row

    async def _admit(self, row: Volume, target: VolumeBackend) -> None:
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
        _check_target(row, target)
        backend = self._disks.backend(target)
        await backend.check(empty(target))
        if held is not None and not _is_local(target):
            confinement.require_network(self._records.backends[held.vm_id], "the new place")

    # --- the job
    async def run(self, control: JobControl) -> dict[str, str]:
        """Move, or go on where an earlier daemon was cut short."""
        request = control.parameters(MoveVolume)
        volume_id = request.volume_id
        await self._settle(volume_id)
        if not _is_at(self._row(volume_id), request.backend):
            await self._abandon(volume_id)
            await self._admit(self._row(volume_id), request.backend)
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

    async def _begin(self, volume_id: str, target: VolumeBackend) -> None:
        row = self._row(volume_id)
        change = LayerChange(kind=ChangeKind.MOVE, layer=row.next_layer, target=target)
        await self._put(volume_id, change=change, next_layer=row.next_layer + 1)
        await failpoint("stord.move.after_intent")
        # A guest may use all that its device has, which can be more than was asked for.
        found = await self._disks.inspect(volume_id)
        size_bytes = max(row.size_bytes, found.size_bytes)
        spec = msgspec.structs.replace(empty(placed(row.backend, target)), size_bytes=size_bytes)
        await self._disks.backend(target).make_base(volume_id, spec)
        await failpoint("stord.move.after_make")
        await Takeover(self._parts).format(volume_id, spec)

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
            await self._mirror(control, row, bench, request.bps_max)
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
        async with bench.monitor() as monitor:
            async with luks.secrets(monitor, self._parts.layout, row.volume_id, keys):
                await monitor.add_node(graph.overlay(row.volume_id, layer))
            await monitor.call(
                "blockdev-mirror",
                {
                    "job-id": _job(row),
                    "device": graph.throttle_node(row.volume_id),
                    "replaces": graph.format_node(row.volume_id, row.base),
                    "target": graph.format_node(row.volume_id, layer.number),
                    "sync": "full",
                    "copy-mode": "write-blocking",
                    "speed": bps_max,
                    "auto-finalize": False,
                    "auto-dismiss": False,
                },
            )
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


def _is_at(row: Volume, target: VolumeBackend) -> bool:
    return placed(row.backend, target) == row.backend


def _is_local(spec: VolumeBackend) -> bool:
    return spec.nbd is None and spec.iscsi is None and spec.rbd is None


def _check_target(row: Volume, target: VolumeBackend) -> None:
    """Refuse a target that is another volume, the same place, or one of the same name."""
    there = row.backend
    wanted = placed(there, target)
    differs = (target.size_bytes, target.access) != (there.size_bytes, there.access)
    if differs or target.encryption != there.encryption:
        raise InvalidArgument(
            "a move changes class, place, pool and format alone",
            resource=row.volume_id,
            field="backend",
            hint="change size, access and key by OpenVolume",
        )
    if wanted == there:
        raise FailedPrecondition(
            "the volume is there already", resource=row.volume_id, field="backend"
        )
    if wanted.class_name is there.class_name and there.class_name.value != "file":
        raise Unsupported(
            f"a volume of class {there.class_name.value} moves to another of its class only by"
            " way of class file",
            resource=row.volume_id,
            field="backend",
            hint="move it to class file, then on",
        )
    devices = ("block", "lvm")
    if wanted.class_name.value in devices and there.class_name.value in devices:
        raise Unsupported(
            "a volume moves from one device to another only by way of class file",
            resource=row.volume_id,
            field="backend",
            hint="move it to class file, then on",
        )
