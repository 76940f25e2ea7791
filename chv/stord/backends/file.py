"""Volumes that are a file: raw, or qcow2 with or without a content-addressed image below.

A volume is a directory `volumes/<uid>/` with `disk.raw` or `disk.qcow2`, `lock` and `volume.json`
(what it is, for a store that was lost). It is built as `<uid>.new` and renamed, removed by way
of `<uid>.old`: under its own name it is always whole. No tool that runs as root parses an image
from outside or a header that a guest could have written: `chv.stord.qcow2` looks at those.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import anyio.to_thread
import msgspec

from chv.common.errors import (
    InUse,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unsupported,
)
from chv.common.failpoint import failpoint
from chv.common.files import (
    resolve_inside,
)
from chv.common.layout import Layout
from chv.common.process import CommandFailed, run
from chv.common.wire.stord import VolumeBackend, VolumeFormat, VolumeSource
from chv.stord.backends import disk_files
from chv.stord.backends.base import Inspection
from chv.stord.qsd.graph import DiskFile

QEMU_IMG_TIMEOUT_S = 50.0


class FileBackend:
    """Class `file`."""

    def __init__(self, layout: Layout, allowed_paths: Sequence[Path], aio: str) -> None:
        self._layout = layout
        self._roots = (layout.images, *allowed_paths)
        self._aio = aio

    # --- the spec
    async def check(self, spec: VolumeBackend) -> VolumeBackend:
        """Return the spec with its source resolved, or raise InvalidArgument."""
        if spec.source is None:
            return spec
        return await anyio.to_thread.run_sync(self._check_source, spec, spec.source)

    def _check_source(self, spec: VolumeBackend, source: VolumeSource) -> VolumeBackend:
        path = self._resolve_image(source)
        size_bytes = disk_files.image_size_bytes(path, source.format)
        if spec.format is VolumeFormat.RAW and source.format is not VolumeFormat.RAW:
            raise Unsupported(
                f"a raw volume cannot start from the {source.format.value} image {source.path}",
                field="backend.format",
                hint="use format qcow2, which lies on top of the image",
            )
        if spec.size_bytes < size_bytes:
            raise InvalidArgument(
                f"{spec.size_bytes} bytes are less than the {size_bytes} of the image {path}",
                field="backend.size_bytes",
                hint=f"at least {size_bytes}",
            )
        resolved = VolumeSource(path=str(path), sha256=source.sha256, format=source.format)
        return msgspec.structs.replace(spec, source=resolved)

    def _resolve_image(self, source: VolumeSource) -> Path:
        given = Path(source.path)
        root = next((root for root in self._roots if given.is_relative_to(root)), None)
        if root is None:
            raise InvalidArgument(
                f"image {source.path!r} lies in no directory that stord may read",
                field="backend.source.path",
                hint="import it as an image, or add its directory to storage.allowed_paths",
            )
        path = resolve_inside(root, str(given.relative_to(root)))
        if path.name != source.sha256:
            raise InvalidArgument(
                f"image {source.path!r} does not carry the name of its sha256 {source.sha256}",
                field="backend.source.sha256",
                hint="content-addressed images are named by their own sha256",
            )
        return path

    # --- files
    def directory(self, volume_id: str) -> Path:
        """Return the volume's directory."""
        return self._layout.volume(volume_id)

    def lock_path(self, volume_id: str) -> Path:
        """Return the file whose lock means use of the volume."""
        return self.directory(volume_id) / "lock"

    def _disk_path(self, volume_id: str, spec: VolumeBackend) -> Path:
        return self.directory(volume_id) / f"disk.{spec.format.value}"

    async def create(self, volume_id: str, spec: VolumeBackend) -> bool:
        """Make the volume whole or not at all; False: it was there already and matches."""
        directory = self.directory(volume_id)
        if await anyio.to_thread.run_sync(disk_files.matches, directory, spec):
            return False
        building = directory.with_name(directory.name + disk_files.NEW)
        try:
            await anyio.to_thread.run_sync(disk_files.begin, building)
            await failpoint("stord.open.after_begin")
            await self._build(building / f"disk.{spec.format.value}", spec)
            await failpoint("stord.open.after_build")
            await anyio.to_thread.run_sync(disk_files.finish, building, directory, spec)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(disk_files.remove_tree, building)
            raise
        return True

    async def _build(self, disk: Path, spec: VolumeBackend) -> None:
        if spec.format is VolumeFormat.RAW:
            await anyio.to_thread.run_sync(disk_files.build_raw, disk, spec)
            return
        argv = ["qemu-img", "create", "-q", "-f", "qcow2"]
        if spec.source is not None:
            # -u: do not open the image; its size was read and compared above.
            argv += ["-u", "-b", spec.source.path, "-F", spec.source.format.value]
        await _qemu_img([*argv, str(disk), str(spec.size_bytes)], disk)

    async def grow(self, volume_id: str, spec: VolumeBackend) -> None:
        """Make it as large as the spec says; never smaller."""
        disk = self._disk_path(volume_id, spec)
        with disk_files.exclusively(self.lock_path(volume_id)):
            if disk_files.virtual_size_bytes(disk, spec.format) < spec.size_bytes:
                if spec.format is VolumeFormat.RAW:
                    await anyio.to_thread.run_sync(disk_files.extend_raw, disk, spec.size_bytes)
                else:
                    await self._extend_qcow2(disk, spec.size_bytes)
            await anyio.to_thread.run_sync(disk_files.describe, disk.parent, spec)

    async def _extend_qcow2(self, disk: Path, size_bytes: int) -> None:
        # The backing file is left out: the volume is never smaller than its image, so nothing
        # of the image can come to light in the new part.
        options: dict[str, object] = {
            "driver": "qcow2",
            "backing": None,
            "file": {"driver": "file", "filename": str(disk)},
        }
        name = f"json:{msgspec.json.encode(options).decode()}"
        await _qemu_img(["qemu-img", "resize", "-q", name, str(size_bytes)], disk)

    async def delete(self, volume_id: str) -> None:
        """Remove every trace; fine when there is none."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(NotFound):
                stack.enter_context(disk_files.exclusively(self.lock_path(volume_id)))
            await anyio.to_thread.run_sync(disk_files.remove_volume, self.directory(volume_id))

    async def inspect(self, volume_id: str, spec: VolumeBackend) -> Inspection:
        """Look at it."""
        return await anyio.to_thread.run_sync(
            disk_files.inspect, self._disk_path(volume_id, spec), spec
        )

    def grant(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give its files to a storage uid; InUse where a process of somebody else holds it."""
        with disk_files.exclusively(self.lock_path(volume_id)):
            for path in (self._disk_path(volume_id, spec), self.lock_path(volume_id)):
                os.chown(path, uid, uid, follow_symlinks=False)

    def revoke(self, volume_id: str, spec: VolumeBackend) -> None:
        """Take its files back to root, unless they are gone or somebody else holds them."""
        with contextlib.suppress(NotFound, FileNotFoundError, InUse):
            self.grant(volume_id, spec, 0)

    def disk(self, volume_id: str, spec: VolumeBackend) -> DiskFile:
        """Describe how the storage daemon opens it."""
        path = self._disk_path(volume_id, spec)
        disk_files.virtual_size_bytes(path, spec.format)  # refuses a header that names other files
        source = spec.source if spec.format is VolumeFormat.QCOW2 else None
        return DiskFile(
            path=path,
            format=spec.format.value,
            direct=disk_files.takes_direct(path),
            aio=self._aio,
            image_path=None if source is None else Path(source.path),
            image_format="" if source is None else source.format.value,
        )

    def sweep(self) -> list[str]:
        """Remove what was being built or removed when stord died; only under its lock."""
        volumes = self.directory("x").parent
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
        volumes = self.directory("x").parent
        return sorted(entry.name for entry in volumes.iterdir()) if volumes.is_dir() else []


async def _qemu_img(argv: list[str], disk: Path) -> None:
    try:
        await run(argv, timeout_s=QEMU_IMG_TIMEOUT_S)
    except CommandFailed as error:
        if b"No space left" in error.stderr or b"quota" in error.stderr:
            raise ResourceExhausted(
                f"no space for {str(disk)!r}", hint=f"free space below {disk.parent}"
            ) from error
        raise
