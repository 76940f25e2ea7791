"""What is changed on a volume under the VMs that it is attached to: limits, and size where safe.

Takes the VM's lock; the caller holds the volume's. A VM whose storage daemon is dead is passed
over: the next one opens the volume as the record then says.
"""

from __future__ import annotations

import anyio

from chv.common import logs
from chv.common.errors import ChvError, Internal
from chv.common.failpoint import failpoint
from chv.common.wire.stord import Limits, VmmClient
from chv.stord import clients
from chv.stord.exports import RunDirectory
from chv.stord.growth import Situation, may_grow_online
from chv.stord.keeper import Keeper
from chv.stord.qsd import graph
from chv.stord.records import Attachment, BackendPhase
from chv.stord.work import work_on

log = logs.get(__name__)
LOOK_TIMEOUT_S = 1.0
FIXED = "Cannot resize fixed-size raw disk"


class Tuning:
    """Changes and reads attached volumes."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._parts = keeper.parts
        self._records = keeper.parts.records

    async def set_limits(self, volume_id: str) -> None:
        """Make every storage daemon that has the volume hold the limits of its record."""
        for row in self._records.holders(volume_id):
            async with self._keeper.locks.hold(row.vm_id):
                await self._set_limits(row)

    async def _set_limits(self, row: Attachment) -> None:
        limits = self._records.volumes[row.volume_id].backend.limits
        group = graph.throttle_group(row.volume_id)
        async with work_on(self._parts, row.vm_id, "limits") as work:
            monitor = await work.monitor() if self._serves(row) else None
            if monitor is None or group not in await monitor.objects():
                return
            await monitor.set_limits(group, limits)
            await failpoint("stord.limits.after_set")
            there = await monitor.limits(group)
        if not same_limits(there, limits):
            raise Internal(
                f"the storage daemon holds other limits than it was given: {there}",
                resource=row.volume_id,
            )
        log.info("limits_set", volume_id=row.volume_id, vm_id=row.vm_id)

    async def limits(self, volume_id: str) -> Limits | None:
        """Return what a storage daemon holds right now; None where none can be asked at once."""
        row = self._records.holder(volume_id)
        if row is None or not self._serves(row) or self._keeper.locks.busy(row.vm_id):
            return None
        with anyio.move_on_after(LOOK_TIMEOUT_S):
            async with self._keeper.locks.hold(row.vm_id):
                try:
                    async with work_on(self._parts, row.vm_id, "look") as work:
                        monitor = await work.monitor()
                        group = graph.throttle_group(volume_id)
                        return None if monitor is None else await monitor.limits(group)
                except ChvError as error:  # it died or hangs: the keeper sees to that
                    log.debug("limits_unread", volume_id=volume_id, error=error)
        return None

    async def grow(self, volume_id: str, client: VmmClient) -> bool:
        """Grow the disk under its VM to the size of its record; False: it is not safe."""
        row = self._records.holder(volume_id)
        volume = self._records.volumes[volume_id]
        if row is None or len(self._records.holders(volume_id)) != 1:
            return False
        async with (
            self._keeper.locks.hold(row.vm_id),
            work_on(self._parts, row.vm_id, "grow") as work,
        ):
            monitor = await work.monitor() if self._serves(row) else None
            if monitor is None:
                return False
            if not may_grow_online(self._situation(row, client, await monitor.major())):
                return False
            backend = self._parts.disks.backend(volume.backend)
            await backend.extend_device(volume_id, volume.backend)
            await failpoint("stord.grow.after_extend")
            try:
                await monitor.resize(graph.throttle_node(volume_id), volume.backend.size_bytes)
            except ChvError as error:
                if FIXED not in error.message:
                    raise
                # It was moved to a larger place under this VM, and is seen as large as it was.
                log.info("growth_waits", volume_id=volume_id, reason=error.message)
                return False
            await failpoint("stord.grow.after_resize")
        return True

    def _situation(self, row: Attachment, client: VmmClient, major: int) -> Situation:
        """Look at who is connected: at the last moment, for a client may leave at any."""
        run = RunDirectory(self._parts.layout, row.vm_id)
        rows, backend = self._records.of_vm(row.vm_id), self._records.backends[row.vm_id]
        seen = clients.Connected()
        if backend.worker is not None and not backend.network:
            exports = [run.unprimed(each.volume_id) for each in rows]
            proxies = [each.proxy.pid for each in rows if each.proxy is not None]
            seen = clients.look(backend.worker.pid, exports, proxies)
        return Situation(
            client=client,
            major=major,
            serving=True,
            connected=run.unprimed(row.volume_id) in seen.exports,
            told=seen.can_all_be_told,
            read_only=row.read_only,
        )

    def _serves(self, row: Attachment) -> bool:
        backend = self._records.backends.get(row.vm_id)
        return (
            row.wanted
            and row.published
            and backend is not None
            and backend.phase is BackendPhase.SERVING
        )


def same_limits(one: Limits, other: Limits) -> bool:
    """Tell whether QEMU makes no difference between them."""
    return graph.limits_arguments(one) == graph.limits_arguments(other)
