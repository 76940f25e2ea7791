"""Growth of a volume whose top layer is an overlay: only that one becomes larger.

What lies below it ends where it did, and reads as zeros beyond. Nobody has the volume open.
"""

from __future__ import annotations

import anyio.to_thread

from chv.common.secret import Secret
from chv.common.wire.stord import VolumeFormat
from chv.stord.backends import disk_files
from chv.stord.keys import read_key
from chv.stord.qsd import graph
from chv.stord.records import Volume
from chv.stord.tools import Call, json_image
from chv.stord.work import Parts

TIMEOUT_S = 50.0
KEY_ID = "k"


async def enlarge_overlay(parts: Parts, row: Volume) -> None:
    """Make the top layer as large as the record says; never smaller."""
    volume_id, number = row.volume_id, row.top.number
    path = parts.disks.layer_path(volume_id, number)
    layer = await anyio.to_thread.run_sync(parts.disks.layer, volume_id, number)
    if disk_files.virtual_size_bytes(path, VolumeFormat.QCOW2) >= row.backend.size_bytes:
        return
    keys: dict[str, Secret] = {}
    if layer.key:
        keys[KEY_ID] = await anyio.to_thread.run_sync(read_key, parts.layout, layer.key)
    node = graph.image_node(layer, KEY_ID) | {"backing": None}
    call = Call(owns=(path,), keys=keys, volume_id=volume_id, timeout_s=TIMEOUT_S)
    await parts.tools.run(["resize", "-q", json_image(node), str(row.backend.size_bytes)], call)
