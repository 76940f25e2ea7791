"""Which subnets, addresses and MACs may be used, and which one a NIC gets. Pure.

Every refusal names the value, the field and what it collides with. Subnets of tenants may overlap
each other, for each has a namespace of its own; they may not overlap what the host itself uses,
since traffic to that must leave the namespace by its uplink.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

from chv.common.errors import InUse, InvalidArgument, ResourceExhausted
from chv.common.names import check_hostname, check_mac, shown
from chv.common.wire.nwd import Topology

PREFIX_MIN, PREFIX_MAX = 8, 30
_SPECIAL = {
    "0.0.0.0/8": "addresses of this host on this network",
    "127.0.0.0/8": "loopback",
    "169.254.0.0/16": "link-local",
    "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "reserved",
}
_SPECIAL_NETWORKS = {IPv4Network(text): what for text, what in _SPECIAL.items()}


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a subnet may not overlap: (network, what it is, for the message)."""

    uplink_pool: str
    reserved: Sequence[str] = ()
    host_addresses: Sequence[str] = ()  # with prefix lengths
    host_routes: Sequence[str] = ()  # without the default route

    def occupied(self) -> Iterable[tuple[IPv4Network, str]]:
        """Return every occupied network and what it is."""
        yield from _SPECIAL_NETWORKS.items()
        yield IPv4Network(self.uplink_pool), "the uplink pool (network.uplink_pool)"
        for text in self.reserved:
            network = ipaddress.ip_network(text)
            if isinstance(network, IPv4Network):
                yield network, "reserved by the node (network.reserved)"
        for text in self.host_addresses:
            yield IPv4Interface(text).network, f"the host's address {text}"
        for text in self.host_routes:
            yield IPv4Network(text), f"the host's route to {text}"


def check_topology(topology: Topology, surroundings: Surroundings) -> IPv4Address:
    """Check what a network asks for; return its gateway."""
    subnet = check_subnet(topology.subnet)
    for network, what in surroundings.occupied():
        if subnet.overlaps(network):
            raise InvalidArgument(
                f"{subnet} overlaps {network}: {what}",
                field="spec.subnet",
                hint="choose a subnet that neither the host nor its uplink uses",
            )
    check_hostname(topology.dns_domain, field="spec.dnsDomain")
    for index, forwarder in enumerate(topology.forwarders):
        check_forwarder(forwarder, f"spec.forwarders[{index}]")
    return check_gateway(topology.gateway, subnet)


def check_subnet(text: str) -> IPv4Network:
    """Check that a text is a subnet that can hold a gateway and a NIC."""
    try:
        interface = IPv4Interface(text)
    except ValueError as error:
        raise InvalidArgument(
            f"{shown(text)} is not an IPv4 subnet", field="spec.subnet", hint="such as 10.0.0.0/24"
        ) from error
    if str(interface.network) != text:
        raise InvalidArgument(
            f"{shown(text)} is not a network address",
            field="spec.subnet",
            hint=f"write {interface.network}",
        )
    if not PREFIX_MIN <= interface.network.prefixlen <= PREFIX_MAX:
        raise InvalidArgument(
            f"{text} has a prefix outside /{PREFIX_MIN} to /{PREFIX_MAX}", field="spec.subnet"
        )
    return interface.network


def check_gateway(text: str, subnet: IPv4Network) -> IPv4Address:
    """Return the gateway: what was asked for, else the first host address."""
    if not text:
        return subnet.network_address + 1
    return _host_address(text, subnet, "spec.gateway")


def check_forwarder(text: str, field: str) -> str:
    """Check the address of a DNS server that answers for the rest of the world."""
    try:
        address = IPv4Address(text)
    except ValueError as error:
        raise InvalidArgument(f"{shown(text)} is not an IPv4 address", field=field) from error
    if address.is_loopback or address.is_multicast or address.is_link_local or int(address) == 0:
        raise InvalidArgument(
            f"{text} cannot be reached from a tenant network",
            field=field,
            hint="name a server on the network; the host's own stub resolver is not one",
        )
    return text


def _host_address(text: str, subnet: IPv4Network, field: str) -> IPv4Address:
    try:
        address = IPv4Address(text)
    except ValueError as error:
        raise InvalidArgument(f"{shown(text)} is not an IPv4 address", field=field) from error
    if address not in subnet:
        raise InvalidArgument(f"{text} is not in {subnet}", field=field)
    if address in (subnet.network_address, subnet.broadcast_address):
        what = "network" if address == subnet.network_address else "broadcast"
        raise InvalidArgument(f"{text} is the {what} address of {subnet}", field=field)
    return address


def check_address(
    text: str, subnet: IPv4Network, gateway: IPv4Address, owners: dict[str, str]
) -> str:
    """Check an address that a NIC asks for; `owners` maps used addresses to their NICs."""
    address = str(_host_address(text, subnet, "address"))
    if address == str(gateway):
        raise InvalidArgument(f"{address} is the gateway of {subnet}", field="address")
    if address in owners:
        raise InUse(
            f"{address} belongs to NIC {owners[address]}", field="address", resource=owners[address]
        )
    return address


def allocate(
    subnet: IPv4Network, gateway: IPv4Address, used: Collection[str], released: Sequence[str]
) -> str:
    """Return a free address: the lowest never used, else the one that is free longest."""
    taken = {str(gateway), *used}
    avoided = taken | set(released)
    # At most one candidate more than there are addresses to avoid, however large the subnet.
    hosts = subnet.num_addresses - 2
    for offset in range(1, min(hosts, len(avoided) + 1) + 1):
        candidate = str(subnet.network_address + offset)
        if candidate not in avoided:
            return candidate
    for candidate in released:
        if candidate not in taken and IPv4Address(candidate) in subnet:
            return candidate
    raise ResourceExhausted(
        f"all {hosts - 1} addresses of {subnet} for NICs are used",
        field="address",
        hint="detach a NIC or use a larger subnet",
    )


def mac_of(uid: str) -> str:
    """Return a locally administered unicast MAC that follows from a uid."""
    digest = hashlib.sha256(f"chv mac {uid}".encode()).digest()
    return ":".join(f"{byte:02x}" for byte in (0x02, *digest[:5]))


def check_nic_mac(text: str, bridge_mac: str) -> str:
    """Check the MAC that a NIC asks for."""
    mac = check_mac(text)
    if mac == bridge_mac:
        raise InvalidArgument(f"{mac} is the MAC of the gateway", field="mac")
    return mac


def uplink_addresses(pool: str, slot: int) -> tuple[str, str]:
    """Return the host's and the network's end of the /31 in a slot of the pool."""
    base = IPv4Network(pool).network_address + 2 * slot
    return str(base), str(base + 1)


def free_slot(pool: str, network_id: str, used: Collection[int], occupied: Set[str]) -> int:
    """Return a slot that neither a record nor an address on the host uses.

    It starts where the uid points to: two nodes in one namespace then seldom meet.
    """
    slots = IPv4Network(pool).num_addresses // 2
    start = int(hashlib.sha256(network_id.encode()).hexdigest(), 16) % slots
    for offset in range(slots):
        slot = (start + offset) % slots
        if slot not in used and not occupied & set(uplink_addresses(pool, slot)):
            return slot
    raise ResourceExhausted(f"all {slots} uplinks of {pool} are used", field="network.uplink_pool")
