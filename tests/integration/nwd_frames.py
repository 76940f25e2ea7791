"""Frames for the tests of nwd, made and read by hand: what no well-behaved kernel would send."""

from __future__ import annotations

import socket
import struct

VNET_HEADER = bytes(10)
BROADCAST = "ff:ff:ff:ff:ff:ff"
ARP, IPV4, IPV6, RARP = 0x0806, 0x0800, 0x86DD, 0x8035
COOKIE = bytes((99, 130, 83, 99))
DISCOVER, OFFER, REQUEST, ACK = 1, 2, 3, 5


def mac_bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace(":", ""))


def checksum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ethernet(target: str, source: str, kind: int, payload: bytes) -> bytes:
    frame = mac_bytes(target) + mac_bytes(source) + struct.pack("!H", kind) + payload
    return frame.ljust(60, b"\0")


def arp(
    operation: int, sender: tuple[str, str], target: tuple[str, str], *, outer: str = ""
) -> bytes:
    """An ARP frame; `outer` is the source in the Ethernet header when it is to differ."""
    body = struct.pack("!HHBBH", 1, IPV4, 6, 4, operation)
    body += mac_bytes(sender[0]) + socket.inet_aton(sender[1])
    body += mac_bytes(target[0]) + socket.inet_aton(target[1])
    return ethernet(BROADCAST, outer or sender[0], ARP, body)


def ipv4(source: str, target: str, protocol: int, payload: bytes) -> bytes:
    head = struct.pack(
        "!BBHHHBBH4s4s", 0x45, 0, 20 + len(payload), 1, 0, 64, protocol, 0,
        socket.inet_aton(source), socket.inet_aton(target),
    )  # fmt: skip
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + payload


def udp(source: tuple[str, int], target: tuple[str, int], payload: bytes) -> bytes:
    """An IPv4 packet with a datagram; no checksum, which IPv4 allows."""
    datagram = struct.pack("!HHHH", source[1], target[1], 8 + len(payload), 0) + payload
    return ipv4(source[0], target[0], socket.IPPROTO_UDP, datagram)


def tcp_syn(source: tuple[str, int], target: tuple[str, int]) -> bytes:
    segment = struct.pack("!HHIIBBHHH", source[1], target[1], 7, 0, 5 << 4, 2, 8192, 0, 0)
    pseudo = socket.inet_aton(source[0]) + socket.inet_aton(target[0])
    pseudo += struct.pack("!BBH", 0, socket.IPPROTO_TCP, len(segment))
    segment = segment[:16] + struct.pack("!H", checksum(pseudo + segment)) + segment[18:]
    return ipv4(source[0], target[0], socket.IPPROTO_TCP, segment)


def ipv6(source: str, target: str, next_header: int, payload: bytes) -> bytes:
    head = struct.pack("!IHBB", 6 << 28, len(payload), next_header, 255)
    addresses = socket.inet_pton(socket.AF_INET6, source) + socket.inet_pton(
        socket.AF_INET6, target
    )
    return head + addresses + payload


def router_advertisement(source: str) -> bytes:
    body = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0)
    pseudo = socket.inet_pton(socket.AF_INET6, source) + socket.inet_pton(
        socket.AF_INET6, "ff02::1"
    )
    pseudo += struct.pack("!IHBB", len(body), 0, 0, 58)
    body = body[:2] + struct.pack("!H", checksum(pseudo + body)) + body[4:]
    return ipv6(source, "ff02::1", 58, body)


def dhcp(
    kind: int, mac: str, *, address: str = "", server: str = "", client_id: bytes = b""
) -> bytes:
    """A frame with a client's DHCP message."""
    head = struct.pack("!4BIHH", 1, 1, 6, 0, 0x1234, 0, 0x8000) + bytes(16)
    options = bytes((53, 1, kind))
    if address:
        options += bytes((50, 4)) + socket.inet_aton(address)
    if server:
        options += bytes((54, 4)) + socket.inet_aton(server)
    if client_id:
        options += bytes((61, len(client_id))) + client_id
    message = head + mac_bytes(mac).ljust(16, b"\0") + bytes(192) + COOKIE + options + b"\xff"
    packet = udp(("0.0.0.0", 68), ("255.255.255.255", 67), message)
    return ethernet(BROADCAST, mac, IPV4, packet)


def dhcp_reply(frame: bytes) -> tuple[str, dict[int, bytes]] | None:
    """Return (address, options) of a server's DHCP message."""
    found = datagram(frame)
    if found is None or found[0] != 67 or found[1] != 68:
        return None
    message = found[2]
    options, rest = {}, message[240:]
    while rest and rest[0] != 255:
        if rest[0] == 0:
            rest = rest[1:]
            continue
        options[rest[0]], rest = rest[2 : 2 + rest[1]], rest[2 + rest[1] :]
    return socket.inet_ntoa(message[16:20]), options


def datagram(frame: bytes) -> tuple[int, int, bytes] | None:
    """Return (source port, target port, payload) of a UDP frame."""
    if frame[12:14] != struct.pack("!H", IPV4) or frame[23] != socket.IPPROTO_UDP:
        return None
    source, target = struct.unpack("!HH", frame[34:38])
    return source, target, frame[42:]


def dns_query(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes((len(part),)) + part.encode() for part in name.split("."))
    return (
        struct.pack("!HHHHHH", 0x77, 0x0100, 1, 0, 0, 0)
        + labels
        + b"\0"
        + struct.pack("!HH", kind, 1)
    )


def dns_answers(reply: bytes) -> tuple[int, list[bytes]]:
    """Return the response code and the data of each answer."""
    _, flags, _, count, _, _ = struct.unpack("!HHHHHH", reply[:12])
    offset, found = 12, []
    while reply[offset]:
        offset += 1 + reply[offset]
    offset += 5
    for _ in range(count):
        while reply[offset] and reply[offset] < 0xC0:
            offset += 1 + reply[offset]
        offset += 2 if reply[offset] >= 0xC0 else 1
        length = struct.unpack("!H", reply[offset + 8 : offset + 10])[0]
        found.append(reply[offset + 10 : offset + 10 + length])
        offset += 10 + length
    return flags & 15, found
