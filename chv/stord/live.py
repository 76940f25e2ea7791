"""The live storage daemon of a VM, for changes of a graph that serves. The VM's lock is held."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chv.stord.qsd import graph
from chv.stord.qsd.monitor import Monitor
from chv.stord.work import Parts, work_on


@asynccontextmanager
async def live_monitor(parts: Parts, vm_id: str, verb: str) -> AsyncIterator[Monitor | None]:
    """Yield the monitor of the VM's storage daemon; None where none lives."""
    if vm_id not in parts.records.backends:
        yield None
        return
    async with work_on(parts, vm_id, verb) as work:
        yield await work.monitor()


async def close_node(monitor: Monitor, volume_id: str, number: int) -> None:
    """Close a layer that nothing lies on and that lies under nothing; fine when it is not open."""
    name = graph.format_node(volume_id, number)
    if name in await monitor.nodes():
        await monitor.delete_node(name)
