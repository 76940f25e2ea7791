"""NICs as calls see them: attach, detach, open, connect, describe. Records first, then the world.

An address and a MAC are chosen once and kept for the NIC's life. Generations work as for
networks. While a VMM holds the tap, changes that would need it fail with InUse.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network

import msgspec

from chv.common.errors import (
    AlreadyExists,
    Conflict,
    FailedPrecondition,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    StaleGeneration,
)
from chv.common.failpoint import failpoint
from chv.common.names import check_name
from chv.common.wire.nwd import AttachVmNic, GuestConnection, NicInfo
from chv.nwd import guest_connection, observe, shaping, stats
from chv.nwd.addresses import allocate, check_address, check_nic_mac, mac_of
from chv.nwd.keeper import DETACH, Keeper
from chv.nwd.kernel import netns, tap
from chv.nwd.kernel.errors import BRIDGE_PORTS_MAX
from chv.nwd.networks import refuse_stale
from chv.nwd.records import Network, Nic, Wanted

ATTACH, OPEN = "attach", "open"


class Nics:
    """The NICs of this node."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._parts = keeper.parts
        self._records = keeper.parts.records

    async def attach(self, request: AttachVmNic) -> NicInfo:
        """Give a VM a port."""
        async with self._keeper.locks.hold(request.network_id):
            old = self._records.nics.get(request.nic_id)
            known = old.generation if old is not None else -1
            refuse_stale(request.nic_id, request.meta.generation, known, self._records.tombstones)
            network = self._due_network(request.network_id)
            shaping.check(request.shape, self._parts.features)
            row = self._row(request, old, network)
            if row != old:
                await self._records.put_nic(row)
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
            name = self._parts.layout.tap(nic_id)
            path = self._parts.netns_path(row.network_id)
            fds = await netns.inside(path, lambda: tap.open_for_vmm(name, row.queues))
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
            queues=row.queues,
            shape=row.shape,
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

    def _row(self, request: AttachVmNic, old: Nic | None, network: Network) -> Nic:
        if old is not None:
            self._refuse_change(request, old)
        others = [
            nic for nic in self._records.nics_of(network.network_id) if nic.nic_id != request.nic_id
        ]
        self._refuse_duplicates(request, others)
        return Nic(
            nic_id=request.nic_id,
            network_id=request.network_id,
            vm_id=request.vm_id,
            generation=request.meta.generation,
            hostname=check_name(request.hostname, field="hostname"),
            mac=self._mac(request, old, network, others),
            address=self._address(request, old, network, others),
            owner_uid=request.owner_uid,
            guest_ports=sorted(set(request.guest_ports)),
            boot_id=self._parts.boot_id,
            asked_mac=request.mac,
            asked_address=request.address,
            queues=request.queues,
            shape=request.shape,
        )

    def _refuse_change(self, request: AttachVmNic, old: Nic) -> None:
        if (request.network_id, request.vm_id) != (old.network_id, old.vm_id):
            raise Conflict(
                f"the NIC belongs to VM {old.vm_id} on network {old.network_id}",
                resource=request.nic_id,
            )
        if request.meta.generation > old.generation:
            return
        if old.wanted is Wanted.REMOVED:
            raise StaleGeneration(
                f"generation {old.generation} is being detached", resource=request.nic_id
            )
        asked = (request.hostname, request.mac, request.address, request.owner_uid)
        known = (old.hostname, old.asked_mac, old.asked_address, old.owner_uid)
        if asked != known or sorted(set(request.guest_ports)) != old.guest_ports:
            raise Conflict(
                f"generation {old.generation} is known with another content",
                resource=request.nic_id,
                hint="a change needs a newer generation",
            )

    def _refuse_duplicates(self, request: AttachVmNic, others: list[Nic]) -> None:
        if len(others) >= BRIDGE_PORTS_MAX:
            raise ResourceExhausted(
                f"the network has {len(others)} NICs, and a bridge takes {BRIDGE_PORTS_MAX}",
                resource=request.network_id,
                hint="put the NIC on another network",
            )
        name = self._parts.layout.tap(request.nic_id)
        for nic in others:
            # Two NICs of one VM may share its name: DNS then answers with both addresses.
            if nic.hostname == request.hostname and nic.vm_id != request.vm_id:
                raise AlreadyExists(
                    f"the name {request.hostname!r} belongs to NIC {nic.nic_id}",
                    field="hostname",
                    resource=nic.nic_id,
                )
            if self._parts.layout.tap(nic.nic_id) == name:
                raise AlreadyExists(
                    f"tap {name} belongs to NIC {nic.nic_id}",
                    field="nic_id",
                    resource=nic.nic_id,
                )

    def _mac(
        self, request: AttachVmNic, old: Nic | None, network: Network, others: list[Nic]
    ) -> str:
        if request.mac:
            mac = check_nic_mac(request.mac, mac_of(network.network_id))
        else:
            mac = old.mac if old is not None and not old.asked_mac else mac_of(request.nic_id)
        for nic in others:
            if nic.mac == mac:
                raise AlreadyExists(
                    f"{mac} belongs to NIC {nic.nic_id}", field="mac", resource=nic.nic_id
                )
        return mac

    def _address(
        self, request: AttachVmNic, old: Nic | None, network: Network, others: list[Nic]
    ) -> str:
        subnet = IPv4Network(network.topology.subnet)
        gateway = IPv4Address(network.topology.gateway)
        owners = {nic.address: nic.nic_id for nic in others}
        if request.address:
            return check_address(request.address, subnet, gateway, owners)
        if old is not None and not old.asked_address:
            return old.address
        released = self._records.released(network.network_id)
        return allocate(subnet, gateway, owners, released)
