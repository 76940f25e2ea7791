"""The one table that this instance has in the host's ruleset. Pure.

Traffic from our uplinks: to the host itself only ping and answers; to other tenants nothing; to
the world only with the uplink's own address as source, which is translated once more on leaving.
Towards a tenant only answers. Traffic that does not touch our uplinks passes through unseen, and
where the host's own rules drop something, an accept here would not help: that is reported, not
worked round.
"""

from __future__ import annotations

from collections.abc import Sequence

from chv.nwd.nft import text
from chv.nwd.nft.text import Ruleset, SetKey

FAMILY = "inet"
# Before the usual filter chains: a verdict of ours is then seen in our counters.
PRIORITY = "filter - 10"


def render(table: str, identity: str, uplinks: Sequence[tuple[str, str]]) -> Ruleset:
    """Return the table for `uplinks`: (name of the host's end, address of the network's end)."""
    body = _BODY.replace("TABLE", text.link(table).strip('"'))
    comment = text.comment(f"{identity}:{text.digest(body)}")
    links, sources = SetKey(FAMILY, table, "uplinks"), SetKey(FAMILY, table, "sources")
    return Ruleset(
        ((FAMILY, table),),
        body.replace("COMMENT", comment),
        {
            links: frozenset(text.link(name) for name, _ in uplinks),
            sources: frozenset(
                text.tuple_of(text.link(name), text.address(address)) for name, address in uplinks
            ),
        },
    )


_BODY = f"""table {FAMILY} TABLE {{
 COMMENT
 set uplinks {{ type ifname; }}
 set sources {{ type ifname . ipv4_addr; }}
 chain input {{
  type filter hook input priority {PRIORITY}; policy accept;
  iifname @uplinks jump from_tenant
 }}
 chain from_tenant {{
  meta nfproto ipv6 drop
  iifname . ip saddr != @sources drop
  ct state established,related accept
  icmp type echo-request limit rate 100/second burst 50 packets accept
  drop
 }}
 chain forward {{
  type filter hook forward priority {PRIORITY}; policy accept;
  iifname @uplinks jump out_of_tenant
  oifname @uplinks jump into_tenant
 }}
 chain out_of_tenant {{
  oifname @uplinks drop
  meta nfproto ipv6 drop
  iifname . ip saddr != @sources drop
  accept
 }}
 chain into_tenant {{
  ct state established,related accept
  drop
 }}
 chain source_nat {{
  type nat hook postrouting priority srcnat; policy accept;
  iifname . ip saddr @sources oifname != @uplinks masquerade
 }}
}}
"""
