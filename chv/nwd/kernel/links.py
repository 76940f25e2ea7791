"""Reading links: all of a namespace, or a few by name. Call through `netns.inside`.

Statistics are asked for by `counters` alone: without them a link that stays is always told of in
the same bytes.
"""

from __future__ import annotations

import errno
import hashlib
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from chv.nwd.kept import Recent
from chv.nwd.kernel import netlink
from chv.nwd.kernel.errors import translated

_RTM_GETLINK = 18
_INFO = struct.Struct("=BxHiII")  # ifinfomsg: family, type, index, flags, change
_ADDRESS, _IFNAME, _MTU, _MASTER, _LINKINFO, _IFALIAS, _EXT_MASK = 1, 3, 4, 10, 18, 20, 29
_STATS64, _CARRIER = 23, 33
_INFO_KIND, _INFO_DATA, _INFO_SLAVE_KIND, _INFO_SLAVE_DATA = 1, 2, 4, 5
_TUN_OWNER, _TUN_MULTI_QUEUE, _PORT_ISOLATED = 1, 7, 33
_SKIP_STATISTICS = struct.pack("=I", 8)
_IFF_UP = 1
_NO_OWNER = 2**32 - 1
_MARK_BYTES = 16


@dataclass(frozen=True, slots=True)
class Link:
    """A link as the kernel has it."""

    index: int
    name: str
    kind: str = ""
    mac: str = ""
    mtu: int = 0
    up: bool = False
    alias: str = ""
    master: int = 0
    isolated: bool = False
    owner_uid: int = -1
    carrier: bool = False  # of a tap: somebody holds it open
    multi_queue: bool = False  # of a tap


@dataclass(frozen=True, slots=True)
class Counters:
    """What a link has counted, as the host sees it."""

    rx_packets: int
    tx_packets: int
    rx_bytes: int
    tx_bytes: int
    rx_dropped: int
    tx_dropped: int


def counters(names: Iterable[str]) -> dict[str, Counters]:
    """Return the counters of those of the named links that exist."""
    found = {}
    with translated("reading counters"), netlink.open_socket(netlink.ROUTE) as ask:
        for name in names:
            wanted = netlink.attribute(_IFNAME, name.encode() + b"\0")
            body = _get(ask, netlink.message(_RTM_GETLINK, 0, _INFO.pack(0, 0, 0, 0, 0) + wanted))
            if body is not None:
                attributes = netlink.table(body, _INFO.size)
                found[name] = _counters(attributes[_STATS64])
    return found


def _counters(data: bytes) -> Counters:
    rx_packets, tx_packets, rx_bytes, tx_bytes, _, _, rx_dropped, tx_dropped = struct.unpack_from(
        "=8Q", data
    )
    return Counters(rx_packets, tx_packets, rx_bytes, tx_bytes, rx_dropped, tx_dropped)


def read_all() -> dict[str, Link]:
    """Return every link by name."""
    with translated("listing links"), netlink.open_socket(netlink.ROUTE) as ask:
        bodies = netlink.ask(ask, _request(netlink.DUMP))
    return {link.name: link for link in map(parse, bodies)}


def read(names: Iterable[str], asker: socket.socket | None = None) -> dict[str, Link]:
    """Return those of the named links that exist."""
    found = {}
    with translated("looking up links"), netlink.route(asker) as ask:
        for name in names:
            link = read_one(ask, name)
            if link is not None:
                found[name] = link
    return found


def read_one(ask: socket.socket, name: str) -> Link | None:
    """Return a link, None where there is none."""
    body = _get(ask, _request(0, netlink.attribute(_IFNAME, name.encode() + b"\0")))
    return parse(body) if body is not None else None


def _get(ask: socket.socket, request: bytes) -> bytes | None:
    try:
        return netlink.ask(ask, request)[0]
    except OSError as error:
        if error.errno == errno.ENODEV:
            return None
        raise


def _request(flags: int, extra: bytes = b"") -> bytes:
    body = _INFO.pack(0, 0, 0, 0, 0) + netlink.attribute(_EXT_MASK, _SKIP_STATISTICS) + extra
    return netlink.message(_RTM_GETLINK, flags, body)


def parse(body: bytes) -> Link:
    """Return the link that an RTM_NEWLINK message describes.

    A link that has not changed is told of in the same bytes, and comes back as the same object: a
    pass over a thousand of them takes apart what is new.
    """
    mark = hashlib.blake2b(body, digest_size=_MARK_BYTES).digest()
    link = _PARSED.get(mark)
    if link is None:
        link = _parse(body)
        _PARSED.put(mark, link)
    return link


_PARSED: Recent[bytes, Link] = Recent()


def _parse(body: bytes) -> Link:
    _, _, index, flags, _ = _INFO.unpack_from(body)
    found = netlink.table(body, _INFO.size)
    information = netlink.table(found.get(_LINKINFO, b""))
    kind = _text(information.get(_INFO_KIND, b""))
    is_port = _text(information.get(_INFO_SLAVE_KIND, b"")) == "bridge"
    port = netlink.table(information.get(_INFO_SLAVE_DATA, b"")) if is_port else {}
    data = netlink.table(information.get(_INFO_DATA, b"")) if kind == "tun" else {}
    owner = _number(data.get(_TUN_OWNER, b""), _NO_OWNER)
    return Link(
        index=index,
        name=_text(found.get(_IFNAME, b"")),
        kind=kind,
        mac=found.get(_ADDRESS, b"").hex(":"),
        mtu=_number(found.get(_MTU, b"")),
        up=bool(flags & _IFF_UP),
        alias=_text(found.get(_IFALIAS, b"")),
        master=_number(found.get(_MASTER, b"")),
        isolated=port.get(_PORT_ISOLATED, b"\0")[0] == 1,
        owner_uid=-1 if owner == _NO_OWNER else owner,
        carrier=found.get(_CARRIER, b"\0")[0] == 1,
        multi_queue=data.get(_TUN_MULTI_QUEUE, b"\0")[0] == 1,
    )


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode(errors="replace")


def _number(data: bytes, default: int = 0) -> int:
    return int(struct.unpack("=I", data)[0]) if len(data) == 4 else default
