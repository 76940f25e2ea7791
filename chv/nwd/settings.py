"""Kernel settings of a tenant's namespace and of the host's end of its uplink. Pure.

Frames between ports never reach iptables. On an isolated bridge the gateway answers ARP and
neighbour solicitations for guests, since its ports are isolated and guests reach each other
through it; without a delay, and without telling them to go direct. IPv6 is on where the network
has a subnet of it: for the loopback, the bridge and the uplink, never for a port. Nobody's router
advertisements are taken, and no address makes itself: each is given, and usable at once.
"""

from __future__ import annotations

from chv.nwd.plan import BRIDGE, LOOPBACK, UPLINK

IP_FORWARD = "net.ipv4.ip_forward"
IP6_FORWARD = "net.ipv6.conf.all.forwarding"
_ALWAYS = {
    "net.ipv6.conf.default.disable_ipv6": "1",
    "net.ipv4.ip_forward": "1",
    "net.ipv4.conf.all.send_redirects": "0",
    "net.ipv4.conf.default.send_redirects": "0",
    "net.ipv4.conf.all.accept_redirects": "0",
    "net.ipv4.conf.default.accept_redirects": "0",
    "net.ipv4.conf.all.accept_source_route": "0",
    "net.ipv4.conf.all.rp_filter": "0",
    "net.ipv4.conf.default.rp_filter": "0",
    "net.ipv4.conf.all.proxy_arp": "0",
    # A stream whose tracking was ended must not be taken up again in its middle: a packet of the
    # side that may open connections would then let the other side's in as answers.
    "net.netfilter.nf_conntrack_tcp_loose": "0",
    "net.bridge.bridge-nf-call-iptables": "0",
    "net.bridge.bridge-nf-call-ip6tables": "0",
    "net.bridge.bridge-nf-call-arptables": "0",
    f"net.ipv4.conf.{BRIDGE}.send_redirects": "0",
    f"net.ipv4.conf.{BRIDGE}.arp_ignore": "1",
    f"net.ipv4.neigh.{BRIDGE}.proxy_delay": "0",
}


def inner(*, has_ipv6: bool, is_isolated: bool) -> dict[str, str]:
    """Return the settings of a network's namespace, in the order to write them."""
    proxy = {f"net.ipv4.conf.{BRIDGE}.proxy_arp_pvlan": str(int(is_isolated))}
    if not has_ipv6:
        names = ("all", LOOPBACK, BRIDGE, UPLINK)
        return {f"net.ipv6.conf.{name}.disable_ipv6": "1" for name in names} | _ALWAYS | proxy
    links = {f"net.ipv6.conf.{LOOPBACK}.disable_ipv6": "0"}
    for name in (BRIDGE, UPLINK):
        links |= _ipv6_of(name)
    return (
        _ALWAYS
        | proxy
        | links
        | {
            IP6_FORWARD: "1",
            f"net.ipv6.conf.{BRIDGE}.proxy_ndp": str(int(is_isolated)),
            f"net.ipv6.neigh.{BRIDGE}.proxy_delay": "0",
        }
    )


def host_uplink(name: str, *, has_ipv6: bool) -> dict[str, str]:
    """Return the settings of the host's end of an uplink; they go with it."""
    return _ipv6_of(name) if has_ipv6 else {f"net.ipv6.conf.{name}.disable_ipv6": "1"}


def _ipv6_of(name: str) -> dict[str, str]:
    return {
        f"net.ipv6.conf.{name}.addr_gen_mode": "1",
        f"net.ipv6.conf.{name}.accept_ra": "0",
        f"net.ipv6.conf.{name}.accept_redirects": "0",
        # Else the kernel waits up to a second, once the link is up, before it hears who asks for
        # its addresses.
        f"net.ipv6.conf.{name}.router_solicitation_delay": "0",
        f"net.ipv6.conf.{name}.router_solicitations": "0",
        f"net.ipv6.conf.{name}.disable_ipv6": "0",
    }
