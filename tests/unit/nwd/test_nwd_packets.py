"""Packets as bytes: what is made is read back; what lies is refused or read while it lasts."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from chv.nwd.kernel import packets
from chv.nwd.kernel.packets import Packet

CASES = [
    Packet("tcp", "10.7.0.2", "1.1.1.1", 50000, 443, 0x1234),
    Packet("udp", "10.7.0.2", "10.7.0.1", 50001, 53, 0xFFFF),
    Packet("icmp", "10.7.0.2", "10.7.0.1", 0, 0, 1),
    Packet("tcp", "fd07::2", "2001:db8::1", 50000, 443, 0xFFFFF),
    Packet("udp", "fd07::2", "fd07::1", 50000, 53, 7),
    Packet("icmpv6", "fd07::2", "fd07::1", 0, 0, 7),
]


@pytest.mark.parametrize("packet", CASES, ids=lambda each: each.ends)
def test_what_is_made_is_read_back(packet: Packet) -> None:
    assert packets.parse(packets.build(packet)) == packet


@pytest.mark.parametrize("packet", CASES, ids=lambda each: each.ends)
def test_checksums_are_right(packet: Packet) -> None:
    data = packets.build(packet)
    six = data[0] >> 4 == 6
    if not six:
        assert packets.checksum(data[:20]) == 0
    payload = data[40:] if six else data[20:]
    number = data[6] if six else data[9]
    pseudo = data[8:40] if six else data[12:20]
    pseudo += struct.pack("!II", len(payload), number)
    if packet.protocol == "icmp":
        pseudo = b""
    assert packets.checksum(pseudo + payload) == 0


@pytest.mark.parametrize("packet", CASES, ids=lambda each: each.ends)
def test_a_packet_that_is_cut_is_refused_or_read_as_far_as_it_goes(packet: Packet) -> None:
    data = packets.build(packet)
    head = 40 if ":" in packet.source else 20
    for length in range(len(data)):
        if length < head:
            with pytest.raises(ValueError, match=r"short|no IP"):
                packets.parse(data[:length])
        else:
            found = packets.parse(data[:length])
            assert replace(found, source_port=0, destination_port=0) == replace(
                packet, source_port=0, destination_port=0
            )


def test_a_later_fragment_has_no_ports() -> None:
    data = bytearray(packets.build(CASES[0]))
    data[6:8] = struct.pack("!H", 1)
    assert packets.parse(bytes(data)).destination_port == 0


def test_a_header_that_claims_more_than_there_is_gives_no_ports() -> None:
    data = bytearray(packets.build(CASES[0]))
    data[0] = 0x4F
    assert packets.parse(bytes(data)).destination_port == 0


@pytest.mark.parametrize("data", [b"", b"\0", b"\xff" * 60, b"\x10" + bytes(60)])
def test_what_is_no_ip_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="no IP"):
        packets.parse(data)


def test_families_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="families"):
        packets.build(Packet("tcp", "10.7.0.2", "fd07::1", 1, 2, 3))


def test_a_frame_says_which_family_it_has() -> None:
    four, six = (
        packets.ethernet("02:00:00:00:00:01", "02:00:00:00:00:02", packets.build(each))
        for each in (CASES[0], CASES[3])
    )
    assert four[:14].hex() == "0200000000010200000000020800"
    assert six[12:14].hex() == "86dd"


@pytest.mark.parametrize(
    ("address", "port", "text"),
    [("10.0.0.1", 0, "10.0.0.1"), ("10.0.0.1", 80, "10.0.0.1:80"), ("fd::1", 80, "[fd::1]:80")],
)
def test_an_end_is_written_as_people_write_it(address: str, port: int, text: str) -> None:
    assert packets.with_port(address, port) == text
