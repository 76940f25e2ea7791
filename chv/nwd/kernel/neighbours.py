"""Addresses for which a link answers neighbour solicitations in a guest's place (NDP proxy).

Ports of a bridge are isolated: who asks for another guest of the network is told the bridge's own
MAC. Call these in the namespace. The kernel drops the entries of a link that goes down.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv6Address

from chv.nwd.kernel import netlink
from chv.nwd.kernel.errors import translated

_NEW, _DELETE, _GET = 28, 29, 30
_BODY = struct.Struct("=BxxxiHBB")  # ndmsg: family, link, state, flags, type
_TARGET = 1
_PERMANENT, _PROXY = 0x80, 0x08
_CREATE, _REPLACE = 0x400, 0x100


def proxied_all(link: int) -> frozenset[str]:
    """Return every address that a link answers for."""
    body = _BODY.pack(socket.AF_INET6, link, 0, _PROXY, 0)
    with translated("listing proxied addresses"), netlink.open_socket(netlink.ROUTE) as asker:
        bodies = netlink.ask(asker, netlink.message(_GET, netlink.DUMP, body))
    return frozenset(address for each in bodies for address in _parse(each, link))


def proxied(asker: socket.socket, link: int, addresses: Iterable[str]) -> frozenset[str]:
    """Return which of the addresses a link answers for."""
    found = set()
    with translated("looking up proxied addresses"):
        for address in addresses:
            try:
                netlink.ask(asker, netlink.message(_GET, 0, _request(link, address, 0)))
            except OSError as error:
                if error.errno != errno.ENOENT:
                    raise
            else:
                found.add(address)
    return frozenset(found)


def add_proxy(asker: socket.socket, link: int, address: str) -> None:
    """Answer for an address from now on."""
    flags = netlink.ACK | _CREATE | _REPLACE
    with translated(f"proxying {address}"):
        netlink.ask(asker, netlink.message(_NEW, flags, _request(link, address)))


def delete_proxy(asker: socket.socket, link: int, address: str) -> None:
    """Answer for it no longer; one that is gone already is fine."""
    with translated(f"no longer proxying {address}"):
        try:
            netlink.ask(asker, netlink.message(_DELETE, netlink.ACK, _request(link, address)))
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                raise


def _request(link: int, address: str, state: int = _PERMANENT) -> bytes:
    body = _BODY.pack(socket.AF_INET6, link, state, _PROXY, 0)
    return body + netlink.attribute(_TARGET, IPv6Address(address).packed)


def _parse(body: bytes, link: int) -> Iterable[str]:
    family, index, _, flags, _ = _BODY.unpack_from(body)
    if family != socket.AF_INET6 or index != link or not flags & _PROXY:
        return
    target = netlink.table(body, _BODY.size).get(_TARGET, b"")
    if len(target) == 16:
        yield socket.inet_ntop(socket.AF_INET6, target)  # as str() writes it, in no time
