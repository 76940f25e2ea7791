"""What the loss of the storage daemon means for a VM. Pure; recomputed after each graph change.

A restart is invisible to the guest only where every disk is raw in one layer, so that no metadata
was in the memory of the storage daemon, or is not written at all, and where its in-flight proxy
gives the requests that were under way to the next one. Anything else is a power cut that the
guest must be told by a reset.
"""

from __future__ import annotations

from collections.abc import Iterable

from chv.common.wire.stord import CrashClass, VolumeClass, VolumeFormat
from chv.stord.records import Attachment, ChangeKind, Volume

# Classes whose QEMU driver holds no data of the guest back in memory.
UNCACHED = (
    VolumeClass.FILE,
    VolumeClass.BLOCK,
    VolumeClass.LVM,
    VolumeClass.NBD,
    VolumeClass.ISCSI,
)
# Begun changes after which the top layer may be another one than the record says.
UNSETTLED = (ChangeKind.SNAPSHOT, ChangeKind.PIVOT, ChangeKind.MOVE_PIVOT)


def is_plain(volume: Volume) -> bool:
    """Tell whether all that the guest was told is written is out of the storage daemon's hands."""
    settled = volume.change is None or volume.change.kind not in UNSETTLED
    return (
        settled
        and len(volume.layers) == 1
        and volume.backend.format is VolumeFormat.RAW
        and volume.backend.class_name in UNCACHED
    )


def of_attachment(row: Attachment, volume: Volume | None) -> CrashClass:
    """Return the class of one disk; of one whose volume is unknown, the worse."""
    plain = row.read_only or (volume is not None and is_plain(volume))
    return CrashClass.KEEP_VM if plain and row.proxied else CrashClass.RESET_VM


def worst(classes: Iterable[CrashClass]) -> CrashClass:
    """Return the class of a VM: the worst of its disks; of a VM without disks, the worse."""
    found = set(classes)
    return CrashClass.KEEP_VM if found == {CrashClass.KEEP_VM} else CrashClass.RESET_VM
