"""A storage daemon for work on volumes that are attached to nothing; it ends with the work.

It runs under the tools uid, with the files lent to it, and holds the volume's lock, so an attach
meanwhile is refused. It is our child: a kill of ours kills it, and what it left half done is
found by whoever resumes the job. Errors: InUse (somebody holds the volume), PermissionDenied (the
key), those of the monitor.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from chv.common.errors import Internal, InUse
from chv.common.files import ensure_dir
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import Program
from chv.common.process.child import start_child
from chv.common.wire.stord import AccessMode
from chv.stord import luks
from chv.stord.confinement import Touched, is_remote, tool_rules
from chv.stord.disks import Disks
from chv.stord.qsd import graph
from chv.stord.qsd.monitor import Monitor, open_monitor
from chv.stord.records import Volume
from chv.stord.tools import Tools

# It writes metadata of qcow2 at its end; a bitmap that is not is of no use afterwards.
TERMINATE_S = 20.0
UMASK = 0o177
TARGET = "target"


class Keys(msgspec.Struct, frozen=True, kw_only=True):
    """Names of keys, and the volume whose secret objects they become."""

    volume_id: str
    names: tuple[str, ...] = ()


class Offline:
    """Starts such storage daemons."""

    def __init__(
        self, layout: Layout, ids: Ids, tools: Tools, disks: Disks, binary: str = graph.BINARY
    ) -> None:
        self._layout = layout
        self._binary = binary
        self._ids = ids
        self._tools = tools
        self._disks = disks
        self.uid = layout.tools_uid

    def sweep(self) -> None:
        """Remove the directories of those that died with an earlier daemon. Blocks."""
        shutil.rmtree(self._home, ignore_errors=True)

    @property
    def _home(self) -> Path:
        return self._layout.run / "tools"

    @asynccontextmanager
    async def open(self, row: Volume, *also: Path) -> AsyncIterator[Monitor]:
        """Yield the monitor of one that has the volume's layers open; `also`: files it needs."""
        async with self.locked(row, *also) as monitor:
            await self.add_chain(monitor, row)
            yield monitor

    @asynccontextmanager
    async def locked(self, row: Volume, *also: Path) -> AsyncIterator[Monitor]:
        """Yield the monitor of one that holds the volume's lock and has nothing open yet."""
        volume_id = row.volume_id
        lock_path = self._disks.lock_path(volume_id)
        owns = [lock_path, *await anyio.to_thread.run_sync(self._disks.paths, volume_id), *also]
        below = await anyio.to_thread.run_sync(self._disks.below_paths, volume_id)
        touched = Touched(owns=tuple(owns), reads=tuple(below), remote=await self._is_remote(row))
        async with (
            self._disks.reach(volume_id),
            self._tools.lend(owns, below),
            self._daemon(touched) as (monitor, _directory),
        ):
            shared = row.backend.access is AccessMode.READ_ONLY_MANY
            try:
                await monitor.add_node(graph.lock_blockdev(volume_id, lock_path, shared=shared))
            except InUse as error:
                raise InUse(
                    "a process holds the volume", resource=volume_id, hint="detach it first"
                ) from error
            yield monitor

    async def _is_remote(self, row: Volume) -> bool:
        describe = partial(self._disks.disk, row.volume_id, read_only=True)
        disk = await anyio.to_thread.run_sync(describe)
        return not all(layer.protocol.local for layer in (*disk.below, *disk.own))

    async def add_chain(self, monitor: Monitor, row: Volume) -> None:
        """Open the volume's layers as an attachment would."""
        read_only = row.backend.access is AccessMode.READ_ONLY_MANY
        describe = partial(self._disks.disk, row.volume_id, read_only=read_only)
        disk = await anyio.to_thread.run_sync(describe)
        await luks.add_locked(monitor, self._layout, disk, graph.chain(disk))

    @asynccontextmanager
    async def serve(
        self, node: graph.Node, owns: Sequence[Path], keys: Keys, *, uid: int
    ) -> AsyncIterator[Path]:
        """Open a node for writing and yield a socket on which `uid` alone may reach it, as NBD.

        When the block ends without an error everything that was written is in the files.
        """
        remote = is_remote(msgspec.json.encode(node).decode())
        touched = Touched(owns=tuple(owns), remote=remote)
        async with self._tools.lend(owns, ()), self._daemon(touched) as (monitor, directory):
            async with luks.secrets(monitor, self._layout, keys.volume_id, keys.names):
                await monitor.add_node(node | {"node-name": TARGET})
            path = directory / "nbd"
            address = {"type": "unix", "data": {"path": str(path)}}
            await monitor.call("nbd-server-start", {"addr": address})
            export: graph.Node = {"type": "nbd", "id": TARGET, "node-name": TARGET}
            await monitor.add_export(export | {"name": TARGET, "writable": True})
            await anyio.to_thread.run_sync(_admit, directory, path, uid)
            yield path

    @asynccontextmanager
    async def _daemon(self, touched: Touched) -> AsyncIterator[tuple[Monitor, Path]]:
        """Yield an empty storage daemon and its directory; it ends well or the block fails."""
        directory = self._home / self._ids.nonce()
        ensure_dir(self._home, mode=0o711)
        ensure_dir(directory, mode=0o700, uid=self.uid, gid=self.uid)
        try:
            socket = directory / "qmp"
            argv = tuple(graph.argv(socket, directory / "pid", self._binary))
            rules = tool_rules(
                self._layout, self._binary, msgspec.structs.replace(touched, directory=directory)
            )
            program = Program(
                argv=argv,
                uid=self.uid,
                gid=self.uid,
                umask=UMASK,
                empty_netns=not touched.remote,
                landlock=rules,
            )
            child = await start_child(program)
            try:
                async with open_monitor(socket, self.uid) as monitor:
                    yield monitor, directory
            finally:
                with anyio.CancelScope(shield=True):
                    await child.terminate(grace_s=TERMINATE_S)
            if child.returncode != 0:
                raise Internal(f"the storage daemon of a job ended with {child.returncode}")
        finally:
            with anyio.CancelScope(shield=True):
                remove = partial(shutil.rmtree, directory, ignore_errors=True)
                await anyio.to_thread.run_sync(remove)


def _admit(directory: Path, socket: Path, uid: int) -> None:
    """Let a uid connect; nobody can replace what it connects to."""
    os.chown(directory, 0, 0)
    directory.chmod(0o711)
    os.chown(socket, uid, uid, follow_symlinks=False)
    socket.chmod(0o600)
