"""The generation number of a namespace's nft ruleset: it grows by one with every transaction.

One message tells whether anybody changed any rule since we last looked. Call through
`netns.inside`. Reads only.
"""

from __future__ import annotations

import errno
import socket
import struct

from chv.nwd.kernel import netlink
from chv.nwd.kernel.errors import translated

_GETGEN = (10 << 8) | 16  # subsystem nftables, NFT_MSG_GETGEN
_NFTA_GEN_ID = 1
_FAMILY = struct.pack("=BBH", 0, 0, 0)
_REQUEST = netlink.message(_GETGEN, 0, _FAMILY)


def read() -> int:
    """Return the generation in the namespace of this thread."""
    with open_socket() as asker:
        return read_from(asker)


def open_socket() -> socket.socket:
    """Return a socket that asks in the namespace of this thread, whoever uses it later."""
    return netlink.open_socket(netlink.NETFILTER)


def read_from(asker: socket.socket) -> int:
    """Return the generation in the namespace of a socket; one user at a time."""
    with translated("reading the nft generation"):
        answer = netlink.ask(asker, _REQUEST)[0]
        found = netlink.table(answer, len(_FAMILY))
        if _NFTA_GEN_ID not in found:
            raise OSError(errno.EPROTO, "no generation in the answer")
        return int(struct.unpack("!I", found[_NFTA_GEN_ID])[0])
