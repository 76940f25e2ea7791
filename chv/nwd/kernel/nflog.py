"""NFLOG of one namespace: packets that rules with `log group 0` told of.

The socket is opened in the namespace (through `netns.inside`) and works from anywhere afterwards;
it never blocks. The kernel counts what it told, so a gap in the numbers is what was lost. Group 0
of a namespace of ours has one listener: another one answers InUse.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from chv.nwd.kernel import netlink
from chv.nwd.kernel.errors import translated

GROUP = 0
COPY_BYTES_MAX = 128
RECEIVE_BYTES = 1 << 20
BUFFER_BYTES = 1 << 16
_ULOG = 4 << 8
_PACKET, _CONFIG = _ULOG | 0, _ULOG | 1
_COMMAND, _MODE, _TIMEOUT, _THRESHOLD, _FLAGS = 1, 2, 4, 5, 6
_BIND, _COPY_PACKET, _WITH_NUMBERS = 1, 2, 1
_TOGETHER_MAX, _DELAY_CS = 32, 10  # packets a message, hundredths of a second until it is sent
_GENERIC = struct.Struct("!BBH")
_TIMESTAMP, _PAYLOAD, _PREFIX, _NUMBER = 3, 9, 10, 12


@dataclass(frozen=True, slots=True)
class Logged:
    """One packet. `time_s` 0: the kernel did not say; `number` counts from 0 per socket."""

    prefix: str
    packet: bytes
    time_s: float = 0.0
    number: int = 0


def open_socket() -> socket.socket:
    """Return the listener of the namespace of this thread."""
    with translated("listening for logged packets"):
        listener = netlink.open_socket(netlink.NETFILTER)
        try:
            listener.setsockopt(socket.SOL_SOCKET, netlink.RECEIVE_BUFFER_FORCE, RECEIVE_BYTES)
            netlink.ask(listener, _request(_COMMAND, struct.pack("!B", _BIND)))
            mode = struct.pack("!IBB", COPY_BYTES_MAX, _COPY_PACKET, 0)
            netlink.ask(listener, _request(_MODE, mode))
            netlink.ask(listener, _request(_THRESHOLD, struct.pack("!I", _TOGETHER_MAX)))
            netlink.ask(listener, _request(_TIMEOUT, struct.pack("!I", _DELAY_CS)))
            netlink.ask(listener, _request(_FLAGS, struct.pack("!H", _WITH_NUMBERS)))
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    return listener


def _request(kind: int, payload: bytes) -> bytes:
    body = _GENERIC.pack(0, 0, GROUP) + netlink.attribute(kind, payload)
    return netlink.message(_CONFIG, netlink.ACK, body)


def receive(listener: socket.socket) -> list[Logged]:
    """Return what has come; empty where nothing has, or where the kernel only says it lost some."""
    try:
        data = listener.recv(BUFFER_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOBUFS, errno.EAGAIN, errno.EINTR):
            return []  # the numbers of what follows tell how many
        raise
    return list(parse(data))


def parse(data: bytes) -> Iterator[Logged]:
    """Yield the packets of a buffer."""
    for kind, _, body in netlink.messages(data):
        if kind != _PACKET:
            continue
        found = netlink.table(body, _GENERIC.size)
        yield Logged(
            prefix=found.get(_PREFIX, b"").split(b"\0", 1)[0].decode("ascii", "replace"),
            packet=found.get(_PAYLOAD, b""),
            time_s=_time_s(found.get(_TIMESTAMP, b"")),
            number=int.from_bytes(found.get(_NUMBER, b""), "big"),
        )


def _time_s(data: bytes) -> float:
    if len(data) != 16:
        return 0.0
    seconds, microseconds = struct.unpack("!QQ", data)
    return float(seconds + microseconds / 1e6)
