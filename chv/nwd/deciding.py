"""Which rule of which security group speaks for a packet, in words. Pure.

The kernel decides, and a trace shows what it decided; this tells where that comes from in the
objects that people write. Where several rules allow a packet, the first is named: by its place
among those of its direction, as it stands in a manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from chv.common.wire.nwd_policy import Direction, IpProtocol, SecurityRule
from chv.nwd.kernel.packets import Packet, with_port
from chv.nwd.policy import ports_of
from chv.nwd.records import GroupRow, Nic


@dataclass(frozen=True)
class Groups:
    """The groups of a network and the addresses of their members there."""

    rows: Mapping[str, GroupRow]
    members: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, rows: Mapping[str, GroupRow], nics: Iterable[Nic]) -> Groups:
        """Take them from records."""
        members: dict[str, set[str]] = {}
        for nic in nics:
            for uid in nic.groups:
                members.setdefault(uid, set()).update(nic.addresses)
        return cls(rows, {uid: frozenset(found) for uid, found in members.items()})

    def allowing(self, nic: Nic, direction: Direction, packet: Packet) -> str:
        """Return what allows it, in words; empty where nothing does."""
        if not nic.groups:
            everything = direction is Direction.EGRESS
            return (
                "it has no security groups, and may then open any connection" if everything else ""
            )
        for uid in nic.groups:
            row = self.rows.get(uid)
            rules = [
                rule
                for rule in (row.group.rules if row is not None else ())
                if rule.direction is direction
            ]
            for index, rule in enumerate(rules):
                if row is not None and self._fits(rule, packet):
                    return f"rule {direction.value}[{index}] of security group {row.group.name}"
        return ""

    def denied(self, nic: Nic, direction: Direction, packet: Packet) -> str:
        """Return why nothing allows it, in words."""
        peer = packet.destination if direction is Direction.EGRESS else packet.source
        towards = "to" if direction is Direction.EGRESS else "from"
        what = _what(packet)
        if not nic.groups:
            why = "it has no security groups, and nothing may then connect to it"
            return f"{why} ({what} {towards} {peer})"
        names = [self.rows[uid].group.name for uid in nic.groups if uid in self.rows]
        return (
            f"no rule of its security groups ({', '.join(names)}) allows {direction.value}"
            f" {what} {towards} {peer}"
        )

    def _fits(self, rule: SecurityRule, packet: Packet) -> bool:
        if rule.protocol is not IpProtocol.ANY and rule.protocol.value != packet.protocol:
            return False
        is_out = rule.direction is Direction.EGRESS
        peer = packet.destination if is_out else packet.source
        port = packet.destination_port
        ranges = [ports_of(text) for text in rule.ports]
        if ranges and not any(first <= port <= last for first, last in ranges):
            return False
        address = ip_address(peer)
        return any(address in ip_network(cidr) for cidr in rule.cidrs) or any(
            peer in self.members.get(uid, ()) for uid in rule.groups
        )


def _what(packet: Packet) -> str:
    port = f" {packet.destination_port}" if packet.destination_port else ""
    return f"{packet.protocol}{port}"


def opened(packet: Packet) -> str:
    """Return a packet in words."""
    return f"{packet.protocol} {with_port(packet.source, packet.source_port)} -> " + with_port(
        packet.destination, packet.destination_port
    )
