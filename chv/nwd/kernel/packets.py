"""IP packets as bytes: made for a question, read from a log or a trace. Sans-I/O.

What is read was written by a guest or by the world: every length is checked, and a packet that is
cut short or lies is read as far as it goes. Fails with ValueError where not even addresses are
there.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

ETHERNET_IPV4, ETHERNET_IPV6 = 0x0800, 0x86DD
TCP, UDP, ICMP, ICMPV6 = 6, 17, 1, 58
NAMES = {TCP: "tcp", UDP: "udp", ICMP: "icmp", ICMPV6: "icmpv6"}
FLOW_LABEL_MAX = 0xFFFFF
IPV4_MARK_MAX = 0xFFFF
_IPV4 = struct.Struct("!BBHHHBBH4s4s")
_IPV6 = struct.Struct("!IHBB16s16s")
_PORTS = struct.Struct("!HH")
_TTL = 64
_WINDOW = 64240
_SYN = 2
_OFFSET_MASK = 0x1FFF


@dataclass(frozen=True, slots=True)
class Packet:
    """What the headers of a packet say. `mark`: IPv4's identification, IPv6's flow label."""

    protocol: str
    source: str
    destination: str
    source_port: int = 0
    destination_port: int = 0
    mark: int = 0

    @property
    def ends(self) -> str:
        """Both ends as text."""
        source = with_port(self.source, self.source_port)
        return f"{source} -> {with_port(self.destination, self.destination_port)}"


def with_port(address: str, port: int) -> str:
    """Return an address and its port, where it has one."""
    if not port:
        return address
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def parse(data: bytes) -> Packet:
    """Return what an IP packet says; ValueError where it is none."""
    version = data[0] >> 4 if data else 0
    try:
        if version == 4:
            return _parse_ipv4(data)
        if version == 6:
            return _parse_ipv6(data)
    except struct.error as error:
        raise ValueError("the packet is cut short") from error
    raise ValueError("no IP packet")


def _parse_ipv4(data: bytes) -> Packet:
    head, _, _, mark, fragment, _, protocol, _, source, target = _IPV4.unpack_from(data)
    is_first = not fragment & _OFFSET_MASK
    ports = _ports(protocol, data, (head & 15) * 4) if is_first else (0, 0)
    return Packet(
        NAMES.get(protocol, str(protocol)),
        str(IPv4Address(source)),
        str(IPv4Address(target)),
        *ports,
        mark=mark,
    )


def _parse_ipv6(data: bytes) -> Packet:
    head, _, protocol, _, source, target = _IPV6.unpack_from(data)
    ports = _ports(protocol, data, _IPV6.size)
    return Packet(
        NAMES.get(protocol, str(protocol)),
        str(IPv6Address(source)),
        str(IPv6Address(target)),
        *ports,
        mark=head & FLOW_LABEL_MAX,
    )


def _ports(protocol: int, data: bytes, offset: int) -> tuple[int, int]:
    if protocol not in (TCP, UDP) or len(data) < offset + _PORTS.size:
        return 0, 0
    source, destination = _PORTS.unpack_from(data, offset)
    return source, destination


# --- making
def build(packet: Packet) -> bytes:
    """Return a TCP SYN, an empty UDP datagram or an echo request; its mark tells it apart."""
    source, target = ip_address(packet.source), ip_address(packet.destination)
    if source.version != target.version:
        raise ValueError(f"{source} and {target} are of different families")
    number = next(each for each, name in NAMES.items() if name == packet.protocol)
    payload = _checked(_payload(packet), number, source.packed, target.packed)
    if source.version == 6:
        head = _IPV6.pack(
            6 << 28 | packet.mark, len(payload), number, _TTL, source.packed, target.packed
        )
        return head + payload
    length = _IPV4.size + len(payload)
    fields = (0x45, 0, length, packet.mark, 0, _TTL, number)
    head = _IPV4.pack(*fields, 0, source.packed, target.packed)
    return _IPV4.pack(*fields, checksum(head), source.packed, target.packed) + payload


def _payload(packet: Packet) -> bytes:
    ports = _PORTS.pack(packet.source_port, packet.destination_port)
    if packet.protocol == NAMES[TCP]:
        return ports + struct.pack("!IIBBHHH", packet.mark, 0, 5 << 4, _SYN, _WINDOW, 0, 0)
    if packet.protocol == NAMES[UDP]:
        return ports + struct.pack("!HH", 8, 0)
    kind = 8 if packet.protocol == NAMES[ICMP] else 128
    return struct.pack("!BBHHH", kind, 0, 0, packet.source_port, 1)


_CHECKSUM_AT = {TCP: 16, UDP: 6, ICMP: 2, ICMPV6: 2}


def _checked(payload: bytes, number: int, source: bytes, target: bytes) -> bytes:
    """Fill in the checksum of the transport header."""
    pseudo = b""
    if number != ICMP:
        pseudo = source + target + struct.pack("!II", len(payload), number)
    total = checksum(pseudo + payload)
    if number == UDP and not total:
        total = 0xFFFF  # 0 would say that there is none
    at = _CHECKSUM_AT[number]
    return payload[:at] + struct.pack("!H", total) + payload[at + 2 :]


def checksum(data: bytes) -> int:
    """Return the Internet checksum (RFC 1071)."""
    data += b"\0" * (len(data) % 2)
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def ethernet(target: str, source: str, packet: bytes) -> bytes:
    """Return the frame of a packet."""
    kind = ETHERNET_IPV6 if packet[0] >> 4 == 6 else ETHERNET_IPV4
    macs = bytes.fromhex((target + source).replace(":", ""))
    return macs + socket.htons(kind).to_bytes(2, "little") + packet
