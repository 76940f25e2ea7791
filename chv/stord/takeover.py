"""Bytes outside of our own files become a volume's: not over somebody's data, LUKS header first.

A device, export or LUN may hold data. A volume that is to be encrypted there, or filled, takes it
over only if its first bytes are zeros, or if this very volume has begun to (`Volume.begun`). One
that an encrypted volume has left, with a header that its key opens, is taken as it is. What we
made ourselves, a logical volume or an RBD image, is empty. All by qemu-img under the tools uid.
Errors: FailedPrecondition (data), PermissionDenied (the key of what is there), DataLoss (what was
written is not there), those of the tools.
"""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from chv.common.errors import DataLoss, FailedPrecondition, Internal
from chv.common.failpoint import failpoint
from chv.common.files import ensure_dir
from chv.common.secret import Secret
from chv.common.wire.stord import VolumeBackend, VolumeClass
from chv.stord import luks
from chv.stord.backends import disk_files
from chv.stord.disks import local_paths
from chv.stord.keys import read_key
from chv.stord.qsd import graph
from chv.stord.records import Volume
from chv.stord.tools import Call, json_image
from chv.stord.work import Parts

KEY_ID = "k"
HEADER_BYTES = luks.PAYLOAD_BYTES + luks.SECTOR_BYTES
LOOK_BYTES = 1 << 20  # where partitions, file systems, LUKS and LVM begin
TIMEOUT_S = 50.0
# Empty when we have made it: a thin pool gives out zeros, the rest of a group is written over.
MADE_BY_US = (VolumeClass.LVM, VolumeClass.RBD)
PASSABLE = 0o711


def is_elsewhere(spec: VolumeBackend) -> bool:
    """Tell whether the bytes are of a class that this module is for."""
    return spec.class_name is not VolumeClass.FILE


def reads_zeros(spec: VolumeBackend) -> bool:
    """Tell whether a new base of the class holds zeros, so that none need be written."""
    return spec.class_name in MADE_BY_US and spec.encryption is None


def padding_bytes(spec: VolumeBackend, filled_bytes: int) -> int:
    """Return how many zeros go behind what fills a volume, that nothing old comes to a guest."""
    foreign = is_elsewhere(spec) and spec.class_name not in MADE_BY_US
    return max(spec.size_bytes - filled_bytes, 0) if foreign and spec.encryption is None else 0


class Takeover:
    """Takes bytes over."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def prepare(self, row: Volume) -> bool:
        """Make the bytes an empty volume; False: they are one of this key already, with its data.

        The volume has its directory and is attached to nothing.
        """
        spec = row.backend
        if not is_elsewhere(spec):
            return True
        if not row.begun and spec.class_name not in MADE_BY_US:
            if await self._is_left_by_one_of_its_kind(row.volume_id, spec):
                return False
            current = self._parts.records.volumes[row.volume_id]
            await self._parts.records.put_volume(msgspec.structs.replace(current, begun=True))
            await failpoint("stord.takeover.after_begin")
        await self.format(row.volume_id, spec)
        return True

    async def format(self, volume_id: str, spec: VolumeBackend) -> None:
        """Put a LUKS header in front of the bytes where they have a key; over anything."""
        if spec.encryption is None or not is_elsewhere(spec):
            return
        async with self._scratch() as head:
            await self._make_header(head, volume_id, spec)
            offset = await anyio.to_thread.run_sync(luks.payload_offset_bytes, head)
            if offset != luks.PAYLOAD_BYTES:
                raise Internal(f"qemu-img puts data at {offset}, not at {luks.PAYLOAD_BYTES}")
            place, _paths = await self._place(volume_id, spec)
            target: graph.Node = {"driver": "raw", "size": HEADER_BYTES, "file": place}
            argv = ["convert", "-n", "-O", "raw", json_image(_raw_file(head)), json_image(target)]
            await self._run(argv, volume_id, spec, head)
        await failpoint("stord.takeover.after_header")
        await self._open(volume_id, spec)

    async def verify(self, source: graph.Node, target: graph.Node, length: int, call: Call) -> None:
        """Read back what was copied; DataLoss where it is not the same."""
        limited: graph.Node = {"driver": "raw", "size": length, "file": target}
        argv = ["compare", "-q", json_image(source), json_image(limited)]
        done = await self._parts.tools.run(argv, msgspec.structs.replace(call, accept=(0, 1)))
        if done.returncode != 0:
            raise DataLoss(
                "what was copied is not what is read back: the device or server lost writes",
                resource=call.volume_id,
                hint="look at its log, then delete the volume and make it again",
            )

    # --- what is there
    async def _is_left_by_one_of_its_kind(self, volume_id: str, spec: VolumeBackend) -> bool:
        """Tell whether the key opens what is there; raise where that is data of others."""
        begins = await self._first_bytes(volume_id, spec)
        filled = (spec.source, spec.snapshot, spec.backup) != (None, None, None)
        if begins.startswith(luks.MAGIC) and spec.encryption is not None and not filled:
            await self._open(volume_id, spec)
            return True
        if begins.strip(b"\0"):
            found = await self._parts.disks.inspect(volume_id)
            raise FailedPrecondition(
                f"{found.location} holds data, which the volume would be written over",
                resource=volume_id,
                field=f"backend.{spec.class_name.value}",
                hint=f"if nobody needs it, write zeros over its first {LOOK_BYTES} bytes",
            )
        return False

    async def _first_bytes(self, volume_id: str, spec: VolumeBackend) -> bytes:
        length = min(LOOK_BYTES, spec.size_bytes)
        place, _paths = await self._place(volume_id, spec)
        source: graph.Node = {"driver": "raw", "size": length, "file": place}
        async with self._scratch() as copy:
            await anyio.to_thread.run_sync(disk_files.extend_raw, copy, length)
            argv = ["convert", "-n", "-O", "raw", json_image(source), json_image(_raw_file(copy))]
            await self._run(argv, volume_id, spec, copy)
            return await anyio.to_thread.run_sync(copy.read_bytes)

    async def _open(self, volume_id: str, spec: VolumeBackend) -> None:
        """Read through the header with the key."""
        place, _paths = await self._place(volume_id, spec)
        node: graph.Node = {"driver": "luks", "key-secret": KEY_ID, "file": place}
        argv = ["map", "--output=json", "--start-offset=0", f"--max-length={luks.SECTOR_BYTES}"]
        await self._run([*argv, json_image(node)], volume_id, spec, locked=True)

    # --- tools
    async def _make_header(self, head: Path, volume_id: str, spec: VolumeBackend) -> None:
        keys = await self._keys(spec)
        argv = ["create", "-q", "-f", "luks", "-o", luks.create_options("raw", KEY_ID)]
        call = Call(owns=(head,), keys=keys, volume_id=volume_id, timeout_s=TIMEOUT_S)
        await self._parts.tools.run([*argv, str(head), str(luks.SECTOR_BYTES)], call)

    async def _keys(self, spec: VolumeBackend) -> dict[str, Secret]:
        assert spec.encryption is not None
        layout, name = self._parts.layout, spec.encryption.key
        return {KEY_ID: await anyio.to_thread.run_sync(read_key, layout, name)}

    async def _place(
        self, volume_id: str, spec: VolumeBackend
    ) -> tuple[graph.Node, tuple[Path, ...]]:
        """Return how the bytes are reached, and the device node that must be lent for it."""
        backend = self._parts.disks.backend(spec)
        protocol = await anyio.to_thread.run_sync(backend.tool_protocol, volume_id, spec)
        layer = graph.LayerNode(number=0, format="raw", protocol=protocol)
        return graph.protocol(protocol), tuple(local_paths((layer,)))

    async def _run(
        self,
        argv: list[str],
        volume_id: str,
        spec: VolumeBackend,
        *files: Path,
        locked: bool = False,
    ) -> None:
        _node, paths = await self._place(volume_id, spec)
        call = Call(
            owns=(*paths, *files),
            keys=await self._keys(spec) if locked else {},
            volume_id=volume_id,
            timeout_s=TIMEOUT_S,
        )
        async with self._parts.disks.backend(spec).reach(volume_id, spec):
            await self._parts.tools.run(argv, call)

    @asynccontextmanager
    async def _scratch(self) -> AsyncIterator[Path]:
        """Yield the name of a file that is gone afterwards; what a kill leaves is swept."""
        directory = self._parts.layout.run / "tools" / self._parts.ids.nonce()
        await anyio.to_thread.run_sync(partial(ensure_dir, directory.parent, mode=PASSABLE))
        await anyio.to_thread.run_sync(partial(ensure_dir, directory, mode=PASSABLE))
        path = directory / "bytes"
        try:
            await anyio.to_thread.run_sync(partial(path.touch, mode=0o600))
            yield path
        finally:
            with anyio.CancelScope(shield=True):
                remove = partial(shutil.rmtree, directory, ignore_errors=True)
                await anyio.to_thread.run_sync(remove)


def _raw_file(path: Path) -> graph.Node:
    return {"driver": "raw", "file": {"driver": "file", "filename": str(path)}}
