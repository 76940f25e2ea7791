"""The bridge table of a tenant: nobody sends what is not his own. Pure.

Stateless, by port: every frame from a port carries that port's MAC and one of its addresses, ARP
and neighbour discovery tell the truth about them, nobody plays DHCP server or router, everything
unknown is dropped, IPv6 too where the network has none. RARP stays: VMMs announce a resumed guest
with it. A link-local address is the guest's own choice, the gateway's excepted, but it makes up few
of them: each is an entry in the kernel's table of neighbours, which all namespaces of the machine
share, the host's included. The frame is the same for any NICs; dropped packets are counted by port
and reason.
"""

from __future__ import annotations

from ipaddress import IPv6Address

from chv.nwd.nft import text
from chv.nwd.nft.model import NicRules
from chv.nwd.nft.text import SetKey

TABLE = ("bridge", "chv")
PORT_MAC = SetKey(*TABLE, "port_mac")
PORT_ADDRESS = SetKey(*TABLE, "port_address")
PORT_ADDRESS6 = SetKey(*TABLE, "port_address6")
PORT_TARGET = SetKey(*TABLE, "port_target")  # what neighbour discovery may be about
GATEWAY_LINK_LOCAL = "fe80::1"
REASONS = (
    "spoofed_mac",
    "spoofed_address",
    "spoofed_arp",
    "spoofed_nd",
    "rogue_dhcp",
    "rogue_ra",
    "unknown_protocol",
)
# What nothing was counted for in so long is forgotten.
_COUNTED_FOR = "7d"
# Link-local addresses of a port: so many at once, then one a minute, each known for half an hour.
LOCALS_MAX = 16
_NEW_LOCALS = f"limit rate over 1/minute burst {LOCALS_MAX} packets"
_SOLICITED = "{ nd-neighbor-solicit, mld-listener-report, mld2-listener-report }"


def table(*, v6: bool) -> str:
    """Return the table without its comment, which takes the place of COMMENT."""
    # No verdict map: see `gateway`.
    ip6 = "  ether type ip6 goto ip6_check\n" if v6 else ""
    counted = "".join(_counted(reason) for reason in REASONS)
    return f"""table bridge chv {{
 COMMENT
 set port_mac {{ type ifname . ether_addr; }}
 set port_address {{ type ifname . ether_addr . ipv4_addr; }}
 set port_address6 {{ type ifname . ether_addr . ipv6_addr; }}
 set port_target {{ typeof iifname . @th,64,128; }}
{counted}{_ARP_AND_IP}{_LOCALS + _IP6 if v6 else ""} chain prerouting {{
  type filter hook prerouting priority -200; policy drop;
  iifname . ether saddr != @port_mac goto drop_spoofed_mac
  ether type ip goto ip_check
{ip6}  ether type arp goto arp_check
  ether type 0x8035 accept
  goto drop_unknown_protocol
 }}
}}
"""


def _counted(reason: str) -> str:
    """A set that is full must not let a packet through: counting and dropping are two rules."""
    return f""" set {reason} {{
  type ifname; flags dynamic,timeout; timeout {_COUNTED_FOR}; size {text.DYNAMIC_MAX};
 }}
 chain drop_{reason} {{
  update @{reason} {{ iifname counter }}
  drop
 }}
"""


_ARP_AND_IP = """ chain arp_check {
  arp htype 1 arp ptype ip iifname . arp saddr ether . arp saddr ip @port_address accept
  arp saddr ip 0.0.0.0 iifname . arp saddr ether @port_mac accept
  goto drop_spoofed_arp
 }
 chain ip_check {
  udp sport 67 goto drop_rogue_dhcp
  ip saddr 0.0.0.0 udp sport 68 udp dport 67 accept
  iifname . ether saddr . ip saddr @port_address accept
  goto drop_spoofed_address
 }
"""

# A set that is full keeps no address, and each packet then counts as a new one.
_LOCALS = f""" set port_local {{
  type ifname . ipv6_addr; flags dynamic,timeout; timeout 30m; size {text.DYNAMIC_MAX};
 }}
 set new_locals {{
  type ifname; flags dynamic,timeout; timeout 1h; size {text.DYNAMIC_MAX};
 }}
 chain local_check {{
  iifname . ip6 saddr @port_local goto target_check
  update @new_locals {{ iifname {_NEW_LOCALS} }} goto drop_spoofed_address
  add @port_local {{ iifname . ip6 saddr }}
  goto target_check
 }}
"""

# A target address lies 8 bytes behind the start of the ICMPv6 header. The first check of
# `target_check` is its own rule, for a negative match on a type passes over what is not ICMPv6.
# Whether an own address is a duplicate is answered by silence: nobody else can have it, and the
# gateway, which answers for it to the others, would answer the guest itself as well.
# The first fragment of a packet holds its transport header (RFC 7112), or nothing can be checked.
_IP6 = f""" chain ip6_check {{
  icmpv6 type {{ nd-router-advert, nd-redirect }} goto drop_rogue_ra
  udp sport 547 goto drop_rogue_dhcp
  exthdr frag exists jump fragment_check
  ip6 saddr :: icmpv6 type {_SOLICITED} goto unspecified_check
  ip6 saddr {GATEWAY_LINK_LOCAL} goto drop_spoofed_address
  ip6 saddr fe80::/10 goto local_check
  iifname . ether saddr . ip6 saddr @port_address6 goto target_check
  goto drop_spoofed_address
 }}
 chain fragment_check {{
  frag frag-off != 0 return
  meta l4proto {{ tcp, udp, sctp, icmpv6 }} return
  goto drop_unknown_protocol
 }}
 chain unspecified_check {{
  icmpv6 type != nd-neighbor-solicit accept
  iifname . @th,64,128 @port_target drop
  goto about_own
 }}
 chain target_check {{
  meta l4proto != icmpv6 accept
  icmpv6 type != nd-neighbor-advert accept
  goto about_own
 }}
 chain about_own {{
  @th,64,128 {int(IPv6Address(GATEWAY_LINK_LOCAL)):#034x} goto drop_spoofed_nd
  @th,64,10 0x3fa accept
  iifname . @th,64,128 @port_target accept
  goto drop_spoofed_nd
 }}
"""


def elements(nic: NicRules) -> dict[SetKey, frozenset[str]]:
    """Return what belongs to one NIC."""
    tap, mac = text.link(nic.tap), text.mac(nic.mac)
    found = {PORT_MAC: frozenset({text.tuple_of(tap, mac)})}
    four = [text.address(each) for each in nic.addresses if not text.is_v6(each)]
    six = [text.address6(each) for each in nic.addresses if text.is_v6(each)]
    if four:
        found[PORT_ADDRESS] = frozenset(text.tuple_of(tap, mac, each) for each in four)
    if six:
        found[PORT_ADDRESS6] = frozenset(text.tuple_of(tap, mac, each) for each in six)
        found[PORT_TARGET] = frozenset(
            text.tuple_of(tap, text.address6_number(each)) for each in six
        )
    return found
