"""LUKS: what an encrypted image is made with, how one is opened, and its header read by us.

A key is in the storage daemon's memory from just before an image is opened until just after, and
at no other time; it gets there by QMP. Wrong keys are PermissionDenied with the key's name, headers
that are none DataLoss. Rotation is in `rekey`.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from chv.common.errors import ChvError, DataLoss, NotFound
from chv.common.layout import Layout
from chv.stord.keys import is_wrong_key, read_key, wrong_key
from chv.stord.qsd import graph
from chv.stord.qsd.monitor import Monitor

# How long guessing one passphrase takes an attacker's equal of this machine. Every open of every
# layer costs about as much; keys are long (KEY_BYTES_MIN), so a second would buy nothing.
ITERATION_MS = 100
FORGET_TIMEOUT_S = 5.0
MAGIC = b"LUKS\xba\xbe"
SECTOR_BYTES = 512
# Where QEMU puts the data of an image that is made with the options below: behind eight slots of a
# 512 bit key. It is seen to be so at each creation.
PAYLOAD_BYTES = 4040 * SECTOR_BYTES
# magic, version, cipher, mode, hash, payload offset in sectors (LUKS on-disk format 1)
_HEADER = struct.Struct(">6sH32s32s32sI")


def create_options(image_format: str, secret: str) -> str:
    """Return the `-o` of qemu-img that makes an encrypted image of that format."""
    prefix = "encrypt." if image_format == "qcow2" else ""
    options = [f"{prefix}key-secret={secret}", f"{prefix}iter-time={ITERATION_MS}"]
    if image_format == "qcow2":
        options.insert(0, "encrypt.format=luks")
    return ",".join(options)


def driver(image_format: str) -> str:
    """Return QEMU's driver of an encrypted image."""
    return "qcow2" if image_format == "qcow2" else "luks"


def payload_offset_bytes(path: Path) -> int:
    """Return where the data of a raw encrypted file begin."""
    with path.open("rb") as file:
        data = file.read(_HEADER.size)
    if len(data) == _HEADER.size:
        magic, version, _cipher, _mode, _hash, offset = _HEADER.unpack(data)
        if magic == MAGIC and version == 1:
            return int(offset) * SECTOR_BYTES
    raise DataLoss(
        f"{str(path)!r} has no LUKS header", hint="nothing in it can be read; restore a backup"
    )


async def add_locked(monitor: Monitor, layout: Layout, disk: graph.Disk, node: graph.Node) -> None:
    """Open a node of the disk, with the keys that it needs for just as long."""
    async with secrets(monitor, layout, disk.volume_id, disk.keys):
        await monitor.add_node(node)


@asynccontextmanager
async def secrets(
    monitor: Monitor, layout: Layout, volume_id: str, keys: Collection[str]
) -> AsyncIterator[None]:
    """Have the storage daemon know the keys during the block."""
    names = sorted(keys)
    if not names:
        yield
        return
    values = {name: await anyio.to_thread.run_sync(read_key, layout, name) for name in names}
    try:
        for name, value in values.items():
            await _forget(monitor, volume_id, name)  # of a daemon that was killed just here
            options: graph.Node = {
                "data": base64.b64encode(value.reveal()).decode(),
                "format": "base64",
            }
            await monitor.add_object("secret", graph.secret_id(volume_id, name), options)
        yield
    except ChvError as error:
        if is_wrong_key(error.message):
            raise wrong_key(" or ".join(names), volume_id) from error
        raise
    finally:
        with anyio.move_on_after(FORGET_TIMEOUT_S, shield=True):
            for name in names:
                await _forget(monitor, volume_id, name)


async def _forget(monitor: Monitor, volume_id: str, name: str) -> None:
    try:
        await monitor.delete_object(graph.secret_id(volume_id, name))
    except NotFound:
        return
