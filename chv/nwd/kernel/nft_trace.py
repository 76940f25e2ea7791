"""What nftables tells of a packet that is traced: one event a rule, jump and policy.

The socket belongs to the namespace of the thread that opened it and never blocks. Events are
parsed as far as they are understood; text in them is the kernel's and our rules', addresses are
whatever the packet holds.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from chv.nwd.kernel import netlink, packets
from chv.nwd.kernel.errors import translated

RECEIVE_BYTES = 1 << 20
BUFFER_BYTES = 1 << 16
_TRACE = 10 << 8 | 17  # subsystem nftables, NFT_MSG_TRACE
_GROUP = 9  # NFNLGRP_NFTRACE
_SOL_NETLINK, _ADD_MEMBERSHIP = 270, 1
_GENERIC_BYTES = 4
(_TABLE, _CHAIN, _HANDLE, _TYPE, _VERDICT, _ID, _, _NETWORK, _TRANSPORT) = range(1, 10)
_IN, _OUT, _FAMILY, _POLICY = 10, 12, 15, 16
_CODE, _TARGET = 1, 2
_FAMILIES = {1: "inet", 2: "ip", 3: "arp", 5: "netdev", 7: "bridge", 10: "ip6"}
_CODES = {
    0: "drop",
    1: "accept",
    2: "stolen",
    3: "queue",
    -1: "continue",
    -2: "break",
    -3: "jump",
    -4: "goto",
    -5: "return",
}


class Kind(StrEnum):
    """What an event is of."""

    POLICY = "policy"
    RETURN = "return"
    RULE = "rule"


_KINDS = {1: Kind.POLICY, 2: Kind.RETURN, 3: Kind.RULE}


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that befell a packet. `packet`: as it was then, where the kernel says."""

    trace_id: int
    family: str
    table: str
    chain: str
    kind: Kind
    verdict: str
    handle: int = 0
    target: str = ""
    ingress: int = 0  # numbers of links
    egress: int = 0
    packet: packets.Packet | None = None


def open_socket() -> socket.socket:
    """Return a listener for the namespace of this thread."""
    with translated("listening for traced packets"):
        listener = netlink.open_socket(netlink.NETFILTER)
        try:
            listener.setsockopt(socket.SOL_SOCKET, netlink.RECEIVE_BUFFER_FORCE, RECEIVE_BYTES)
            listener.bind((0, 0))
            listener.setsockopt(_SOL_NETLINK, _ADD_MEMBERSHIP, _GROUP)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    return listener


def receive(listener: socket.socket) -> list[Event]:
    """Return what has come; an overflow counts as nothing, the trace then has a gap."""
    try:
        data = listener.recv(BUFFER_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOBUFS, errno.EAGAIN, errno.EINTR):
            return []
        raise
    return list(parse(data))


def parse(data: bytes) -> Iterator[Event]:
    """Yield the events of a buffer."""
    for kind, _, body in netlink.messages(data):
        if kind == _TRACE:
            event = _event(netlink.table(body, _GENERIC_BYTES))
            if event is not None:
                yield event


def _event(found: dict[int, bytes]) -> Event | None:
    kind = _KINDS.get(_number(found.get(_TYPE, b"")))
    if kind is None:
        return None
    verdict = netlink.table(found.get(_VERDICT, b""))
    code = _POLICY if kind is Kind.POLICY else _CODE
    text = found.get(_POLICY, b"") if kind is Kind.POLICY else verdict.get(code, b"")
    return Event(
        trace_id=_number(found.get(_ID, b"")),
        family=_FAMILIES.get(_number(found.get(_FAMILY, b"")), ""),
        table=_text(found.get(_TABLE, b"")),
        chain=_text(found.get(_CHAIN, b"")),
        kind=kind,
        verdict=_CODES.get(_signed(text), "continue"),
        handle=_number(found.get(_HANDLE, b"")),
        target=_text(verdict.get(_TARGET, b"")),
        ingress=_number(found.get(_IN, b"")),
        egress=_number(found.get(_OUT, b"")),
        packet=_packet(found),
    )


def _packet(found: dict[int, bytes]) -> packets.Packet | None:
    if _NETWORK not in found:
        return None
    try:
        return packets.parse(found[_NETWORK] + found.get(_TRANSPORT, b""))
    except ValueError:
        return None


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode("ascii", "replace")


def _number(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _signed(data: bytes) -> int:
    return int(struct.unpack("!i", data)[0]) if len(data) == 4 else -1
