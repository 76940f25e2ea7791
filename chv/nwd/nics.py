"""NICs as calls see them: attach, detach, open, connect, describe. Records first, then the world.

What a record holds is decided in `nic_rows`. Generations work as for networks; a newer one changes
groups, rates, limits and ports without touching the tap. While a VMM holds the tap, changes that
would need it fail with InUse.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network

import msgspec

from chv.common.errors import FailedPrecondition, InUse, NotFound, PermissionDenied
from chv.common.failpoint import failpoint
from chv.common.wire.nwd import AttachVmNic, GuestConnection, NicInfo
from chv.nwd import guest_connection, observe, shaping, stats
from chv.nwd.addresses import gateway6
from chv.nwd.keeper import DETACH, Keeper
from chv.nwd.kernel import links, netns, tap
from chv.nwd.networks import refuse_stale
from chv.nwd.nic_rows import NicRows
from chv.nwd.plan import BRIDGE
from chv.nwd.records import Network, Nic, Wanted

ATTACH, OPEN = "attach", "open"


class Nics:
    """The NICs of this node."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._parts = keeper.parts
        self._records = keeper.parts.records
        self._rows = NicRows(self._parts.layout, self._records, self._parts.boot_id)

    async def attach(self, request: AttachVmNic) -> NicInfo:
        """Give a VM a port."""
        async with self._keeper.locks.hold(request.network_id):
            old = self._records.nics.get(request.nic_id)
            known = old.generation if old is not None else -1
            refuse_stale(request.nic_id, request.meta.generation, known, self._records.tombstones)
            network = self._due_network(request.network_id)
            shaping.check(request.shape, self._parts.features)
            await self._refuse_held(request, old)
            async with self._parts.registry:
                row = self._rows.make(request, old, network)
                if row != old:
                    await self._records.put_nic(row)
            if old is not None and old.boot_id != row.boot_id:
                await self._keeper.forget_health(row)
            await failpoint("nwd.attach.recorded")
            await self._keeper.converge_nic(row, ATTACH)
            return self.info(row.nic_id)

    async def detach(self, nic_id: str, generation: int) -> None:
        """Leave nothing of a NIC."""
        row = self._records.nics.get(nic_id)
        if row is None:
            await self._records.bury(nic_id, generation)
            return
        async with self._keeper.locks.hold(row.network_id):
            row = self._records.nics.get(nic_id)
            if row is None:
                return
            refuse_stale(nic_id, generation, row.generation, {})
            row = msgspec.structs.replace(row, generation=generation, wanted=Wanted.REMOVED)
            await self._records.put_nic(row)
            await failpoint("nwd.detach.recorded")
            await self._keeper.converge_nic(row, DETACH)
            if nic_id in self._records.nics:
                await failpoint("nwd.detach.before_drop")
                await self._keeper.finish_removal(row)

    async def open(self, nic_id: str) -> tuple[NicInfo, list[int]]:
        """Return the NIC and a descriptor for each queue of its tap."""
        row = self.require(nic_id)
        async with self._keeper.locks.hold(row.network_id):
            row = self._present(nic_id)
            await self._keeper.converge_nic(row, OPEN)
            await self._keeper.end_lease6(row)  # what starts now may be another system
            name = self._parts.layout.tap(nic_id)
            path = self._parts.netns_path(row.network_id)
            fds = await netns.inside(path, lambda: _open(name, row.queues))
        return self.info(nic_id), fds

    async def connect(
        self, nic_id: str, port: int, timeout_s: float
    ) -> tuple[GuestConnection, int]:
        """Return a connection from the gateway to a declared port of the guest."""
        row = self._present(nic_id)
        if port not in row.guest_ports:
            declared = ", ".join(str(each) for each in sorted(row.guest_ports)) or "none"
            raise PermissionDenied(
                f"port {port} is not declared for this NIC",
                resource=nic_id,
                field="port",
                hint=f"declared ports: {declared}",
            )
        gateway = self._records.networks[row.network_id].topology.gateway
        connection, local, remote = await guest_connection.connect(
            self._parts.netns_path(row.network_id), gateway, (row.address, port), timeout_s
        )
        return GuestConnection(local=local, remote=remote), connection.detach()

    async def seen(self, nic_ids: Iterable[str]) -> list[NicInfo]:
        """Describe NICs with what the kernel says of their taps."""
        infos = [self.info(each) for each in nic_ids]
        taps: dict[str, list[str]] = {}
        for info in infos:
            taps.setdefault(info.network_id, []).append(info.tap)
        held = await observe.carriers(self._parts, taps)
        shapes = await stats.shapes(self._parts, [self.require(info.nic_id) for info in infos])
        return [
            msgspec.structs.replace(
                info, carrier=info.tap in held, shape=shapes.get(info.nic_id, info.shape)
            )
            for info in infos
        ]

    def info(self, nic_id: str) -> NicInfo:
        """Describe a NIC as it is recorded."""
        row = self.require(nic_id)
        topology = self._records.networks[row.network_id].topology
        state, message = self._state(row)
        return NicInfo(
            nic_id=nic_id,
            vm_id=row.vm_id,
            network_id=row.network_id,
            generation=row.generation,
            tap=self._parts.layout.tap(nic_id),
            netns=self._parts.layout.netns(row.network_id),
            mac=row.mac,
            address=row.address,
            prefix_length=IPv4Network(topology.subnet).prefixlen,
            gateway=topology.gateway,
            mtu=topology.mtu,
            hostname=row.hostname,
            address6=row.address6,
            gateway6=str(gateway6(IPv6Network(topology.subnet6))) if topology.subnet6 else "",
            queues=row.queues,
            security_groups=row.groups,
            shape=row.shape,
            connections_max=row.connections_max or self._parts.settings.connections_max,
            state=state,
            message=message,
        )

    def require(self, nic_id: str) -> Nic:
        """Return the record of a NIC."""
        row = self._records.nics.get(nic_id)
        if row is None:
            raise NotFound("there is no such NIC", resource=nic_id)
        return row

    def _present(self, nic_id: str) -> Nic:
        row = self.require(nic_id)
        network = self._records.networks[row.network_id]
        if not (self._parts.is_due(row) and self._parts.is_due(network)):
            raise FailedPrecondition(
                f"the NIC is {self._state(row)[0]}", resource=nic_id, hint="attach it again"
            )
        return row

    def _state(self, row: Nic) -> tuple[str, str]:
        network = self._records.networks[row.network_id]
        if row.wanted is Wanted.REMOVED:
            return "degraded", "it is being detached"
        if not (self._parts.is_due(row) and self._parts.is_due(network)):
            return "absent", "the host has booted since; attach it again"
        problem = self._keeper.problems.get(row.network_id)
        return ("attached", "") if problem is None else ("degraded", problem)

    # --- what a new record holds
    def _due_network(self, network_id: str) -> Network:
        network = self._records.networks.get(network_id)
        if network is None:
            raise NotFound("there is no such network", resource=network_id, field="network_id")
        if not self._parts.is_due(network):
            raise FailedPrecondition(
                "the network is absent", resource=network_id, hint="ensure it first"
            )
        return network

    async def _refuse_held(self, request: AttachVmNic, old: Nic | None) -> None:
        """A tap has as many queues as it was made with: while somebody holds it, they stay."""
        if old is None or old.queues == request.queues or old.network_id != request.network_id:
            return
        name = self._parts.layout.tap(old.nic_id)
        if name in await observe.carriers(self._parts, {old.network_id: [name]}):
            raise InUse(
                f"the tap has {old.queues} queues and is held open",
                field="queues",
                resource=old.nic_id,
                hint="the number of queues changes while the VM is off",
            )


def _open(name: str, queues: int) -> list[int]:
    """In the namespace: open a tap; the kernel notices at once, asked for the links, that it is."""
    fds = tap.open_for_vmm(name, queues)
    try:
        links.read([name, BRIDGE])
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return fds
