"""Volumes that start from something that takes time to copy: made empty, then filled by a job.

While the job runs the volume is CREATING; a restart begins the copy anew. What fills a volume is
looked up by the kind of its source; each of them is registered by the module that knows it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from chv.common.errors import Unsupported
from chv.common.secret import Secret
from chv.common.wire.stord import CloneMode, VolumeBackend, VolumeFormat
from chv.stord.cancelling import cancellable
from chv.stord.jobs import JobControl
from chv.stord.keys import read_key
from chv.stord.qsd import graph
from chv.stord.records import Volume
from chv.stord.tools import Call
from chv.stord.work import Parts

KEY_ID = "k"
Fill = Callable[[JobControl, Volume], Awaitable[None]]
Check = Callable[[VolumeBackend], object]


class FillKind(StrEnum):
    """What a volume is filled from."""

    IMAGE = "image"
    CLONE = "clone"
    BACKUP = "backup"


class FillVolume(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the job."""

    volume_id: str


def kind_of(spec: VolumeBackend) -> FillKind | None:
    """Return how the volume is filled by a job; None where it is made at once."""
    if spec.backup is not None:
        return FillKind.BACKUP
    if spec.snapshot is not None:
        return FillKind.CLONE if spec.snapshot.mode is CloneMode.FULL else None
    if spec.source is None or spec.format is not VolumeFormat.RAW:
        return None
    copied = spec.source.format is VolumeFormat.RAW and spec.encryption is None
    return None if copied else FillKind.IMAGE


class Fills:
    """What can fill a volume on this node."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._checks: dict[FillKind | None, Check] = {}
        self._of: dict[FillKind, Fill] = {FillKind.IMAGE: self._from_image}

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
        if kind in self._checks:
            self._checks[kind](spec)

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

    async def _from_image(self, control: JobControl, row: Volume) -> None:
        """Copy an image into a raw volume, through the key where it has one."""
        source = row.backend.source
        assert source is not None
        layout, disks = self._parts.layout, self._parts.disks
        image = graph.LayerNode(
            number=0,
            format=source.format.value,
            protocol=graph.Protocol(driver="file", options={"filename": source.path}),
        )
        target = await anyio.to_thread.run_sync(disks.layer, row.volume_id, 0)
        keys: dict[str, Secret] = {}
        if target.key:
            keys[KEY_ID] = await anyio.to_thread.run_sync(read_key, layout, target.key)
        call = Call(
            owns=tuple(disks.paths(row.volume_id)),
            reads=(Path(source.path),),
            keys=keys,
            volume_id=row.volume_id,
        )
        await self._convert(control, image, target, call)

    async def _convert(
        self, control: JobControl, source: graph.LayerNode, target: graph.LayerNode, call: Call
    ) -> None:
        """Convert one layer into an empty one until it is done or somebody wants it to end."""
        control.total_bytes = self._parts.records.volumes[control.volume_id].backend.size_bytes
        nodes = graph.image_node(source, KEY_ID), graph.image_node(target, KEY_ID)
        await cancellable(control, lambda: self._parts.tools.convert(*nodes, call, control.percent))
