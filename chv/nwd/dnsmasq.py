"""What a network's dnsmasq reads: its configuration and two files made from records. Pure.

dnsmasq has no authority over addresses: every NIC has a fixed entry, unknown clients get no
answer, and no lease is written to disk. A restart with nothing but these files gives each client
the address that it had. Changes of NICs reach it by SIGHUP, which re-reads the two files and
not the configuration; nothing watches files, for inotify instances are few. Every value is an
address, a MAC or a name that has been checked where it enters, and is checked here once more.

IPv6 addresses are given by DHCPv6 alone: router advertisements say so (managed, no prefix to make
an address from) and tell gateway, DNS server, search domains and MTU. Leases are then written
down, not to be read by dnsmasq again, but to tell who has to give an address back, see
`dhcp6_release`.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Network
from pathlib import Path

from chv.common.names import check_address, check_hostname, check_mac
from chv.nwd.nft.text import digest

PROGRAM = "dnsmasq"
HOSTS, NAMES = "hosts", "names"
LEASES = "leases"  # of the running process alone: a new one starts with none
ENTERPRISE = 32473  # for examples (RFC 5612): only its own clients see a server's identity
LOG = "dnsmasq.log"
# A reverse zone ends at an octet: /12 takes 16 of them, the most there can be is 128.
_OCTET_BITS = 8
_NIBBLE_BITS = 4
ADVERTISED_EVERY_S, ROUTER_LIFETIME_S = 120, 1800
_PATH = re.compile(r"^/[A-Za-z0-9/._:-]+\Z")


@dataclass(frozen=True, slots=True)
class DnsNetwork:
    """What dnsmasq needs to know of a network. `directory` is where its files are."""

    directory: Path
    bridge: str
    subnet: str
    gateway: str
    mtu: int
    domain: str
    has_uplink: bool
    forwarders: Sequence[str]
    lease_s: int
    subnet6: str = ""
    gateway6: str = ""
    search: Sequence[str] = ()
    names: Sequence[DnsName] = ()
    by_gateway: Sequence[str] = ()  # what is reached by the gateway though there is no uplink


@dataclass(frozen=True, slots=True)
class DnsName:
    """A static record: labels below the domain, and what they stand for."""

    name: str
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DnsNic:
    """What dnsmasq needs to know of a NIC."""

    mac: str
    address: str
    hostname: str
    address6: str = ""


def configuration(network: DnsNetwork) -> str:
    """Return the configuration file."""
    subnet, domain = IPv4Network(network.subnet), check_hostname(network.domain)
    directory = str(network.directory)
    if not _PATH.match(directory):
        raise ValueError(f"{directory!r} cannot stand in a dnsmasq configuration")
    lines = [
        "port=53",
        f"interface={network.bridge}",
        "except-interface=lo",
        "bind-interfaces",
        "no-resolv",
        "no-hosts",
        "no-poll",
        "bogus-priv",
        "domain-needed",
        "user=root",
        "log-facility=-",
        "quiet-dhcp",
        f"domain={domain}",
        f"local=/{domain}/",
        *(f"local=/{zone}/" for zone in reverse_zones(subnet)),
        f"addn-hosts={directory}/{NAMES}",
        f"dhcp-hostsfile={directory}/{HOSTS}",
        f"dhcp-range={subnet.network_address},static,{subnet.netmask},{network.lease_s}",
        "dhcp-authoritative",
        f"dhcp-leasefile={directory}/{LEASES}" if network.subnet6 else "leasefile-ro",
        "no-ping",
        f"dhcp-option-force=option:mtu,{int(network.mtu)}",
        f"dhcp-option=option:domain-search,{_search(network)}",
        f"dhcp-option=option:dns-server,{IPv4Address(network.gateway)}",
        # An empty option is not sent: without an uplink there is nowhere to route to.
        f"dhcp-option=option:router,{IPv4Address(network.gateway)}"
        if network.has_uplink
        else "dhcp-option=option:router",
        *(
            f"dhcp-option=option:classless-static-route,{IPv4Address(each)}/32,"
            f"{IPv4Address(network.gateway)}"
            for each in network.by_gateway
            if not network.has_uplink
        ),
        *(f"server={check_address(server)}" for server in network.forwarders if network.has_uplink),
        *(_ipv6_lines(network) if network.subnet6 else ()),
    ]
    return "\n".join(lines) + "\n"


def server_identifier(gateway6: str) -> bytes:
    """Return what tells the DHCPv6 servers of networks apart; a restart does not change it."""
    return check_address(gateway6).packed


def _search(network: DnsNetwork) -> str:
    domains = dict.fromkeys([network.domain, *network.search])
    return ",".join(check_hostname(domain) for domain in domains)


def _ipv6_lines(network: DnsNetwork) -> list[str]:
    subnet, gateway = IPv6Network(network.subnet6), check_address(network.gateway6)
    lifetime = ROUTER_LIFETIME_S if network.has_uplink else 0  # 0: nowhere to route to
    return [
        *(f"local=/{zone}/" for zone in reverse_zones6(subnet)),
        f"dhcp-range={subnet.network_address},static,{subnet.prefixlen},{network.lease_s}",
        f"dhcp-duid={ENTERPRISE},{server_identifier(network.gateway6).hex(':')}",
        "enable-ra",
        f"ra-param={network.bridge},mtu:{int(network.mtu)},{ADVERTISED_EVERY_S},{lifetime}",
        f"dhcp-option=option6:dns-server,[{gateway}]",
        f"dhcp-option=option6:domain-search,{_search(network)}",
    ]


class Texts:
    """The two files of a network, of which a change of a NIC renders that one's lines alone."""

    def __init__(self, network: DnsNetwork) -> None:
        self._network = network
        self._suffix = check_hostname(network.domain)
        self._order: list[int] = []
        self._hosts: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._static = _static_lines(network.names, self._suffix)

    def put(self, nic: DnsNic) -> None:
        """Add a NIC; its address is nobody else's."""
        number = int(IPv4Address(nic.address))
        host, name = _host_line(nic, self._network.lease_s), _name_lines(nic, self._suffix)
        if number not in self._hosts:
            insort(self._order, number)
        self._hosts[number], self._names[number] = host, name

    def drop(self, address: str) -> None:
        """Remove the NIC that has this address."""
        number = int(IPv4Address(address))
        del self._hosts[number], self._names[number]
        del self._order[bisect_left(self._order, number)]

    def files(self) -> dict[str, str]:
        """Return them by name: fixed addresses, and names in the format of /etc/hosts."""
        return {
            HOSTS: "".join(map(self._hosts.__getitem__, self._order)),
            NAMES: "".join(map(self._names.__getitem__, self._order)) + self._static,
        }


def files(nics: Iterable[DnsNic], network: DnsNetwork) -> dict[str, str]:
    """Return the two files by name."""
    texts = Texts(network)
    for nic in nics:
        texts.put(nic)
    return texts.files()


def _host_line(nic: DnsNic, lease_s: int) -> str:
    """Return the fixed address. `id:*`: whatever client id a guest sends does not matter."""
    address, name = str(IPv4Address(nic.address)), _label(nic.hostname)
    if nic.address6:
        address += f",[{check_address(nic.address6)}]"
    return f"{check_mac(nic.mac)},id:*,{address},{name},{lease_s}\n"


def _name_lines(nic: DnsNic, suffix: str) -> str:
    """Return addresses and names; the reverse follows from it."""
    name = _label(nic.hostname)
    addresses = [str(IPv4Address(nic.address))]
    if nic.address6:
        addresses.append(str(check_address(nic.address6)))
    return "".join(f"{address} {name}.{suffix} {name}\n" for address in addresses)


def _static_lines(names: Iterable[DnsName], suffix: str) -> str:
    lines = [_record_line(text, each.name, suffix) for each in names for text in each.addresses]
    return "".join(sorted(lines))


def _record_line(address: str, name: str, suffix: str) -> str:
    full = check_hostname(f"{name}.{suffix}")
    alias = "" if "." in name else f" {name}"
    return f"{check_address(address)} {full}{alias}\n"


def files_digest(texts: dict[str, str]) -> str:
    """Tell two states of the files apart."""
    return digest("\0".join(f"{name}\0{texts[name]}" for name in sorted(texts)))


def reverse_zones(subnet: IPv4Network) -> list[str]:
    """Return the in-addr.arpa zones that cover a subnet, or its surroundings beyond /24."""
    octets = min(3, -(-subnet.prefixlen // _OCTET_BITS))
    length = octets * _OCTET_BITS
    parts = list(subnet.subnets(new_prefix=length)) if length > subnet.prefixlen else []
    zones = parts or [subnet.supernet(new_prefix=length)]
    return [_zone(zone, octets) for zone in zones]


def reverse_zones6(subnet: IPv6Network) -> list[str]:
    """Return the ip6.arpa zones that cover a subnet; a zone ends at a nibble."""
    nibbles = -(-subnet.prefixlen // _NIBBLE_BITS)
    parts = subnet.subnets(new_prefix=nibbles * _NIBBLE_BITS)
    return [_zone6(part, nibbles) for part in parts]


def _zone6(network: IPv6Network, nibbles: int) -> str:
    digits = network.network_address.packed.hex()[:nibbles]
    return ".".join([*reversed(digits), "ip6", "arpa"])


def _zone(network: IPv4Network, octets: int) -> str:
    labels = str(network.network_address).split(".")[:octets]
    return ".".join([*reversed(labels), "in-addr", "arpa"])


def _label(hostname: str) -> str:
    if "." in hostname:
        raise ValueError(f"{hostname!r} is more than one label")
    return check_hostname(hostname)
