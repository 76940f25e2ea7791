"""What a network's dnsmasq reads: its configuration and two files made from records. Pure.

dnsmasq has no authority over addresses: every NIC has a fixed entry, unknown clients get no
answer, and no lease is written to disk. A restart with nothing but these files gives each client
the address that it had. Changes of NICs reach it by SIGHUP, which re-reads the two files and
not the configuration; nothing watches files, for inotify instances are few. Every value is an
address, a MAC or a name that has been checked where it enters, and is checked here once more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from chv.common.names import check_hostname, check_mac
from chv.nwd.nft.text import digest

PROGRAM = "dnsmasq"
HOSTS, NAMES = "hosts", "names"
LOG = "dnsmasq.log"
LINES_KEPT_MAX = 8192
# A reverse zone ends at an octet: /12 takes 16 of them, the most there can be is 128.
_OCTET_BITS = 8
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


@dataclass(frozen=True, slots=True)
class DnsNic:
    """What dnsmasq needs to know of a NIC."""

    mac: str
    address: str
    hostname: str


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
        "leasefile-ro",
        "no-ping",
        f"dhcp-option-force=option:mtu,{int(network.mtu)}",
        f"dhcp-option=option:domain-search,{domain}",
        f"dhcp-option=option:dns-server,{IPv4Address(network.gateway)}",
        # An empty option is not sent: without an uplink there is nowhere to route to.
        f"dhcp-option=option:router,{IPv4Address(network.gateway)}"
        if network.has_uplink
        else "dhcp-option=option:router",
        *(f"server={IPv4Address(server)}" for server in network.forwarders if network.has_uplink),
    ]
    return "\n".join(lines) + "\n"


def hosts_file(nics: Sequence[DnsNic], lease_s: int) -> str:
    """Return the fixed addresses. `id:*`: whatever client id a guest sends does not matter."""
    return "".join(_host_line(nic, lease_s) for nic in _sorted(nics))


def names_file(nics: Sequence[DnsNic], domain: str) -> str:
    """Return addresses and names, in the format of /etc/hosts. The reverse follows from it."""
    suffix = check_hostname(domain)
    return "".join(_name_line(nic, suffix) for nic in _sorted(nics))


# A change of one NIC renders all: what did not change comes from memory.
@lru_cache(LINES_KEPT_MAX)
def _host_line(nic: DnsNic, lease_s: int) -> str:
    address, name = IPv4Address(nic.address), _label(nic.hostname)
    return f"{check_mac(nic.mac)},id:*,{address},{name},{lease_s}\n"


@lru_cache(LINES_KEPT_MAX)
def _name_line(nic: DnsNic, suffix: str) -> str:
    name = _label(nic.hostname)
    return f"{IPv4Address(nic.address)} {name}.{suffix} {name}\n"


@lru_cache(LINES_KEPT_MAX)
def _order(nic: DnsNic) -> int:
    return int(IPv4Address(nic.address))


def files(nics: Sequence[DnsNic], network: DnsNetwork) -> dict[str, str]:
    """Return the two files by name."""
    return {
        HOSTS: hosts_file(nics, network.lease_s),
        NAMES: names_file(nics, network.domain),
    }


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


def _zone(network: IPv4Network, octets: int) -> str:
    labels = str(network.network_address).split(".")[:octets]
    return ".".join([*reversed(labels), "in-addr", "arpa"])


def _label(hostname: str) -> str:
    if "." in hostname:
        raise ValueError(f"{hostname!r} is more than one label")
    return check_hostname(hostname)


def _sorted(nics: Sequence[DnsNic]) -> list[DnsNic]:
    return sorted(nics, key=_order)
