"""What every volume class offers. A backend knows files and devices, not VMs and not records.

Methods that touch a disk may take long and run their work in threads. All are idempotent.
Errors: InvalidArgument (the request can never work), Unsupported (a package is missing, named in
the hint), PermissionDenied (no allowlist has it), ResourceExhausted (space), InUse (a process
holds the volume although no record says so), DataLoss (the disk), Unavailable (a server).

Whatever its class, a volume has a directory `volumes/<uid>/` with `lock`, `volume.json` and the
overlays of its snapshots; a backend makes that directory with the volume, whole or not at all.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from chv.common.config import StorageConfig
from chv.common.wire.stord import SpaceLevel, VolumeBackend
from chv.stord.qsd.graph import Protocol as ProtocolNode

PERCENT = 100


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """A volume's base as it is now. `state`: open | missing | broken.

    `location` is for people. `device_bytes` is what a fixed device has, 0 where it can grow.
    """

    location: str
    state: str
    size_bytes: int = 0
    allocated_bytes: int = 0
    direct: bool = True
    problem: str = ""
    device_bytes: int = 0


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """What is left where the bytes of a volume go."""

    free_bytes: int
    total_bytes: int
    level: SpaceLevel


class Backend(Protocol):
    """One class of volumes."""

    # The QEMU driver that it needs beyond the built-in ones, and the package that has it.
    driver: str
    package: str

    async def check(self, spec: VolumeBackend) -> VolumeBackend:
        """Return the spec with its source resolved, or raise; asked before anything is made."""

    async def create(self, volume_id: str, spec: VolumeBackend) -> bool:
        """Make the volume whole or not at all; False: it was there already and matches."""

    async def grow(self, volume_id: str, spec: VolumeBackend) -> None:
        """Make the base as large as the spec says while nobody has it open; never smaller."""

    async def extend_device(self, volume_id: str, spec: VolumeBackend) -> None:
        """Make room for an online growth: a logical volume is extended, a file needs nothing."""

    async def delete(self, volume_id: str, spec: VolumeBackend) -> None:
        """Remove every trace; fine when there is none. A device that we did not make stays."""

    async def inspect(self, volume_id: str, spec: VolumeBackend) -> Inspection:
        """Look at the base."""

    async def space(self, volume_id: str, spec: VolumeBackend) -> Space | None:
        """Return what is left for it; None where that has no meaning."""

    def grant(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give the base and the lock to a storage uid; 0 takes them back."""

    def protocol(self, volume_id: str, spec: VolumeBackend) -> ProtocolNode:
        """Describe how the storage daemon reaches the bytes of the base."""

    def tool_protocol(self, volume_id: str, spec: VolumeBackend) -> ProtocolNode:
        """Describe how the tools uid reaches them, whoever else has the volume."""

    def directory(self, volume_id: str, spec: VolumeBackend) -> Path:
        """Return where overlays go."""

    def lock_path(self, volume_id: str) -> Path:
        """Return the file whose lock means use of the volume."""

    def reach(self, volume_id: str, spec: VolumeBackend) -> AbstractAsyncContextManager[None]:
        """Let the tools uid reach bytes that no file mode is for: a server's."""

    # A move: the volume is there, its bytes come to another place.
    async def make_base(self, volume_id: str, spec: VolumeBackend) -> None:
        """Make an empty base for a volume that has its directory; InUse where one is there."""

    async def drop_base(self, volume_id: str, spec: VolumeBackend) -> None:
        """Remove a base and nothing else of the volume; fine when there is none."""

    def lend_base(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give the base alone to a storage uid, whoever holds the lock; 0 takes it back."""


def space_of(free_bytes: int, total_bytes: int, storage: StorageConfig) -> Space:
    """Judge what is left by the thresholds of the configuration."""
    used_percent = PERCENT * (total_bytes - free_bytes) / total_bytes if total_bytes else PERCENT
    level = SpaceLevel.OK
    if used_percent >= storage.space_warn_percent:
        level = SpaceLevel.WARN
    critical = used_percent >= storage.space_critical_percent
    if critical or free_bytes < storage.space_critical_bytes:
        level = SpaceLevel.CRITICAL
    return Space(free_bytes=free_bytes, total_bytes=total_bytes, level=level)
