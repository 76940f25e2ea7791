"""Whether an address is one of this namespace: one question to the kernel, however many it has.

Call it in the namespace. What the kernel does not call local may still be an address of a link
that is down or not ready: a list of addresses knows better.
"""

from __future__ import annotations

import errno
import socket
import struct
from ipaddress import ip_address

from chv.nwd.kernel import netlink
from chv.nwd.kernel.errors import translated

_GET_ROUTE, _TARGET, _LOCAL = 26, 1, 2
_ROUTE = struct.Struct("=8BI")  # rtmsg: family, lengths, tos, table, protocol, scope, type, flags
_KIND = 7
_NO_ROUTE = (
    errno.ENETUNREACH,
    errno.EHOSTUNREACH,
    errno.EACCES,
    errno.EINVAL,
    errno.ENOENT,
    errno.ESRCH,
)


def is_here(address: str) -> bool:
    """Tell whether packets to an address are for this namespace itself."""
    target = ip_address(address)
    if target.is_unspecified:
        return False
    family = socket.AF_INET if target.version == 4 else socket.AF_INET6
    body = _ROUTE.pack(family, target.max_prefixlen, 0, 0, 0, 0, 0, 0, 0)
    body += netlink.attribute(_TARGET, target.packed)
    with translated(f"looking up {address}"), netlink.open_socket(netlink.ROUTE) as asker:
        try:
            answer = netlink.ask(asker, netlink.message(_GET_ROUTE, 0, body))[0]
        except OSError as error:
            if error.errno in _NO_ROUTE:
                return False
            raise
    return answer[_KIND] == _LOCAL
