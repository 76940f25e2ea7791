"""The storage daemon's argv and block graph as data: names, nodes, exports. Pure.

Nodes of a volume: `l-` holds the volume's lock, `f-` is the format node that is exported, `p-`
its file, `b-` the image below an overlay. Formats and backing files are always declared: QEMU
probes nothing, and what a header says of other files is never followed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from chv.common.ids import short_uid

BINARY = "qemu-storage-daemon"
# One queue with native AIO is the set whose behaviour on a crash is proven.
QUEUES = 1
Node = dict[str, object]


class DiskFile(msgspec.Struct, frozen=True, kw_only=True):
    """How one volume is opened. `direct`: O_DIRECT, else through the page cache."""

    path: Path
    format: str
    direct: bool = True
    aio: str = "native"
    image_path: Path | None = None
    image_format: str = ""


def lock_node(volume_id: str) -> str:
    """Name of the node that keeps every other storage daemon away from the volume."""
    return f"l-{short_uid(volume_id)}"


def format_node(volume_id: str) -> str:
    """Name of the exported node."""
    return f"f-{short_uid(volume_id)}"


def export_id(volume_id: str) -> str:
    """Id of the volume's export."""
    return f"e-{short_uid(volume_id)}"


def argv(monitor_path: Path, pid_path: Path) -> list[str]:
    """Command line of an empty storage daemon; disks come by QMP.

    QSD has no option for a label and its ids take no colon, so the name of the pid file carries
    the worker id. It also is the sign that the monitor may be connected to: a client that comes
    before can be left without a greeting for ever (seen in 3 of 1000 starts of QEMU 7.2).
    """
    return [
        BINARY,
        "--chardev",
        f"socket,id=monitor,path={monitor_path},server=on,wait=off",
        "--monitor",
        "chardev=monitor",
        "--pidfile",
        str(pid_path),
    ]


def lock_blockdev(volume_id: str, lock_path: Path) -> Node:
    """Describe the node that locks `lock_path` for the life of this storage daemon.

    A raw image gets no lock from QEMU: two writers would be accepted in silence. This filter
    claims write permission on the lock file and shares it with nobody, so QEMU's own file locks
    refuse the second claim, whoever makes it, and the kernel drops them with the process.
    """
    return {
        "driver": "blkdebug",
        "node-name": lock_node(volume_id),
        "take-child-perms": ["write"],
        "unshare-child-perms": ["write"],
        "image": {"driver": "file", "filename": str(lock_path), "locking": "on"},
    }


def disk_blockdev(volume_id: str, disk: DiskFile, read_only: bool) -> Node:
    """Describe file, format and, where it is an overlay, image below."""
    short = short_uid(volume_id)
    node = _format(disk.format, disk.path, disk, f"p-{short}")
    node["node-name"] = format_node(volume_id)
    node["read-only"] = read_only
    if disk.format == "qcow2":
        node["backing"] = None
    if disk.image_path is not None:
        image = _format(disk.image_format, disk.image_path, disk, f"i-{short}")
        image |= {"node-name": f"b-{short}", "read-only": True}
        if disk.image_format == "qcow2":
            image["backing"] = None
        node["backing"] = image
    return node


def _format(driver: str, path: Path, disk: DiskFile, file_node: str) -> Node:
    file: Node = {
        "driver": "file",
        "node-name": file_node,
        "filename": str(path),
        "aio": disk.aio if disk.direct or disk.aio != "native" else "threads",
        "cache": {"direct": disk.direct},
        "discard": "unmap",
    }
    return {"driver": driver, "discard": "unmap", "file": file}


def export(volume_id: str, socket_path: Path, writable: bool) -> Node:
    """Describe the vhost-user-blk export of the volume's format node."""
    return {
        "type": "vhost-user-blk",
        "id": export_id(volume_id),
        "node-name": format_node(volume_id),
        "writable": writable,
        "num-queues": QUEUES,
        "addr": {"type": "unix", "path": str(socket_path)},
    }
