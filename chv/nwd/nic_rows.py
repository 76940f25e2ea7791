"""What the record of a NIC holds: every field of a request checked against all that is recorded.

Decides and refuses; changes nothing. An address and a MAC are chosen once and kept for the NIC's
life. Errors name the field of the request.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Network, ip_address

from chv.common.errors import (
    AlreadyExists,
    Conflict,
    InUse,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    StaleGeneration,
)
from chv.common.layout import Layout
from chv.common.names import check_name
from chv.common.wire.nwd import BRIDGE_PORTS_MAX, AttachVmNic
from chv.nwd import addresses
from chv.nwd.members import Members
from chv.nwd.records import Network, Nic, Records, Wanted
from chv.nwd.topology import refuse_recorded_name

SUBNETS_KEPT_MAX = 1024


class NicRows:
    """Makes records of NICs."""

    def __init__(self, layout: Layout, records: Records, boot_id: str) -> None:
        self._layout = layout
        self._records = records
        self._boot_id = boot_id

    def make(self, request: AttachVmNic, old: Nic | None, network: Network) -> Nic:
        """Return the record that a request leads to."""
        if old is not None:
            _refuse_change(request, old)
        members = self._records.members(network.network_id)
        self._refuse_duplicates(request, members)
        refuse_recorded_name(network.topology, request.hostname)
        groups = self._groups(request, network)
        address = self._address(request, old, network)
        return Nic(
            nic_id=request.nic_id,
            network_id=request.network_id,
            vm_id=request.vm_id,
            generation=request.meta.generation,
            hostname=check_name(request.hostname, field="hostname"),
            mac=_mac(request, old, network, members),
            address=address,
            owner_uid=request.owner_uid,
            guest_ports=sorted(set(request.guest_ports)),
            boot_id=self._boot_id,
            asked_mac=request.mac,
            asked_address=request.address,
            address6=self._address6(request, old, network, address),
            asked_address6=request.address6,
            queues=request.queues,
            groups=groups,
            shape=request.shape,
            connections_max=request.connections_max,
            public_address=_public_address(request, network),
            metadata=request.metadata,
            unswept=old is not None and (old.unswept or old.groups != groups),
        )

    def _refuse_duplicates(self, request: AttachVmNic, members: Members) -> None:
        others = len(members.nics) - (request.nic_id in members.nics)
        if others >= BRIDGE_PORTS_MAX:
            raise ResourceExhausted(
                f"the network has {others} NICs, and a bridge takes {BRIDGE_PORTS_MAX}",
                resource=request.network_id,
                hint="put the NIC on another network",
            )
        for nic in members.named(request.hostname):
            # Two NICs of one VM may share its name: DNS then answers with both addresses.
            if nic.nic_id != request.nic_id and nic.vm_id != request.vm_id:
                raise AlreadyExists(
                    f"the name {request.hostname!r} belongs to NIC {nic.nic_id}",
                    field="hostname",
                    resource=nic.nic_id,
                )
        owner = members.with_tap_of(request.nic_id)
        if owner not in (None, request.nic_id):
            raise AlreadyExists(
                f"tap {self._layout.tap(request.nic_id)} belongs to NIC {owner}",
                field="nic_id",
                resource=owner,
            )

    def _groups(self, request: AttachVmNic, network: Network) -> list[str]:
        """Return the groups, each once; they are of the network's tenant."""
        tenant = network.topology.tenant
        for index, group_id in enumerate(request.security_groups):
            field, row = f"security_groups[{index}]", self._records.groups.get(group_id)
            if row is None or row.wanted is Wanted.REMOVED:
                raise NotFound(
                    f"there is no security group {group_id}", field=field, resource=group_id
                )
            if row.group.tenant != tenant:
                raise PermissionDenied(
                    f"security group {group_id} belongs to another tenant than the network",
                    field=field,
                    resource=group_id,
                    hint=f"the network belongs to tenant {tenant!r}",
                )
        return sorted(set(request.security_groups))

    def _address(self, request: AttachVmNic, old: Nic | None, network: Network) -> str:
        subnet = _subnet(network.topology.subnet)
        gateway = IPv4Address(network.topology.gateway)
        owners = self._others_with(request.address, request)
        if request.address:
            self._refuse_exposed(request.address, "address", network.network_id)
            return addresses.check_address(request.address, subnet, gateway, owners)
        if old is not None and not old.asked_address:
            return old.address
        used = self._used(old, network.network_id)
        return addresses.allocate(subnet, gateway, used, self._records.released(network.network_id))

    def _address6(
        self, request: AttachVmNic, old: Nic | None, network: Network, address: str
    ) -> str:
        text = network.topology.subnet6
        if not text:
            if request.address6:
                raise InvalidArgument(
                    f"{request.address6} is IPv6, and the network has none",
                    field="address6",
                    hint="the network needs a subnet6",
                )
            return ""
        subnet = _subnet6(text)
        owners = self._others_with(request.address6, request)
        if request.address6:
            self._refuse_exposed(request.address6, "address6", network.network_id)
            return addresses.check_address6(request.address6, subnet, owners)
        if old is not None and old.address6 and not old.asked_address6:
            return old.address6
        used = self._used(old, network.network_id)
        number = int(IPv4Address(address)) - int(_subnet(network.topology.subnet).network_address)
        released = self._records.released(network.network_id)
        return addresses.allocate6(subnet, number, used, released)

    def _others_with(self, address: str, request: AttachVmNic) -> dict[str, str]:
        """Return the other NIC that has an address, however it is written."""
        owners = self._records.members(request.network_id).owners
        texts = {address, _usual(address)}
        return {
            text: owners[text]
            for text in texts
            if text in owners and owners[text] != request.nic_id
        }

    def _used(self, old: Nic | None, network_id: str) -> tuple[Collection[str], Collection[str]]:
        """Return the addresses of either family that a NIC cannot be given."""
        owners: Collection[str] = self._records.members(network_id).owners
        if old is not None:
            owners = set(owners).difference(old.addresses)
        return owners, self._exposed(network_id)

    def _exposed(self, network_id: str) -> dict[str, str]:
        """Return addresses that exposures of the network have, and whose they are."""
        rows = self._records.exposures_of(network_id)
        return {text: row.exposure.exposure_id for row in rows for text in row.exposure.addresses}

    def _refuse_exposed(self, address: str, field: str, network_id: str) -> None:
        owner = self._exposed(network_id).get(_usual(address))
        if owner is not None:
            raise InUse(f"{address} belongs to exposure {owner}", field=field, resource=owner)


@lru_cache(SUBNETS_KEPT_MAX)
def _subnet(text: str) -> IPv4Network:
    return IPv4Network(text)


@lru_cache(SUBNETS_KEPT_MAX)
def _subnet6(text: str) -> IPv6Network:
    return IPv6Network(text)


def _refuse_change(request: AttachVmNic, old: Nic) -> None:
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
    if _asked(request) != _known(old):
        raise Conflict(
            f"generation {old.generation} is known with another content",
            resource=request.nic_id,
            hint="a change needs a newer generation",
        )


def _asked(request: AttachVmNic) -> tuple[object, ...]:
    return (
        (request.hostname, request.mac, request.address, request.address6, request.owner_uid),
        (sorted(set(request.guest_ports)), sorted(set(request.security_groups))),
        (request.queues, request.shape, request.connections_max),
        (request.public_address, request.metadata),
    )


def _known(old: Nic) -> tuple[object, ...]:
    return (
        (old.hostname, old.asked_mac, old.asked_address, old.asked_address6, old.owner_uid),
        (old.guest_ports, old.groups),
        (old.queues, old.shape, old.connections_max),
        (old.public_address, old.metadata),
    )


def _usual(address: str) -> str:
    """Return an address as it is always written; what is none comes back as it is."""
    try:
        return str(ip_address(address))
    except ValueError:
        return address


def _mac(request: AttachVmNic, old: Nic | None, network: Network, members: Members) -> str:
    if request.mac:
        mac = addresses.check_nic_mac(request.mac, addresses.mac_of(network.network_id))
    elif old is not None and not old.asked_mac:
        mac = old.mac
    else:
        mac = addresses.mac_of(request.nic_id)
    owner = members.macs.get(mac)
    if owner not in (None, request.nic_id):
        raise AlreadyExists(f"{mac} belongs to NIC {owner}", field="mac", resource=owner)
    return mac


def _public_address(request: AttachVmNic, network: Network) -> str:
    known = network.topology.public_addresses
    if request.public_address and request.public_address not in known:
        raise InvalidArgument(
            f"{request.public_address} is no public address of the network",
            field="public_address",
            hint=f"it has {', '.join(known) or 'none'}",
        )
    return request.public_address
