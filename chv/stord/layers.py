"""Changes of a volume's layers, on its record. Pure: no files, no clock, no storage daemon.

A volume is a chain: the base, then overlays, of which only the last is written. A snapshot freezes
the last and puts a new one on top. The deletion of a snapshot merges the layer above its own
into its own, which then stands in that layer's place. A restoration drops everything above the
snapshot's layer for an empty overlay. Each change is begun (recorded before its first effect)
and finished or abandoned. A record of what was written since a backup does not outlive any of
them: it belongs to one layer. Rules that hold for every record: the snapshots of the layers are the
volume's snapshots; a number is never used twice; the top is frozen by no snapshot.
"""

from __future__ import annotations

import msgspec

from chv.common.errors import FailedPrecondition, NotFound, ResourceExhausted
from chv.stord.records import ChangeKind, Layer, LayerChange, Snapshot, Volume

# Each is one more file to look through for every read of something never written since.
LAYERS_MAX = 32


def find_snapshot(row: Volume, snapshot_id: str) -> Snapshot | None:
    """Return a snapshot of the volume."""
    return next((each for each in row.snapshots if each.snapshot_id == snapshot_id), None)


def require_snapshot(row: Volume, snapshot_id: str) -> Snapshot:
    """Return a snapshot of the volume, or raise NotFound."""
    found = find_snapshot(row, snapshot_id)
    if found is None:
        raise NotFound(f"the volume has no snapshot {snapshot_id}", resource=row.volume_id)
    return found


def require_whole(row: Volume, snapshot_id: str) -> Snapshot:
    """Return a snapshot that still is the state it was; a begun deletion has spoilt it."""
    found = require_snapshot(row, snapshot_id)
    if found.deleting:
        raise FailedPrecondition(
            f"snapshot {snapshot_id} is being deleted and no longer whole",
            resource=row.volume_id,
            hint="DeleteSnapshot again to finish its deletion; the volume itself is whole",
        )
    return found


def numbers(row: Volume) -> list[int]:
    """Return the numbers of the layers, the base first."""
    return [layer.number for layer in row.layers]


def upto(row: Volume, number: int) -> tuple[Layer, ...]:
    """Return the layers from the base to this one."""
    return row.layers[: numbers(row).index(number) + 1]


def above(row: Volume, number: int) -> int:
    """Return the number of the layer on top of a frozen one."""
    return row.layers[numbers(row).index(number) + 1].number


def below(row: Volume, number: int) -> int:
    """Return the number of the layer under this one, which is not the base."""
    return row.layers[numbers(row).index(number) - 1].number


def from_on(row: Volume, snapshot_id: str) -> list[str]:
    """Return this snapshot and those that froze a layer above its own, oldest first."""
    start = require_snapshot(row, snapshot_id).layer
    rest = numbers(row)[numbers(row).index(start) :]
    return [item.snapshot_id for n in rest for item in row.snapshots if item.layer == n]


def check_room(row: Volume, layers_below: int = 0) -> None:
    """Raise ResourceExhausted where the chain takes no further layer."""
    if len(row.layers) + layers_below >= LAYERS_MAX:
        raise ResourceExhausted(
            f"the volume has {len(row.layers) + layers_below} layers, at most {LAYERS_MAX}",
            resource=row.volume_id,
            hint="delete snapshots that nobody needs",
        )


# --- snapshot
def begin_snapshot(row: Volume, snapshot_id: str, created_at: str) -> Volume:
    """Say that a layer is being put on top."""
    assert row.change is None
    change = LayerChange(
        kind=ChangeKind.SNAPSHOT,
        layer=row.next_layer,
        snapshot_id=snapshot_id,
        created_at=created_at,
    )
    return msgspec.structs.replace(
        row, change=change, next_layer=row.next_layer + 1, backup_bitmap=""
    )


def finish_snapshot(row: Volume, size_bytes: int) -> Volume:
    """Say that the layer is on top and the one below frozen, at the size that it had."""
    change = row.change
    assert change is not None
    assert change.kind is ChangeKind.SNAPSHOT
    frozen = msgspec.structs.replace(row.top, snapshots=(*row.top.snapshots, change.snapshot_id))
    snapshot = Snapshot(
        snapshot_id=change.snapshot_id,
        layer=frozen.number,
        created_at=change.created_at,
        size_bytes=size_bytes,
    )
    return msgspec.structs.replace(
        row,
        change=None,
        layers=(*row.layers[:-1], frozen, Layer(number=change.layer)),
        snapshots=(*row.snapshots, snapshot),
    )


def abandon(row: Volume) -> Volume:
    """Say that the change was taken back. A merge has spoilt its snapshot, which stays marked."""
    return msgspec.structs.replace(row, change=None)


# --- merge
def begin_merge(row: Volume, snapshot_id: str) -> Volume:
    """Say that the layer above the snapshot's is going into it."""
    assert row.change is None
    snapshot = require_snapshot(row, snapshot_id)
    marked = tuple(
        msgspec.structs.replace(each, deleting=True) if each is snapshot else each
        for each in row.snapshots
    )
    change = LayerChange(
        kind=ChangeKind.MERGE, layer=above(row, snapshot.layer), snapshot_id=snapshot_id
    )
    return msgspec.structs.replace(row, change=change, snapshots=marked, backup_bitmap="")


def is_active(row: Volume) -> bool:
    """Tell whether the layer that is being merged is the one that is written."""
    return row.change is not None and row.change.layer == row.top.number


def pivot(row: Volume) -> Volume:
    """Say that the layer was merged whole and that nothing is written to it any more."""
    return _with_kind(row, ChangeKind.PIVOT)


def unpivot(row: Volume) -> Volume:
    """Say that the layer went on being written after all."""
    return _with_kind(row, ChangeKind.MERGE)


def _with_kind(row: Volume, kind: ChangeKind) -> Volume:
    assert row.change is not None
    return msgspec.structs.replace(row, change=msgspec.structs.replace(row.change, kind=kind))


def finish_merge(row: Volume) -> Volume:
    """Say that the layer is gone: the one below stands in its place, its snapshot is no more."""
    change = row.change
    assert change is not None
    assert change.kind in (ChangeKind.MERGE, ChangeKind.PIVOT)
    gone = next(layer for layer in row.layers if layer.number == change.layer)
    heir = Layer(number=below(row, change.layer), snapshots=gone.snapshots)
    layers = tuple(
        heir if layer.number == heir.number else layer for layer in row.layers if layer is not gone
    )
    snapshots = tuple(
        msgspec.structs.replace(each, layer=heir.number) if each.layer == gone.number else each
        for each in row.snapshots
        if each.layer != heir.number
    )
    return msgspec.structs.replace(row, change=None, layers=layers, snapshots=snapshots)


# --- restore
def restored(row: Volume, snapshot_id: str) -> Volume:
    """Return the record with an empty layer, the next number's, on the snapshot's own."""
    assert row.change is None
    snapshot = require_snapshot(row, snapshot_id)
    return msgspec.structs.replace(
        row,
        layers=(*upto(row, snapshot.layer), Layer(number=row.next_layer)),
        next_layer=row.next_layer + 1,
        backup_bitmap="",
    )
