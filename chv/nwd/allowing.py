"""Whether a tracked connection is one that the rules of now would let come about. Pure.

It answers for connections that stand: what opened them is their source, so an answer needs no
rule of its own. Left alone are connections of the gateway, those that an exposure translated (the
exposure decides on them), and everything in which no NIC of the network takes part.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from chv.common.wire.nwd_policy import Direction, IpProtocol
from chv.nwd.kernel.conntrack import ICMP, ICMPV6, TCP, UDP, Connection
from chv.nwd.nft.gateway import METADATA6
from chv.nwd.nft.model import Exposed, NetworkRules, NicRules, Rule
from chv.nwd.records import Footprint

NUMBERS = {
    IpProtocol.TCP: TCP,
    IpProtocol.UDP: UDP,
    IpProtocol.ICMP: ICMP,
    IpProtocol.ICMPV6: ICMPV6,
}
# Of the gateway itself, whoever asks: link-local and metadata.
_LOCAL = (
    IPv4Network("169.254.0.0/16"),
    IPv6Network("fe80::/10"),
    IPv6Network(f"{METADATA6}/128"),
)
CIDRS_KEPT_MAX = 4096


class Judge:
    """The groups of one network, asked about connections."""

    def __init__(self, network: NetworkRules) -> None:
        self._nics = {address: nic for nic in network.nics for address in nic.addresses}
        self._rules = {group.group_id: group.rules for group in network.groups}
        self._members: dict[str, set[str]] = {}
        for nic in network.nics:
            for group_id in nic.groups:
                self._members.setdefault(group_id, set()).update(nic.addresses)
        self._gateways = {network.gateway, network.gateway6} - {""}

    def permits(self, connection: Connection) -> bool:
        """Tell whether the rules would let it come about, or have no say in it."""
        if connection.is_translated or self._is_of_gateway(connection):
            return True
        source, server = self._nics.get(connection.source), self._nics.get(connection.server)
        return (source is None or self._lets_out(source, connection)) and (
            server is None or self._lets_in(server, connection)
        )

    def _is_of_gateway(self, connection: Connection) -> bool:
        ends = {connection.source, connection.server, connection.target}
        return bool(ends & self._gateways) or any(
            _contains(net, each) for net in _LOCAL for each in ends
        )

    def _lets_out(self, nic: NicRules, connection: Connection) -> bool:
        if not nic.groups:
            return True
        return self._allows(nic, Direction.EGRESS, connection.server, connection)

    def _lets_in(self, nic: NicRules, connection: Connection) -> bool:
        return self._allows(nic, Direction.INGRESS, connection.source, connection)

    def _allows(
        self, nic: NicRules, direction: Direction, peer: str, connection: Connection
    ) -> bool:
        return any(
            rule.direction is direction
            and _fits(rule, connection)
            and (_in_cidrs(peer, rule.cidrs) or self._is_member(peer, rule.groups))
            for group_id in nic.groups
            for rule in self._rules.get(group_id, ())
        )

    def _is_member(self, address: str, groups: Iterable[str]) -> bool:
        return any(address in self._members.get(group_id, ()) for group_id in groups)


def _fits(rule: Rule, connection: Connection) -> bool:
    if rule.protocol is IpProtocol.ANY:
        return True
    if NUMBERS[rule.protocol] != connection.protocol:
        return False
    port = connection.server_port
    return not rule.ports or any(first <= port <= last for first, last in rule.ports)


def _in_cidrs(address: str, cidrs: Iterable[str]) -> bool:
    return any(_contains(_network(cidr), address) for cidr in cidrs)


@lru_cache(CIDRS_KEPT_MAX)
def _network(cidr: str) -> IPv4Network | IPv6Network:
    return ip_network(cidr)


@lru_cache(CIDRS_KEPT_MAX)
def _parsed(address: str) -> IPv4Address | IPv6Address:
    return ip_address(address)


def _contains(network: IPv4Network | IPv6Network, address: str) -> bool:
    return bool(address) and _parsed(address) in network


# --- exposures
def is_stray(
    connection: Connection, print_: Footprint, now: Exposed | None, targets: frozenset[str]
) -> bool:
    """Tell whether a connection inside the namespace is to end after a change of an exposure.

    `now`: the exposure as it stands, None: withdrawn. `targets`: addresses of its targets and of
    those that drain. What was tracked before the exposure came would never be translated, so UDP
    of that kind ends in any case: its senders do not open anew.
    """
    if not _touches(connection, print_, print_.addresses):
        return False
    if not connection.is_translated:
        return connection.protocol == UDP
    if now is None:
        return print_.drop
    if connection.server not in targets:
        return print_.drop or connection.protocol == UDP
    return print_.drop and not _still_taken(connection, now)


def is_stray_on_host(
    connection: Connection, print_: Footprint, host: Iterable[str], now: Exposed | None
) -> bool:
    """The same in the host's namespace; `host`: the node's addresses that it has now."""
    if not _touches(connection, print_, print_.host_addresses):
        return False
    if not connection.is_translated:
        return connection.protocol == UDP
    taken = now is not None and connection.target in host
    if now is None or not taken:
        return print_.drop
    first, last = now.ports
    return print_.drop and not (
        first <= connection.target_port <= last and _in_cidrs(connection.source, now.sources)
    )


def is_drained(connection: Connection, now: Exposed, drained: frozenset[str]) -> bool:
    """Tell whether a connection is one of a target whose time is over."""
    first, last = now.ports
    return (
        connection.is_translated
        and NUMBERS[now.protocol] == connection.protocol
        and connection.target in now.addresses
        and first <= connection.target_port <= last
        and connection.server in drained
    )


def _touches(connection: Connection, print_: Footprint, addresses: Iterable[str]) -> bool:
    return (
        connection.protocol == NUMBERS[print_.protocol]
        and connection.target in addresses
        and print_.first <= connection.target_port <= print_.last
    )


def _still_taken(connection: Connection, now: Exposed) -> bool:
    first, last = now.ports
    return (
        connection.target in now.addresses
        and first <= connection.target_port <= last
        and _in_cidrs(connection.source, now.sources)
    )
