"""A guest's requests held back for a moment, while jobs on the layers below go on.

A commit of the layer that is written ends only at an instant without any write in flight, and it
looks for one by draining the graph. A guest that never pauses never gives it one; and since a
drain lets everything through that a throttle filter has kept waiting, looking for it again and
again would also make the limits of the volume void (QEMU 7.2, `mirror_run` and
`throttle_co_drain_begin`; seen: 6,000 writes a second on a volume of 500, and the guest waiting
for minutes afterwards until that was made good).

So the guest is held first, by a job that is made for nothing else: a mirror from the volume's
topmost node to nowhere. In its mode nothing is ever left to copy, so that it always comes to its
end; and until it is told to finish, it keeps what it mirrors drained. What lies above waits, what
lies below does not: the other job finds its instant at once. A job does not outlive the storage
daemon, and to cancel this one lets the guest go on.
"""

from __future__ import annotations

from chv.common.errors import DeadlineExceeded
from chv.common.ids import short_uid
from chv.stord.qsd import block_jobs, graph
from chv.stord.qsd.monitor import Monitor

WORD = "hold"
HOLD_TIMEOUT_S = 5.0  # what is in flight must come to its end first


def sink_node(volume_id: str) -> str:
    """Name of the node that the mirror goes to."""
    return f"z-{short_uid(volume_id)}"


async def hold(monitor: Monitor, volume_id: str, size_bytes: int) -> None:
    """Let no request of the guest begin from now on; `size_bytes` is the disk's.

    Raises:
        DeadlineExceeded: what is in flight did not end within `HOLD_TIMEOUT_S`; nothing is held.
    """
    name = block_jobs.job_name(WORD, volume_id)
    job = await block_jobs.find(monitor, name)
    if job is not None and job.status == block_jobs.PENDING:
        return
    await release(monitor, volume_id)
    await monitor.add_node(
        {"driver": "null-co", "node-name": sink_node(volume_id), "size": size_bytes}
    )
    await monitor.call(
        "blockdev-mirror",
        {
            "job-id": name,
            "device": graph.throttle_node(volume_id),
            "target": sink_node(volume_id),
            "sync": "none",
            "copy-mode": "write-blocking",
            "auto-finalize": False,
            "auto-dismiss": False,
        },
    )
    await block_jobs.settled(monitor, name, HOLD_TIMEOUT_S, block_jobs.READY)
    await block_jobs.complete(monitor, name)
    job = await block_jobs.settled(monitor, name, HOLD_TIMEOUT_S, block_jobs.PENDING)
    if job is None or job.status != block_jobs.PENDING:
        await release(monitor, volume_id)
        raise DeadlineExceeded(f"requests did not end within {HOLD_TIMEOUT_S:g} s")


async def release(monitor: Monitor, volume_id: str) -> None:
    """Let the guest go on; fine where it is not held."""
    await block_jobs.cancel(monitor, block_jobs.job_name(WORD, volume_id))
    if sink_node(volume_id) in await monitor.nodes():
        await monitor.delete_node(sink_node(volume_id))
