"""What every volume class offers. A backend knows files and devices, not VMs and not records.

Methods that touch a disk may take long and run their work in threads. All are idempotent.
Errors: InvalidArgument (the request can never work), ResourceExhausted (space), InUse (a process
holds the volume although no record says so), DataLoss (the disk).
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from chv.common.wire.stord import VolumeBackend
from chv.stord.qsd.graph import DiskFile


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """A volume as it is now. `state`: open | missing | broken."""

    path: Path
    state: str
    size_bytes: int = 0
    allocated_bytes: int = 0
    direct: bool = True
    problem: str = ""


class Backend(Protocol):
    """One class of volumes."""

    async def check(self, spec: VolumeBackend) -> VolumeBackend:
        """Return the spec with its source resolved, or raise InvalidArgument."""

    async def create(self, volume_id: str, spec: VolumeBackend) -> bool:
        """Make the volume whole or not at all; False: it was there already and matches."""

    async def grow(self, volume_id: str, spec: VolumeBackend) -> None:
        """Make it as large as the spec says; never smaller."""

    async def delete(self, volume_id: str) -> None:
        """Remove every trace; fine when there is none."""

    async def inspect(self, volume_id: str, spec: VolumeBackend) -> Inspection:
        """Look at it."""

    def grant(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give its files to a storage uid."""

    def revoke(self, volume_id: str, spec: VolumeBackend) -> None:
        """Take its files back to root."""

    def disk(self, volume_id: str, spec: VolumeBackend) -> DiskFile:
        """Describe how the storage daemon opens it."""

    def lock_path(self, volume_id: str) -> Path:
        """Return the file whose lock means use of the volume."""
