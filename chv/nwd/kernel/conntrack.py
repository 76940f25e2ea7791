"""Tracked connections of a namespace: listed as values, ended one by one.

An established connection passes the rules without a further look. What the rules no longer allow,
and what a guest that is gone leaves behind, is ended here. Call through `netns.inside`; what is to
be ended is decided elsewhere.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chv.nwd.kernel import netlink, sysctl
from chv.nwd.kernel.errors import translated

TCP, UDP, ICMP, ICMPV6 = 6, 17, 1, 58
TOWARDS_MAX = 8
# Of the subsystem ctnetlink.
_GET, _DELETE, _GET_STATISTICS = (1 << 8) | 1, (1 << 8) | 2, (1 << 8) | 5
_ENTRIES = 1
_FILTER, _ORIGINAL_FLAGS = 25, 1
_BY_TARGET, _BY_PROTOCOL, _BY_TARGET_PORT = 1 << 1, 1 << 3, 1 << 5
_TUPLE_ORIGINAL, _TUPLE_REPLY, _STATUS, _ID, _NESTED = 1, 2, 3, 12, 0x8000
_TUPLE_IP, _TUPLE_PROTOCOL = 1, 2
_SOURCES, _TARGETS = (1, 3), (2, 4)  # IPv4, IPv6
_NUMBER, _SOURCE_PORT, _TARGET_PORT = 1, 2, 3
_TRANSLATED = 1 << 5  # IPS_DST_NAT
_FAMILY = struct.Struct("=BBH")
_ALL = _FAMILY.pack(socket.AF_UNSPEC, 0, 0)
_COUNT = "net.netfilter.nf_conntrack_count"


@dataclass(frozen=True, slots=True)
class Connection:
    """A tracked connection. `target` is where its opener sent to, `server` who it came to.

    The two differ where the target was translated. Ports are 0 for protocols without any.
    """

    protocol: int
    source: str
    source_port: int
    target: str
    target_port: int
    server: str
    server_port: int
    is_translated: bool = False
    ends: frozenset[str] = frozenset()  # every address in it
    handle: bytes = b""  # what the kernel knows it by
    family: int = socket.AF_INET


@dataclass(frozen=True, slots=True)
class Towards:
    """Connections whose opener sent to an address and port; `port` 0: to any."""

    protocol: int
    target: str
    port: int = 0


@dataclass(frozen=True, slots=True)
class _Way:
    source: str = ""
    target: str = ""
    protocol: int = 0
    source_port: int = 0
    target_port: int = 0


def read() -> list[Connection]:
    """Return every tracked connection in the namespace of this thread."""
    with translated("listing connections"), netlink.open_socket(netlink.NETFILTER) as asker:
        return _list(asker)


def end(unwanted: Callable[[Connection], bool], towards: Sequence[Towards] = ()) -> int:
    """End the connections of which `unwanted` says so; return how many there were.

    With `towards` the kernel picks those that go there, and only these are asked about.
    """
    with translated("ending connections"), netlink.open_socket(netlink.NETFILTER) as asker:
        listed = _list_towards(asker, towards) if towards else _list(asker)
        found = [each for each in listed if unwanted(each)]
        for each in found:
            _delete(asker, each)
    return len(found)


def forget(*addresses: str) -> int:
    """End every tracked connection from or to one of the addresses."""
    wanted = frozenset(addresses)
    return end(lambda each: bool(each.ends & wanted))


def tracked() -> set[str]:
    """Return every address that takes part in a tracked connection."""
    return {address for each in read() for address in each.ends}


def is_any() -> bool:
    """Tell whether anything is tracked: a list takes a walk through the whole host's table."""
    return sysctl.read(_COUNT) != "0"


def count(asker: socket.socket) -> int:
    """Return how many connections are tracked in the namespace of a socket for netfilter."""
    with translated("counting connections"):
        body = netlink.ask(asker, netlink.message(_GET_STATISTICS, 0, _ALL))[0]
    found = netlink.table(body, _FAMILY.size)
    return int.from_bytes(found[_ENTRIES], "big")


def _list(asker: socket.socket) -> list[Connection]:
    if not is_any():
        return []
    return [_connection(body) for body in netlink.ask(asker, _dump(_ALL))]


def _list_towards(asker: socket.socket, towards: Sequence[Towards]) -> list[Connection]:
    """A walk for each; beyond a few of them one walk takes all."""
    each = list(dict.fromkeys(towards))
    if len(each) > TOWARDS_MAX:
        return _list(asker)
    if not is_any():
        return []
    return [_connection(body) for one in each for body in netlink.ask(asker, _dump(_filter(one)))]


def _dump(body: bytes) -> bytes:
    return netlink.message(_GET, netlink.DUMP, body)


def _filter(towards: Towards) -> bytes:
    """Return what a dump asks for; a kernel that does not know filters lists everything.

    Of IPv6 only protocol and port: kernels have taken an address there for what is *not* wanted.
    """
    target = ipaddress.ip_address(towards.target)
    flags, way, protocol = _BY_PROTOCOL, b"", netlink.attribute(_NUMBER, bytes([towards.protocol]))
    if target.version == 4:
        flags |= _BY_TARGET
        way = _nested(_TUPLE_IP, netlink.attribute(_TARGETS[0], target.packed))
    if towards.port:
        flags |= _BY_TARGET_PORT
        protocol += netlink.attribute(_TARGET_PORT, struct.pack("!H", towards.port))
    way += _nested(_TUPLE_PROTOCOL, protocol)
    asked = netlink.attribute(_ORIGINAL_FLAGS, struct.pack("=I", flags))
    family = socket.AF_INET if target.version == 4 else socket.AF_INET6
    header = _FAMILY.pack(family, 0, 0)
    return header + _nested(_TUPLE_ORIGINAL, way) + _nested(_FILTER, asked)


def _nested(kind: int, payload: bytes) -> bytes:
    return netlink.attribute(kind | _NESTED, payload)


def _connection(body: bytes) -> Connection:
    parts = netlink.table(body, _FAMILY.size)
    original, reply = _way(parts.get(_TUPLE_ORIGINAL, b"")), _way(parts.get(_TUPLE_REPLY, b""))
    status = int(struct.unpack("!I", parts.get(_STATUS, bytes(4)))[0])
    handle = netlink.attribute(_TUPLE_ORIGINAL | _NESTED, parts.get(_TUPLE_ORIGINAL, b""))
    if _ID in parts:  # a new connection of the same ends is another one
        handle += netlink.attribute(_ID, parts[_ID])
    ends = {original.source, original.target, reply.source, reply.target}
    return Connection(
        protocol=original.protocol,
        source=original.source,
        source_port=original.source_port,
        target=original.target,
        target_port=original.target_port,
        server=reply.source,
        server_port=reply.source_port,
        is_translated=bool(status & _TRANSLATED),
        ends=frozenset(ends - {""}),
        handle=handle,
        family=body[0],
    )


def _way(data: bytes) -> _Way:
    nested = netlink.table(data)
    ip = netlink.table(nested.get(_TUPLE_IP, b""))
    protocol = netlink.table(nested.get(_TUPLE_PROTOCOL, b""))
    return _Way(
        source=_address(ip, _SOURCES),
        target=_address(ip, _TARGETS),
        protocol=protocol.get(_NUMBER, b"\0")[0],
        source_port=_port(protocol, _SOURCE_PORT),
        target_port=_port(protocol, _TARGET_PORT),
    )


def _address(ip: dict[int, bytes], kinds: tuple[int, ...]) -> str:
    packed = next((ip[kind] for kind in kinds if kind in ip), None)
    return str(ipaddress.ip_address(packed)) if packed else ""


def _port(protocol: dict[int, bytes], kind: int) -> int:
    return int(struct.unpack("!H", protocol[kind])[0]) if kind in protocol else 0


def _delete(asker: socket.socket, connection: Connection) -> None:
    body = _FAMILY.pack(connection.family, 0, 0) + connection.handle
    try:
        netlink.ask(asker, netlink.message(_DELETE, netlink.ACK, body))
    except OSError as error:
        if error.errno != errno.ENOENT:  # it has ended by itself
            raise
