"""The news that rules of a namespace were changed: the generation that each transaction makes.

The kernel tells of every element of a transaction; a filter lets only the last word of it through,
so a thousand NICs at once are one message. The socket belongs to the namespace of the thread that
opened it, keeps that namespace alive, and never blocks.
"""

from __future__ import annotations

import errno
import socket
import struct

from chv.nwd.kernel import netlink, socket_filter
from chv.nwd.kernel.errors import translated

BUFFER_BYTES = 1 << 16
DRAINED_MAX = 1024  # messages a call: what is left is told of again
_NEW_GENERATION = (10 << 8) | 15  # subsystem nftables, NFT_MSG_NEWGEN
_GROUP = 7  # NFNLGRP_NFTABLES
_GENERIC_BYTES, _ID = 4, 1
_SOL_NETLINK, _ADD_MEMBERSHIP = 270, 1


def open_socket() -> socket.socket:
    """Return a listener for the namespace of this thread."""
    with translated("listening for changes of nft rules"):
        listener = netlink.open_socket(netlink.NETFILTER)
        try:
            listener.bind((0, 0))  # without a number of its own it is told nothing
            socket_filter.attach(listener, socket_filter.netlink_types([_NEW_GENERATION]))
            listener.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, _GROUP)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    return listener


def receive(listener: socket.socket) -> tuple[int, bool]:
    """Return the newest generation that was told of, 0 for none; and whether any was lost."""
    newest, lost = 0, False
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
        newest = max([newest, *parse(data)])
    return newest, lost


def parse(data: bytes) -> list[int]:
    """Return the generations that a buffer tells of."""
    found: list[int] = []
    for kind, _, body in netlink.messages(data):
        if kind == _NEW_GENERATION:
            number = netlink.table(body, _GENERIC_BYTES).get(_ID, b"")
            found += struct.unpack("!I", number) if len(number) == 4 else ()
    return found
