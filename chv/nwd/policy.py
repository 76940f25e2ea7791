"""From records to what rules are made of: groups, exposures, what a NIC may do. Pure.

An exposure's targets get new connections while they are attached and, where they are checked,
healthy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from ipaddress import ip_address, ip_network

from chv.common.layout import Layout
from chv.common.wire.nwd_policy import Exposure, HealthProtocol, SecurityGroup, SecurityRule
from chv.nwd.kept import Kept
from chv.nwd.nft.model import Backend, Exposed, Group, NicRules, Rule
from chv.nwd.records import ExposureRow, GroupRow, Nic, Records, Wanted


@dataclass(frozen=True)
class Policy:
    """What the rules of one network hold beside its NICs.

    `virtual`: addresses of its subnets that exposures have and no NIC.
    """

    groups: Sequence[Group] = ()
    exposures: Sequence[Exposed] = ()
    virtual: Sequence[str] = ()


NOTHING = Policy()


def policy_of(
    records: Records, network_id: str, nics: Sequence[Nic], uplinks: Sequence[str]
) -> Policy:
    """Return the policy of a network with these NICs and these addresses of its uplink."""
    rows = sorted(
        (row for row in records.exposures_of(network_id) if row.wanted is Wanted.PRESENT),
        key=lambda row: row.exposure.exposure_id,
    )
    known = records.members(network_id)
    if nics is known.all:  # nearly always, and then nobody looks at a thousand
        targets = _targets(rows, known.nics)
        members: Set[str] = known.groups.keys()
    else:
        targets = _targets(rows, {nic.nic_id: nic for nic in nics})
        members = _MEMBERS.get(network_id, (tuple(nics),), _members_of)
    return Policy(
        groups=groups_of(records.groups, members),
        exposures=[exposed(row, targets, uplinks) for row in rows],
        virtual=_virtual(rows, records, network_id),
    )


def _targets(rows: Sequence[ExposureRow], nics: Mapping[str, Nic]) -> dict[str, Nic]:
    """Return the NICs that exposures name."""
    wanted = {uid for row in rows for uid in row.exposure.targets}
    return {uid: nics[uid] for uid in wanted if uid in nics}


def nic_rules(layout: Layout, nic: Nic, connections_max: int = 0) -> NicRules:
    """Return what the rules need to know of a NIC; its bound, where it says none, as given."""
    return NicRules(
        nic_id=nic.nic_id,
        tap=layout.tap(nic.nic_id),
        mac=nic.mac,
        addresses=nic.addresses,
        guest_ports=tuple(nic.guest_ports),
        groups=tuple(nic.groups),
        connections_max=nic.connections_max or connections_max,
        public=nic.public_address,
    )


# --- groups
def groups_of(rows: Mapping[str, GroupRow], names: Set[str]) -> list[Group]:
    """Return the groups of these names, and those that their rules name."""
    members = names & rows.keys()
    named = {uid for member in members for uid in peers_of(rows[member]) if uid in rows}
    return [group_of(rows[uid]) for uid in sorted(members | named)]


def _members_of(nics: Sequence[Nic]) -> frozenset[str]:
    return frozenset[str]().union(*[nic.groups for nic in nics])


_MEMBERS: Kept[frozenset[str]] = Kept()


def peers_of(row: GroupRow) -> frozenset[str]:
    """Return the groups that the rules of a group name."""
    return _PEERS.get(row.group.group_id, (row.group,), _peers_of)


def _peers_of(group: SecurityGroup) -> frozenset[str]:
    return frozenset(uid for rule in group.rules for uid in rule.groups)


def group_of(row: GroupRow) -> Group:
    """Return a group as the rules see it."""
    return _GROUPS.get(row.group.group_id, (row.group,), _group_of)


_PEERS: Kept[frozenset[str]] = Kept()
_GROUPS: Kept[Group] = Kept()


def _group_of(group: SecurityGroup) -> Group:
    return Group(group.group_id, tuple(rule_of(rule) for rule in group.rules), group.log_dropped)


def rule_of(rule: SecurityRule) -> Rule:
    """Return one rule as the rules see it."""
    return Rule(
        direction=rule.direction,
        protocol=rule.protocol,
        ports=tuple(ports_of(text) for text in rule.ports),
        cidrs=tuple(rule.cidrs),
        groups=tuple(rule.groups),
        rate=rule.rate,
        connections_max=rule.connections_max,
        log=rule.log,
    )


def ports_of(text: str) -> tuple[int, int]:
    """Return first and last of `80` or `80-90`."""
    first, _, last = text.partition("-")
    return int(first), int(last or first)


# --- exposures
def exposed(row: ExposureRow, nics: Mapping[str, Nic], uplinks: Sequence[str]) -> Exposed:
    """Return an exposure as the namespace sees it."""
    exposure = row.exposure
    targets = tuple(nics[uid] for uid in exposure.targets if uid in nics)
    return _EXPOSED.get(exposure.exposure_id, (row, targets, tuple(uplinks)), _exposed)


_EXPOSED: Kept[Exposed] = Kept()


def _exposed(row: ExposureRow, targets: Sequence[Nic], uplinks: Sequence[str]) -> Exposed:
    exposure = row.exposure
    addresses = inner_addresses(row, uplinks)
    families = {family(text) for text in addresses}
    ready = [nic for nic in targets if takes_new(row, nic.nic_id)]
    return Exposed(
        exposure_id=exposure.exposure_id,
        protocol=exposure.protocol,
        addresses=addresses,
        ports=(exposure.port, exposure.port_end or exposure.port),
        sources=tuple(exposure.sources),
        backends=tuple(
            Backend(address, 0 if exposure.port_end else exposure.target_port)
            for nic in ready
            for address in nic.addresses
            if family(address) in families
        ),
        algorithm=exposure.algorithm,
        checks=_checks(exposure, targets),
    )


def _checks(exposure: Exposure, targets: Sequence[Nic]) -> tuple[Backend, ...]:
    if exposure.health.protocol is HealthProtocol.NONE:
        return ()
    port = checked_port(exposure)
    return tuple(Backend(checked_address(exposure, nic), port) for nic in targets)


def inner_addresses(row: ExposureRow, uplinks: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses that clients of it meet in the namespace.

    What comes to an address of the node arrives at the uplink's of the same family.
    """
    families = {family(text) for text in row.host_addresses}
    arriving = [text for text in uplinks if family(text) in families]
    return (*row.exposure.addresses, *arriving)


def takes_new(row: ExposureRow, nic_id: str) -> bool:
    """Tell whether a target may get new connections, as far as checks say."""
    if row.exposure.health.protocol is HealthProtocol.NONE:
        return True
    health = row.health.get(nic_id)
    return health is not None and health.healthy


def checked_port(exposure: Exposure) -> int:
    """Return the port that checks go to."""
    return exposure.health.port or exposure.target_port or exposure.port


def checked_address(exposure: Exposure, nic: Nic) -> str:
    """Return the address that checks go to: IPv4 unless clients have IPv6 alone."""
    is_v6 = all(family(text) == 6 for text in exposure.addresses)
    return nic.address6 if is_v6 and nic.address6 else nic.address


def family(address: str) -> int:
    """Return 4 or 6."""
    return ip_address(address).version


def _virtual(rows: Iterable[ExposureRow], records: Records, network_id: str) -> list[str]:
    network = records.networks.get(network_id)
    if network is None:
        return []
    subnets = (network.topology.subnet, network.topology.subnet6)
    each = [
        _VIRTUAL.get(row.exposure.exposure_id, (row.exposure, subnets), _within) for row in rows
    ]
    return sorted(frozenset().union(*each))


def _within(exposure: Exposure, subnets: Sequence[str]) -> frozenset[str]:
    """Return the addresses of an exposure that are in a subnet."""
    found = [ip_network(text) for text in subnets if text]
    return frozenset(
        text for text in exposure.addresses if any(ip_address(text) in net for net in found)
    )


_VIRTUAL: Kept[frozenset[str]] = Kept()


@dataclass(frozen=True, slots=True, order=True)
class HostExposed:
    """What the host's table sends to a network: `address:first-last` to the uplink's address."""

    protocol: str
    address: str
    first: int
    last: int
    uplink: str


def host_exposed(rows: Iterable[ExposureRow], uplinks: Sequence[str]) -> list[HostExposed]:
    """Return what the host sends to a network that has these exposures and uplink addresses."""
    return sorted(
        HostExposed(
            row.exposure.protocol.value,
            address,
            row.exposure.port,
            row.exposure.port_end or row.exposure.port,
            uplink,
        )
        for row in rows
        if row.wanted is Wanted.PRESENT
        for address in row.host_addresses
        for uplink in uplinks
        if family(uplink) == family(address)
    )
