"""How a mirror of a served disk is started, so that no write of the guest is missed.

Until a mirror has its map of what is to be copied it takes no notice of writes, and one that is
under way just then may be copied before it is done and never again (QEMU 7.2: below a guest with
32 requests in flight one move in 20 lost some). It takes that map in one go, with no request in
between, where it need not first make the target empty; that it does only where zeros can be
given back. So the target is opened as one where they cannot, and told that they can once
the mirror runs; up to then it is to copy next to nothing.
"""

from __future__ import annotations

from chv.stord.qsd import graph
from chv.stord.qsd.monitor import Monitor
from chv.stord.records import Volume

SLOWLY_BPS = 1


async def start(monitor: Monitor, row: Volume, layer: graph.LayerNode, job_id: str) -> None:
    """Open the target and mirror to it, slowly; the keys that it needs are there.

    The caller holds the VM's lock and then says how fast it may go.
    """
    target = graph.overlay(row.volume_id, layer)
    await monitor.add_node(target | {"discard": "ignore"})
    await monitor.call(
        "blockdev-mirror",
        {
            "job-id": job_id,
            "device": graph.throttle_node(row.volume_id),
            "replaces": graph.format_node(row.volume_id, row.base),
            "target": graph.format_node(row.volume_id, layer.number),
            "sync": "full",
            "copy-mode": "write-blocking",
            "speed": SLOWLY_BPS,
            "auto-finalize": False,
            "auto-dismiss": False,
        },
    )
    if target["driver"] != "luks":  # which gives nothing back in any case
        opened = target | {"file": graph.protocol_node(row.volume_id, layer.number)}
        await monitor.call("blockdev-reopen", {"options": [opened]})
