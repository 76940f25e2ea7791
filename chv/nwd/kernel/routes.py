"""Reading routes of a namespace's main table: all, or those of one link. Call in the namespace.

A host may have a million routes: those of one link are picked by the kernel, not here.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from ipaddress import IPv6Address

from chv.nwd.kernel import netlink
from chv.nwd.kernel.errors import translated

_RTM_GETROUTE = 26
_BODY = struct.Struct("=8BI")  # rtmsg: family, lengths, tos, table, protocol, scope, type, flags
_TARGET, _LINK, _GATEWAY, _TABLE = 1, 4, 5, 15
_MAIN, _UNICAST, _KERNEL, _ADVERTISED = 254, 1, 2, 9
_SOL_NETLINK, _STRICT = 270, 12
_ANY = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}  # noqa: S104  nothing is bound to it
DEFAULT_ROUTE, DEFAULT_ROUTE6 = "0.0.0.0/0", "::/0"


@dataclass(frozen=True, slots=True)
class Route:
    """A unicast route. `gateway` empty: directly by the link."""

    target: str
    gateway: str
    link: int
    is_automatic: bool = False  # made by the kernel along with an address
    is_advertised: bool = False  # learned from a router


def read(link: int = 0) -> list[Route]:
    """Return the routes of both families; with `link` those that leave by it."""
    found: list[Route] = []
    with translated("listing routes"), netlink.open_socket(netlink.ROUTE) as asker:
        asker.setsockopt(_SOL_NETLINK, _STRICT, 1)
        for family in (socket.AF_INET, socket.AF_INET6):
            found += _read_family(asker, family, link)
    return found


def _read_family(asker: socket.socket, family: int, link: int) -> list[Route]:
    body = _BODY.pack(family, 0, 0, 0, 0, 0, 0, 0, 0)
    body += netlink.attribute(_TABLE, struct.pack("=I", _MAIN))
    if link:
        body += netlink.attribute(_LINK, struct.pack("=i", link))
    try:
        bodies = netlink.ask(asker, netlink.message(_RTM_GETROUTE, netlink.DUMP, body))
    except FileNotFoundError:  # a namespace that has had no route yet
        return []
    routes = [parse(each) for each in bodies]
    return [route for route in routes if route is not None]


def parse(body: bytes) -> Route | None:
    """Return the unicast route of the main table that a message describes; None for others."""
    family, length, _, _, table, protocol, _, kind, _ = _BODY.unpack_from(body)
    if kind != _UNICAST or table != _MAIN or family not in _ANY:
        return None
    found = netlink.table(body, _BODY.size)
    target = _text(family, found[_TARGET]) if _TARGET in found else _ANY[family]
    gateway = _text(family, found[_GATEWAY]) if _GATEWAY in found else ""
    link = struct.unpack("=i", found[_LINK])[0] if _LINK in found else 0
    return Route(f"{target}/{length}", gateway, link, protocol == _KERNEL, protocol == _ADVERTISED)


def _text(family: int, packed: bytes) -> str:
    if family == socket.AF_INET6:
        return str(IPv6Address(packed))
    return socket.inet_ntoa(packed)
