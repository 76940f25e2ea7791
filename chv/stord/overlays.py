"""The files of overlays: made whole under another name first, removed, swept.

An overlay is an empty qcow2 file of the volume's size, encrypted where the volume is, without a
word about what lies below it: that is in the records, and a header is never followed. Errors are
those of the tools: ResourceExhausted (space), NotFound or PermissionDenied (the key).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import anyio.to_thread
import msgspec

from chv.common.failpoint import failpoint
from chv.common.files import sync_directory
from chv.common.layout import Layout
from chv.common.secret import Secret
from chv.stord import luks
from chv.stord.backends import disk_files
from chv.stord.disks import Disks
from chv.stord.keys import read_key
from chv.stord.qsd import graph
from chv.stord.records import ChangeKind, Records, Volume
from chv.stord.tools import Call, Tools

CREATE_TIMEOUT_S = 30.0
NEW = ".new"
PATTERN = "layer-*"


class Overlays:
    """Makes and removes overlays of any volume."""

    def __init__(self, layout: Layout, records: Records, disks: Disks, tools: Tools) -> None:
        self._layout = layout
        self._records = records
        self._disks = disks
        self._tools = tools

    def path(self, volume_id: str, number: int) -> Path:
        """Return where an overlay is, whether it exists or not."""
        return self._disks.layer_path(volume_id, number)

    async def make(self, row: Volume, number: int, size_bytes: int) -> Path:
        """Make an overlay whole or not at all; it belongs to root."""
        path = self.path(row.volume_id, number)
        new = path.with_name(path.name + NEW)
        empty = Empty(path=new, size_bytes=size_bytes, timeout_s=CREATE_TIMEOUT_S)
        await make_empty(self._tools, self._layout, row, empty)
        await failpoint("stord.overlay.after_create")
        await anyio.to_thread.run_sync(_give_name, new, path)
        return path

    async def remove(self, volume_id: str, number: int) -> None:
        """Remove an overlay and what was being made of it; fine when there is none."""
        await anyio.to_thread.run_sync(_remove, self.path(volume_id, number))

    def exists(self, volume_id: str, number: int) -> bool:
        """Tell whether an overlay was made whole."""
        return self.path(volume_id, number).is_file()

    async def size_bytes(self, row: Volume) -> int:
        """Return the size that the top layer has; what was asked for where that is not known."""
        found = await self._disks.inspect(row.volume_id)
        return found.size_bytes or row.size_bytes

    def sweep(self) -> list[str]:
        """Remove files that no record explains; at start only, when every change is settled."""
        removed: list[str] = []
        for row in self._records.volumes.values():
            directory = self.path(row.volume_id, 1).parent
            explained = {self.path(row.volume_id, each.number) for each in row.layers[1:]}
            if row.change is not None and row.change.kind is ChangeKind.SNAPSHOT:
                explained.add(self.path(row.volume_id, row.change.layer))
            for path in directory.glob(PATTERN):
                if path not in explained:
                    path.unlink(missing_ok=True)
                    removed.append(str(path))
        return removed


async def read_keys(layout: Layout, volume_id: str, names: Collection[str]) -> dict[str, Secret]:
    """Return keys by the ids of the secret objects that a volume's graph knows them by."""
    return {
        graph.secret_id(volume_id, name): await anyio.to_thread.run_sync(read_key, layout, name)
        for name in sorted(names)
    }


class Empty(msgspec.Struct, frozen=True, kw_only=True):
    """A qcow2 file without content that is to be made."""

    path: Path
    size_bytes: int
    timeout_s: float


async def make_empty(tools: Tools, layout: Layout, row: Volume, empty: Empty) -> None:
    """Make the file in place of whatever there is, encrypted if the volume is."""
    await anyio.to_thread.run_sync(_touch, empty.path)
    argv = ["create", "-q", "-f", "qcow2"]
    keys = await read_keys(layout, row.volume_id, [row.key] if row.key else [])
    for secret in keys:
        argv += ["-o", luks.create_options("qcow2", secret)]
    owns = (empty.path,)
    call = Call(owns=owns, keys=keys, volume_id=row.volume_id, timeout_s=empty.timeout_s)
    await tools.run([*argv, str(empty.path), str(empty.size_bytes)], call)


def _touch(path: Path) -> None:
    """Make an empty file in place of whatever there is."""
    path.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(path, flags, 0o600))


def _give_name(new: Path, path: Path) -> None:
    disk_files.settle(new)
    new.rename(path)
    sync_directory(path.parent)


def _remove(path: Path) -> None:
    path.with_name(path.name + NEW).unlink(missing_ok=True)
    if path.exists():
        path.unlink()
        sync_directory(path.parent)
