"""Files that are encrypted from their first byte: made and enlarged by qemu-img with their key.

The disk is made under its final name in a directory that is not the volume's yet; the caller
removes it after an error. Errors are those of the tools and of the keys.
"""

from __future__ import annotations

from pathlib import Path

import anyio.to_thread

from chv.common.layout import Layout
from chv.common.wire.stord import VolumeBackend, VolumeFormat
from chv.stord import luks
from chv.stord.backends import disk_files
from chv.stord.keys import Key, read_key
from chv.stord.qsd import graph
from chv.stord.tools import Call, Tools, json_image

TIMEOUT_S = 50.0
PASSABLE = 0o711
KEY = "k"


async def build(tools: Tools, layout: Layout, disk: Path, spec: VolumeBackend) -> None:
    """Make an empty disk, on top of its image where it is qcow2; a job copies one into raw."""
    key = await _key(layout, spec)
    await anyio.to_thread.run_sync(_reserve, disk)
    argv = ["create", "-q", "-f", luks.driver(spec.format.value)]
    argv += ["-o", luks.create_options(spec.format.value, KEY)]
    if spec.source is not None and spec.format is VolumeFormat.QCOW2:
        # -u: do not open the image; its size was read and compared before.
        argv += ["-u", "-b", spec.source.path, "-F", spec.source.format.value]
    call = Call(owns=(disk,), keys={KEY: key}, timeout_s=TIMEOUT_S)
    await tools.run([*argv, str(disk), str(spec.size_bytes)], call)


async def grow(tools: Tools, layout: Layout, disk: Path, spec: VolumeBackend) -> None:
    """Make the disk larger; nobody has it open."""
    if spec.format is VolumeFormat.RAW:
        # The size of what is encrypted is that of the file.
        offset = await anyio.to_thread.run_sync(luks.payload_offset_bytes, disk)
        await anyio.to_thread.run_sync(disk_files.extend_raw, disk, offset + spec.size_bytes)
        return
    call = Call(owns=(disk,), keys={KEY: await _key(layout, spec)}, timeout_s=TIMEOUT_S)
    argv = ["resize", "-q", json_image(_node(disk, spec)), str(spec.size_bytes)]
    await tools.run(argv, call)


async def _key(layout: Layout, spec: VolumeBackend) -> Key:
    assert spec.encryption is not None
    return await anyio.to_thread.run_sync(read_key, layout, spec.encryption.key)


def _node(disk: Path, spec: VolumeBackend) -> graph.Node:
    layer = graph.LayerNode(
        number=0,
        format=spec.format.value,
        protocol=graph.Protocol(driver="file", options={"filename": str(disk)}),
        key=KEY,
    )
    node = graph.image_node(layer, KEY)
    return node | {"backing": None} if layer.format == "qcow2" else node


def _reserve(disk: Path) -> None:
    """Make the file for root alone, where the tools uid can pass through to what it is lent."""
    disk.parent.chmod(PASSABLE)
    disk.touch(mode=0o600, exist_ok=False)
