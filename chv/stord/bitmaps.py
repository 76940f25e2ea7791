"""Dirty bitmaps of a volume's top layer: which there are, and which one can be relied on.

Every backup begins a bitmap of its own at the very instant that it copies, in one transaction;
the one before goes on until the backup is recorded, so a backup that fails costs nothing. In a
qcow2 layer bitmaps are kept by a clean end of the storage daemon; a kill leaves them marked
inconsistent or not there at all. In a raw layer they are in the storage daemon's memory alone.
A snapshot puts a new layer on top, which has none: the next backup must be whole.
"""

from __future__ import annotations

import hashlib
from typing import Any, cast

from chv.common.errors import ChvError, FailedPrecondition
from chv.stord.qsd import graph
from chv.stord.qsd.monitor import Monitor
from chv.stord.records import Volume

PREFIX = "chv-"
GRANULARITY_BYTES = 65536


def bitmap_name(job_id: str) -> str:
    """Return the name of the bitmap that a backup begins."""
    return PREFIX + hashlib.sha256(job_id.encode()).hexdigest()[:16]


async def usable(monitor: Monitor, row: Volume) -> dict[str, bool]:
    """Return our bitmaps of the top layer, and whether each can be relied on."""
    node = await _node(monitor, row)
    return {
        item["name"]: item["recording"] and not item.get("inconsistent", False)
        for item in node.get("dirty-bitmaps", [])
        if item.get("name", "").startswith(PREFIX)
    }


async def size_bytes(monitor: Monitor, row: Volume) -> int:
    """Return the size of the top layer as the storage daemon has it."""
    return int((await _node(monitor, row))["image"]["virtual-size"])


async def _node(monitor: Monitor, row: Volume) -> dict[str, Any]:
    name = graph.format_node(row.volume_id, row.top.number)
    answer = await monitor.call("query-named-block-nodes", {"flat": True})
    nodes = cast(list[dict[str, Any]], answer)
    return next(node for node in nodes if node["node-name"] == name)


async def remove_others(monitor: Monitor, row: Volume, keep: str) -> None:
    """Remove our bitmaps of the top layer but one."""
    for name in await usable(monitor, row):
        if name != keep:
            node = graph.format_node(row.volume_id, row.top.number)
            await monitor.call("block-dirty-bitmap-remove", {"node": node, "name": name})


async def require(monitor: Monitor, row: Volume) -> str:
    """Return the bitmap of the last backup; FailedPrecondition where it cannot be relied on."""
    known = await usable(monitor, row)
    if known.get(row.backup_bitmap):
        return row.backup_bitmap
    raise lost(row, "the record of what changed was lost (a snapshot, or an unclean end)")


def lost(row: Volume, why: str) -> ChvError:
    """Return the error of an incremental backup that would not be true."""
    return FailedPrecondition(
        f"an incremental backup is not possible: {why}",
        resource=row.volume_id,
        field="incremental",
        hint="make a full backup; incremental ones are possible after it",
    )


def begin_action(row: Volume, name: str) -> graph.Node:
    """Return the transaction's action that begins a bitmap on the top layer."""
    return {
        "type": "block-dirty-bitmap-add",
        "data": {
            "node": graph.format_node(row.volume_id, row.top.number),
            "name": name,
            "persistent": is_persistent(row),
            "granularity": GRANULARITY_BYTES,
        },
    }


def is_persistent(row: Volume) -> bool:
    """Tell whether bitmaps of the top layer outlive the storage daemon."""
    return row.top.number != row.base or row.backend.format.value == "qcow2"
