"""The graph of a backup in a storage daemon that a guest writes through meanwhile.

    throttle - copy-before-write - top layer
                      |        \\
               snapshot-access   fleece (a file beside the volume)

What the guest overwrites goes to the fleece first, so the backup reads the volume as it was in
one instant, and the guest never waits for the backup's target, nor gets its errors: where the
fleece cannot take more (`break-snapshot`), the backup fails and the guest goes on. Names end in
the volume's short uid, so that whoever takes the volume's nodes away finds these, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from chv.common.ids import short_uid
from chv.stord.qsd import block_jobs, graph
from chv.stord.qsd.monitor import Monitor
from chv.stord.records import Volume

FILE_NAME = "fleece.qcow2"
JOB_WORD = "backup"
CHANGED = "changed"


def _name(word: str, volume_id: str) -> str:
    return f"{word}-{short_uid(volume_id)}"


def filter_node(volume_id: str) -> str:
    """Name of the copy-before-write filter."""
    return _name("cbw", volume_id)


def fleece_node(volume_id: str) -> str:
    """Name of the node that takes what is overwritten."""
    return _name("fl", volume_id)


def access_node(volume_id: str) -> str:
    """Name of the node that shows the volume as it was."""
    return _name("snap", volume_id)


def target_node(volume_id: str) -> str:
    """Name of the backup's target."""
    return _name("bk", volume_id)


def job(volume_id: str) -> str:
    """Name of the backup's job."""
    return block_jobs.job_name(JOB_WORD, volume_id)


async def insert(monitor: Monitor, rows: Sequence[Volume]) -> None:
    """Put the filters below the throttles, all in one instant. The fleeces are open."""
    for row in rows:
        await monitor.add_node(
            {
                "driver": "copy-before-write",
                "node-name": filter_node(row.volume_id),
                "file": graph.format_node(row.volume_id, row.top.number),
                "target": fleece_node(row.volume_id),
                "on-cbw-error": "break-snapshot",
                "discard": "unmap",
            }
        )
    # QEMU holds all disks still from the first of these to the last.
    options = [_throttle_on(row, filter_node(row.volume_id)) for row in rows]
    await monitor.call("blockdev-reopen", {"options": options})
    for row in rows:
        await monitor.add_node(
            {
                "driver": "snapshot-access",
                "node-name": access_node(row.volume_id),
                "file": filter_node(row.volume_id),
            }
        )


def _throttle_on(row: Volume, child: str) -> graph.Node:
    return graph.throttle(row.volume_id, row.top.number) | {"file": child}


async def share_bitmap(monitor: Monitor, row: Volume, source: str, bitmap: str) -> str:
    """Return a bitmap of `source` with what `bitmap` of the top layer has."""
    add: graph.Node = {"node": source, "name": CHANGED, "disabled": True}
    await monitor.call("block-dirty-bitmap-add", add)
    top = graph.format_node(row.volume_id, row.top.number)
    merge: graph.Node = {
        "node": source,
        "target": CHANGED,
        "bitmaps": [{"node": top, "name": bitmap}],
    }
    await monitor.call("block-dirty-bitmap-merge", merge)
    return CHANGED


async def remove(monitor: Monitor, row: Volume) -> None:
    """End the backup's job and take everything of it away; fine when there is nothing."""
    volume_id = row.volume_id
    await block_jobs.cancel(monitor, job(volume_id))
    present = await monitor.nodes()
    if access_node(volume_id) in present:
        await monitor.delete_node(access_node(volume_id))
    if filter_node(volume_id) in present:
        top = graph.format_node(volume_id, row.top.number)
        await monitor.call("blockdev-reopen", {"options": [_throttle_on(row, top)]})
        await monitor.delete_node(filter_node(volume_id))
    for name in (fleece_node(volume_id), target_node(volume_id)):
        if name in present:
            await monitor.delete_node(name)
