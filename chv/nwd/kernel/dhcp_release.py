"""Tells a DHCP server that a client gives its address back, in the client's name.

dnsmasq refuses an address to a new MAC while another MAC has a lease on it, even when its fixed
entry is gone. One datagram from inside the namespace ends that lease without a restart. Losing
it is harmless: the lease ends by itself. Call through `netns.inside`.
"""

from __future__ import annotations

import socket
import struct

from chv.nwd.kernel.errors import translated

_BOOTREQUEST, _ETHERNET, _MAC_BYTES = 1, 1, 6
_COOKIE = bytes((99, 130, 83, 99))
_RELEASE = 7
_SERVER_PORT = 67


def packet(mac: str, address: str, server: str) -> bytes:
    """Return a DHCPRELEASE (RFC 2131) of a client's address."""
    hardware = bytes.fromhex(mac.replace(":", ""))
    head = struct.pack("!4BIHH", _BOOTREQUEST, _ETHERNET, _MAC_BYTES, 0, 1, 0, 0)
    addresses = socket.inet_aton(address) + bytes(12)
    names = bytes(64 + 128)
    options = bytes((53, 1, _RELEASE, 54, 4)) + socket.inet_aton(server) + b"\xff"
    return head + addresses + hardware.ljust(16, b"\0") + names + _COOKIE + options


def send(mac: str, address: str, server: str, interface: str) -> None:
    """Send it to the server, which listens on `interface` of this namespace."""
    with (
        translated(f"releasing {address}"),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as udp,
    ):
        udp.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
        udp.sendto(packet(mac, address, server), (server, _SERVER_PORT))
