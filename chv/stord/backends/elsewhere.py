"""What the classes share whose bytes lie outside of the volume's directory.

`Elsewhere` makes and removes the directory `volumes/<uid>/`, with its lock and description, and
sees to it that no two volumes of this node have the same bytes. Errors are those of `base`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from chv.common.config import StorageConfig
from chv.common.errors import (
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unsupported,
)
from chv.common.layout import Layout
from chv.common.wire.stord import AccessMode, VolumeBackend, VolumeClass, VolumeFormat
from chv.stord import luks
from chv.stord.backends import disk_files
from chv.stord.backends.base import Inspection, Space
from chv.stord.backends.images import Images
from chv.stord.qsd.graph import Protocol as ProtocolNode


class Elsewhere(ABC):
    """A class whose volumes are a directory of ours and bytes in another place."""

    class_name: VolumeClass
    driver = ""
    package = ""

    def __init__(self, layout: Layout, storage: StorageConfig) -> None:
        self._layout = layout
        self._storage = storage
        self._images = Images(layout, storage)
        self._making = anyio.Lock()

    # --- what a class says of itself
    @abstractmethod
    async def prepare(self, volume_id: str, spec: VolumeBackend) -> None:
        """Find or make the bytes, large enough; the volume has no directory yet."""

    @abstractmethod
    async def discard(self, volume_id: str, spec: VolumeBackend) -> None:
        """Remove the bytes if we made them; fine when there are none."""

    @abstractmethod
    async def inspect(self, volume_id: str, spec: VolumeBackend) -> Inspection:
        """Look at the base."""

    @abstractmethod
    async def grow(self, volume_id: str, spec: VolumeBackend) -> None:
        """Make the base as large as the spec says."""

    @abstractmethod
    def protocol(self, volume_id: str, spec: VolumeBackend) -> ProtocolNode:
        """Describe how the storage daemon reaches the bytes of the base."""

    def tool_protocol(self, volume_id: str, spec: VolumeBackend) -> ProtocolNode:
        """Describe how the tools uid reaches the bytes, whoever else has the volume."""
        return self.protocol(volume_id, spec)

    @abstractmethod
    def grant(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give the base and the lock to a storage uid; 0 takes them back."""

    def same_bytes(self, _spec: VolumeBackend, _other: VolumeBackend) -> bool:
        """Tell whether two descriptions of this class mean the same bytes."""
        return False

    # --- the same for all
    async def check(self, spec: VolumeBackend) -> VolumeBackend:
        """Return the spec, or raise; asked before anything is made."""
        if getattr(spec, self.class_name.value) is None:
            raise InvalidArgument(
                f"class {self.class_name.value} needs `{self.class_name.value}`, its place",
                field=f"backend.{self.class_name.value}",
            )
        if spec.format is not VolumeFormat.RAW:
            raise Unsupported(
                f"class {self.class_name.value} holds raw data, not {spec.format.value}",
                field="backend.format",
                hint="format raw; its snapshots are qcow2 files of this node",
            )
        await anyio.to_thread.run_sync(self.permit, spec)
        return await anyio.to_thread.run_sync(self._images.checked, spec)

    @abstractmethod
    def permit(self, spec: VolumeBackend) -> None:
        """Raise PermissionDenied unless an allowlist has the place; asked at each use. Blocks."""

    async def create(self, volume_id: str, spec: VolumeBackend) -> bool:
        """Make the volume whole or not at all; False: it was there already and matches."""
        directory = self.directory(volume_id, spec)
        async with self._making:  # that nobody has the bytes holds until we have them
            if await anyio.to_thread.run_sync(disk_files.matches, directory, spec):
                return False
            await self._take(volume_id, spec)
            try:
                await anyio.to_thread.run_sync(make_directory, directory, spec)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self.discard(volume_id, spec)
                raise
        return True

    async def _take(self, volume_id: str, spec: VolumeBackend) -> None:
        await anyio.to_thread.run_sync(self._refuse_shared, volume_id, spec)
        await self.prepare(volume_id, spec)

    async def delete(self, volume_id: str, spec: VolumeBackend) -> None:
        """Remove every trace; fine when there is none. A device that we did not make stays."""
        directory = self.directory(volume_id, spec)
        try:
            with disk_files.exclusively(directory / "lock"):
                await self.discard(volume_id, spec)
        except NotFound:
            await self.discard(volume_id, spec)
        await anyio.to_thread.run_sync(disk_files.remove_volume, directory)

    async def make_base(self, volume_id: str, spec: VolumeBackend) -> None:
        """Find or make the bytes for a volume that comes from elsewhere."""
        async with self._making:
            await self._take(volume_id, spec)

    async def drop_base(self, volume_id: str, spec: VolumeBackend) -> None:
        """Forget the bytes; remove them if we made them."""
        await self.discard(volume_id, spec)

    def lend_base(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give the bytes to a storage uid; a server lets in whom it does anyway."""
        self.permit(spec)

    @asynccontextmanager
    async def reach(self, volume_id: str, spec: VolumeBackend) -> AsyncIterator[None]:
        """Let the tools uid reach the bytes; a device node is lent as a file is."""
        yield

    async def extend_device(self, volume_id: str, spec: VolumeBackend) -> None:
        """Make room for an online growth: here the owner of the bytes must have made it."""
        found = await self.inspect(volume_id, spec)
        refuse_smaller(found, spec)

    async def space(self, _volume_id: str, _spec: VolumeBackend) -> Space | None:
        """Return what is left for it; it has no meaning where the whole is ours already."""
        return None

    def directory(self, volume_id: str, _spec: VolumeBackend) -> Path:
        """Return where overlays go."""
        return self._layout.volume(volume_id)

    def lock_path(self, volume_id: str) -> Path:
        """Return the file whose lock means use of the volume."""
        return self._layout.volume(volume_id) / "lock"

    def _refuse_shared(self, volume_id: str, spec: VolumeBackend) -> None:
        for other_id, other in described(self._layout):
            if other_id != volume_id and self.overlaps(spec, other):
                raise InUse(
                    f"volume {other_id} has these bytes already",
                    field=f"backend.{self.class_name.value}",
                    hint="delete that volume first; delete keeps the data of this class",
                )

    def overlaps(self, spec: VolumeBackend, other: VolumeBackend) -> bool:
        """Tell whether another volume of this node has some of the same bytes."""
        return other.class_name is self.class_name and self.same_bytes(spec, other)


def make_directory(directory: Path, spec: VolumeBackend) -> None:
    """Make `lock` and `volume.json`; under its name the directory is whole."""
    building = directory.with_name(directory.name + disk_files.NEW)
    try:
        disk_files.begin(building)
        disk_files.finish(building, directory, spec)
    except BaseException:
        disk_files.remove_tree(building)
        raise


def described(layout: Layout) -> Iterator[tuple[str, VolumeBackend]]:
    """Yield every volume that has a directory: id and description. Blocks."""
    volumes = layout.volume("x").parent
    for entry in volumes.iterdir() if volumes.is_dir() else ():
        try:
            data = (entry / "volume.json").read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            continue
        yield entry.name, msgspec.json.decode(data, type=VolumeBackend)


def stored_bytes(spec: VolumeBackend) -> int:
    """Return how many bytes a volume takes where it is: its LUKS header comes on top."""
    return spec.size_bytes + (0 if spec.encryption is None else luks.PAYLOAD_BYTES)


def visible_bytes(spec: VolumeBackend, there: int) -> int:
    """Return what a guest sees of so many bytes."""
    return there if spec.encryption is None else max(there - luks.PAYLOAD_BYTES, 0)


def writable(spec: VolumeBackend) -> bool:
    """Tell whether any VM may write to it."""
    return spec.access is AccessMode.READ_WRITE_ONCE


def refuse_smaller(found: Inspection, spec: VolumeBackend) -> None:
    """Raise unless what was found is there and large enough."""
    if found.state == "missing":
        raise NotFound(found.problem, resource=found.location)
    if found.state != "open":
        raise Unavailable(found.problem, resource=found.location)
    if found.size_bytes < spec.size_bytes:
        raise FailedPrecondition(
            f"{found.location} has {found.size_bytes} bytes{_beside_header(spec)},"
            f" {spec.size_bytes} are asked for",
            field="backend.size_bytes",
            hint="enlarge it where it is, then try again",
        )


def _beside_header(spec: VolumeBackend) -> str:
    return "" if spec.encryption is None else f" behind the {luks.PAYLOAD_BYTES} of its LUKS header"
