"""Packet sockets: a tap as a stream of frames, and sightings of one marked packet.

Call the openers through `netns.inside`; the sockets work from anywhere afterwards. A filter in
the kernel lets only the marked packet through, so that a busy host costs nothing.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from chv.nwd.kernel import packets, socket_filter
from chv.nwd.kernel.errors import translated
from chv.nwd.kernel.netlink import RECEIVE_BUFFER_FORCE

CAPTURE_BYTES = 8 << 20
_ANY_PROTOCOL = 3
_OUTGOING = 4
_SNAP_BYTES = 128
_DRAINED_MAX = 10_000
# Classic BPF: loads of a half word, a word, the packet's protocol; compare, mask, return.
_LOAD_HALF, _LOAD_WORD, _EQUALS, _AND, _RETURN = 0x28, 0x20, 0x15, 0x54, 0x06
_PROTOCOL_AT = 0xFFFFF000  # SKF_AD_OFF + SKF_AD_PROTOCOL
_IPV4_MARK_AT = 4


@dataclass(frozen=True, slots=True)
class Sighting:
    """The marked packet at a link. `leaves`: it was handed to the link's driver."""

    link: str
    leaves: bool
    packet: packets.Packet


def open_capture(link: str) -> int:
    """Return a socket that gets every frame that passes `link`, both ways."""
    with translated(f"opening a packet socket on {link}"):
        # Protocol 0 until it is bound: nothing of another link gets in.
        capture = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)
        try:
            capture.setsockopt(socket.SOL_SOCKET, RECEIVE_BUFFER_FORCE, CAPTURE_BYTES)
            capture.bind((link, _ANY_PROTOCOL))
        except BaseException:
            capture.close()
            raise
    return capture.detach()


def open_sightings(mark: int, version: int) -> socket.socket:
    """Return a socket that sees the packet with this mark on every link of the namespace."""
    with translated("opening a packet socket"):
        kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC
        watcher = socket.socket(socket.AF_PACKET, kind, socket.htons(_ANY_PROTOCOL))
        try:
            watcher.setblocking(False)
            socket_filter.attach(watcher, _filter(mark, version))
            _drain(watcher)  # what came before the filter
        except BaseException:
            watcher.close()
            raise
    return watcher


def _drain(watcher: socket.socket) -> None:
    try:
        for _ in range(_DRAINED_MAX):
            watcher.recv(1)
    except BlockingIOError:
        return


def receive(watcher: socket.socket) -> list[Sighting]:
    """Return what has come."""
    try:
        data, address = watcher.recvfrom(_SNAP_BYTES)
        packet = packets.parse(data)
    except OSError as error:
        # ENETDOWN: a link went, as ours do; the socket goes on.
        if error.errno in (errno.EAGAIN, errno.EINTR, errno.ENOBUFS, errno.ENETDOWN):
            return []
        raise
    except ValueError:
        return []
    return [Sighting(str(address[0]), address[2] == _OUTGOING, packet)]


def _filter(mark: int, version: int) -> list[tuple[int, int, int, int]]:
    """Return the program: (code, jump if true, jump if false, operand)."""
    if version == 4:
        kind, load = packets.ETHERNET_IPV4, [(_LOAD_HALF, 0, 0, _IPV4_MARK_AT)]
    else:
        kind = packets.ETHERNET_IPV6
        load = [(_LOAD_WORD, 0, 0, 0), (_AND, 0, 0, packets.FLOW_LABEL_MAX)]
    return [
        (_LOAD_HALF, 0, 0, _PROTOCOL_AT),
        (_EQUALS, 0, len(load) + 2, kind),
        *load,
        (_EQUALS, 0, 1, mark),
        (_RETURN, 0, 0, _SNAP_BYTES),
        (_RETURN, 0, 0, 0),
    ]
