"""The rules inside a tenant's namespace. Pure.

Bridge family, stateless: every frame from a port carries that port's MAC and address, ARP tells
the truth about them, nobody plays DHCP server, IPv6 and everything unknown is dropped. RARP stays:
VMMs announce a resumed guest with it. Inet family, stateful: forward drops by default and lets
guests reach each other (east-west inside one network is allowed: there are no security groups yet)
and the uplink; nothing may open a connection to a guest but the gateway to its declared ports.
Guests reach DHCP, DNS and ping on the gateway; 169.254/16 (metadata, uplinks) is dropped.

What belongs to one NIC is only in set elements: the frame is the same for any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from chv.nwd.nft import text
from chv.nwd.nft.model import NetworkRules, NicRules
from chv.nwd.nft.text import Ruleset, SetKey

TABLES = (("bridge", "chv"), ("inet", "chv"))
PORT_MAC = SetKey("bridge", "chv", "port_mac")
PORT_ADDRESS = SetKey("bridge", "chv", "port_address")
GUEST_PORTS = SetKey("inet", "chv", "guest_ports")
NICS_KEPT_MAX = 8192


def render(network: NetworkRules) -> Ruleset:
    """Return the ruleset of a network."""
    body = _BRIDGE_TABLE + _inet_table(network)
    comment = text.comment(f"{network.identity}:{text.digest(body)}")
    return Ruleset(TABLES, body.replace("COMMENT", comment), _elements(network.nics))


def _elements(nics: Sequence[NicRules]) -> dict[SetKey, frozenset[str]]:
    each = [_of_nic(nic) for nic in nics]
    return {
        PORT_MAC: frozenset(elements.mac for elements in each),
        PORT_ADDRESS: frozenset(elements.address for elements in each),
        GUEST_PORTS: frozenset(port for elements in each for port in elements.ports),
    }


class _NicElements(NamedTuple):
    mac: str
    address: str
    ports: tuple[str, ...]


@lru_cache(NICS_KEPT_MAX)
def _of_nic(nic: NicRules) -> _NicElements:
    """A change of one NIC renders all: what did not change comes from memory."""
    tap, mac, address = text.link(nic.tap), text.mac(nic.mac), text.address(nic.addresses[0])
    ports = tuple(text.tuple_of(address, text.port(port)) for port in nic.guest_ports)
    return _NicElements(text.tuple_of(tap, mac), text.tuple_of(tap, mac, address), ports)


_BRIDGE_TABLE = """table bridge chv {
 COMMENT
 set port_mac { type ifname . ether_addr; }
 set port_address { type ifname . ether_addr . ipv4_addr; }
 counter spoofed_mac { }
 counter spoofed_arp { }
 counter spoofed_address { }
 counter rogue_dhcp { }
 counter unknown_protocol { }
 chain arp_check {
  arp htype 1 arp ptype ip iifname . arp saddr ether . arp saddr ip @port_address accept
  arp saddr ip 0.0.0.0 iifname . arp saddr ether @port_mac accept
  counter name spoofed_arp drop
 }
 chain ip_check {
  udp sport 67 counter name rogue_dhcp drop
  ip saddr 0.0.0.0 udp sport 68 udp dport 67 accept
  iifname . ether saddr . ip saddr @port_address accept
  counter name spoofed_address drop
 }
 chain prerouting {
  type filter hook prerouting priority -200; policy drop;
  iifname . ether saddr != @port_mac counter name spoofed_mac drop
  ether type vmap { arp : jump arp_check, ip : jump ip_check, 0x8035 : accept }
  counter name unknown_protocol drop
 }
}
"""


def _inet_table(network: NetworkRules) -> str:
    bridge, gateway = text.link(network.bridge), text.address(network.gateway)
    return f"""table inet chv {{
 COMMENT
 set guest_ports {{ type ipv4_addr . inet_service; }}
 chain input {{
  type filter hook input priority filter; policy drop;
  iifname "lo" accept
  meta nfproto ipv6 drop
  iifname {bridge} udp sport 68 udp dport 67 accept
  ct state vmap {{ established : accept, related : accept, invalid : drop }}
  iifname {bridge} ip daddr {gateway} udp dport 53 accept
  iifname {bridge} ip daddr {gateway} tcp dport 53 accept
  icmp type echo-request limit rate 100/second burst 50 packets accept
  counter drop
 }}
 chain forward {{
  type filter hook forward priority filter; policy drop;
  meta nfproto ipv6 drop
  ip daddr 169.254.0.0/16 counter drop
  tcp flags syn tcp option maxseg size set rt mtu
  ct state vmap {{ established : accept, related : accept, invalid : drop }}
  iifname {bridge} oifname {bridge} accept
{_forward_out(network, bridge)}  counter drop
 }}
 chain output {{
  type filter hook output priority filter; policy drop;
  oifname "lo" accept
  meta nfproto ipv6 drop
  ct state vmap {{ established : accept, related : accept }}
  oifname {bridge} udp sport 67 udp dport 68 accept
  oifname {bridge} ip saddr {gateway} ip daddr . tcp dport @guest_ports accept
{_to_forwarders(network)}  counter drop
 }}
 chain checksums {{
  type filter hook postrouting priority -150; policy accept;
  udp sport 67 udp checksum set 0
 }}
{_masquerade(network)}}}
"""


def _forward_out(network: NetworkRules, bridge: str) -> str:
    if not network.uplink:
        return ""
    uplink, subnet = text.link(network.uplink), text.subnet(network.subnet)
    return f"  iifname {bridge} oifname {uplink} ip saddr {subnet} accept\n"


def _to_forwarders(network: NetworkRules) -> str:
    if not network.uplink or not network.forwarders:
        return ""
    uplink = text.link(network.uplink)
    servers = ", ".join(sorted({text.address(server) for server in network.forwarders}))
    return (
        f"  oifname {uplink} ip daddr {{ {servers} }} udp dport 53 accept\n"
        f"  oifname {uplink} ip daddr {{ {servers} }} tcp dport 53 accept\n"
    )


def _masquerade(network: NetworkRules) -> str:
    if not network.uplink:
        return ""
    uplink, subnet = text.link(network.uplink), text.subnet(network.subnet)
    return f""" chain source_nat {{
  type nat hook postrouting priority srcnat; policy accept;
  oifname {uplink} ip saddr {subnet} masquerade
 }}
"""
