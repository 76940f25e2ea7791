"""The generation number of a namespace's nft ruleset: it grows by one with every transaction.

One message tells whether anybody changed any rule since we last looked. Call through
`netns.inside`. Reads only.
"""

from __future__ import annotations

import os
import socket
import struct

from chv.nwd.kernel.errors import translated

_NETLINK_NETFILTER = 12
_GETGEN = (10 << 8) | 16  # subsystem nftables, NFT_MSG_GETGEN
_NLM_F_REQUEST = 1
_NLMSG_ERROR = 2
_NFTA_GEN_ID = 1
_HEADER = struct.Struct("=IHHII")
_FAMILY = struct.pack("=BBH", 0, 0, 0)
_ATTRIBUTE = struct.Struct("=HH")
_ANSWER_BYTES = 4096
ANSWER_TIMEOUT_S = 5.0
_REQUEST = _HEADER.pack(_HEADER.size + len(_FAMILY), _GETGEN, _NLM_F_REQUEST, 1, 0) + _FAMILY


def read() -> int:
    """Return the generation in the namespace of this thread."""
    with translated("reading the nft generation"), open_socket() as netlink:
        return read_from(netlink)


def open_socket() -> socket.socket:
    """Return a socket that asks in the namespace of this thread, whoever uses it later."""
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    netlink = socket.socket(socket.AF_NETLINK, kind, _NETLINK_NETFILTER)
    netlink.settimeout(ANSWER_TIMEOUT_S)
    return netlink


def read_from(netlink: socket.socket) -> int:
    """Return the generation in the namespace of a socket; one user at a time."""
    with translated("reading the nft generation"):
        netlink.send(_REQUEST)
        return _parse(netlink.recv(_ANSWER_BYTES))


def _parse(answer: bytes) -> int:
    kind = _HEADER.unpack_from(answer)[1]
    if kind == _NLMSG_ERROR:
        number = -struct.unpack_from("=i", answer, _HEADER.size)[0]
        raise OSError(number, os.strerror(number))
    offset = _HEADER.size + len(_FAMILY)
    while offset < len(answer):
        length, attribute = _ATTRIBUTE.unpack_from(answer, offset)
        if attribute == _NFTA_GEN_ID:
            return int(struct.unpack_from("!I", answer, offset + _ATTRIBUTE.size)[0])
        offset += (length + 3) & ~3
    raise OSError(5, "no generation in the answer")
