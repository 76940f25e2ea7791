"""Volumes that start from a snapshot of another: linked (an overlay on it) or full (a copy).

A linked clone is made at once: it is an empty qcow2 whose chain goes on below with the frozen
layers of the other volume, which may be attached and running meanwhile. It keeps them from being
deleted. A full clone is filled by a job, from the same layers, which it needs until that ends.
"""

from __future__ import annotations

from functools import partial

import anyio
import anyio.to_thread

from chv.common.errors import FailedPrecondition, InUse, NotFound
from chv.common.failpoint import failpoint
from chv.common.wire.stord import SnapshotSource
from chv.stord import layers
from chv.stord.cancelling import cancellable
from chv.stord.disks import Disks, local_paths
from chv.stord.jobs import JobControl
from chv.stord.overlays import read_keys
from chv.stord.qsd import graph
from chv.stord.records import Records, Volume, VolumeState
from chv.stord.takeover import padding_bytes, reads_zeros
from chv.stord.tools import Call, Fresh
from chv.stord.work import Parts


def users_of(records: Records, volume_id: str, snapshot_id: str = "") -> list[str]:
    """Return the volumes that need a volume (one of its snapshots): linked clones, open copies."""
    copies = [
        row.volume_id
        for row in records.volumes.values()
        if row.state is VolumeState.CREATING
        and (source := row.backend.snapshot) is not None
        and source.volume_id == volume_id
        and snapshot_id in ("", source.snapshot_id)
    ]
    return sorted({*records.clones(volume_id, snapshot_id), *copies})


def refuse_used(records: Records, volume_id: str) -> None:
    """Raise InUse where another volume needs this one."""
    if users := users_of(records, volume_id):
        raise InUse(
            f"volumes {', '.join(users)} rest on snapshots of volume {volume_id}",
            resource=volume_id,
            hint="delete those clones first",
        )


def _parent(records: Records, source: SnapshotSource) -> Volume:
    parent = records.volumes.get(source.volume_id)
    if parent is None:
        raise NotFound(f"there is no volume {source.volume_id}", field="backend.snapshot.volume_id")
    if parent.state in (VolumeState.CREATING, VolumeState.DELETING):
        raise FailedPrecondition(
            f"volume {source.volume_id} is {parent.state.value}",
            field="backend.snapshot.volume_id",
        )
    return parent


def _source_layers(disks: Disks, parent: Volume, snapshot_id: str) -> tuple[graph.LayerNode, ...]:
    """Return the read-only layers whose top is the snapshot."""
    disk = disks.disk(parent.volume_id, read_only=True)
    snapshot = layers.require_whole(parent, snapshot_id)
    return (*disk.below, *disk.own[: len(layers.upto(parent, snapshot.layer))])


class Copies:
    """Fills full clones; see `chv.stord.filling`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def fill(self, control: JobControl, row: Volume) -> None:
        """Copy the snapshot into the volume, which is empty; cancelled where somebody wants so."""
        disks = self._parts.disks
        source = row.backend.snapshot
        assert source is not None
        parent = _parent(self._parts.records, source)
        read = partial(_source_layers, disks, parent, source.snapshot_id)
        below = await anyio.to_thread.run_sync(read)
        target = await anyio.to_thread.run_sync(disks.layer, row.volume_id, row.top.number)
        await control.progress(0, row.backend.size_bytes, "qemu-img copies the snapshot")
        await self._copy(control, row, (parent.volume_id, below), target)

    async def _copy(
        self,
        control: JobControl,
        row: Volume,
        source: tuple[str, tuple[graph.LayerNode, ...]],
        target: graph.LayerNode,
    ) -> None:
        parent_id, below = source
        taken = row.backend.snapshot
        assert taken is not None
        parent = self._parts.records.volumes[parent_id]
        filled_bytes = layers.require_snapshot(parent, taken.snapshot_id).size_bytes
        padding = padding_bytes(row.backend, filled_bytes)
        # Composed as the parent's own, so that every layer finds its key by the parent's id.
        disk = graph.Disk(volume_id=parent_id, own=below, read_only=True)
        layout, own_keys = self._parts.layout, [target.key] if target.key else []
        call = Call(
            owns=tuple(local_paths((target,))),
            reads=tuple(local_paths(below)),
            keys=await read_keys(layout, parent_id, disk.keys)
            | await read_keys(layout, row.volume_id, own_keys),
            volume_id=row.volume_id,
        )
        node = graph.image_node(target, graph.secret_id(row.volume_id, target.key))
        fresh = Fresh(zeros=reads_zeros(row.backend), padding_bytes=padding)
        convert = self._parts.tools.convert
        copying = partial(convert, graph.chain(disk), node, call, control.percent, fresh=fresh)
        async with self._parts.disks.reach(row.volume_id, parent_id):
            await cancellable(control, copying)
        await failpoint("stord.copy.after_fill")
