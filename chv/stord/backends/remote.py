"""Classes whose bytes a server has, reached by QEMU's own client.

`probe` asks a server for a size through qemu-img under the tools uid, with a deadline: no server
can hold stord up. Errors: Unavailable names server and class; Unsupported names the package.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec

from chv.common.config import StorageConfig
from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from chv.common.layout import Layout
from chv.common.process import CommandFailed, run
from chv.common.wire.stord import VolumeBackend
from chv.stord import acl, allow
from chv.stord.backends import disk_files
from chv.stord.backends.base import Inspection
from chv.stord.backends.elsewhere import Elsewhere, refuse_smaller, visible_bytes
from chv.stord.qsd.graph import Node
from chv.stord.qsd.graph import Protocol as ProtocolNode
from chv.stord.tools import json_image

EXTRA_PACKAGE = "qemu-block-extra"
PROBE_TIMEOUT_S = 8.0
CONNECT_BY_ALL = 0o006


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
        self._inside: Counter[Path] = Counter()
        self.said_bytes: dict[str, int] = {}  # by volume: what its server said last

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
        self.said_bytes.pop(volume_id, None)
        await anyio.to_thread.run_sync(self.lend_base, volume_id, spec, 0)

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

    def lend_base(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give the way to the server to a storage uid; 0 takes it back from who has the lock."""
        if uid != 0:
            self.permit(spec)
        try:
            holder = self.lock_path(volume_id).lstat().st_uid
        except FileNotFoundError:
            return  # nobody has ever had it
        for socket in self.sockets(spec):
            let_in(socket, uid, holder)

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

    async def served(self, volume_id: str, spec: VolumeBackend) -> Inspection:
        """Look at a volume that a storage daemon has."""
        return await self.inspect(volume_id, spec)

    async def size_bytes(self, volume_id: str, spec: VolumeBackend) -> int:
        """Return how many bytes a guest would see of what the server says that it has."""
        name = f"{self.class_name.value} server {self.location(spec)}"
        async with self._probing, self.reach(volume_id, spec):
            said = await probe(self._layout, self.protocol(volume_id, spec), name)
            self.said_bytes[volume_id] = visible_bytes(spec, said)
            return self.said_bytes[volume_id]

    @asynccontextmanager
    async def reach(self, volume_id: str, spec: VolumeBackend) -> AsyncIterator[None]:
        """Let the tools uid connect: as long as any piece of work needs it."""
        uid, sockets = self._layout.tools_uid, self.sockets(spec)
        try:
            for socket in sockets:
                self._inside[socket] += 1
                let_in(socket, uid, 0)
            yield
        finally:
            for socket in sockets:
                self._inside[socket] -= 1
                if self._inside[socket] <= 0:
                    del self._inside[socket]
                    let_in(socket, 0, uid)


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
