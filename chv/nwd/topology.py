"""What a network may ask for: subnets, public addresses, DNS. Pure.

Every refusal names the value, the field and what it collides with. Subnets of tenants may overlap
each other, for each has a namespace of its own; they may not overlap what the host itself uses,
since traffic to that must leave the namespace by its uplink. What the host has a route for
(subnets of routed networks, public addresses) belongs to one network alone.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Network

import msgspec

from chv.common.errors import AlreadyExists, InUse, InvalidArgument
from chv.common.names import Address, Network, check_address, check_hostname, shown
from chv.common.wire.nwd import Topology, UplinkMode
from chv.nwd.addresses import check_gateway, check_subnet, check_subnet6

MTU6_MIN = 1280  # RFC 8200: no link of IPv6 has less
_SPECIAL = {
    "0.0.0.0/8": "addresses of this host on this network",
    "127.0.0.0/8": "loopback",
    "169.254.0.0/16": "link-local",
    "224.0.0.0/4": "multicast",
    "240.0.0.0/4": "reserved",
    "::/8": "reserved",
    "64:ff9b::/32": "translated IPv4 addresses",
    "2001::/32": "Teredo",
    "2001:db8::/32": "documentation",
    "2002::/16": "6to4",
    "3fff::/20": "documentation",
    "fe80::/10": "link-local",
    "fec0::/10": "site-local, which is gone",
    "ff00::/8": "multicast",
}
_SPECIAL_NETWORKS = {ipaddress.ip_network(text): what for text, what in _SPECIAL.items()}
_USABLE6 = (IPv6Network("2000::/3"), IPv6Network("fc00::/7"))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a subnet may not overlap. Addresses come with prefix lengths.

    `host_routes` are without the default routes and without those to networks of ours.
    """

    uplink_pool: str
    uplink_pool6: str = ""
    reserved: Sequence[str] = ()
    host_addresses: Sequence[str] = ()
    host_routes: Sequence[str] = ()

    def occupied(self) -> Iterable[tuple[Network, str]]:
        """Return every occupied network and what it is."""
        yield from _SPECIAL_NETWORKS.items()
        yield ipaddress.ip_network(self.uplink_pool), "the uplink pool (network.uplink_pool)"
        if self.uplink_pool6:
            yield ipaddress.ip_network(self.uplink_pool6), "the uplink pool (network.uplink_pool6)"
        for text in self.reserved:
            yield ipaddress.ip_network(text), "reserved by the node (network.reserved)"
        for text in self.host_addresses:
            yield ipaddress.ip_interface(text).network, f"the host's address {text}"
        for text in self.host_routes:
            yield ipaddress.ip_network(text), f"the host's route to {text}"


def check_topology(topology: Topology, surroundings: Surroundings) -> Topology:
    """Check what a network asks for by itself; return it with everything filled in."""
    subnet = check_subnet(topology.subnet)
    _refuse_occupied(subnet, surroundings, "spec.subnet")
    gateway = check_gateway(topology.gateway, subnet)
    if topology.subnet6:
        _check_subnet6(topology, surroundings)
    _check_public(topology, subnet, surroundings)
    _check_names(topology)
    return msgspec.structs.replace(topology, gateway=str(gateway))


def _refuse_occupied(subnet: Network, surroundings: Surroundings, field: str) -> None:
    for network, what in surroundings.occupied():
        if _overlap(subnet, network):
            raise InvalidArgument(
                f"{subnet} overlaps {network}: {what}",
                field=field,
                hint="choose a subnet that neither the host nor its uplink uses",
            )


def _overlap(one: Network, other: Network) -> bool:
    if isinstance(one, IPv4Network):
        return isinstance(other, IPv4Network) and one.overlaps(other)
    return isinstance(other, IPv6Network) and one.overlaps(other)


def _check_subnet6(topology: Topology, surroundings: Surroundings) -> None:
    subnet = check_subnet6(topology.subnet6)
    _refuse_occupied(subnet, surroundings, "spec.subnet6")
    if not any(subnet.subnet_of(usable) for usable in _USABLE6):
        raise InvalidArgument(
            f"{subnet} is neither unique local (fc00::/7) nor global (2000::/3)",
            field="spec.subnet6",
        )
    if topology.mtu < MTU6_MIN:
        raise InvalidArgument(
            f"{topology.mtu} is too small for IPv6, which needs {MTU6_MIN}", field="spec.mtu"
        )


def _check_public(topology: Topology, subnet: IPv4Network, surroundings: Surroundings) -> None:
    """Check the public addresses: they may lie in a subnet of the host, but not be its own."""
    if topology.public_addresses and topology.uplink is UplinkMode.NONE:
        raise InvalidArgument(
            "a network without an uplink has no public addresses", field="spec.publicAddresses"
        )
    own = {text.partition("/")[0] for text in surroundings.host_addresses}
    foreign = set(surroundings.host_routes)
    pool = ipaddress.ip_network(surroundings.uplink_pool)
    for index, text in enumerate(topology.public_addresses):
        field = f"spec.publicAddresses[{index}]"
        address = _ipv4(text, field)
        what = next((w for net, w in _SPECIAL_NETWORKS.items() if address in net), "")
        if address in subnet:
            what = f"part of the subnet {subnet}"
        elif address in pool:
            what = "part of the uplink pool (network.uplink_pool)"
        elif text in own:
            what = "an address of the host itself: expose ports of it instead"
        elif f"{text}/32" in foreign:
            what = "an address that the host has another route to"
        elif text in topology.public_addresses[:index]:
            what = "named twice"
        if what:
            raise InvalidArgument(f"{text} is {what}", field=field)


def _ipv4(text: str, field: str) -> IPv4Address:
    try:
        address = IPv4Address(text)
    except ValueError as error:
        raise InvalidArgument(f"{shown(text)} is not an IPv4 address", field=field) from error
    return address


# --- DNS
def _check_names(topology: Topology) -> None:
    check_hostname(topology.dns_domain, field="spec.dns.domain")
    for index, domain in enumerate(topology.search):
        check_hostname(domain, field=f"spec.dns.search[{index}]")
    for index, forwarder in enumerate(topology.forwarders):
        field = f"spec.dns.forwarders[{index}]"
        address = check_forwarder(forwarder, field)
        if address.version == 6 and not topology.subnet6:
            raise InvalidArgument(f"{forwarder} needs a network with subnet6", field=field)
    seen: set[str] = set()
    for index, record in enumerate(topology.records):
        field = f"spec.dns.records[{index}]"
        check_hostname(f"{record.name}.{topology.dns_domain}", field=f"{field}.name")
        if record.name in seen:
            raise InvalidArgument(f"{shown(record.name)} is named twice", field=f"{field}.name")
        seen.add(record.name)
        for number, text in enumerate(record.addresses):
            check_address(text, field=f"{field}.addresses[{number}]")


def check_forwarder(text: str, field: str) -> Address:
    """Check the address of a DNS server that answers for the rest of the world."""
    address = check_address(text, field=field)
    if address.is_loopback or address.is_multicast or address.is_link_local or int(address) == 0:
        raise InvalidArgument(
            f"{text} cannot be reached from a tenant network",
            field=field,
            hint="name a server on the network; the host's own stub resolver is not one",
        )
    return address


def refuse_taken_names(topology: Topology, hostnames: dict[str, str]) -> None:
    """Raise when a static record has the name of a NIC; `hostnames`: to ids of NICs."""
    for index, record in enumerate(topology.records):
        if record.name in hostnames:
            raise AlreadyExists(
                f"the name {record.name!r} belongs to NIC {hostnames[record.name]}",
                field=f"spec.dns.records[{index}].name",
                resource=hostnames[record.name],
            )


def refuse_recorded_name(topology: Topology, hostname: str) -> None:
    """Raise when a NIC asks for the name of a static record of its network."""
    if any(record.name == hostname for record in topology.records):
        raise AlreadyExists(
            f"the name {hostname!r} is a static record of network {topology.name}",
            field="hostname",
            resource=topology.network_id,
        )


# --- what the host has routes for
def routed(topology: Topology) -> dict[Network, str]:
    """Return what the host routes to the network, and the field that asks for it."""
    found: dict[Network, str] = {
        IPv4Network(text): "spec.publicAddresses" for text in topology.public_addresses
    }
    if topology.uplink is UplinkMode.ROUTED:
        found[IPv4Network(topology.subnet)] = "spec.subnet"
        if topology.subnet6:
            found[IPv6Network(topology.subnet6)] = "spec.subnet6"
    return found


def refuse_overlap(topology: Topology, others: Iterable[Topology]) -> None:
    """Raise when the host would have to route the same addresses to two networks."""
    ours = routed(topology)
    for other in others:
        for theirs in routed(other):
            for network, field in ours.items():
                if _overlap(network, theirs):
                    raise InUse(
                        f"{network} overlaps {theirs} of network {other.name} (tenant"
                        f" {other.tenant}), to which the host routes it",
                        field=field,
                        resource=other.network_id,
                        hint="routed networks and public addresses must not overlap",
                    )
