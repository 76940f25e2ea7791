"""Where the kernel would send a packet that came in by a link. Call through `netns.inside`."""

from __future__ import annotations

import errno
import socket
import struct
from ipaddress import ip_address

from chv.nwd.kernel import links, netlink
from chv.nwd.kernel.errors import translated

_GET_ROUTE = 26
_ROUTE = struct.Struct("=BBBBBBBBI")  # rtmsg
_DESTINATION, _SOURCE, _IN, _OUT, _GATEWAY, _VIA = 1, 2, 3, 4, 5, 18
_LOCAL, _BLACKHOLE = 2, 6
_NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EACCES, errno.EINVAL)


def lookup(source: str, destination: str, ingress: str) -> str:
    """Return the route in words; empty where there is none."""
    with translated(f"looking up the route to {destination}"):
        found = links.read([ingress])
        if ingress not in found:
            return ""
        with netlink.open_socket(netlink.ROUTE) as ask:
            try:
                body = netlink.ask(ask, _request(source, destination, found[ingress].index))[0]
            except OSError as error:
                if error.errno in _NO_ROUTE:
                    return ""
                raise
        names = {link.index: link.name for link in links.read_all().values()}
    return _words(body, names)


def _request(source: str, destination: str, ingress: int) -> bytes:
    target, origin = ip_address(destination), ip_address(source)
    family = socket.AF_INET if target.version == 4 else socket.AF_INET6
    bits = len(target.packed) * 8
    body = _ROUTE.pack(family, bits, bits, 0, 0, 0, 0, 0, 0)
    body += netlink.attribute(_DESTINATION, target.packed)
    body += netlink.attribute(_SOURCE, origin.packed)
    body += netlink.attribute(_IN, struct.pack("=I", ingress))
    return netlink.message(_GET_ROUTE, 0, body)


def _words(body: bytes, names: dict[int, str]) -> str:
    kind = body[7]
    if kind == _LOCAL:
        return "local: an address of the network's gateway"
    if kind >= _BLACKHOLE:
        return ""
    found = netlink.table(body, _ROUTE.size)
    link = names.get(int.from_bytes(found.get(_OUT, b""), "little"), "?")
    gateway = found.get(_GATEWAY, b"") or found.get(_VIA, b"")[2:]
    via = f"via {ip_address(gateway)} " if gateway else ""
    return f"{via}dev {link}"
