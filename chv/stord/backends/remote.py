"""What the classes share whose bytes lie outside of the volume's directory, and their servers.

`Elsewhere` makes and removes the directory `volumes/<uid>/` and says who uses the same bytes.
`probe` asks a server for a size through qemu-img under the tools uid, with a deadline: no server
can hold stord up. Errors: Unavailable names server and class; Unsupported names the package.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec

from chv.common.config import StorageConfig
from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from chv.common.layout import Layout
from chv.common.process import CommandFailed, run
from chv.common.wire.stord import AccessMode, VolumeBackend, VolumeClass, VolumeFormat
from chv.stord import acl, allow
from chv.stord.backends import disk_files
from chv.stord.backends.base import Inspection, Space
from chv.stord.qsd.graph import Node
from chv.stord.qsd.graph import Protocol as ProtocolNode
from chv.stord.tools import json_image

EXTRA_PACKAGE = "qemu-block-extra"
PROBE_TIMEOUT_S = 8.0
# The storage daemon answers nothing while it opens a disk; longer than this and it is killed.
OPEN_TIMEOUT_S = 10.0
CONNECT_BY_ALL = 0o006
REMOTE_CLASSES = (VolumeClass.NBD, VolumeClass.ISCSI, VolumeClass.RBD)


class Elsewhere(ABC):
    """A class whose volumes are a directory of ours and bytes in another place."""

    class_name: VolumeClass
    driver = ""
    package = ""

    def __init__(self, layout: Layout, storage: StorageConfig) -> None:
        self._layout = layout
        self._storage = storage
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
        if spec.source is not None:
            raise Unsupported(
                f"a volume of class {self.class_name.value} cannot start from an image",
                field="backend.source",
                hint="make it of class file, then move it there (MoveVolume)",
            )
        if spec.format is not VolumeFormat.RAW:
            raise Unsupported(
                f"class {self.class_name.value} holds raw data, not {spec.format.value}",
                field="backend.format",
                hint="format raw; its snapshots are qcow2 files of this node",
            )
        if spec.encryption is not None:
            raise Unsupported(
                f"class {self.class_name.value} does not encrypt",
                field="backend.encryption",
                hint="use class file, or encrypt in the guest",
            )
        await anyio.to_thread.run_sync(self.permit, spec)
        return spec

    @abstractmethod
    def permit(self, spec: VolumeBackend) -> None:
        """Raise PermissionDenied unless an allowlist has the place; asked at each use. Blocks."""

    async def create(self, volume_id: str, spec: VolumeBackend) -> bool:
        """Make the volume whole or not at all; False: it was there already and matches."""
        directory = self.directory(volume_id, spec)
        async with self._making:  # that nobody has the bytes holds until we have them
            if await anyio.to_thread.run_sync(disk_files.matches, directory, spec):
                return False
            await anyio.to_thread.run_sync(self._refuse_shared, volume_id, spec)
            await self.prepare(volume_id, spec)
            try:
                await anyio.to_thread.run_sync(make_directory, directory, spec)
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self.discard(volume_id, spec)
                raise
        return True

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
            await anyio.to_thread.run_sync(self._refuse_shared, volume_id, spec)
            await self.prepare(volume_id, spec)

    async def drop_base(self, volume_id: str, spec: VolumeBackend) -> None:
        """Forget the bytes; remove them if we made them."""
        await self.discard(volume_id, spec)

    def lend_base(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give the bytes to a storage uid; a server lets in whom it does anyway."""
        self.permit(spec)

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
            f"{found.location} has {found.size_bytes} bytes, {spec.size_bytes} are asked for",
            field="backend.size_bytes",
            hint="enlarge it where it is, then try again",
        )


async def probe(layout: Layout, protocol: ProtocolNode, name: str) -> int:
    """Return how many bytes a server says that it has; `name` is what errors call it."""
    node: Node = {"driver": "raw", "file": {"driver": protocol.driver, **protocol.options}}
    timeout_s = PROBE_TIMEOUT_S
    argv = ["qemu-img", "info", "--output", "json", "-U", json_image(node)]
    try:
        completed = await run(argv, timeout_s=timeout_s, uid=layout.tools_uid, gid=layout.tools_uid)
    except DeadlineExceeded as error:
        raise Unavailable(f"{name} did not answer within {timeout_s:g} s") from error
    except CommandFailed as error:
        text = error.stderr.decode(errors="replace")
        raise translate(protocol.driver, name, text, layout.tools_uid) from error
    return msgspec.json.decode(completed.stdout, type=_ImageInfo).virtual_size


class _ImageInfo(msgspec.Struct, rename="kebab"):
    """The part of `qemu-img info` that we read."""

    virtual_size: int


def translate(driver: str, name: str, text: str, uid: int) -> ChvError:
    """Return our error for what QEMU says of a server, by text: QEMU has no codes."""
    # "qemu-img: Could not open 'json:{...}': what we want"
    said = text.strip().rpartition("}': ")[2].replace("\n", " ")[-300:] or "no message"
    if "Unknown driver" in text or "Unknown protocol" in text or "does not accept value" in text:
        return missing_driver(driver)
    if "Permission denied" in text or "Operation not permitted" in text:
        return PermissionDenied(f"{name} refuses uid {uid}: {said}")
    if any(sign in text for sign in _ABSENT):
        return NotFound(f"{name} has no such export, target or image: {said}")
    return Unavailable(f"{name}: {said}")


# What nbd, iSCSI and RBD say of what the server does not have.
_ABSENT = (
    "Requested export not available",
    "No export with name",
    "export '",
    "error reading header from",
    "LOGICAL_UNIT_NOT_SUPPORTED",
    "Target not found",
)


async def require_driver(layout: Layout, driver: str) -> None:
    """Raise Unsupported, with the package, where QEMU lacks a driver."""
    node: Node = {"driver": "raw", "file": {"driver": driver}}
    argv = ["qemu-img", "info", json_image(node)]
    uid = layout.tools_uid
    completed = await run(argv, timeout_s=PROBE_TIMEOUT_S, check=False, uid=uid, gid=uid)
    error = translate(driver, driver, completed.stderr.decode(errors="replace"), uid)
    if isinstance(error, Unsupported):
        raise error


def missing_driver(driver: str) -> Unsupported:
    """Return the error of a QEMU without the module of a driver."""
    return Unsupported(
        f"QEMU on this node has no driver {driver!r}",
        field="backend.class_name",
        hint=f"apt-get install {EXTRA_PACKAGE}",
    )


class OnServer(Elsewhere):
    """Classes whose bytes a server has."""

    def __init__(self, layout: Layout, storage: StorageConfig) -> None:
        super().__init__(layout, storage)
        self._probing = anyio.Lock()

    @abstractmethod
    def place(self, spec: VolumeBackend) -> allow.Remote:
        """Return the part of the spec that says where."""

    def sockets(self, _spec: VolumeBackend) -> list[Path]:
        """Return the Unix sockets that a storage daemon must be let into."""
        return []

    def location(self, spec: VolumeBackend) -> str:
        """Return where the bytes are, for people."""
        return allow.remote_of(self.place(spec))

    async def prepare(self, volume_id: str, spec: VolumeBackend) -> None:
        """Find the bytes."""
        refuse_smaller(await self.inspect(volume_id, spec), spec)

    async def discard(self, volume_id: str, spec: VolumeBackend) -> None:
        """Forget the bytes; what a storage daemon was let into is taken back."""

    async def grow(self, volume_id: str, spec: VolumeBackend) -> None:
        """See that the bytes have become more, which is the server's work."""
        refuse_smaller(await self.inspect(volume_id, spec), spec)
        directory = self._layout.volume(volume_id)
        await anyio.to_thread.run_sync(disk_files.describe, directory, spec)

    def grant(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give lock and way to the server to a storage uid; 0 takes them back.

        In a worker thread: first the server must answer. A storage daemon that opened a disk of a
        dead one would answer nothing meanwhile, and the VM's other disks would stand still.
        """
        lock = self.lock_path(volume_id)
        with disk_files.exclusively(lock):
            if uid != 0:
                self.permit(spec)
                anyio.from_thread.run(self.size_bytes, volume_id, spec)
            before = lock.lstat().st_uid
            for socket in self.sockets(spec):
                let_in(socket, uid, before)
            os.chown(lock, uid, uid, follow_symlinks=False)

    async def inspect(self, volume_id: str, spec: VolumeBackend) -> Inspection:
        """Ask the server; what it does not have or does not say is in the answer."""
        location = self.location(spec)
        try:
            size_bytes = await self.size_bytes(volume_id, spec)
        except NotFound as error:
            return Inspection(location=location, state="missing", problem=error.message)
        except (Unavailable, PermissionDenied) as error:
            return Inspection(location=location, state="broken", problem=error.message)
        had_bytes = disk_files.described_bytes(self._layout.volume(volume_id))
        if size_bytes < had_bytes:
            problem = f"{location} holds {size_bytes} bytes of the {had_bytes} that it had"
            return Inspection(location=location, state="broken", problem=problem)
        return Inspection(
            location=location, state="open", size_bytes=size_bytes, device_bytes=size_bytes
        )

    async def size_bytes(self, volume_id: str, spec: VolumeBackend) -> int:
        """Return how many bytes the server says that it has."""
        name = f"{self.class_name.value} server {self.location(spec)}"
        async with self._probing:
            try:
                for socket in self.sockets(spec):
                    let_in(socket, self._layout.tools_uid, 0)
                return await probe(self._layout, self.protocol(volume_id, spec), name)
            finally:
                for socket in self.sockets(spec):
                    let_in(socket, 0, self._layout.tools_uid)


def let_in(socket: Path, uid: int, before: int) -> None:
    """Let `uid` connect to a socket instead of `before`; 0 stands for nobody. No owner changes."""
    try:
        if before not in (0, uid):
            acl.forbid_read(socket, before)
        if uid != 0 and socket.stat().st_mode & CONNECT_BY_ALL != CONNECT_BY_ALL:
            acl.allow_connect(socket, uid)
    except FileNotFoundError as error:
        if uid != 0:
            raise Unavailable(f"there is no socket {str(socket)!r}") from error
