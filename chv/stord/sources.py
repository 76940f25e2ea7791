"""What a volume may start from: at most one source, and a snapshot that is there and whole."""

from __future__ import annotations

from chv.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unsupported,
)
from chv.common.wire.stord import CloneMode, SnapshotSource, VolumeBackend, VolumeClass
from chv.stord import layers
from chv.stord.layers import LAYERS_MAX
from chv.stord.records import Records, Snapshot


class Sources:
    """Checks sources against the records."""

    def __init__(self, records: Records) -> None:
        self._records = records

    def check(self, spec: VolumeBackend) -> None:
        """Raise where the volume cannot start from what it names."""
        given = [
            name for name in ("source", "snapshot", "backup") if getattr(spec, name) is not None
        ]
        if len(given) > 1:
            raise InvalidArgument(
                f"a volume starts from one thing, not from {' and '.join(given)}",
                field=f"backend.{given[1]}",
            )
        if spec.snapshot is not None:
            self._check_snapshot(spec, spec.snapshot)

    def _check_snapshot(self, spec: VolumeBackend, source: SnapshotSource) -> None:
        snapshot = self._find(source)
        if spec.size_bytes < snapshot.size_bytes:
            raise InvalidArgument(
                f"{spec.size_bytes} bytes are less than the {snapshot.size_bytes} of the snapshot",
                field="backend.size_bytes",
                hint=f"at least {snapshot.size_bytes}",
            )
        if source.mode is not CloneMode.LINKED:
            return
        if spec.class_name is not VolumeClass.FILE:
            raise Unsupported(
                f"a linked clone is a file, not of class {spec.class_name.value}",
                field="backend.snapshot.mode",
                hint="class file, or clone mode full",
            )
        self._check_key(spec, source)
        self._check_depth(source)

    def _check_key(self, spec: VolumeBackend, source: SnapshotSource) -> None:
        locked = self._records.volumes[source.volume_id].backend.encryption is not None
        if locked and spec.encryption is None:
            raise InvalidArgument(
                "a linked clone of an encrypted volume is encrypted as well",
                field="backend.encryption",
                hint="name a key, its own or that of the other volume, or make a full clone",
            )

    def _find(self, source: SnapshotSource) -> Snapshot:
        parent = self._records.volumes.get(source.volume_id)
        found = [] if parent is None else list(parent.snapshots)
        for snapshot in found:
            if snapshot.snapshot_id == source.snapshot_id:
                if snapshot.deleting:
                    raise FailedPrecondition(
                        f"the snapshot {source.snapshot_id} is being deleted",
                        field="backend.snapshot",
                    )
                return snapshot
        raise NotFound(
            f"there is no snapshot {source.snapshot_id} of volume {source.volume_id}",
            field="backend.snapshot",
        )

    def _check_depth(self, source: SnapshotSource) -> None:
        """Count the layers that reads of the clone may have to go through."""
        below = layers_below(self._records, source)
        if below + 1 > LAYERS_MAX:
            raise ResourceExhausted(
                f"a linked clone would rest on {below} layers, {LAYERS_MAX} is the most in all",
                field="backend.snapshot.mode",
                hint="clone mode full, or delete snapshots of the other volume first",
            )


def layers_below(records: Records, source: SnapshotSource | None) -> int:
    """Return how many layers of other volumes a linked clone of a snapshot rests on."""
    count = 0
    while source is not None and source.mode is CloneMode.LINKED and count <= LAYERS_MAX:
        parent = records.volumes[source.volume_id]
        snapshot = layers.require_snapshot(parent, source.snapshot_id)
        count += len(layers.upto(parent, snapshot.layer))
        source = parent.backend.snapshot
    return count
