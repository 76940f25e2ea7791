"""The storage daemon's argv and block graph as data: names, nodes, exports, limits. Pure.

Nodes of a volume, `<s>` being its short uid: `l-<s>` holds the volume's lock; `f<n>-<s>` is the
format node of layer n and `p<n>-<s>` its bytes; `b<i>-<s>` and `i<i>-<s>` are the read-only
layers below the volume's own (an image, or the layers of the volume that it is a clone of),
counted from the bottom; `t-<s>` is the throttle filter on top, which is exported; `z-<s>` is there
while the guest is held (`chv.stord.qsd.hold`). Objects: `g-<s>` the throttle group, `k-<s>-<key>`
a key while something is opened with it. Formats and backing files are always declared: QEMU probes
nothing, and what a header says of other files is never followed. What is QEMU's default anyway
is left out: a monitor reads byte by byte, about 5 us each, so that a command costs its length.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from chv.common.ids import short_uid
from chv.common.wire.stord import Limits, Rate

BINARY = "qemu-storage-daemon"
Node = dict[str, object]
Command = tuple[str, Node]
BLOCK, OBJECT, EXPORT = "blockdev-add", "object-add", "block-export-add"
OPTIONS = {BLOCK: "--blockdev", OBJECT: "--object", EXPORT: "--export"}
# QEMU's names of the limits, ours, and what the parts of a Rate are called there.
RATES = {
    "iops-total": "iops_total",
    "iops-read": "iops_read",
    "iops-write": "iops_write",
    "bps-total": "bps_total",
    "bps-read": "bps_read",
    "bps-write": "bps_write",
}


class Protocol(msgspec.Struct, frozen=True, kw_only=True):
    """How the bytes of a layer are reached.

    `options` go to QEMU's driver beside node name, cache, discard. `direct`: O_DIRECT, else
    through the page cache; None where the driver has no such thing (network). `key`: name of a
    secret object that the driver itself needs, with its value's source in the caller's hands.
    """

    driver: str
    options: dict[str, object]
    direct: bool | None = True
    aio: str = ""  # empty: the driver has no choice
    local: bool = True  # False: the storage daemon needs the network
    limit_bytes: int = 0  # what lies behind them is not seen; 0: all is


class LayerNode(msgspec.Struct, frozen=True, kw_only=True):
    """One layer as the storage daemon opens it."""

    number: int
    format: str  # raw | qcow2
    protocol: Protocol
    key: str = ""  # name of the key that it is encrypted with


class Disk(msgspec.Struct, frozen=True, kw_only=True):
    """A volume as the storage daemon opens it, from bottom to top.

    `below`: read-only layers of others. `own`: the volume's; all but the last are frozen.
    """

    volume_id: str
    own: tuple[LayerNode, ...]
    below: tuple[LayerNode, ...] = ()
    limits: Limits = Limits()
    read_only: bool = False

    @property
    def local(self) -> bool:
        """Tell whether it needs no network."""
        return all(layer.protocol.local for layer in (*self.below, *self.own))

    @property
    def keys(self) -> frozenset[str]:
        """Names of the keys that opening it needs; a clone and its parent have their own."""
        return frozenset(layer.key for layer in (*self.below, *self.own) if layer.key)


def lock_node(volume_id: str) -> str:
    """Name of the node that keeps every other storage daemon away from the volume."""
    return f"l-{short_uid(volume_id)}"


def format_node(volume_id: str, number: int) -> str:
    """Name of the format node of one of the volume's own layers."""
    return f"f{number}-{short_uid(volume_id)}"


def protocol_node(volume_id: str, number: int) -> str:
    """Name of the node below it."""
    return f"p{number}-{short_uid(volume_id)}"


def throttle_node(volume_id: str) -> str:
    """Name of the exported node."""
    return f"t-{short_uid(volume_id)}"


def throttle_group(volume_id: str) -> str:
    """Id of the volume's throttle group."""
    return f"g-{short_uid(volume_id)}"


def secret_id(volume_id: str, key: str) -> str:
    """Id of the secret object that holds a key of the volume's layers for a moment."""
    return f"k-{short_uid(volume_id)}-{key.replace('/', '.')}"


def export_id(volume_id: str) -> str:
    """Id of the volume's export."""
    return f"e-{short_uid(volume_id)}"


def is_of(node_name: str, volume_id: str) -> bool:
    """Tell whether a node belongs to the volume."""
    return node_name.endswith(f"-{short_uid(volume_id)}")


def removal_order(present: frozenset[str], volume_id: str) -> list[str]:
    """Return the volume's nodes in the order in which they most likely can go, the lock last."""
    top, lock = throttle_node(volume_id), lock_node(volume_id)

    def rank(name: str) -> tuple[int, int]:
        if name == lock:
            return (3, 0)
        if name == top:
            return (0, 0)
        digits = name.partition("-")[0][1:]
        return (1 if name.startswith("f") else 2, -int(digits) if digits.isdigit() else 0)

    return sorted((name for name in present if is_of(name, volume_id)), key=rank)


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """A disk with all that it takes to export it."""

    disk: Disk
    lock_path: Path
    socket_path: Path
    shared: bool = False  # several may read it, nobody writes


def commands(serving: Serving) -> list[Command]:
    """Return what opens and exports a disk, in this order: the lock, before anything is opened."""
    disk = serving.disk
    return [
        (BLOCK, lock_blockdev(disk.volume_id, serving.lock_path, shared=serving.shared)),
        (OBJECT, {"qom-type": "throttle-group", **_group(disk)}),
        (BLOCK, chain(disk)),
        (BLOCK, throttle(disk.volume_id, disk.own[-1].number)),
        (EXPORT, export(disk.volume_id, serving.socket_path, not disk.read_only)),
    ]


def options(serving: Serving) -> list[str]:
    """Return the same for a command line."""
    return [
        text
        for command, node in commands(serving)
        for text in (OPTIONS[command], msgspec.json.encode(node).decode())
    ]


def argv(
    monitor_path: Path, pid_path: Path, binary: str = BINARY, disks: tuple[Serving, ...] = ()
) -> list[str]:
    """Command line of a storage daemon with these disks; all others come by QMP.

    Options take effect in their order and the first that fails ends it: where the monitor
    answers, every disk is exported.

    QSD has no option for a label and its ids take no colon, so the name of the pid file carries
    the worker id. `wait=on` makes it take its first client before it moves the monitor into a
    thread of its own: a client that comes during the move is served by both threads at once, and
    is left without an answer or loses a byte (seen in 1 of 3000 starts of QEMU 7.2 when it came
    right after the pid file, in none of 4000 with the wait).
    """
    return [
        binary,
        *(text for disk in disks for text in options(disk)),
        "--chardev",
        f"socket,id=monitor,path={monitor_path},server=on,wait=on",
        "--monitor",
        "chardev=monitor",
        "--pidfile",
        str(pid_path),
    ]


def lock_blockdev(volume_id: str, lock_path: Path, *, shared: bool = False) -> Node:
    """Describe the node that locks `lock_path` for the life of this storage daemon.

    A raw image gets no lock from QEMU: two writers would be accepted in silence. This filter
    claims write permission on the lock file and shares it with nobody, so QEMU's own file locks
    refuse the second claim, whoever makes it, and the kernel drops them with the process. With
    `shared` it claims to read and refuses writers alone.
    """
    permission = "consistent-read" if shared else "write"
    return {
        "driver": "blkdebug",
        "node-name": lock_node(volume_id),
        "take-child-perms": [permission],
        "unshare-child-perms": ["write"],
        "image": {"driver": "file", "filename": str(lock_path), "locking": "on"}
        | _read_only(shared),
    } | _read_only(shared)


def _read_only(value: bool) -> Node:
    return {"read-only": True} if value else {}


def chain(disk: Disk) -> Node:
    """Describe the format node of the top layer with everything below it."""
    node: Node | None = None
    for index, layer in enumerate(disk.below):
        short = short_uid(disk.volume_id)
        names = (f"b{index}-{short}", f"i{index}-{short}")
        node = _layer(disk.volume_id, layer, names, below=node, read_only=True)
    for layer in disk.own:
        names = own_names(disk.volume_id, layer.number)
        read_only = disk.read_only or layer is not disk.own[-1]
        node = _layer(disk.volume_id, layer, names, below=node, read_only=read_only)
    assert node is not None
    return node


def overlay(volume_id: str, layer: LayerNode) -> Node:
    """Describe a new top layer that is put on the chain by `blockdev-snapshot`."""
    names = own_names(volume_id, layer.number)
    return _layer(volume_id, layer, names, below=None, read_only=False)


def own_names(volume_id: str, number: int) -> tuple[str, str]:
    """Return the names of format and protocol node of one of the volume's layers."""
    return format_node(volume_id, number), protocol_node(volume_id, number)


def _layer(
    volume_id: str, layer: LayerNode, names: tuple[str, str], *, below: Node | None, read_only: bool
) -> Node:
    node = image_node(layer, secret_id(volume_id, layer.key), file_node=names[1])
    node |= {"node-name": names[0], **_read_only(read_only)}
    if layer.format == "qcow2":
        node["backing"] = below
    return node


def image_node(layer: LayerNode, secret: str, *, file_node: str = "") -> Node:
    """Describe format over protocol without a backing file and without a name of its own."""
    file = protocol(layer.protocol, file_node)
    if layer.format == "qcow2":
        node: Node = {"driver": "qcow2", "discard": "unmap", "file": file}
        if layer.key:
            node["encrypt"] = {"format": "luks", "key-secret": secret}
        return node
    if layer.key:
        return {"driver": "luks", "key-secret": secret, "discard": "unmap", "file": file}
    return {"driver": "raw", "discard": "unmap", "file": file}


def protocol(description: Protocol, name: str = "") -> Node:
    """Describe the bytes."""
    node: Node = {"driver": description.driver, **description.options, "discard": "unmap"}
    if name:
        node["node-name"] = name
    if description.direct is not None:
        node["cache"] = {"direct": description.direct}
    if description.aio:
        # Native AIO is refused without O_DIRECT.
        usable = description.direct or description.aio != "native"
        node["aio"] = description.aio if usable else "threads"
    if description.limit_bytes:
        size_bytes = description.limit_bytes
        named = {"node-name": node.pop("node-name")} if name else {}
        return {"driver": "raw", "size": size_bytes, "discard": "unmap", "file": node} | named
    return node


def throttle(volume_id: str, top: int) -> Node:
    """Describe the filter above the top layer; it is there also without limits.

    It has no permissions of its own: read-only is what its child is.
    """
    return {
        "driver": "throttle",
        "node-name": throttle_node(volume_id),
        "throttle-group": throttle_group(volume_id),
        "file": format_node(volume_id, top),
        "discard": "unmap",
    }


def export(volume_id: str, socket_path: Path, writable: bool) -> Node:
    """Describe the vhost-user-blk export of the volume.

    One queue, the default, with native AIO is the set whose behaviour on a crash is proven.
    """
    node: Node = {
        "type": "vhost-user-blk",
        "id": export_id(volume_id),
        "node-name": throttle_node(volume_id),
        "addr": {"type": "unix", "path": str(socket_path)},
    }
    return node | ({"writable": True} if writable else {})


def _group(disk: Disk) -> Node:
    """Return id and limits of the disk's throttle group; a new group has none."""
    group: Node = {"id": throttle_group(disk.volume_id)}
    return group if disk.limits == Limits() else group | {"limits": limits_arguments(disk.limits)}


def limits_arguments(limits: Limits) -> Node:
    """Return all 19 fields of QEMU's ThrottleLimits; what is left out would keep its value."""
    arguments: Node = {"iops-size": limits.iops_size_bytes}
    for theirs, ours in RATES.items():
        rate: Rate = getattr(limits, ours)
        burst = rate.burst if rate.limit else 0
        arguments[theirs] = rate.limit
        arguments[f"{theirs}-max"] = burst
        # QEMU refuses a length other than 1 where there is no burst.
        arguments[f"{theirs}-max-length"] = rate.burst_s if burst else 1
    return arguments


def limits_from(answer: dict[str, int]) -> Limits:
    """Read what the storage daemon reports of a throttle group."""
    rates = {
        ours: Rate(
            limit=answer[theirs],
            burst=answer[f"{theirs}-max"],
            burst_s=answer[f"{theirs}-max-length"],
        )
        for theirs, ours in RATES.items()
    }
    return Limits(iops_size_bytes=answer["iops-size"], **rates)
