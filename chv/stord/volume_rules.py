"""What may be asked of a volume, and what is said where it cannot be. Pure."""

from __future__ import annotations

from chv.common.errors import (
    ChvError,
    DataLoss,
    InvalidArgument,
    StaleGeneration,
    Unavailable,
)
from chv.common.wire.stord import VolumeBackend, VolumeClass, VolumeFormat
from chv.stord.backends import disk_files
from chv.stord.backends.base import Inspection
from chv.stord.records import Volume


def check_generation(row: Volume, generation: int) -> None:
    """Refuse a caller that has not seen the newest generation."""
    if generation < row.generation:
        raise StaleGeneration(
            f"generation {generation} of the volume is older than {row.generation}",
            resource=row.volume_id,
        )


def unusable(row: Volume, found: Inspection) -> ChvError:
    """Return the error of a volume that is not in order where its bytes are."""
    message = f"the volume is {found.state}: {found.problem}"
    if row.backend.class_name is VolumeClass.FILE:
        return DataLoss(message, resource=row.volume_id, hint=_remedy(row))
    return Unavailable(
        message,
        resource=row.volume_id,
        hint="bring the device or server back, then start again",
    )


def _remedy(row: Volume) -> str:
    if row.backend.format is VolumeFormat.QCOW2:
        return f"chv volume repair {row.volume_id}, or restore a backup"
    return "put the file back as it was, or restore a backup"


def key_of(spec: VolumeBackend) -> str:
    """Return the name of the key that the volume is encrypted with; empty: it is not."""
    return "" if spec.encryption is None else spec.encryption.key


def check_change(row: Volume, spec: VolumeBackend) -> None:
    """Refuse a description that the volume cannot become."""
    there = row.backend
    if disk_files.identity(spec) != disk_files.identity(there):
        raise InvalidArgument(
            f"the volume is {there.format.value} and keeps its class, place, format and source",
            resource=row.volume_id,
            field="backend",
            hint="make a new volume, or move it (MoveVolume)",
        )
    if spec.size_bytes < there.size_bytes:
        raise InvalidArgument(
            f"{spec.size_bytes} bytes are less than the {there.size_bytes} that the volume has",
            resource=row.volume_id,
            field="backend.size_bytes",
            hint="a volume never becomes smaller",
        )
