"""The one table that this instance has in the host's ruleset. Pure.

Traffic from our uplinks: to the host itself only ping and answers; to the world only with a source
that belongs to the network: the uplink's own address, which is translated once more on leaving, a
public address or one of a routed subnet, which are not. Towards a network: answers, and what the
host routes to it (public addresses, routed subnets) or sends to it for an exposure; what of that
gets in is decided by the network's own rules. To a network its neighbours are the world.

Traffic that does not touch our uplinks passes through unseen, and where the host's own rules drop
something, an accept here would not help: that is reported, not worked round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from chv.common.names import check_address, check_cidr
from chv.nwd.nft import text
from chv.nwd.nft.text import Ruleset, SetKey

FAMILY = "inet"
# Before the usual filter chains: a verdict of ours is then seen in our counters.
PRIORITY = "filter - 10"
_PROTOCOLS = ("tcp", "udp")


@dataclass(frozen=True, slots=True)
class HostUplink:
    """The host's end of an uplink: what comes out of it, and what is routed into it."""

    name: str
    addresses: tuple[str, ...]  # of the network's end, one a family
    routed: tuple[str, ...] = ()  # subnets and public addresses, with prefix lengths


@dataclass(frozen=True, slots=True)
class HostExposure:
    """Ports of an address of the node that lead to the address of an uplink."""

    protocol: str
    address: str
    ports: tuple[int, int]
    uplink: str


def render(
    table: str,
    identity: str,
    uplinks: Sequence[HostUplink],
    exposures: Sequence[HostExposure] = (),
) -> Ruleset:
    """Return the table."""
    body = _BODY.replace("TABLE", text.link(table).strip('"'))
    comment = text.comment(f"{identity}:{text.digest(body)}")
    elements = {"uplinks": {text.link(uplink.name) for uplink in uplinks}}
    for version, suffix in ((4, ""), (6, "6")):
        elements[f"sources{suffix}"] = set(_sources(uplinks, version))
        elements[f"routed{suffix}"] = set(_routed(uplinks, version))
        elements[f"exposed{suffix}"] = set(_exposed(exposures, version))
    keyed = {SetKey(FAMILY, table, name): frozenset(each) for name, each in elements.items()}
    shared = frozenset({text.Part(keyed)})
    return Ruleset(((FAMILY, table),), body.replace("COMMENT", comment), shared)


def _sources(uplinks: Iterable[HostUplink], version: int) -> Iterable[str]:
    for uplink in uplinks:
        for each in map(check_address, uplink.addresses):
            if each.version == version:
                yield text.tuple_of(text.link(uplink.name), str(each))


def _routed(uplinks: Iterable[HostUplink], version: int) -> Iterable[str]:
    for uplink in uplinks:
        for each in map(check_cidr, uplink.routed):
            if each.version == version:
                is_one = each.num_addresses == 1
                target = str(each.network_address) if is_one else str(each)
                yield text.tuple_of(text.link(uplink.name), target)


def _exposed(exposures: Iterable[HostExposure], version: int) -> Iterable[str]:
    for exposure in exposures:
        address, uplink = check_address(exposure.address), check_address(exposure.uplink)
        if exposure.protocol not in _PROTOCOLS or uplink.version != address.version:
            raise ValueError(f"{exposure!r} cannot be translated")
        if address.version == version:
            first, last = (text.port(port) for port in exposure.ports)
            ports = first if first == last else f"{first}-{last}"
            yield text.tuple_of(exposure.protocol, str(address), f"{ports} : {uplink}")


_BODY = f"""table {FAMILY} TABLE {{
 COMMENT
 set uplinks {{ type ifname; }}
 set sources {{ type ifname . ipv4_addr; }}
 set sources6 {{ type ifname . ipv6_addr; }}
 set routed {{ type ifname . ipv4_addr; flags interval; }}
 set routed6 {{ type ifname . ipv6_addr; flags interval; }}
 map exposed {{ type inet_proto . ipv4_addr . inet_service : ipv4_addr; flags interval; }}
 map exposed6 {{ type inet_proto . ipv6_addr . inet_service : ipv6_addr; flags interval; }}
 chain input {{
  type filter hook input priority {PRIORITY}; policy accept;
  iifname @uplinks jump from_tenant
 }}
 chain from_tenant {{
  icmpv6 type {{ nd-neighbor-solicit, nd-neighbor-advert }} ip6 hoplimit 255 accept
  jump check_source
  ct state established,related accept
  icmp type echo-request limit rate 100/second burst 50 packets accept
  icmpv6 type echo-request limit rate 100/second burst 50 packets accept
  drop
 }}
 chain check_source {{
  iifname . ip saddr @sources return
  iifname . ip saddr @routed return
  iifname . ip6 saddr @sources6 return
  iifname . ip6 saddr @routed6 return
  drop
 }}
 chain forward {{
  type filter hook forward priority {PRIORITY}; policy accept;
  iifname @uplinks jump check_source
  oifname @uplinks jump into_tenant
  iifname @uplinks accept
 }}
 chain into_tenant {{
  ct state established,related accept
  oifname . ip daddr @routed accept
  oifname . ip6 daddr @routed6 accept
  ct status dnat oifname . ip daddr @sources accept
  ct status dnat oifname . ip6 daddr @sources6 accept
  drop
 }}
 chain expose {{
  type nat hook prerouting priority dstnat; policy accept;
  jump translate
 }}
 chain expose_local {{
  type nat hook output priority -100; policy accept;
  jump translate
 }}
 chain translate {{
  dnat ip to meta l4proto . ip daddr . th dport map @exposed
  dnat ip6 to meta l4proto . ip6 daddr . th dport map @exposed6
 }}
 chain source_nat {{
  type nat hook postrouting priority srcnat; policy accept;
  iifname . ip saddr @sources oifname != @uplinks masquerade
  iifname . ip6 saddr @sources6 oifname != @uplinks masquerade
 }}
}}
"""
