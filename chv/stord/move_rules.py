"""What a move changes in a volume's description, and where a volume may move to. Pure."""

from __future__ import annotations

import msgspec

from chv.common.errors import FailedPrecondition, InvalidArgument, Unsupported
from chv.common.wire.stord import VolumeBackend
from chv.stord import luks
from chv.stord.qsd import graph
from chv.stord.records import Volume

NO_SPEC: dict[str, None] = {"source": None, "snapshot": None, "backup": None}


def placed(spec: VolumeBackend, place: VolumeBackend) -> VolumeBackend:
    """Return the spec with the place of another."""
    return msgspec.structs.replace(
        spec,
        class_name=place.class_name,
        format=place.format,
        pool=place.pool,
        block=place.block,
        lvm=place.lvm,
        nbd=place.nbd,
        iscsi=place.iscsi,
        rbd=place.rbd,
    )


def empty(spec: VolumeBackend) -> VolumeBackend:
    """Return the spec of a volume that starts from nothing."""
    return msgspec.structs.replace(spec, **NO_SPEC)


def limited(layer: graph.LayerNode, size_bytes: int) -> graph.LayerNode:
    """Return the layer of a larger place as large as what is mirrored to it.

    A mirror goes to nothing that is larger; what lies behind shows at the next attachment.
    """
    header = luks.PAYLOAD_BYTES if layer.key else 0
    protocol = msgspec.structs.replace(layer.protocol, limit_bytes=size_bytes + header)
    return msgspec.structs.replace(layer, protocol=protocol)


def is_at(row: Volume, target: VolumeBackend) -> bool:
    """Tell whether the volume is at the place already."""
    return placed(row.backend, target) == row.backend


def needs_network(spec: VolumeBackend) -> bool:
    """Tell whether a storage daemon needs a network to reach the place."""
    if spec.nbd is not None:
        return not spec.nbd.socket
    return spec.iscsi is not None or spec.rbd is not None


def check_target(row: Volume, target: VolumeBackend) -> None:
    """Refuse a target that is another volume, the same place, or one of the same name."""
    there = row.backend
    wanted = placed(there, target)
    differs = (target.size_bytes, target.access) != (there.size_bytes, there.access)
    if differs or target.encryption != there.encryption:
        raise InvalidArgument(
            "a move changes class, place, pool and format alone",
            resource=row.volume_id,
            field="backend",
            hint="change size, access and key by OpenVolume",
        )
    if wanted == there:
        raise FailedPrecondition(
            "the volume is there already", resource=row.volume_id, field="backend"
        )
    if wanted.class_name is there.class_name and there.class_name.value != "file":
        raise Unsupported(
            f"a volume of class {there.class_name.value} moves to another of its class only by"
            " way of class file",
            resource=row.volume_id,
            field="backend",
            hint="move it to class file, then on",
        )
    devices = ("block", "lvm")
    if wanted.class_name.value in devices and there.class_name.value in devices:
        raise Unsupported(
            "a volume moves from one device to another only by way of class file",
            resource=row.volume_id,
            field="backend",
            hint="move it to class file, then on",
        )
