"""What a recorded network is made of: links, rules and files, from records alone. Pure.

Names, aliases and MACs follow from uids, so two passes and two daemons come to the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network

from chv.common.config import Config
from chv.common.layout import Layout
from chv.common.wire.nwd import UplinkMode
from chv.nwd import addresses, dnsmasq
from chv.nwd.dnsmasq import DnsNetwork, DnsNic
from chv.nwd.nft import rules
from chv.nwd.nft.model import NetworkRules
from chv.nwd.nft.text import Ruleset, digest
from chv.nwd.plan import BRIDGE, UPLINK, VETH, DesiredNetwork
from chv.nwd.policy import NOTHING, Policy, nic_rules
from chv.nwd.records import Network, Nic
from chv.nwd.shaping import shaping
from chv.nwd.steps import WantedLink

UPLINK_PREFIX = 31


@dataclass(frozen=True, slots=True)
class Settings:
    """What the node's configuration says about networks."""

    uplink_pool: str
    forwarders: Sequence[str]
    reserved: Sequence[str]
    lease_s: int

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Take them from the configuration; DNS inside tenants is IPv4 alone for now."""
        network = config.network
        forwarders = tuple(server for server in network.forwarders if ":" not in server)
        return cls(network.uplink_pool, forwarders, tuple(network.reserved), network.dhcp_lease_s)


@dataclass(frozen=True)
class Blueprint:
    """A network as it should be, with the texts behind the digests."""

    desired: DesiredNetwork
    rules: Ruleset
    files: dict[str, str]
    configuration: str


def alias(layout: Layout, network_id: str, part: str) -> str:
    """Return what a link of ours carries as its identity."""
    return f"chv:1:{layout.instance}:{network_id}:{part}"


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
    dns = _dns_network(layout, settings, network)
    dns_nics = [DnsNic(nic.mac, nic.address, nic.hostname) for nic in nics]
    ruleset = rules.render(network_rules(layout, settings, network, nics, policy))
    files = dnsmasq.files(dns_nics, dns)
    configuration = dnsmasq.configuration(dns)
    inner, host, gateway = _uplink(layout, settings, network)
    desired = DesiredNetwork(
        bridge=_bridge(layout, network),
        uplink=inner,
        host_uplink=host,
        host_name=layout.uplink(network.network_id),
        default_gateway=gateway,
        taps=tuple(_tap(layout, network, nic) for nic in nics),
        rules=ruleset.digest,
        files=dnsmasq.files_digest(files),
        configuration=digest(configuration),
    )
    return Blueprint(desired, ruleset, files, configuration)


def has_uplink(network: Network) -> bool:
    """Tell whether a network reaches the outside."""
    return network.topology.uplink is UplinkMode.NAT


def forwarders(settings: Settings, network: Network) -> Sequence[str]:
    """Return the DNS servers for the rest of the world: the network's, else the node's."""
    return network.topology.forwarders or settings.forwarders


def _bridge(layout: Layout, network: Network) -> WantedLink:
    topology = network.topology
    length = IPv4Network(topology.subnet).prefixlen
    return WantedLink(
        name=BRIDGE,
        kind="bridge",
        alias=alias(layout, network.network_id, "bridge"),
        mac=addresses.mac_of(network.network_id),
        mtu=topology.mtu,
        addresses=frozenset({f"{topology.gateway}/{length}"}),
    )


def _uplink(
    layout: Layout, settings: Settings, network: Network
) -> tuple[WantedLink | None, WantedLink | None, str]:
    """Return both ends, the network's first, and the host's address."""
    if network.uplink_slot is None or not has_uplink(network):
        return None, None, ""
    ours, theirs = addresses.uplink_addresses(settings.uplink_pool, network.uplink_slot)
    mtu = network.topology.mtu
    inner = WantedLink(
        name=UPLINK,
        kind=VETH,
        alias=alias(layout, network.network_id, "uplink"),
        mtu=mtu,
        addresses=frozenset({f"{theirs}/{UPLINK_PREFIX}"}),
    )
    host = WantedLink(
        name=layout.uplink(network.network_id),
        kind=VETH,
        alias=alias(layout, network.network_id, "host"),
        mtu=mtu,
        addresses=frozenset({f"{ours}/{UPLINK_PREFIX}"}),
    )
    return inner, host, ours


def _tap(layout: Layout, network: Network, nic: Nic) -> WantedLink:
    return WantedLink(
        name=layout.tap(nic.nic_id),
        kind="tun",
        alias=alias(layout, network.network_id, f"nic:{nic.nic_id}"),
        mtu=network.topology.mtu,
        master=BRIDGE,
        isolated=True,
        owner_uid=nic.owner_uid,
        queues=nic.queues,
        shaping=shaping(
            nic.shape,
            layout.ifb(nic.nic_id),
            alias(layout, network.network_id, f"ifb:{nic.nic_id}"),
        ),
    )


def network_rules(
    layout: Layout,
    settings: Settings,
    network: Network,
    nics: Sequence[Nic],
    policy: Policy = NOTHING,
) -> NetworkRules:
    """Return what the rules of a network are made from."""
    return NetworkRules(
        identity=f"chv:1:{layout.instance}:{network.network_id}",
        bridge=BRIDGE,
        uplink=UPLINK if has_uplink(network) else "",
        subnet=network.topology.subnet,
        gateway=network.topology.gateway,
        forwarders=forwarders(settings, network),
        nics=[nic_rules(layout, nic) for nic in nics],
        groups=policy.groups,
        exposures=policy.exposures,
    )


def uplink_addresses(settings: Settings, network: Network) -> tuple[str, ...]:
    """Return the addresses of the network's end of the uplink, if it has one."""
    if network.uplink_slot is None or not has_uplink(network):
        return ()
    return (addresses.uplink_addresses(settings.uplink_pool, network.uplink_slot)[1],)


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
    )
