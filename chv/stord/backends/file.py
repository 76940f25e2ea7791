"""Volumes that are a file: raw, or qcow2 with or without layers of others below.

A volume is a directory `volumes/<uid>/` with `disk.raw` or `disk.qcow2`, `lock` and `volume.json`
(what it is, for a store that was lost); the disk of a volume in a pool is in `<pool>/<uid>/`.
Both are built as `<uid>.new` and renamed, removed by way of `<uid>.old`, the pool's first: under
its own name a volume is always whole. No tool that runs as root parses an image from outside or
a header that a guest could have written: `chv.stord.qcow2` looks at those.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from chv.common.config import StorageConfig
from chv.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OwnershipConflict,
    ResourceExhausted,
)
from chv.common.failpoint import failpoint
from chv.common.files import ensure_dir
from chv.common.layout import Layout
from chv.common.paths import resolve_inside
from chv.common.process import CommandFailed, run
from chv.common.wire.stord import CloneMode, VolumeBackend, VolumeFormat
from chv.stord.backends import disk_files, encrypted
from chv.stord.backends.base import Inspection, Space, space_of
from chv.stord.backends.images import Images
from chv.stord.qsd import graph
from chv.stord.tools import Call, Tools, json_image

QEMU_IMG_TIMEOUT_S = 50.0


class FileBackend:
    """Class `file`."""

    driver = "file"
    package = "qemu-system-common or qemu-utils"

    def __init__(self, layout: Layout, storage: StorageConfig, tools: Tools | None = None) -> None:
        self._layout = layout
        self._tools = tools or Tools(layout)
        self._storage = storage
        self._images = Images(layout, storage)
        self._aio = storage.aio

    # --- the spec
    async def check(self, spec: VolumeBackend) -> VolumeBackend:
        """Return the spec with its source resolved, or raise InvalidArgument."""
        if spec.pool:
            await anyio.to_thread.run_sync(self._pool, spec.pool)
        if spec.format is VolumeFormat.RAW and _is_overlay(spec):
            raise InvalidArgument(
                "a linked clone is an overlay and cannot be raw",
                field="backend.format",
                hint="use format qcow2, or clone mode full",
            )
        return await anyio.to_thread.run_sync(self._images.checked, spec)

    def _pool(self, name: str) -> Path:
        """Return the directory of a pool; it must exist, so that no unmounted one is filled."""
        given = self._storage.pools.get(name)
        if given is None:
            known = ", ".join(sorted(self._storage.pools)) or "none"
            raise InvalidArgument(
                f"there is no pool {name!r}",
                field="backend.pool",
                hint=f"name it in storage.pools of the node's configuration; known: {known}",
            )
        path = Path(given)
        if not path.is_dir():
            raise FailedPrecondition(
                f"the pool {name!r} is not there: {given!r} is no directory",
                field="backend.pool",
                hint="mount it, or correct storage.pools",
            )
        return path

    # --- files
    def home(self, volume_id: str) -> Path:
        """Return the directory that every volume has, with its lock and its description."""
        return self._layout.volume(volume_id)

    def directory(self, volume_id: str, spec: VolumeBackend) -> Path:
        """Return where the disk is and overlays go."""
        if not spec.pool:
            return self.home(volume_id)
        pool = self._pool(spec.pool)
        return resolve_inside(pool, volume_id)

    def lock_path(self, volume_id: str) -> Path:
        """Return the file whose lock means use of the volume."""
        return self.home(volume_id) / "lock"

    def disk_path(self, volume_id: str, spec: VolumeBackend) -> Path:
        """Return the file of the base."""
        return self.directory(volume_id, spec) / f"disk.{spec.format.value}"

    async def create(self, volume_id: str, spec: VolumeBackend) -> bool:
        """Make the volume whole or not at all; False: it was there already and matches."""
        home, directory = self.home(volume_id), self.directory(volume_id, spec)
        if await anyio.to_thread.run_sync(disk_files.matches, home, spec):
            return False
        if directory != home and directory.exists():
            raise OwnershipConflict(
                f"{str(directory)!r} holds a volume that has no record here; left alone",
                resource=volume_id,
                hint="move the directory away",
            )
        building = [_beside(path, disk_files.NEW) for path in dict.fromkeys((home, directory))]
        try:
            for path in building:
                await anyio.to_thread.run_sync(disk_files.begin, path)
            await failpoint("stord.open.after_begin")
            await self._build(building[-1] / f"disk.{spec.format.value}", spec)
            await failpoint("stord.open.after_build")
            if directory != home:
                await anyio.to_thread.run_sync(disk_files.give_name, building[-1], directory)
                await failpoint("stord.open.after_pool")
            await anyio.to_thread.run_sync(disk_files.finish, building[0], home, spec)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._take_back, volume_id, spec, building)
            raise
        return True

    def _take_back(self, volume_id: str, spec: VolumeBackend, building: list[Path]) -> None:
        for path in building:
            disk_files.remove_tree(path)
        directory = self.directory(volume_id, spec)
        if directory.exists() and not self.home(volume_id).exists():
            disk_files.remove_volume(directory)

    async def _build(self, disk: Path, spec: VolumeBackend) -> None:
        if spec.encryption is not None:
            await encrypted.build(self._tools, self._layout, disk, spec)
        elif spec.format is VolumeFormat.RAW:
            await anyio.to_thread.run_sync(disk_files.build_raw, disk, spec)
        else:
            argv = ["qemu-img", "create", "-q", "-f", "qcow2"]
            if spec.source is not None:
                # -u: do not open the image; its size was read and compared above.
                argv += ["-u", "-b", spec.source.path, "-F", spec.source.format.value]
            await _qemu_img([*argv, str(disk), str(spec.size_bytes)], disk)
        await anyio.to_thread.run_sync(disk_files.settle, disk)

    async def grow(self, volume_id: str, spec: VolumeBackend) -> None:
        """Make it as large as the spec says; never smaller."""
        disk, locked = self.disk_path(volume_id, spec), spec.encryption is not None
        with disk_files.exclusively(self.lock_path(volume_id)):
            there = disk_files.virtual_size_bytes(disk, spec.format, encrypted=locked)
            if there < spec.size_bytes:
                if locked:
                    await encrypted.grow(self._tools, self._layout, disk, spec)
                elif spec.format is VolumeFormat.RAW:
                    await anyio.to_thread.run_sync(disk_files.extend_raw, disk, spec.size_bytes)
                else:
                    await self._extend_qcow2(disk, spec.size_bytes)
            await anyio.to_thread.run_sync(disk_files.describe, self.home(volume_id), spec)

    async def _extend_qcow2(self, disk: Path, size_bytes: int) -> None:
        # The backing file is left out: the volume is never smaller than what is below it, so
        # nothing of that can come to light in the new part.
        node: graph.Node = {
            "driver": "qcow2",
            "backing": None,
            "file": {"driver": "file", "filename": str(disk)},
        }
        call = Call(owns=(disk,), timeout_s=QEMU_IMG_TIMEOUT_S)
        await self._tools.run(["resize", "-q", json_image(node), str(size_bytes)], call)

    async def extend_device(self, volume_id: str, spec: VolumeBackend) -> None:
        """Do nothing: a file grows by itself."""

    async def delete(self, volume_id: str, spec: VolumeBackend) -> None:
        """Remove every trace; fine when there is none."""
        home = self.home(volume_id)
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(NotFound):
                stack.enter_context(disk_files.exclusively(self.lock_path(volume_id)))
            for path in dict.fromkeys((self.directory(volume_id, spec), home)):
                await anyio.to_thread.run_sync(
                    disk_files.remove_tree, _beside(path, disk_files.NEW)
                )
                await anyio.to_thread.run_sync(disk_files.remove_volume, path)

    async def inspect(self, volume_id: str, spec: VolumeBackend) -> Inspection:
        """Look at it."""
        try:
            disk = self.disk_path(volume_id, spec)
        except (FailedPrecondition, InvalidArgument) as error:
            return Inspection(location=f"pool {spec.pool}", state="missing", problem=error.message)
        return await anyio.to_thread.run_sync(disk_files.inspect, disk, self.home(volume_id), spec)

    async def space(self, volume_id: str, spec: VolumeBackend) -> Space | None:
        """Return what the file system has left."""
        directory = self.directory(volume_id, spec)
        status = await anyio.to_thread.run_sync(os.statvfs, directory)
        block = status.f_frsize
        # As df does: what is reserved for root counts as used.
        usable = (status.f_blocks - status.f_bfree + status.f_bavail) * block
        return space_of(status.f_bavail * block, usable, self._storage)

    def grant(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give its files to a storage uid; InUse where a process of somebody else holds it."""
        with disk_files.exclusively(self.lock_path(volume_id)):
            for path in (self.disk_path(volume_id, spec), self.lock_path(volume_id)):
                os.chown(path, uid, uid, follow_symlinks=False)

    def protocol(self, volume_id: str, spec: VolumeBackend) -> graph.Protocol:
        """Describe how the storage daemon reaches the disk; refuse a header that was changed."""
        path = self.disk_path(volume_id, spec)
        locked = spec.encryption is not None
        disk_files.virtual_size_bytes(path, spec.format, encrypted=locked)
        return disk_files.protocol(path, self._aio)

    def tool_protocol(self, volume_id: str, spec: VolumeBackend) -> graph.Protocol:
        """Describe it for the tools uid, to which files are lent one by one."""
        return self.protocol(volume_id, spec)

    @asynccontextmanager
    async def reach(self, volume_id: str, spec: VolumeBackend) -> AsyncIterator[None]:
        """Do nothing: files are lent one by one."""
        yield

    # --- a move
    async def make_base(self, volume_id: str, spec: VolumeBackend) -> None:
        """Make an empty disk beside whatever there is of the volume."""
        directory, disk = self.directory(volume_id, spec), self.disk_path(volume_id, spec)
        if disk.exists():
            raise OwnershipConflict(
                f"{str(disk)!r} is there and no record explains it; left alone",
                resource=volume_id,
                hint="move it away",
            )
        await anyio.to_thread.run_sync(partial(ensure_dir, directory, mode=0o711))
        try:
            await self._build(disk, spec)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self.drop_base(volume_id, spec)
            raise

    async def drop_base(self, volume_id: str, spec: VolumeBackend) -> None:
        """Remove the disk, and the volume's directory in a pool if nothing else is in it."""
        await anyio.to_thread.run_sync(self._drop_base, volume_id, spec)

    def _drop_base(self, volume_id: str, spec: VolumeBackend) -> None:
        directory, disk = self.directory(volume_id, spec), self.disk_path(volume_id, spec)
        disk.unlink(missing_ok=True)
        if (
            directory != self.home(volume_id)
            and directory.is_dir()
            and not any(directory.iterdir())
        ):
            directory.rmdir()

    def lend_base(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give the disk to a storage uid."""
        os.chown(self.disk_path(volume_id, spec), uid, uid, follow_symlinks=False)

    def sweep(self) -> list[str]:
        """Remove what was being built or removed when stord died; only under its lock."""
        volumes = self.home("x").parent
        if not volumes.is_dir():
            return []
        leftovers = [
            entry for entry in volumes.iterdir() if entry.suffix in (disk_files.NEW, disk_files.OLD)
        ]
        for leftover in leftovers:
            disk_files.remove_tree(leftover)
        return [entry.name for entry in leftovers]

    def found(self) -> list[str]:
        """Return the names of everything in the directory of volumes."""
        volumes = self.home("x").parent
        return sorted(entry.name for entry in volumes.iterdir()) if volumes.is_dir() else []


def _is_overlay(spec: VolumeBackend) -> bool:
    return spec.snapshot is not None and spec.snapshot.mode is CloneMode.LINKED


def _beside(directory: Path, suffix: str) -> Path:
    return directory.with_name(directory.name + suffix)


async def _qemu_img(argv: list[str], disk: Path) -> None:
    try:
        await run(argv, timeout_s=QEMU_IMG_TIMEOUT_S)
    except CommandFailed as error:
        if b"No space left" in error.stderr or b"quota" in error.stderr:
            raise ResourceExhausted(
                f"no space for {str(disk)!r}", hint=f"free space below {disk.parent}"
            ) from error
        raise
