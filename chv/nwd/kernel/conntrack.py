"""Ends the connections of an address in a namespace, as the kernel tracks them.

An established connection passes the rules without a further look. When its guest is gone, the
next one with that address must not inherit it. Call through `netns.inside`.
"""

from __future__ import annotations

import errno
import socket
import struct

from chv.nwd.kernel import netlink
from chv.nwd.kernel.errors import translated

_GET, _DELETE = (1 << 8) | 1, (1 << 8) | 2  # subsystem ctnetlink
_TUPLE_ORIGINAL, _TUPLE_REPLY, _NESTED = 1, 2, 0x8000
_TUPLE_IP, _IP_SOURCE, _IP_TARGET = 1, 1, 2
_FAMILY = struct.pack("=BBH", socket.AF_INET, 0, 0)


def forget(address: str) -> int:
    """End every tracked connection from or to an address; return how many there were."""
    with (
        translated(f"ending connections of {address}"),
        netlink.open_socket(netlink.NETFILTER) as asker,
    ):
        originals = [original for original, ends in _list(asker) if address in ends]
        for original in originals:
            _delete(asker, original)
    return len(originals)


def tracked() -> set[str]:
    """Return every address that takes part in a tracked connection."""
    with netlink.open_socket(netlink.NETFILTER) as asker:
        return {address for _, ends in _list(asker) for address in ends}


def _list(asker: socket.socket) -> list[tuple[bytes, set[str]]]:
    """Return each connection's original tuple and the addresses in both directions."""
    found = []
    for body in netlink.ask(asker, netlink.message(_GET, netlink.DUMP, _FAMILY)):
        parts = dict(netlink.attributes(body, len(_FAMILY)))
        original, reply = parts.get(_TUPLE_ORIGINAL, b""), parts.get(_TUPLE_REPLY, b"")
        found.append((original, _ends(original) | _ends(reply)))
    return found


def _ends(one_way: bytes) -> set[str]:
    ip = dict(netlink.attributes(dict(netlink.attributes(one_way)).get(_TUPLE_IP, b"")))
    packed = [ip[kind] for kind in (_IP_SOURCE, _IP_TARGET) if kind in ip]
    return {socket.inet_ntoa(each) for each in packed}


def _delete(asker: socket.socket, original: bytes) -> None:
    body = _FAMILY + netlink.attribute(_TUPLE_ORIGINAL | _NESTED, original)
    try:
        netlink.ask(asker, netlink.message(_DELETE, netlink.ACK, body))
    except OSError as error:
        if error.errno != errno.ENOENT:  # it has ended by itself
            raise
