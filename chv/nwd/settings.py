"""Kernel settings of a tenant's namespace. Pure.

IPv6 is off in tenant networks in this version, and dropped by the rules besides. Frames between
ports never reach iptables. The bridge answers ARP for guests, since its ports are isolated and
guests reach each other through it; without a delay, and without telling them to go direct.
"""

from __future__ import annotations

from chv.nwd.plan import BRIDGE

SYSCTLS = {
    "net.ipv6.conf.all.disable_ipv6": "1",
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
    "net.bridge.bridge-nf-call-iptables": "0",
    "net.bridge.bridge-nf-call-ip6tables": "0",
    "net.bridge.bridge-nf-call-arptables": "0",
    f"net.ipv4.conf.{BRIDGE}.proxy_arp_pvlan": "1",
    f"net.ipv4.conf.{BRIDGE}.send_redirects": "0",
    f"net.ipv4.conf.{BRIDGE}.arp_ignore": "1",
    f"net.ipv4.neigh.{BRIDGE}.proxy_delay": "0",
}
IP_FORWARD = "net.ipv4.ip_forward"
