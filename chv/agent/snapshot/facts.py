"""What both kinds of snapshot read off their records and off stord's volumes. Pure.

Fails with Unavailable or Conflict where the volumes cannot be frozen together now.
"""

from __future__ import annotations

from chv.agent.records import SnapshotFacts, SnapshotPart, StoredObject
from chv.common.errors import Conflict, Unavailable
from chv.common.wire import stord
from chv.common.wire.resources import VolumeSnapshot

Volumes = dict[str, stord.VolumeInfo]
Seen = dict[str, tuple[stord.VolumeInfo, stord.SnapshotInfo]]  # by volume id


def snapshot_of(stored: StoredObject) -> VolumeSnapshot:
    """Return the stored object as the snapshot that it is."""
    assert isinstance(stored.resource, VolumeSnapshot)
    return stored.resource


def snapshot_facts(stored: StoredObject) -> SnapshotFacts:
    """Return what became of it so far."""
    return stored.snapshot_facts or SnapshotFacts()


def phase_of(stored: StoredObject, facts: SnapshotFacts) -> str:
    """Return the one word."""
    if stored.deleting:
        return "Deleting"
    if facts.failed:
        return "Failed"
    return "Ready" if facts.taken else "Pending"


def holder_of(parts: tuple[SnapshotPart, ...], volumes: dict[str, stord.VolumeInfo]) -> str:
    """Return the VM that all volumes are attached to, '' where none is attached to any."""
    holders = set()
    for part in parts:
        volume = volumes.get(part.volume_uid)
        if volume is None or volume.state != "open":
            raise Unavailable(f"volume {part.volume} is not ready")
        if volume.job:
            raise Conflict(f"a job is under way on volume {part.volume}")
        holders.add(volume.attached_to)
    if len(holders) > 1:
        raise Conflict("its volumes are being attached or detached")
    return holders.pop()
