"""The inet table of a tenant: what the gateway takes, passes on and says itself. Pure.

Stateful, closed by default. Forwarding is decided in two base chains, one after the other: the
first for who sends (its groups' egress), the second for who receives (their ingress); an accept
in the first leaves the decision to the second, so both must allow. An address leads by a map to
the number of its profile, and the number to the profile's chain: a change of a NIC is an element,
and the kernel, which checks every way through the table at each change, finds few.
The library reads every set of a table for each change, so there are few as well: members of
groups, counted connections and rates are in one each, under the number of their group or rule.
What stands passes by no verdict map: the elements of one are gone for a moment while the kernel
takes the rules that a reload replaces out of use, and a dropped packet costs a stream 200 ms.
The frame depends on the network alone; groups, exposures and NICs are chains, sets and elements
that others render (`groups`, `exposures`).
"""

from __future__ import annotations

from chv.common.wire.nwd import L2Mode
from chv.nwd.nft import text
from chv.nwd.nft.model import MASQUERADE, NetworkRules, NicRules
from chv.nwd.nft.spoof import GATEWAY_LINK_LOCAL
from chv.nwd.nft.text import SetKey

TABLE = ("inet", "chv")
METADATA, METADATA6 = "169.254.169.254", "fd00:ec2::254"
GUEST_PORTS = (SetKey(*TABLE, "guest_ports4"), SetKey(*TABLE, "guest_ports6"))
CHECKED = (SetKey(*TABLE, "checked4"), SetKey(*TABLE, "checked6"))  # by health checks
NOT_ALLOWED = (SetKey(*TABLE, "not_allowed4"), SetKey(*TABLE, "not_allowed6"))
TOO_MANY = (SetKey(*TABLE, "connections4"), SetKey(*TABLE, "connections6"))
PUBLIC = (SetKey(*TABLE, "public4"), SetKey(*TABLE, "public6"))
_FILLED = f"size {text.DYNAMIC_MAX}; flags dynamic"  # by packets
# Pings to the gateway, of all guests together.
_PINGS = "limit rate 100/second burst 50 packets accept"
_ND = "{ nd-neighbor-solicit, nd-neighbor-advert }"
_MLD = "{ mld-listener-query, mld-listener-report, mld2-listener-report }"


def table(network: NetworkRules) -> str:
    """Return the table without its comment, which takes the place of COMMENT."""
    bridge = text.link(network.bridge)
    six = bool(network.subnet6)
    return (
        "table inet chv {\n COMMENT\n"
        + "".join(_sets(family) for family in ("4", "6"))
        + _PROFILES
        + _counted("not_allowed")
        + _counted("connections")
        + _input(network, bridge, six)
        + _forward_out(network, bridge, six)
        + _forward_in(network, bridge, six)
        + _output(network, bridge, six)
        + _destination_nat(six)
        + _source_nat(network, bridge, six)
        + _CHECKSUMS
        + "}\n"
    )


def elements(nic: NicRules) -> dict[SetKey, frozenset[str]]:
    """Return what belongs to one NIC, its groups and limits excepted."""
    found: dict[SetKey, frozenset[str]] = {}
    for six, parse in ((False, text.address), (True, text.address6)):
        own = [parse(each) for each in nic.addresses if text.is_v6(each) is six]
        ports = [text.port(number) for number in nic.guest_ports]
        found[NOT_ALLOWED[six]] = frozenset(own)
        found[GUEST_PORTS[six]] = frozenset(
            text.tuple_of(address, port) for address in own for port in ports
        )
        if nic.public and text.is_v6(nic.public) is six:
            found[PUBLIC[six]] = frozenset(f"{each} : {parse(nic.public)}" for each in own)
    return {key: values for key, values in found.items() if values}


def _sets(family: str) -> str:
    kind = f"ipv{family}_addr"
    return f""" set guest_ports{family} {{ type {kind} . inet_service; }}
 set checked{family} {{ type {kind} . inet_service; }}
 set not_allowed{family} {{ type {kind}; counter; }}
 set connections{family} {{ type {kind}; counter; }}
 set limited{family} {{ type mark . {kind}; {_FILLED}; }}
 set counted{family} {{ type mark . {kind} . {kind}; {_FILLED}; }}
 set rated{family} {{ type mark . {kind}; {_FILLED},timeout; timeout 1m; }}
 set members{family} {{ type mark . {kind}; }}
 map limits{family} {{ type {kind} : mark; }}
 map profiles{family} {{ type {kind} : mark; }}
 map exposures{family} {{ type inet_proto . {kind} . inet_service : verdict; flags interval; }}
 set hairpins{family} {{ type {kind} . {kind}; }}
 map public{family} {{ type {kind} : {kind}; }}
"""


_PROFILES = """ map limits_out { type mark : verdict; }
 map limits_in { type mark : verdict; }
 map profiles_out { type mark : verdict; }
 map profiles_in { type mark : verdict; }
"""


def _counted(reason: str) -> str:
    """Drop, and count it for the NIC: what it sent by its source, else by its destination."""
    return "".join(
        f""" chain {reason}_{way} {{
  ip {field} @{reason}4 drop
  ip6 {field} @{reason}6 drop
  counter drop
 }}
"""
        for way, field in (("out", "saddr"), ("in", "daddr"))
    )


def _input(network: NetworkRules, bridge: str, six: bool) -> str:
    gateway = text.address(network.gateway)
    return f""" chain input {{
  type filter hook input priority filter; policy drop;
  iifname "lo" accept
{"" if six else "  meta nfproto ipv6 drop" + chr(10)}\
  iifname {bridge} udp sport 68 udp dport 67 accept
{_input_before6(network, bridge) if six else ""}\
  ct state established,related accept
  ct state invalid drop
  iifname {bridge} ip daddr {gateway} udp dport 53 accept
  iifname {bridge} ip daddr {gateway} tcp dport 53 accept
{_input_after6(network, bridge) if six else ""}{_metadata(network, bridge, six)}\
  icmp type echo-request {_PINGS}
  icmpv6 type echo-request {_PINGS}
  counter drop
 }}
"""


def _input_before6(network: NetworkRules, bridge: str) -> str:
    """Neighbour discovery has no connections, and an uplink needs it as well."""
    uplink = ""
    if network.uplink:
        link = text.link(network.uplink)
        uplink = f"  iifname {link} icmpv6 type {_ND} ip6 hoplimit 255 accept\n"
    return f"""  iifname {bridge} ip6 saddr fe80::/10 udp sport 546 udp dport 547 accept
  iifname {bridge} icmpv6 type {_ND} ip6 hoplimit 255 accept
  iifname {bridge} icmpv6 type nd-router-solicit ip6 hoplimit 255 accept
  iifname {bridge} icmpv6 type {_MLD} accept
{uplink}"""


def _input_after6(network: NetworkRules, bridge: str) -> str:
    gateway = f"{{ {text.address6(network.gateway6)}, {GATEWAY_LINK_LOCAL} }}"
    return f"""  iifname {bridge} ip6 daddr {gateway} udp dport 53 accept
  iifname {bridge} ip6 daddr {gateway} tcp dport 53 accept
"""


def _metadata(network: NetworkRules, bridge: str, six: bool) -> str:
    if not network.metadata:
        return ""
    four = f"  iifname {bridge} ip daddr {METADATA} tcp dport 80 accept\n"
    return four + (f"  iifname {bridge} ip6 daddr {METADATA6} tcp dport 80 accept\n" * six)


def _forward_out(network: NetworkRules, bridge: str, six: bool) -> str:
    """Who sends. What comes in by the uplink is decided by who receives it, alone."""
    from_uplink = ""
    if network.uplink:
        uplink = text.link(network.uplink)
        # Nobody outside is a member of a group, or a client of ours that sources allow.
        from_uplink = f"  iifname {uplink} ip saddr {text.subnet(network.subnet)} drop\n"
        if six:
            from_uplink += f"  iifname {uplink} ip6 saddr {text.subnet6(network.subnet6)} drop\n"
        from_uplink += f"  iifname {uplink} oifname {bridge} accept\n"
    return f""" chain forward_out {{
  type filter hook forward priority filter - 1; policy drop;
{"" if six else "  meta nfproto ipv6 drop" + chr(10)}\
  tcp flags syn tcp option maxseg size set rt mtu
  ct state established,related accept
  ct state invalid drop
{from_uplink}  iifname != {bridge} counter drop
  ip daddr 169.254.0.0/16 goto not_allowed_out
  ip6 daddr {METADATA6} goto not_allowed_out
{_by_mark("limits", "out", "saddr")}  ct status dnat accept
{_by_mark("profiles", "out", "saddr")}  meta mark 0 accept
  goto not_allowed_out
 }}
"""


def _by_mark(what: str, way: str, field: str) -> str:
    return f"""  meta mark set 0
  meta mark set ip {field} map @{what}4
  meta mark set ip6 {field} map @{what}6
  meta mark vmap @{what}_{way}
"""


def _forward_in(network: NetworkRules, bridge: str, six: bool) -> str:
    """Who receives; the outside takes everything that comes from the network's own addresses."""
    to_uplink = ""
    if network.uplink:
        way = f"  iifname {bridge} oifname {text.link(network.uplink)}"
        to_uplink = f"{way} ip saddr {text.subnet(network.subnet)} accept\n"
        if six:
            to_uplink += f"{way} ip6 saddr {text.subnet6(network.subnet6)} accept\n"
    return f""" chain forward_in {{
  type filter hook forward priority filter; policy drop;
  ct state established,related accept
{to_uplink}  oifname != {bridge} counter drop
{_by_mark("limits", "in", "daddr")}  ct status dnat accept
{_by_mark("profiles", "in", "daddr")}  goto not_allowed_in
 }}
"""


def _output(network: NetworkRules, bridge: str, six: bool) -> str:
    """Redirects would tell guests to go round the gateway, which they cannot."""
    gateway = text.address(network.gateway)
    return f""" chain output {{
  type filter hook output priority filter; policy drop;
  oifname "lo" accept
{"" if six else "  meta nfproto ipv6 drop" + chr(10)}\
  icmp type redirect drop
  icmpv6 type nd-redirect drop
  ct state established,related accept
  oifname {bridge} udp sport 67 udp dport 68 accept
  oifname {bridge} ip saddr {gateway} ip daddr . tcp dport @guest_ports4 accept
  oifname {bridge} ip saddr {gateway} ip daddr . tcp dport @checked4 accept
  icmp type {{ destination-unreachable, time-exceeded, parameter-problem }} accept
{_output6(network, bridge) if six else ""}{_to_forwarders(network)}  counter drop
 }}
"""


def _output6(network: NetworkRules, bridge: str) -> str:
    gateway = text.address6(network.gateway6)
    errors = "{ destination-unreachable, packet-too-big, time-exceeded, parameter-problem }"
    return f"""  icmpv6 type {_ND} accept
  icmpv6 type {_MLD} accept
  icmpv6 type {errors} accept
  oifname {bridge} icmpv6 type nd-router-advert accept
  oifname {bridge} udp sport 547 udp dport 546 accept
  oifname {bridge} ip6 hoplimit 0 udp sport 546 udp dport 547 accept
  oifname {bridge} ip6 saddr {gateway} ip6 daddr . tcp dport @guest_ports6 accept
  oifname {bridge} ip6 saddr {gateway} ip6 daddr . tcp dport @checked6 accept
"""


def _to_forwarders(network: NetworkRules) -> str:
    if not network.uplink:
        return ""
    uplink, lines = text.link(network.uplink), []
    for six, ip in ((False, "ip"), (True, "ip6")):
        parse = text.address6 if six else text.address
        servers = sorted({parse(each) for each in network.forwarders if text.is_v6(each) is six})
        lines += [
            f"  oifname {uplink} {ip} daddr {text.any_of(servers)} {protocol} dport 53 accept\n"
            for protocol in ("udp", "tcp")
            if servers
        ]
    return "".join(lines)


def _destination_nat(six: bool) -> str:
    v6 = "  meta l4proto . ip6 daddr . th dport vmap @exposures6\n"
    return f""" chain destination_nat {{
  type nat hook prerouting priority dstnat; policy accept;
  meta l4proto . ip daddr . th dport vmap @exposures4
{v6 * six} }}
"""


def _source_nat(network: NetworkRules, bridge: str, six: bool) -> str:
    """A guest that meets itself, or one on its own segment, must answer by the gateway."""
    lines = _hairpin("ip", text.address(network.gateway), "4", bridge, network.l2)
    lines += _leaving(network, "ip", text.subnet(network.subnet))
    if six:
        lines += _hairpin("ip6", text.address6(network.gateway6), "6", bridge, network.l2)
        lines += _leaving(network, "ip6", text.subnet6(network.subnet6))
    return f""" chain source_nat {{
  type nat hook postrouting priority srcnat; policy accept;
{lines} }}
"""


def _hairpin(ip: str, gateway: str, family: str, bridge: str, l2: L2Mode) -> str:
    back = f"iifname {bridge} oifname {bridge} ct status dnat"
    lines = f"  {back} {ip} saddr . {ip} daddr @hairpins{family} snat {ip} to {gateway}\n"
    if l2 is L2Mode.OPEN:
        lines += f"  {back} meta nfproto ipv{family} snat {ip} to {gateway}\n"
    return lines


def _leaving(network: NetworkRules, ip: str, subnet: str) -> str:
    if not network.uplink:
        return ""
    source, family = (network.source, "4") if ip == "ip" else (network.source6, "6")
    away = f"  oifname {text.link(network.uplink)}"
    lines = f"{away} snat {ip} to {ip} saddr map @public{family}\n"
    if source == MASQUERADE:
        lines += f"{away} {ip} saddr {subnet} masquerade\n"
    elif source:
        address = text.address(source) if ip == "ip" else text.address6(source)
        lines += f"{away} {ip} saddr {subnet} snat {ip} to {address}\n"
    return lines


_CHECKSUMS = """ chain checksums {
  type filter hook postrouting priority -150; policy accept;
  udp sport 67 udp checksum set 0
 }
"""
