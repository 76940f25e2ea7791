"""What a volume starts from: a name in its spec to what stord can open. Reads tables only."""

from __future__ import annotations

from dataclasses import dataclass

from chv.agent.records import StoredObject
from chv.agent.tables import Tables
from chv.agent.volume.wish import Source
from chv.common.errors import InvalidArgument
from chv.common.wire import stord
from chv.common.wire.resources import (
    CloneModeName,
    ImageStatus,
    Volume,
    VolumeSnapshot,
    VolumeSourceSpec,
)


@dataclass(frozen=True, slots=True)
class Unready:
    """The source is not there yet; why."""

    reason: str
    message: str


def resolve(tables: Tables, volume: Volume) -> Source | Unready | None:
    """Return what the volume is to be made from; None: it starts empty."""
    source = volume.spec.source
    if source is None:
        return None
    if source.image:
        return _image(tables, volume.metadata.namespace, source.image)
    if source.snapshot:
        return _snapshot(tables, volume.metadata.namespace, source)
    return stord.BackupSource(target=source.backup, sequence=source.backup_sequence)


def _image(tables: Tables, namespace: str, name: str) -> Source | Unready:
    image = tables.find("Image", namespace, name)
    status = image.resource.status if image is not None else None
    if not isinstance(status, ImageStatus) or status.phase != "Ready" or status.disk is None:
        return Unready("ImageNotReady", f"waits for image {name}")
    return stord.VolumeSource(
        path=status.disk.path,
        sha256=status.disk.sha256,
        format=stord.VolumeFormat(status.disk.format),
    )


def _snapshot(tables: Tables, namespace: str, source: VolumeSourceSpec) -> Source | Unready:
    stored = tables.find("VolumeSnapshot", namespace, source.snapshot)
    if stored is not None and has_failed(stored):
        raise InvalidArgument(
            f"snapshot {source.snapshot} has failed and never will be there",
            field="spec.source.snapshot",
            hint="delete both, take another snapshot, and make the volume from that",
        )
    if stored is None or not is_ready(stored):
        return Unready("SnapshotNotReady", f"waits for snapshot {source.snapshot}")
    volume_uid = volume_of(stored, source.snapshot_volume)
    if not volume_uid:
        raise _no_such_part(stored, source)
    full = source.mode is CloneModeName.FULL
    return stord.SnapshotSource(
        volume_id=volume_uid,
        snapshot_id=stored.uid,
        mode=stord.CloneMode.FULL if full else stord.CloneMode.LINKED,
    )


def _no_such_part(stored: StoredObject, source: VolumeSourceSpec) -> InvalidArgument:
    """Which volumes a snapshot is of was decided once, so that waiting does not help."""
    parts = stored.snapshot_facts.parts if stored.snapshot_facts is not None else ()
    names = ", ".join(part.volume for part in parts)
    wanted = source.snapshot_volume
    what = f"does not have volume {wanted!r}" if wanted else "has several volumes"
    return InvalidArgument(
        f"snapshot {source.snapshot} {what}: it is of {names}",
        field="spec.source.snapshotVolume",
        hint=f"delete this volume and make it with snapshotVolume as one of {names}",
    )


def is_ready(stored: StoredObject) -> bool:
    """Tell whether a snapshot is there and stays."""
    snapshot = stored.resource
    assert isinstance(snapshot, VolumeSnapshot)
    ready = snapshot.status is not None and snapshot.status.phase == "Ready"
    return ready and not stored.deleting


def has_failed(stored: StoredObject) -> bool:
    """Tell whether a snapshot was not taken, or is lost."""
    snapshot = stored.resource
    assert isinstance(snapshot, VolumeSnapshot)
    return snapshot.status is not None and snapshot.status.phase == "Failed"


def volume_of(stored: StoredObject, name: str) -> str:
    """Return the uid of a volume of a snapshot: by its name, or the only one; '' for none."""
    facts = stored.snapshot_facts
    parts = facts.parts if facts is not None else ()
    named = [part.volume_uid for part in parts if name in ("", part.volume)]
    return named[0] if len(named) == 1 else ""
