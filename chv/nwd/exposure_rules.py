"""Whether an exposure may have what it asks for: addresses, ports, targets. Decides only.

An address is the node's own, one of the network's public ones, or a free one of its subnets. The
same protocol, address and port belong to one exposure. What comes to any of the node's addresses
arrives in the network at its one uplink address: two exposures of a network therefore cannot have
the same port on different addresses of the node. A port that the node itself listens on is not
taken from it. A range keeps its ports: `target_port` is then none, or the first port itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv6Network, ip_network

from chv.common.errors import AlreadyExists, InUse, InvalidArgument, NotFound
from chv.common.names import check_address, check_cidr
from chv.common.wire.nwd import L2Mode
from chv.common.wire.nwd_policy import Exposure, IpProtocol
from chv.nwd.addresses import gateway6
from chv.nwd.kernel.listeners import Listener
from chv.nwd.parts import Parts
from chv.nwd.policy import family
from chv.nwd.records import ExposureRow, Network, Wanted

PORTS_MAX = 1024
PORT_MAX = 65535


class Checks:
    """Checks against everything that is recorded."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._records = parts.records

    def check(self, exposure: Exposure, network: Network, node: frozenset[str]) -> list[str]:
        """Raise for what cannot be; return the addresses that are the node's own, `node`."""
        check_form(exposure)
        host = [
            text
            for index, text in enumerate(exposure.addresses)
            if self._check_address(text, f"exposure.addresses[{index}]", network, node)
        ]
        if host and not self._parts.uplinks(network):
            raise InvalidArgument(
                f"{host[0]} is the node's, and the network has no uplink",
                field="exposure.addresses",
                hint="use a free address of its subnet",
            )
        self._check_targets(exposure)
        self._refuse_taken(exposure, host)
        return host

    def _check_address(self, text: str, field: str, network: Network, node: frozenset[str]) -> bool:
        """Return whether an address is the node's own; raise where it cannot be used at all."""
        topology = network.topology
        if text in topology.public_addresses:
            return False
        address = check_address(text, field=field)
        subnets = [ip_network(each) for each in (topology.subnet, topology.subnet6) if each]
        subnet = next((each for each in subnets if address in each), None)
        if subnet is None:
            if text in node:
                return True
            raise InvalidArgument(
                f"{text} is neither the node's, nor public, nor in {topology.subnet}",
                field=field,
                hint="name one of the node's, one of the network's public ones, or a free one of"
                " its subnet",
            )
        if topology.l2 is L2Mode.OPEN:
            raise InvalidArgument(
                f"{text} is in the subnet of a network whose guests are bridged",
                field=field,
                hint="use one of the node's or one of the network's public ones",
            )
        taken = {topology.gateway: "the gateway", str(subnet.network_address): "the subnet itself"}
        if topology.subnet6:
            taken[str(gateway6(IPv6Network(topology.subnet6)))] = "the gateway"
        if subnet.version == 4:
            taken[str(subnet.broadcast_address)] = "for broadcast"
        if text in taken:
            raise InvalidArgument(f"{text} is {taken[text]}", field=field)
        owner = self._records.members(network.network_id).owners.get(text)
        if owner is not None:
            raise InUse(f"{text} belongs to NIC {owner}", field=field, resource=owner)
        return False

    def _check_targets(self, exposure: Exposure) -> None:
        for index, nic_id in enumerate(exposure.targets):
            field, nic = f"exposure.targets[{index}]", self._records.nics.get(nic_id)
            if nic_id in exposure.targets[:index]:
                raise InvalidArgument(f"NIC {nic_id} is named twice", field=field)
            if nic is None or nic.wanted is Wanted.REMOVED:
                raise NotFound(f"there is no NIC {nic_id}", field=field, resource=nic_id)
            if nic.network_id != exposure.network_id:
                raise InvalidArgument(
                    f"NIC {nic_id} is on another network", field=field, resource=nic_id
                )

    def _refuse_taken(self, exposure: Exposure, host: list[str]) -> None:
        for row in self._others(exposure):
            other = row.exposure
            if not _overlap(exposure, other):
                continue
            same_network = other.network_id == exposure.network_id
            for index, text in enumerate(exposure.addresses):
                # Subnets of two networks may be the same and mean different guests.
                inside = text not in host and text not in self._public(exposure.network_id)
                if text in other.addresses and (same_network or not inside):
                    raise _taken(text, exposure, other, f"exposure.addresses[{index}]")
            if same_network and _families(host) & _families(row.host_addresses):
                raise _taken(
                    f"the node ({host[0]} and {row.host_addresses[0]})",
                    exposure,
                    other,
                    "exposure.port",
                )

    def _others(self, exposure: Exposure) -> Iterable[ExposureRow]:
        return [
            row
            for row in self._records.exposures.values()
            if row.exposure.exposure_id != exposure.exposure_id
            and row.exposure.protocol is exposure.protocol
        ]

    def _public(self, network_id: str) -> list[str]:
        return self._records.networks[network_id].topology.public_addresses


def refuse_listened(
    exposure: Exposure,
    host: Iterable[str],
    old: ExposureRow | None,
    listening: Iterable[Listener],
) -> None:
    """Raise where the node itself listens on what the exposure does not have yet."""
    first, last = exposure.port, exposure.port_end or exposure.port
    held = _held(exposure, old)
    for text in host:
        port = next(
            (
                each.port
                for each in listening
                if each.protocol == exposure.protocol.value and each.takes(text, first, last)
            ),
            0,
        )
        if port and text not in held:
            raise InUse(
                f"the node itself listens on {exposure.protocol.value} port {port} of {text}",
                field="exposure.port",
                hint="choose another port or address, or end what listens there (ss -lntup)",
            )


def takes_more(exposure: Exposure, host: Iterable[str], old: ExposureRow | None) -> bool:
    """Tell whether it asks for ports of the node that it does not have yet."""
    return not set(host) <= set(_held(exposure, old))


def _held(exposure: Exposure, old: ExposureRow | None) -> list[str]:
    """Return the node's addresses of which it has these ports already."""
    if old is None:
        return []
    first, last = exposure.port, exposure.port_end or exposure.port
    return old.host_addresses if _has(old.exposure, exposure.protocol, first, last) else []


def _has(exposure: Exposure, protocol: IpProtocol, first: int, last: int) -> bool:
    own_last = exposure.port_end or exposure.port
    return exposure.protocol is protocol and exposure.port <= first and last <= own_last


def _taken(address: str, exposure: Exposure, other: Exposure, field: str) -> AlreadyExists:
    return AlreadyExists(
        f"{exposure.protocol.value} port {exposure.port} of {address} belongs to exposure"
        f" {other.exposure_id}",
        field=field,
        resource=other.exposure_id,
    )


def check_form(exposure: Exposure) -> None:
    """Check what can be told from the exposure alone."""
    if exposure.protocol not in (IpProtocol.TCP, IpProtocol.UDP):
        raise InvalidArgument(
            f"{exposure.protocol.value} cannot be exposed",
            field="exposure.protocol",
            hint="tcp or udp",
        )
    for index, text in enumerate(exposure.addresses):
        address = check_address(text, field=f"exposure.addresses[{index}]")
        if str(address) != text or text in exposure.addresses[:index]:
            raise InvalidArgument(
                f"{text} is written in another way, or twice",
                field=f"exposure.addresses[{index}]",
                hint=f"write {address} once",
            )
    for index, text in enumerate(exposure.sources):
        check_cidr(text, field=f"exposure.sources[{index}]")
    if exposure.port_end:
        _check_range(exposure)


def _check_range(exposure: Exposure) -> None:
    first, last = exposure.port, exposure.port_end
    if last < first:
        raise InvalidArgument(f"{last} is below the first port {first}", field="exposure.port_end")
    if last - first >= PORTS_MAX:
        raise InvalidArgument(
            f"{last - first + 1} ports are more than {PORTS_MAX}",
            field="exposure.port_end",
            hint="several exposures can share the targets",
        )
    if exposure.target_port not in (0, first):
        raise InvalidArgument(
            f"a range keeps its ports: target port {exposure.target_port} is not {first}",
            field="exposure.target_port",
            hint="leave it out",
        )


def _overlap(one: Exposure, other: Exposure) -> bool:
    return one.port <= (other.port_end or other.port) and other.port <= (one.port_end or one.port)


def _families(addresses: Iterable[str]) -> set[int]:
    return {family(text) for text in addresses}
