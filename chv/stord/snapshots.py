"""Snapshots: taken of one volume or of several in the same instant, restored, listed.

Of volumes that a VM writes: overlays are made, opened in the VM's storage daemon and put on top
of all chains by one transaction; of others the overlay alone is. The intention is recorded
before, for all volumes in one commit, and so is the outcome. What was cut short in between is
settled by looking: at the live graph, where the transaction has happened for all or for none, or,
when the storage daemon is dead, at the files: if every overlay was made whole the snapshot counts,
since an overlay that nobody has written to changes nothing, and one that somebody has is needed.
"""

from __future__ import annotations

import os

import anyio
import anyio.to_thread

from chv.common import logs
from chv.common.clock import timestamp
from chv.common.errors import (
    ChvError,
    Conflict,
    FailedPrecondition,
    InUse,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from chv.common.failpoint import failpoint
from chv.common.wire.stord import (
    AccessMode,
    CreateSnapshot,
    SnapshotInfo,
    SnapshotRef,
    SnapshotsReply,
    SpaceLevel,
)
from chv.stord import layers, luks
from chv.stord.backends import disk_files
from chv.stord.jobs import Jobs
from chv.stord.live import close_node, live_monitor
from chv.stord.overlays import Overlays
from chv.stord.qsd import block_jobs, graph
from chv.stord.qsd.monitor import Monitor
from chv.stord.records import BackendPhase, ChangeKind, Volume, VolumeState
from chv.stord.sources import layers_below
from chv.stord.work import Parts

log = logs.get(__name__)
UNDO_TIMEOUT_S = 10.0


class Snapshots:
    """Snapshots of all volumes."""

    def __init__(self, parts: Parts, jobs: Jobs, overlays: Overlays) -> None:
        self._parts = parts
        self._records = parts.records
        self._jobs = jobs
        self._overlays = overlays

    # --- create
    async def create(self, request: CreateSnapshot) -> SnapshotsReply:
        """Freeze all volumes or none; the same snapshot again is the same answer.

        The caller holds the locks of the volumes and that of the VM.
        """
        volume_ids = sorted(set(request.volume_ids))
        for volume_id in volume_ids:
            await self.settle(volume_id)
        if not self._is_there(volume_ids, request.snapshot_id):
            for volume_id in volume_ids:
                await self._admit(volume_id, request)
            await self._take(volume_ids, request)
        found = [await self.info(each, request.snapshot_id) for each in volume_ids]
        return SnapshotsReply(snapshots=found)

    def _is_there(self, volume_ids: list[str], snapshot_id: str) -> bool:
        """Tell whether these volumes have the snapshot; Conflict where it is one of others."""
        having = {
            row.volume_id
            for row in self._records.volumes.values()
            if layers.find_snapshot(row, snapshot_id) is not None
        }
        if having and not having.issuperset(volume_ids):
            raise Conflict(
                f"snapshot {snapshot_id} exists and is of other volumes: {', '.join(having)}",
                field="snapshot_id",
                hint="a snapshot id names one snapshot",
            )
        return bool(having)

    def _row(self, volume_id: str) -> Volume:
        row = self._records.volumes.get(volume_id)
        if row is None:
            raise NotFound(f"there is no volume {volume_id}", resource=volume_id)
        return row

    async def _admit(self, volume_id: str, request: CreateSnapshot) -> None:
        row = self._row(volume_id)
        self._jobs.refuse_busy(volume_id)
        if row.state is not VolumeState.OPEN or row.change is not None:
            what = row.state.value if row.change is None else f"in a {row.change.kind.value}"
            raise FailedPrecondition(f"the volume is {what}", resource=volume_id)
        if row.backend.access is AccessMode.READ_ONLY_MANY:
            raise FailedPrecondition(
                "a ReadOnlyMany volume never changes and has no use for a snapshot",
                resource=volume_id,
                hint="make a clone of it to write to",
            )
        layers.check_room(row, layers_below(self._records, row.backend.snapshot))
        self._admit_holder(row, request.vm_id)
        await self._admit_space(row)

    def _admit_holder(self, row: Volume, vm_id: str) -> None:
        holders = self._records.holders(row.volume_id)
        others = [each.vm_id for each in holders if each.vm_id != vm_id]
        if others:
            raise FailedPrecondition(
                f"the volume is attached to VM {others[0]}",
                resource=row.volume_id,
                field="vm_id",
                hint=f"name that VM, now it is {vm_id!r}",
            )
        if not vm_id:
            return
        backend = self._records.backends.get(vm_id)
        if not holders or backend is None or backend.phase is not BackendPhase.SERVING:
            raise FailedPrecondition(
                f"the volume is not served to VM {vm_id}",
                resource=row.volume_id,
                field="vm_id",
                hint="RecoverVmBackend, or leave vm_id empty for volumes that are not attached",
            )
        if holders[0].read_only or not holders[0].wanted or not holders[0].published:
            raise FailedPrecondition(
                "the VM does not write to the volume", resource=row.volume_id, field="volume_ids"
            )

    async def _admit_space(self, row: Volume) -> None:
        space = await self._parts.disks.overlay_space(row.volume_id)
        if space is not None and space.level is SpaceLevel.CRITICAL:
            raise ResourceExhausted(
                f"{space.free_bytes} bytes are left for the volume's layers",
                resource=row.volume_id,
                hint="free space: a snapshot makes the volume grow with every write",
            )

    async def _take(self, volume_ids: list[str], request: CreateSnapshot) -> None:
        now = timestamp(self._parts.clock.now())
        rows = [self._row(each) for each in volume_ids]
        begun = [layers.begin_snapshot(row, request.snapshot_id, now) for row in rows]
        await self._records.put_volumes(begun)
        await failpoint("stord.snapshot.after_intent")
        failure: Exception | None = None
        try:
            for row in begun:
                assert row.change is not None
                size_bytes = await self._overlays.size_bytes(row)
                await self._overlays.make(row, row.change.layer, size_bytes)
            await failpoint("stord.snapshot.after_overlays")
            if request.vm_id:
                await self._put_on_top(request.vm_id, begun)
        except (ChvError, OSError, TimeoutError) as error:
            failure = error
        except BaseException:
            with anyio.move_on_after(UNDO_TIMEOUT_S, shield=True):
                await self._settle_group(begun)
            raise
        if failure is not None:
            # What was begun is settled, or left for the next look; it may be there after all.
            with anyio.move_on_after(UNDO_TIMEOUT_S, shield=True):
                await self._settle_group(begun)
            if not self._is_there(volume_ids, request.snapshot_id):
                raise failure
            return
        await self._finish(begun)
        await failpoint("stord.snapshot.after_record")
        log.info("snapshot_taken", snapshot_id=request.snapshot_id, volumes=volume_ids)

    async def _put_on_top(self, vm_id: str, rows: list[Volume]) -> None:
        async with live_monitor(self._parts, vm_id, "snapshot") as monitor:
            if monitor is None:
                raise Unavailable("the VM's storage daemon has ended", resource=vm_id)
            for row in rows:
                await self._open_overlay(monitor, vm_id, row)
            await failpoint("stord.snapshot.after_blockdev")
            actions = [_snapshot_action(row) for row in rows]
            await monitor.call("transaction", {"actions": actions})
            await failpoint("stord.snapshot.after_transaction")

    async def _open_overlay(self, monitor: Monitor, vm_id: str, row: Volume) -> None:
        assert row.change is not None
        number, uid = row.change.layer, self._records.backends[vm_id].storage_uid
        path = self._overlays.path(row.volume_id, number)
        os.chown(path, uid, uid, follow_symlinks=False)
        layer = await anyio.to_thread.run_sync(self._parts.disks.layer, row.volume_id, number)
        keys = [layer.key] if layer.key else []
        async with luks.secrets(monitor, self._parts.layout, row.volume_id, keys):
            await monitor.add_node(graph.overlay(row.volume_id, layer))

    async def _finish(self, begun: list[Volume]) -> None:
        """Record the outcome for all volumes at once."""
        rows = [self._row(row.volume_id) for row in begun]
        sizes = [await self._overlays.size_bytes(row) for row in rows]
        pairs = zip(rows, sizes, strict=True)
        await self._records.put_volumes(
            [layers.finish_snapshot(row, size_bytes) for row, size_bytes in pairs]
        )

    # --- what was cut short
    async def settle(self, volume_id: str) -> None:
        """Finish or take back the snapshot that a kill or a hung storage daemon left open.

        The caller holds the lock of the VM that the volume is attached to.
        """
        row = self._records.volumes.get(volume_id)
        if row is None or row.change is None or row.change.kind is not ChangeKind.SNAPSHOT:
            return
        wanted = row.change.snapshot_id
        rows = self._records.volumes.values()
        group = [
            each
            for each in rows
            if each.change is not None
            and each.change.kind is ChangeKind.SNAPSHOT
            and each.change.snapshot_id == wanted
        ]
        await self._settle_group(group)

    async def settle_vm(self, vm_id: str) -> None:
        """Do so for every volume of a VM, before it gets a new storage daemon."""
        for attachment in self._records.of_vm(vm_id):
            await self.settle(attachment.volume_id)

    async def settle_detached(self) -> None:
        """Do so for all that no VM holds; at start. One bad volume does not keep others away."""
        for row in list(self._records.volumes.values()):
            if self._records.holder(row.volume_id) is None:
                try:
                    await self.settle(row.volume_id)
                except (ChvError, OSError) as error:
                    log.warning("snapshot_unsettled", volume_id=row.volume_id, error=error)

    async def _settle_group(self, group: list[Volume]) -> None:
        holder = self._records.holder(group[0].volume_id)
        if holder is None:
            await self._settle_by_files(group)
            return
        async with live_monitor(self._parts, holder.vm_id, "snapshot") as monitor:
            if monitor is None:
                await self._settle_by_files(group)
                return
            taken = [await self._is_taken(monitor, row) for row in group]
            if all(taken):
                await self._finish(group)
            elif not any(taken):
                for row in group:
                    assert row.change is not None
                    await close_node(monitor, row.volume_id, row.change.layer)
                await self._take_back(group)
            else:
                raise Conflict(
                    f"the layers of volumes {[row.volume_id for row in group]} are neither"
                    " all nor none on top",
                    resource=holder.vm_id,
                )

    @staticmethod
    async def _is_taken(monitor: Monitor, row: Volume) -> bool:
        assert row.change is not None
        return await block_jobs.is_on_top(monitor, row.volume_id, row.change.layer)

    async def _settle_by_files(self, group: list[Volume]) -> None:
        changes = [(row.volume_id, row.change) for row in group]
        made = [each is not None and self._overlays.exists(v, each.layer) for v, each in changes]
        if all(made):
            await self._finish(group)
        else:
            await self._take_back(group)

    async def _take_back(self, group: list[Volume]) -> None:
        for row in group:
            assert row.change is not None
            await self._overlays.remove(row.volume_id, row.change.layer)
        rows = [layers.abandon(self._row(row.volume_id)) for row in group]
        await self._records.put_volumes(rows)
        log.info("snapshot_taken_back", volumes=[row.volume_id for row in group])

    # --- restore
    async def restore(self, request: SnapshotRef) -> None:
        """Make the volume what it was at the snapshot; the caller holds the volume's lock."""
        await self.settle(request.volume_id)
        row = self._row(request.volume_id)
        self._jobs.refuse_busy(row.volume_id)
        layers.require_whole(row, request.snapshot_id)
        self._admit_restore(row, request.snapshot_id)
        await self._admit_space(row)
        number = row.next_layer
        with disk_files.exclusively(self._parts.disks.lock_path(row.volume_id)):
            size_bytes = await self._overlays.size_bytes(row)
            await self._overlays.make(row, number, size_bytes)
            await failpoint("stord.restore.after_overlay")
            left = layers.restored(self._row(row.volume_id), request.snapshot_id)
            await self._records.put_volume(left)
            await failpoint("stord.restore.after_record")
            for gone in set(layers.numbers(row)) - set(layers.numbers(left)):
                await self._overlays.remove(row.volume_id, gone)
        log.info("snapshot_restored", volume_id=row.volume_id, snapshot_id=request.snapshot_id)

    def _admit_restore(self, row: Volume, snapshot_id: str) -> None:
        held = self._records.holder(row.volume_id)
        if held is not None:
            raise InUse(
                f"the volume is attached to VM {held.vm_id}",
                resource=row.volume_id,
                hint="stop the VM first",
            )
        if row.state is not VolumeState.OPEN or row.change is not None:
            raise FailedPrecondition(f"the volume is {row.state.value}", resource=row.volume_id)
        later = layers.from_on(row, snapshot_id)[1:]
        if later:
            raise FailedPrecondition(
                f"the volume has later snapshots: {', '.join(later)}",
                resource=row.volume_id,
                field="snapshot_id",
                hint="delete them first, the newest first; they would be lost",
            )

    # --- list
    async def info(self, volume_id: str, snapshot_id: str) -> SnapshotInfo:
        """Describe one snapshot of one volume."""
        row = self._row(volume_id)
        found = layers.require_snapshot(row, snapshot_id)
        return SnapshotInfo(
            snapshot_id=snapshot_id,
            volume_id=volume_id,
            created_at=found.created_at,
            size_bytes=found.size_bytes,
            allocated_bytes=await self._allocated_bytes(row, found.layer),
            used_by=sorted(self._records.clones(volume_id, snapshot_id)),
            deleting=found.deleting,
        )

    async def _allocated_bytes(self, row: Volume, number: int) -> int:
        if number == row.base:
            backend = self._parts.disks.backend(row.backend)
            return (await backend.inspect(row.volume_id, row.backend)).allocated_bytes
        try:
            status = self._overlays.path(row.volume_id, number).stat()
        except FileNotFoundError:
            return 0
        return status.st_blocks * disk_files.STAT_BLOCK_BYTES

    async def of(self, volume_id: str) -> list[SnapshotInfo]:
        """Describe all snapshots of a volume, oldest first."""
        rows = self._row(volume_id).snapshots
        return [await self.info(volume_id, each.snapshot_id) for each in rows]

    async def list(self) -> SnapshotsReply:
        """Describe all, by volume and age."""
        ids = sorted(self._records.volumes)
        return SnapshotsReply(snapshots=[item for each in ids for item in await self.of(each)])


def _snapshot_action(row: Volume) -> graph.Node:
    assert row.change is not None
    return {
        "type": "blockdev-snapshot",
        "data": {
            "node": graph.format_node(row.volume_id, row.top.number),
            "overlay": graph.format_node(row.volume_id, row.change.layer),
        },
    }
