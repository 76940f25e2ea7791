"""Volumes that start from something that takes time to copy: made empty, then filled by a job.

While the job runs the volume is CREATING; a restart begins the copy anew. What fills a volume is
looked up by the kind of its source; each of them is registered by the module that knows it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from chv.common.errors import Unsupported
from chv.common.failpoint import failpoint
from chv.common.secret import Secret
from chv.common.wire.stord import CloneMode, VolumeBackend, VolumeFormat
from chv.stord.backends import disk_files
from chv.stord.cancelling import cancellable
from chv.stord.jobs import JobControl
from chv.stord.keys import read_key
from chv.stord.qsd import graph
from chv.stord.records import Volume
from chv.stord.takeover import Takeover, is_elsewhere, padding_bytes, reads_zeros
from chv.stord.tools import Call, Fresh
from chv.stord.work import Parts

KEY_ID = "k"
Fill = Callable[[JobControl, Volume], Awaitable[None]]
Check = Callable[[VolumeBackend], object]


class FillKind(StrEnum):
    """What a volume is filled from."""

    IMAGE = "image"
    CLONE = "clone"
    BACKUP = "backup"
    KEY = "key"  # of nothing, but encrypted where the bytes are not a file of ours


class FillVolume(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the job."""

    volume_id: str


def kind_of(spec: VolumeBackend) -> FillKind | None:
    """Return how the volume is filled by a job; None where it is made at once."""
    if spec.backup is not None:
        return FillKind.BACKUP
    if spec.snapshot is not None:
        return FillKind.CLONE if spec.snapshot.mode is CloneMode.FULL else None
    if is_elsewhere(spec):
        if spec.source is not None:
            return FillKind.IMAGE
        return None if spec.encryption is None else FillKind.KEY
    if spec.source is None or spec.format is not VolumeFormat.RAW:
        return None
    copied = spec.source.format is VolumeFormat.RAW and spec.encryption is None
    return None if copied else FillKind.IMAGE


class Fills:
    """What can fill a volume on this node."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._checks: dict[FillKind | None, Check] = {}
        self._takeover = Takeover(parts)
        self._of: dict[FillKind, Fill] = {
            FillKind.IMAGE: self._from_image,
            FillKind.KEY: self._from_nothing,
        }

    def register(self, kind: FillKind, fill: Fill, check: Check | None = None) -> None:
        """Say what fills volumes of a kind. The volume exists, is empty and attached to nothing.

        `check` refuses, before anything is made, what could not be filled; it may block.
        """
        self._of[kind] = fill
        if check is not None:
            self._checks[kind] = check

    def check_source(self, spec: VolumeBackend) -> None:
        """Raise where the source of a volume that is to be made is of no use. Blocks."""
        kind = kind_of(spec)
        if kind is not None and spec.encryption is not None:
            read_key(self._parts.layout, spec.encryption.key)
        if kind in self._checks:
            self._checks[kind](spec)

    async def prepare(self, row: Volume) -> bool:
        """Make what holds the volume ready to be filled; False: it has its data already."""
        return await self._takeover.prepare(row)

    def of(self, spec: VolumeBackend) -> Fill | None:
        """Return what fills the volume; None where it needs none, Unsupported where none can."""
        kind = kind_of(spec)
        if kind is None:
            return None
        if kind not in self._of:
            raise Unsupported(
                f"a volume cannot start from a {kind.value} yet",
                field="backend.backup" if kind is FillKind.BACKUP else "backend.snapshot",
            )
        return self._of[kind]

    async def _from_nothing(self, control: JobControl, row: Volume) -> None:
        """Leave the volume as it was made."""

    async def _from_image(self, control: JobControl, row: Volume) -> None:
        """Copy an image into a raw volume, through the key where it has one."""
        source, spec = row.backend.source, row.backend
        assert source is not None
        layout, disks = self._parts.layout, self._parts.disks
        path = Path(source.path)
        image = graph.LayerNode(
            number=0,
            format=source.format.value,
            protocol=graph.Protocol(driver="file", options={"filename": source.path}),
        )
        length = await anyio.to_thread.run_sync(disk_files.image_size_bytes, path, source.format)
        target = await anyio.to_thread.run_sync(disks.layer, row.volume_id, 0)
        keys: dict[str, Secret] = {}
        if target.key:
            keys[KEY_ID] = await anyio.to_thread.run_sync(read_key, layout, target.key)
        call = Call(
            owns=tuple(disks.paths(row.volume_id)),
            reads=(path,),
            keys=keys,
            volume_id=row.volume_id,
        )
        fresh = Fresh(zeros=reads_zeros(spec), padding_bytes=padding_bytes(spec, length))
        nodes = graph.image_node(image, KEY_ID), graph.image_node(target, KEY_ID)
        control.total_bytes = spec.size_bytes
        convert = partial(self._parts.tools.convert, *nodes, call, control.percent, fresh=fresh)
        async with disks.reach(row.volume_id):
            await cancellable(control, convert)
            await failpoint("stord.fill.after_convert")
            if is_elsewhere(spec):
                await control.progress(spec.size_bytes, spec.size_bytes, "reading it back")
                verify = partial(self._takeover.verify, *nodes, length, call)
                await cancellable(control, verify)
