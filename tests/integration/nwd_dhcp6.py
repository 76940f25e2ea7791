"""A DHCPv6 client for the tests of nwd, in the namespace of the calling thread."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

SOLICIT, ADVERTISE, REQUEST, REPLY = 1, 2, 3, 7
CLIENT_ID, SERVER_ID, IA_NA, IA_ADDRESS, WANTED, ELAPSED, STATUS = 1, 2, 3, 5, 6, 8, 13
DNS_SERVERS, SEARCH = 23, 24
ALL_SERVERS, CLIENT_PORT, SERVER_PORT = "ff02::1:2", 546, 547
ATTEMPTS_MAX = 20


def lease6(link: str, mac: str, *, duid: bytes = b"") -> tuple[str, dict[int, bytes]]:
    """Go through SOLICIT, ADVERTISE, REQUEST, REPLY; return the address, if any, and options."""
    identity = duid or struct.pack("!HH", 3, 1) + bytes.fromhex(mac.replace(":", ""))
    with _client(link) as udp:
        offer = _ask(udp, link, SOLICIT, [(CLIENT_ID, identity), *_wishes()])
        if not address_of(offer):
            return "", offer
        chosen = [(CLIENT_ID, identity), (SERVER_ID, offer[SERVER_ID]), (IA_NA, offer[IA_NA])]
        reply = _ask(udp, link, REQUEST, [*chosen, (WANTED, _WISHED)])
    return address_of(reply), reply


def address_of(options: dict[int, bytes]) -> str:
    """Return the address in an answer, empty where there is none."""
    inner = dict(_options(options.get(IA_NA, b"")[12:]))
    return socket.inet_ntop(socket.AF_INET6, inner[IA_ADDRESS][:16]) if IA_ADDRESS in inner else ""


_WISHED = struct.pack("!HH", DNS_SERVERS, SEARCH)


def _wishes() -> list[tuple[int, bytes]]:
    return [(IA_NA, struct.pack("!III", 7, 0, 0)), (WANTED, _WISHED), (ELAPSED, b"\0\0")]


def _client(link: str) -> socket.socket:
    udp = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, link.encode())
    udp.bind(("::", CLIENT_PORT))
    udp.settimeout(0.3)
    return udp


def _ask(
    udp: socket.socket, link: str, kind: int, options: list[tuple[int, bytes]]
) -> dict[int, bytes]:
    body = b"".join(struct.pack("!HH", code, len(data)) + data for code, data in options)
    message = bytes((kind, 0, 0, kind)) + body
    for _ in range(ATTEMPTS_MAX):
        udp.sendto(message, (ALL_SERVERS, SERVER_PORT, 0, socket.if_nametoindex(link)))
        try:
            reply = udp.recv(1500)
        except TimeoutError:
            continue
        if reply[3] == kind:
            return dict(_options(reply[4:]))
    raise AssertionError(f"no answer to message {kind}")


def _options(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        code, length = struct.unpack_from("!HH", data)
        yield code, data[4 : 4 + length]
        data = data[4 + length :]
