"""Reading the addresses of links: of all, or of one. Call in the namespace.

A host has two or four addresses for each of its networks: those of one link are picked by the
kernel, not here.
"""

from __future__ import annotations

import socket
import struct
from ipaddress import IPv6Address

from chv.nwd.kernel import netlink
from chv.nwd.kernel.errors import translated

_RTM_GETADDR = 22
_BODY = struct.Struct("=4Bi")  # ifaddrmsg: family, length, flags, scope, link
_ADDRESS, _LOCAL = 1, 2
_SOL_NETLINK, _STRICT = 270, 12


def read(link: int = 0) -> dict[int, frozenset[str]]:
    """Return addresses with prefix lengths by number of link; with `link` those of it alone."""
    found: dict[int, set[str]] = {}
    with translated("listing addresses"), netlink.open_socket(netlink.ROUTE) as asker:
        asker.setsockopt(_SOL_NETLINK, _STRICT, 1)
        for family in (socket.AF_INET, socket.AF_INET6):
            body = _BODY.pack(family, 0, 0, 0, link)
            for each in netlink.ask(asker, netlink.message(_RTM_GETADDR, netlink.DUMP, body)):
                index, text = _parse(each)
                found.setdefault(index, set()).add(text)
    return {index: frozenset(texts) for index, texts in found.items()}


def _parse(body: bytes) -> tuple[int, str]:
    family, length, _, _, index = _BODY.unpack_from(body)
    found = netlink.table(body, _BODY.size)
    # A peer's address stands in IFA_ADDRESS; the link's own one in IFA_LOCAL.
    packed = found.get(_LOCAL) or found[_ADDRESS]
    is_v6 = family == socket.AF_INET6
    return index, f"{IPv6Address(packed) if is_v6 else socket.inet_ntoa(packed)}/{length}"
