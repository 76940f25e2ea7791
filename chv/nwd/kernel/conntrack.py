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
from collections.abc import Callable
from dataclasses import dataclass

from chv.nwd.kernel import netlink, sysctl
from chv.nwd.kernel.errors import translated

TCP, UDP, ICMP, ICMPV6 = 6, 17, 1, 58
_GET, _DELETE = (1 << 8) | 1, (1 << 8) | 2  # subsystem ctnetlink
_TUPLE_ORIGINAL, _TUPLE_REPLY, _STATUS, _ID, _NESTED = 1, 2, 3, 12, 0x8000
_TUPLE_IP, _TUPLE_PROTOCOL = 1, 2
_SOURCES, _TARGETS = (1, 3), (2, 4)  # IPv4, IPv6
_NUMBER, _SOURCE_PORT, _TARGET_PORT = 1, 2, 3
_TRANSLATED = 1 << 5  # IPS_DST_NAT
_FAMILY = struct.Struct("=BBH")
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


def end(unwanted: Callable[[Connection], bool]) -> int:
    """End the connections of which `unwanted` says so; return how many there were."""
    with translated("ending connections"), netlink.open_socket(netlink.NETFILTER) as asker:
        found = [each for each in _list(asker) if unwanted(each)]
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


def _list(asker: socket.socket) -> list[Connection]:
    if not is_any():
        return []
    request = netlink.message(_GET, netlink.DUMP, _FAMILY.pack(socket.AF_UNSPEC, 0, 0))
    return [_connection(body) for body in netlink.ask(asker, request)]


def _connection(body: bytes) -> Connection:
    parts = dict(netlink.attributes(body, _FAMILY.size))
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
    nested = dict(netlink.attributes(data))
    ip = dict(netlink.attributes(nested.get(_TUPLE_IP, b"")))
    protocol = dict(netlink.attributes(nested.get(_TUPLE_PROTOCOL, b"")))
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
