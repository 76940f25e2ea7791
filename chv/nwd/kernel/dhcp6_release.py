"""Tells a DHCPv6 server that a client gives its address back, in the client's name.

dnsmasq gives an address to one identity (DUID and IAID), and another one of the same guest, as of
a newly installed system, gets none until that lease ends. Unlike in IPv4, who had it must be known:
it stands in the file that dnsmasq writes its leases to. The datagram does not leave the namespace,
for its hop limit is 0. Losing it is harmless: the lease ends by itself. Call through
`netns.inside`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address

from chv.nwd.kernel.errors import translated

_RELEASE = 8
_CLIENT_ID, _SERVER_ID, _IA_NA, _IA_ADDRESS, _ELAPSED = 1, 2, 3, 5, 8
_DUID_ENTERPRISE = 2
_SERVERS, _SERVER_PORT, _CLIENT_PORT = "ff02::1:2", 547, 546
_FIELDS = 5


@dataclass(frozen=True, slots=True)
class Lease6:
    """Who has an address."""

    address: str
    identity: bytes
    association: int


def leases(text: str) -> Iterator[Lease6]:
    """Yield the IPv6 leases of a lease file; what is no such line is passed over."""
    for line in text.splitlines():
        fields = line.split()
        if len(fields) == _FIELDS and ":" in fields[2] and fields[1].isdigit():
            identity = bytes.fromhex(fields[4].replace(":", ""))
            yield Lease6(fields[2], identity, int(fields[1]))


def server_id(enterprise: int, identifier: bytes) -> bytes:
    """Return the identity of a server that is configured with these."""
    return struct.pack("!HI", _DUID_ENTERPRISE, enterprise) + identifier


def packet(lease: Lease6, server: bytes) -> bytes:
    """Return a RELEASE (RFC 8415) of a lease."""
    address = IPv6Address(lease.address).packed + struct.pack("!II", 0, 0)
    association = struct.pack("!III", lease.association, 0, 0) + _option(_IA_ADDRESS, address)
    return (
        bytes((_RELEASE, 0, 0, 1))
        + _option(_CLIENT_ID, lease.identity)
        + _option(_SERVER_ID, server)
        + _option(_ELAPSED, bytes(2))
        + _option(_IA_NA, association)
    )


def send(lease: Lease6, server: bytes, interface: str) -> None:
    """Send it to the server, which listens on `interface` of this namespace."""
    with (
        translated(f"releasing {lease.address}"),
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as udp,
    ):
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 0)
        udp.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
        udp.bind(("::", _CLIENT_PORT))
        scope = socket.if_nametoindex(interface)
        udp.sendto(packet(lease, server), (_SERVERS, _SERVER_PORT, 0, scope))


def _option(code: int, data: bytes) -> bytes:
    return struct.pack("!HH", code, len(data)) + data
