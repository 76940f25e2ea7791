"""Netlink messages as bytes: all that nwd asks of the kernel. Sans-I/O but for `ask`.

A message is taken apart only as far as its caller needs. Sockets belong to the namespace of the
thread that opened them. An answer that does not come within TIMEOUT_S is an OSError (EAGAIN).
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

ROUTE, NETFILTER = 0, 12
REQUEST, ACK, DUMP = 1, 4, 0x300
ERROR, DONE = 2, 3
RECEIVE_BUFFER_FORCE = 33  # SO_RCVBUFFORCE, which Python does not name
TIMEOUT_S = 5
DUMP_ATTEMPTS_MAX = 5
_INTERRUPTED = 0x10
_TYPE_MASK = 0x3FFF
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
# A list comes in pieces as large as the reader takes; any other answer is one small message.
_LIST_BYTES, _ANSWER_BYTES = 1 << 18, 1 << 14


def open_socket(protocol: int) -> socket.socket:
    """Return a socket that asks in the namespace of this thread, whoever uses it later."""
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    netlink = socket.socket(socket.AF_NETLINK, kind, protocol)
    # By the kernel: a timeout of Python's would be one system call more for each of ours.
    limit = struct.pack("@ll", TIMEOUT_S, 0)
    netlink.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    return netlink


@contextmanager
def route(asker: socket.socket | None = None) -> Iterator[socket.socket]:
    """Yield `asker`, else a socket for questions about links, that ends with the block."""
    if asker is not None:
        yield asker
        return
    with open_socket(ROUTE) as own:
        yield own


def message(kind: int, flags: int, body: bytes) -> bytes:
    """Return a message with its header."""
    return _HEADER.pack(_HEADER.size + len(body), kind, flags | REQUEST, 1, 0) + body


def attribute(kind: int, payload: bytes) -> bytes:
    """Return an attribute, padded."""
    text = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(payload), kind) + payload
    return text.ljust((len(text) + 3) & ~3, b"\0")


def attributes(data: bytes, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield kind and payload of each attribute."""
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size:
            return
        yield kind & _TYPE_MASK, data[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3


def table(data: bytes, offset: int = 0) -> dict[int, bytes]:
    """Return the attributes by kind; of several of one kind the last."""
    # As above, in one go: a link has sixty, and each attach of a NIC looks at several links.
    found: dict[int, bytes] = {}
    last, unpack, size = len(data) - _ATTRIBUTE.size, _ATTRIBUTE.unpack_from, _ATTRIBUTE.size
    while offset <= last:
        length, kind = unpack(data, offset)
        if length < size:
            break
        found[kind & _TYPE_MASK] = data[offset + size : offset + length]
        offset += (length + 3) & ~3
    return found


def ask(netlink: socket.socket, request: bytes) -> list[bytes]:
    """Send one request and return the bodies of the answer; OSError for the kernel's refusal.

    With ACK the answer may be empty and ends with the acknowledgement; without, it is one message.
    """
    flags = _HEADER.unpack_from(request)[2]
    for _ in range(DUMP_ATTEMPTS_MAX if flags & DUMP == DUMP else 1):
        bodies, interrupted = _ask_once(netlink, request, flags)
        if not interrupted:
            return bodies
    raise OSError(errno.EAGAIN, "the list keeps changing while it is read")


def _ask_once(netlink: socket.socket, request: bytes, flags: int) -> tuple[list[bytes], bool]:
    is_list = flags & DUMP == DUMP
    has_end, size = is_list or bool(flags & ACK), _LIST_BYTES if is_list else _ANSWER_BYTES
    netlink.send(request)
    bodies: list[bytes] = []
    interrupted = False
    while True:
        for kind, marks, body in messages(netlink.recv(size)):
            interrupted = interrupted or bool(marks & _INTERRUPTED)
            if kind == DONE:
                return bodies, interrupted
            if kind == ERROR:
                _raise(body)
                return bodies, False
            bodies.append(body)
            if not has_end:
                return bodies, False


def messages(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield kind, flags and body of each message; what is cut short ends it."""
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, flags = _HEADER.unpack_from(data, offset)[:3]
        if length < _HEADER.size:
            return
        yield kind, flags, data[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def _raise(body: bytes) -> None:
    """Raise for an error; number 0 acknowledges."""
    number = -int(struct.unpack_from("=i", body)[0])
    if number:
        raise OSError(number, os.strerror(number))
