"""Ends the connections of an address in a namespace, as the kernel tracks them.

An established connection passes the rules without a further look. When its guest is gone, the
next one with that address must not inherit it. Call through `netns.inside`.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

from chv.nwd.kernel.errors import translated

_NETLINK_NETFILTER = 12
_GET, _DELETE = (1 << 8) | 1, (1 << 8) | 2  # subsystem ctnetlink
_REQUEST, _ACK, _DUMP = 1, 4, 0x300
_ERROR, _DONE = 2, 3
_CTA_TUPLE_ORIG, _CTA_TUPLE_REPLY = 1, 2
_TYPE_MASK = 0x3FFF
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_FAMILY = struct.pack("=BBH", socket.AF_INET, 0, 0)
_BODY_OFFSET = _HEADER.size + len(_FAMILY)
_BUFFER_BYTES = 1 << 16
TIMEOUT_S = 5.0
# CTA_IP_V4_SRC and CTA_IP_V4_DST, each with its header, in front of an address.
_SOURCE, _TARGET = _ATTRIBUTE.pack(8, 1), _ATTRIBUTE.pack(8, 2)


def forget(address: str) -> int:
    """End every tracked connection from or to an address; return how many there were."""
    with translated(f"ending connections of {address}"), _open() as netlink:
        tuples = [original for original, reply in _dump(netlink) if _has(address, original, reply)]
        for original in tuples:
            _delete(netlink, original)
    return len(tuples)


def _open() -> socket.socket:
    kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
    netlink = socket.socket(socket.AF_NETLINK, kind, _NETLINK_NETFILTER)
    netlink.settimeout(TIMEOUT_S)
    return netlink


def _has(address: str, *tuples: bytes) -> bool:
    packed = socket.inet_aton(address)
    return any(_SOURCE + packed in each or _TARGET + packed in each for each in tuples)


def _dump(netlink: socket.socket) -> list[tuple[bytes, bytes]]:
    """Return (original, reply) of every connection."""
    netlink.send(_message(_GET, _REQUEST | _DUMP))
    found: list[tuple[bytes, bytes]] = []
    while True:
        for kind, body in _messages(netlink.recv(_BUFFER_BYTES)):
            if kind == _DONE:
                return found
            if kind == _ERROR:
                _raise(body)
            attributes = dict(_attributes(body[len(_FAMILY) :]))
            found.append(
                (attributes.get(_CTA_TUPLE_ORIG, b""), attributes.get(_CTA_TUPLE_REPLY, b""))
            )


def _delete(netlink: socket.socket, original: bytes) -> None:
    nested = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(original), _CTA_TUPLE_ORIG | 0x8000)
    netlink.send(_message(_DELETE, _REQUEST | _ACK, nested + original))
    for kind, body in _messages(netlink.recv(_BUFFER_BYTES)):
        if kind == _ERROR:
            _raise(body, unless=errno.ENOENT)


def _message(kind: int, flags: int, payload: bytes = b"") -> bytes:
    length = _BODY_OFFSET + len(payload)
    return _HEADER.pack(length, kind, flags, 1, 0) + _FAMILY + payload


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind = _HEADER.unpack_from(data, offset)[:2]
        yield kind, data[offset + _HEADER.size : offset + length]
        offset += (length + 3) & ~3


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        yield kind & _TYPE_MASK, data[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3


def _raise(body: bytes, unless: int = 0) -> None:
    number = -struct.unpack_from("=i", body)[0]
    if number not in (0, unless):
        raise OSError(number, os.strerror(number))
