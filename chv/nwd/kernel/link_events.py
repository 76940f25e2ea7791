"""The news that links, addresses, routes or forwarding of a namespace were changed, by whomever.

The socket belongs to the namespace of the thread that opened it, keeps that namespace alive, and
never blocks. Messages are hints: what was lost is said once, and whoever needs to be sure looks.
Routes of routing daemons are left out by a filter in the kernel: a host may have a million.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address

from chv.nwd.kernel import links, netlink, routes, socket_filter
from chv.nwd.kernel.errors import translated
from chv.nwd.kernel.links import Link
from chv.nwd.kernel.routes import Route

BUFFER_BYTES = 1 << 16
RECEIVE_BYTES = 1 << 20
DRAINED_MAX = 4096  # messages a call: what is left is told of again
HEARD_MAX = 8192
_NEW_LINK, _DELETE_LINK, _NEW_ADDRESS, _DELETE_ADDRESS = 16, 17, 20, 21
_NEW_ROUTE, _DELETE_ROUTE, _NEW_SETTINGS = 24, 25, 80
_LINK, _ADDRESS4, _ROUTE4, _ADDRESS6, _ROUTE6, _SETTINGS4, _SETTINGS6 = 1, 5, 7, 9, 11, 24, 25
_GROUPS = (_LINK, _ADDRESS4, _ROUTE4, _ADDRESS6, _ROUTE6, _SETTINGS4, _SETTINGS6)
_SOL_NETLINK, _ADD_MEMBERSHIP = 270, 1
_INFO = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, change
_INDEX_AT = slice(4, 8)  # of it: the number of the link
_IFNAME, _PROTINFO, _ISOLATED = 3, 12, 33
_IP = struct.Struct("=4Bi")  # ifaddrmsg: family, length, flags, scope, link
_IP_ADDRESS, _IP_LOCAL = 1, 2
_ROUTE_PROTOCOL_AT = 16 + 5
_STATIC = 4  # routes of the kernel and of hands have this or less; those of daemons more
_ALL_LINKS, _SETTING_LINK, _SETTING_FORWARDING = -1, 1, 2


@dataclass(frozen=True, slots=True)
class LinkNews:
    """A link is so now, or is gone."""

    link: Link
    gone: bool = False


@dataclass(frozen=True, slots=True)
class PortNews:
    """A port of a bridge reaches others, or does not."""

    name: str
    isolated: bool


@dataclass(frozen=True, slots=True)
class AddressNews:
    """A link has an address, or has it no more. `link` is its number."""

    link: int
    cidr: str
    gone: bool = False


@dataclass(frozen=True, slots=True)
class RouteNews:
    """There is a route, or there is not."""

    route: Route
    gone: bool = False


@dataclass(frozen=True, slots=True)
class ForwardingNews:
    """The namespace forwards packets of a family, or does not."""

    family: int
    on: bool


News = LinkNews | PortNews | AddressNews | RouteNews | ForwardingNews


def open_socket() -> socket.socket:
    """Return a listener for the namespace of this thread."""
    with translated("listening for changes of links"):
        listener = netlink.open_socket(netlink.ROUTE)
        try:
            listener.setsockopt(socket.SOL_SOCKET, netlink.RECEIVE_BUFFER_FORCE, RECEIVE_BYTES)
            listener.bind((0, 0))  # without a number of its own it is told nothing
            socket_filter.attach(listener, _program())
            for group in _GROUPS:
                listener.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, group)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    return listener


def _program() -> list[socket_filter.Instruction]:
    """Return what takes everything but routes of routing daemons."""
    kinds = [socket.htons(kind) for kind in (_NEW_ROUTE, _DELETE_ROUTE)]
    return [
        (socket_filter.LOAD_HALF, 0, 0, 4),
        (socket_filter.EQUALS, 1, 0, kinds[0]),
        (socket_filter.EQUALS, 0, 3, kinds[1]),
        (socket_filter.LOAD_BYTE, 0, 0, _ROUTE_PROTOCOL_AT),
        (socket_filter.ABOVE, 0, 1, _STATIC),
        (socket_filter.RETURN, 0, 0, 0),
        (socket_filter.RETURN, 0, 0, socket_filter.ALL_BYTES),
    ]


class Heard:
    """What has come and was not taken apart yet: of each link, and each port, the last message.

    A new tap is told of a dozen times, mostly by our own doing: reading costs next to nothing, and
    what each is now is found out once.
    """

    def __init__(self) -> None:
        self._latest: dict[object, tuple[int, bytes]] = {}
        self._count = 0

    def __bool__(self) -> bool:
        """Tell whether there is anything."""
        return bool(self._latest)

    def receive(self, listener: socket.socket) -> bool:
        """Take in what has come; return whether any was lost."""
        lost = False
        for _ in range(DRAINED_MAX):
            try:
                data = listener.recv(BUFFER_BYTES)
            except OSError as error:
                if error.errno == errno.ENOBUFS:
                    lost = True
                    continue
                if error.errno in (errno.EAGAIN, errno.EINTR):
                    break
                raise
            self.add(data)
        if len(self._latest) > HEARD_MAX:
            self._latest.clear()
            lost = True
        return lost

    def add(self, data: bytes) -> None:
        """Take in a buffer."""
        for kind, _, body in netlink.messages(data):
            self._count += 1
            is_link = kind in (_NEW_LINK, _DELETE_LINK) and len(body) >= _INFO.size
            key: object = (body[0], body[_INDEX_AT]) if is_link else self._count
            self._latest.pop(key, None)  # the last word comes last
            self._latest[key] = kind, body

    def news(self) -> list[News]:
        """Return it, and begin anew; what nobody here asks for is left out."""
        messages, self._latest = self._latest, {}
        return list(_news(messages.values()))


def parse(data: bytes) -> Iterator[News]:
    """Yield what a buffer tells of; what nobody here asks for is left out."""
    return _news([(kind, body) for kind, _, body in netlink.messages(data)])


def _news(messages: Iterable[tuple[int, bytes]]) -> Iterator[News]:
    for kind, body in messages:
        news = _parse_one(kind, body)
        if news is not None:
            yield news


def _parse_one(kind: int, body: bytes) -> News | None:
    if kind in (_NEW_LINK, _DELETE_LINK):
        return _link(body, gone=kind == _DELETE_LINK)
    if kind in (_NEW_ADDRESS, _DELETE_ADDRESS):
        return _address(body, gone=kind == _DELETE_ADDRESS)
    if kind in (_NEW_ROUTE, _DELETE_ROUTE):
        route = routes.parse(body)
        return RouteNews(route, kind == _DELETE_ROUTE) if route is not None else None
    return _settings(body) if kind == _NEW_SETTINGS else None


def _link(body: bytes, *, gone: bool) -> News | None:
    family = _INFO.unpack_from(body)[0]
    if family == socket.AF_UNSPEC:
        return LinkNews(links.parse(body), gone)
    if family != socket.AF_BRIDGE or gone:  # a port that leaves its bridge is told of as a link
        return None
    found = netlink.table(body, _INFO.size)
    port = netlink.table(found.get(_PROTINFO, b""))
    if _ISOLATED not in port or _IFNAME not in found:
        return None
    name = found[_IFNAME].split(b"\0", 1)[0].decode(errors="replace")
    return PortNews(name, port[_ISOLATED][:1] == b"\1")


def _address(body: bytes, *, gone: bool) -> AddressNews | None:
    family, length, _, _, index = _IP.unpack_from(body)
    found = netlink.table(body, _IP.size)
    packed = found.get(_IP_LOCAL) or found.get(_IP_ADDRESS, b"")
    if family == socket.AF_INET and len(packed) == 4:
        return AddressNews(index, f"{socket.inet_ntoa(packed)}/{length}", gone)
    if family == socket.AF_INET6 and len(packed) == 16:
        return AddressNews(index, f"{IPv6Address(packed)}/{length}", gone)
    return None


def _settings(body: bytes) -> ForwardingNews | None:
    found = netlink.table(body, 4)
    if found.get(_SETTING_LINK) != struct.pack("=i", _ALL_LINKS):
        return None
    forwarding = found.get(_SETTING_FORWARDING, b"")
    if len(forwarding) != 4:
        return None
    family = 6 if body[0] == socket.AF_INET6 else 4
    return ForwardingNews(family, struct.unpack("=i", forwarding)[0] != 0)
