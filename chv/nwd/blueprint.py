"""What a recorded network is made of: links, rules and files, from records alone. Pure.

Names, aliases and MACs follow from uids, so two passes and two daemons come to the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from ipaddress import IPv4Network, IPv6Network

from chv.common.config import Config
from chv.common.layout import Layout
from chv.common.wire.nwd import L2Mode, Topology, UplinkMode
from chv.nwd import addresses, dnsmasq, metadata
from chv.nwd import settings as kernel_settings
from chv.nwd.crowd import Crowd, alias
from chv.nwd.dnsmasq import DnsName, DnsNetwork
from chv.nwd.kept import Kept
from chv.nwd.nft import rules
from chv.nwd.nft.model import MASQUERADE, NetworkRules
from chv.nwd.nft.text import Ruleset, digest
from chv.nwd.plan import BRIDGE, UPLINK, VETH, DesiredNetwork
from chv.nwd.policy import NOTHING, Policy
from chv.nwd.records import Network, Nic
from chv.nwd.steps import WantedLink
from chv.nwd.topology import routed

UPLINK_PREFIX, UPLINK_PREFIX6 = 31, 127
# A link without a link-local address cannot ask for neighbours; these are ours to give.
LINK_LOCAL, LINK_LOCAL_INNER = "fe80::1/64", "fe80::2/64"


@dataclass(frozen=True, slots=True)
class Settings:
    """What the node's configuration says about networks."""

    uplink_pool: str
    uplink_pool6: str
    forwarders: Sequence[str]
    reserved: Sequence[str]
    lease_s: int
    connections_max: int = 0  # of a NIC for which nobody says; 0: unlimited

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Take them from the configuration."""
        network = config.network
        return cls(
            uplink_pool=network.uplink_pool,
            uplink_pool6=network.uplink_pool6,
            forwarders=tuple(network.forwarders),
            reserved=tuple(network.reserved),
            lease_s=network.dhcp_lease_s,
        )


@dataclass(frozen=True)
class Blueprint:
    """A network as it should be, with the texts behind the digests."""

    desired: DesiredNetwork
    rules: Ruleset
    files: dict[str, str]
    configuration: str
    sysctls: dict[str, str]
    host_sysctls: dict[str, str]


def alias_prefix(layout: Layout) -> str:
    """Return what every link of this instance carries in front."""
    return f"chv:1:{layout.instance}:"


def draw(
    layout: Layout,
    settings: Settings,
    network: Network,
    nics: Sequence[Nic],
    policy: Policy = NOTHING,
) -> Blueprint:
    """Return the blueprint of a network with these NICs."""
    frame = _FRAMES.get(network.network_id, (layout, settings, network), _frame)
    crowd = _crowd(layout, settings, network, nics)
    ruleset = rules.render(_rules(settings, network, (layout, crowd), policy))
    files = crowd.files()
    desired = replace(
        frame.desired,
        bridge=_bridge(layout, network, policy.virtual),
        taps=crowd.taps(),
        rules=ruleset.digest,
        files=dnsmasq.files_digest(files),
    )
    return Blueprint(
        desired=desired,
        rules=ruleset,
        files=files,
        configuration=frame.configuration,
        sysctls=frame.sysctls,
        host_sysctls=frame.host_sysctls,
    )


def _crowd(layout: Layout, settings: Settings, network: Network, nics: Sequence[Nic]) -> Crowd:
    """Return the NICs of a network, brought up to date."""

    def make(*_: object) -> Crowd:
        dns = _dns_network(layout, settings, network)
        return Crowd(layout, network, dns, settings.connections_max)

    crowd = _CROWDS.get(network.network_id, (layout, settings, network), make)
    crowd.follow(nics)
    return crowd


@dataclass(frozen=True, slots=True)
class _Frame:
    """What of a blueprint follows from the network alone; `desired` without the rest."""

    configuration: str
    desired: DesiredNetwork
    sysctls: dict[str, str]
    host_sysctls: dict[str, str]


def _frame(layout: Layout, settings: Settings, network: Network) -> _Frame:
    configuration = dnsmasq.configuration(_dns_network(layout, settings, network))
    inner, host = _uplink(layout, settings, network)
    desired = DesiredNetwork(
        bridge=_bridge(layout, network, ()),
        uplink=inner,
        host_uplink=host,
        host_name=layout.uplink(network.network_id),
        default_gateways=_default_gateways(settings, network),
        host_routes=_host_routes(settings, network),
        taps=(),
        rules="",
        files="",
        configuration=digest(configuration),
    )
    return _Frame(
        configuration=configuration,
        desired=desired,
        sysctls=inner_sysctls(network.topology),
        host_sysctls=host_sysctls(layout, network.topology),
    )


_FRAMES: Kept[_Frame] = Kept()
_CROWDS: Kept[Crowd] = Kept()


def inner_sysctls(topology: Topology) -> dict[str, str]:
    """Return the kernel settings of a network's namespace."""
    is_isolated = topology.l2 is L2Mode.ISOLATED
    return kernel_settings.inner(has_ipv6=bool(topology.subnet6), is_isolated=is_isolated)


def host_sysctls(layout: Layout, topology: Topology) -> dict[str, str]:
    """Return the kernel settings of the host's end of its uplink."""
    name = layout.uplink(topology.network_id)
    return kernel_settings.host_uplink(name, has_ipv6=bool(topology.subnet6))


def has_uplink(network: Network) -> bool:
    """Tell whether a network reaches the outside."""
    return network.topology.uplink is not UplinkMode.NONE


def forwarders(settings: Settings, network: Network) -> Sequence[str]:
    """Return the DNS servers for the rest of the world: the network's, else the node's."""
    servers = network.topology.forwarders or settings.forwarders
    return [server for server in servers if network.topology.subnet6 or ":" not in server]


def gateway6(topology: Topology) -> str:
    """Return the IPv6 gateway, empty where the network has no IPv6."""
    return str(addresses.gateway6(IPv6Network(topology.subnet6))) if topology.subnet6 else ""


def _bridge(layout: Layout, network: Network, virtual: Sequence[str]) -> WantedLink:
    """Return the bridge; it answers for the addresses that exposures have in the subnets."""
    topology = network.topology
    length = IPv4Network(topology.subnet).prefixlen
    cidrs = {f"{topology.gateway}/{length}"}
    if topology.subnet6:
        length = IPv6Network(topology.subnet6).prefixlen
        cidrs |= {f"{gateway6(topology)}/{length}", LINK_LOCAL}
    cidrs |= {f"{address}/{128 if ':' in address else 32}" for address in virtual}
    cidrs |= metadata.addresses_of(network)
    return WantedLink(
        name=BRIDGE,
        kind="bridge",
        alias=alias(layout, network.network_id, "bridge"),
        mac=addresses.mac_of(network.network_id),
        mtu=topology.mtu,
        addresses=frozenset(cidrs),
    )


def _uplink(
    layout: Layout, settings: Settings, network: Network
) -> tuple[WantedLink | None, WantedLink | None]:
    """Return both ends, the network's first."""
    pairs = _pairs(settings, network)
    if not pairs:
        return None, None
    topology, network_id = network.topology, network.network_id
    ours = {f"{host}/{length}" for host, _, length in pairs}
    theirs = {f"{inner}/{length}" for _, inner, length in pairs}
    theirs |= {f"{address}/32" for address in topology.public_addresses}
    if topology.subnet6:
        ours, theirs = ours | {LINK_LOCAL}, theirs | {LINK_LOCAL_INNER}
    inner = WantedLink(
        name=UPLINK,
        kind=VETH,
        alias=alias(layout, network_id, "uplink"),
        mtu=topology.mtu,
        addresses=frozenset(theirs),
    )
    host = WantedLink(
        name=layout.uplink(network_id),
        kind=VETH,
        alias=alias(layout, network_id, "host"),
        mtu=topology.mtu,
        addresses=frozenset(ours),
    )
    return inner, host


def _pairs(settings: Settings, network: Network) -> list[tuple[str, str, int]]:
    """Return (host's end, network's end, prefix length) of each family; none without uplink."""
    slot = network.uplink_slot
    if slot is None or not has_uplink(network):
        return []
    pairs = [(*addresses.uplink_addresses(settings.uplink_pool, slot), UPLINK_PREFIX)]
    if network.topology.subnet6:
        pair = addresses.uplink_addresses6(settings.uplink_pool6, slot)
        pairs.append((*pair, UPLINK_PREFIX6))
    return pairs


def _default_gateways(settings: Settings, network: Network) -> frozenset[str]:
    return frozenset(host for host, _, _ in _pairs(settings, network))


def _host_routes(settings: Settings, network: Network) -> frozenset[tuple[str, str]]:
    """Return (target, gateway) of what the host routes to the network."""
    inner = {":" in inner: inner for _, inner, _ in _pairs(settings, network)}
    return frozenset(
        (str(target), inner[target.version == 6])
        for target in routed(network.topology)
        if target.version == 4 or True in inner
    )


def network_rules(
    layout: Layout,
    settings: Settings,
    network: Network,
    nics: Sequence[Nic],
    policy: Policy = NOTHING,
) -> NetworkRules:
    """Return what the rules of a network are made from."""
    crowd = _crowd(layout, settings, network, nics)
    return _rules(settings, network, (layout, crowd), policy)


def _rules(
    settings: Settings, network: Network, of: tuple[Layout, Crowd], policy: Policy
) -> NetworkRules:
    layout, crowd = of
    topology = network.topology
    is_routed = topology.uplink is UplinkMode.ROUTED
    return NetworkRules(
        identity=f"chv:1:{layout.instance}:{network.network_id}",
        bridge=BRIDGE,
        uplink=UPLINK if has_uplink(network) else "",
        subnet=topology.subnet,
        gateway=topology.gateway,
        subnet6=topology.subnet6,
        gateway6=gateway6(topology),
        l2=topology.l2,
        source="" if is_routed else next(iter(topology.public_addresses), MASQUERADE),
        source6="" if is_routed else MASQUERADE,
        metadata=topology.metadata,
        forwarders=forwarders(settings, network),
        nics=crowd.rules(),
        groups=policy.groups,
        exposures=policy.exposures,
    )


def uplink_addresses(settings: Settings, network: Network) -> tuple[str, ...]:
    """Return the addresses of the network's end of the uplink, if it has one."""
    return tuple(inner for _, inner, _ in _pairs(settings, network))


def _dns_network(layout: Layout, settings: Settings, network: Network) -> DnsNetwork:
    topology = network.topology
    return DnsNetwork(
        directory=layout.network_run(network.network_id),
        bridge=BRIDGE,
        subnet=topology.subnet,
        gateway=topology.gateway,
        mtu=topology.mtu,
        domain=topology.dns_domain,
        has_uplink=has_uplink(network),
        forwarders=forwarders(settings, network),
        lease_s=settings.lease_s,
        subnet6=topology.subnet6,
        gateway6=gateway6(topology),
        search=topology.search,
        names=[DnsName(record.name, tuple(record.addresses)) for record in topology.records],
        by_gateway=[metadata.ADDRESS] if topology.metadata else [],
    )
