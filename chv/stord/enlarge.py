"""Growth of a volume whose top layer is an overlay: only that one becomes larger.

What lies below it ends where it did, and reads as zeros beyond. Nobody has the volume open.
"""

from __future__ import annotations

import anyio.to_thread

from chv.common.errors import InvalidArgument
from chv.common.secret import Secret
from chv.common.wire.stord import VolumeBackend, VolumeClass, VolumeFormat
from chv.stord.backends import disk_files
from chv.stord.backends.base import Backend
from chv.stord.backends.elsewhere import refuse_smaller
from chv.stord.keys import read_key
from chv.stord.qsd import graph
from chv.stord.records import Volume
from chv.stord.tools import Call, json_image
from chv.stord.work import Parts

TIMEOUT_S = 50.0
KEY_ID = "k"
# Their size is up to others; the other classes enlarge the base when layers are merged.
SOMEBODY_ELSES = (VolumeClass.BLOCK, VolumeClass.NBD, VolumeClass.ISCSI)


async def enlarge_overlay(parts: Parts, row: Volume) -> None:
    """Make the top layer as large as the record says; never smaller."""
    volume_id, number = row.volume_id, row.top.number
    path = parts.disks.layer_path(volume_id, number)
    layer = await anyio.to_thread.run_sync(parts.disks.layer, volume_id, number)
    if disk_files.virtual_size_bytes(path, VolumeFormat.QCOW2) >= row.backend.size_bytes:
        return
    await _refuse_beyond(parts, row)
    keys: dict[str, Secret] = {}
    if layer.key:
        keys[KEY_ID] = await anyio.to_thread.run_sync(read_key, parts.layout, layer.key)
    node = graph.image_node(layer, KEY_ID) | {"backing": None}
    call = Call(owns=(path,), keys=keys, volume_id=volume_id, timeout_s=TIMEOUT_S)
    await parts.tools.run(["resize", "-q", json_image(node), str(row.backend.size_bytes)], call)


async def refuse_beyond_device(backend: Backend, volume_id: str, spec: VolumeBackend) -> None:
    """Refuse a size that the device or server does not have: no later start would bring it."""
    if spec.class_name not in SOMEBODY_ELSES:
        return
    found = await backend.inspect(volume_id, spec)
    if found.state == "open" and found.device_bytes < spec.size_bytes:
        raise InvalidArgument(
            f"{spec.size_bytes} bytes are more than the {found.device_bytes} of {found.location}",
            resource=volume_id,
            field="backend.size_bytes",
            hint="enlarge it where it is, then try again",
        )
    refuse_smaller(found, spec)


async def _refuse_beyond(parts: Parts, row: Volume) -> None:
    """Raise where the base could never hold it: no merge would ever bring the layers together."""
    if row.backend.class_name in SOMEBODY_ELSES:
        backend = parts.disks.backend(row.backend)
        refuse_smaller(await backend.inspect(row.volume_id, row.backend), row.backend)
