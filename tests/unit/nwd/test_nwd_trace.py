"""Traces and logs of the kernel, from recorded messages."""

from __future__ import annotations

import struct

import pytest

from chv.nwd.kernel import netlink, nflog, nft_trace, packets
from chv.nwd.kernel.nft_trace import Event, Kind
from chv.nwd.kernel.packets import Packet

# Recorded: a rule of a bridge table that switches tracing on, its chain's end, the policy, then
# `jump d` of an inet table and the drop there.
RECORDED = [
    "a8000000110a000000000000000000000700000008000f0000000007080004000000000308000600f9fa2ae306000200"
    "6300000006000100740000000c00030000000000000000020c00050008000100ffffffff08000a000000000306000b00"
    "000100001800080045000028004d00004006666c0a0900050a09000118000900115c0050000000070000000050022000"
    "6a180000120007001a932b2c711a02000000000508000000",
    "48000000110a000000000000000000000700000008000f0000000007080004000000000308000600f9fa2ae306000200"
    "6300000006000100740000000c00050008000100ffffffff",
    "44000000110a000000000000000000000700000008000f0000000007080004000000000108000600f9fa2ae306000200"
    "63000000060001007400000008001000"
    "00000001",
    "b0000000110a000000000000000000000100000008000f000000000208000400000000030800060032"
    "70bf04060002006300000006000100750000000c00030000000000000000041400050008000100fffffffd0600020064"
    "00000008000a000000000206000b00000100001800080045000028004d00004006666c0a0900050a0900011800090011"
    "5c00500000000700000000500220006a180000120007001a932b2c711a02000000000508000000",
    "54000000110a000000000000000000000100000008000f00000000020800040000000003080006003270bf0406000200"
    "6400000006000100750000000c00030000000000000000030c0005000800010000000000",
]
SYN = Packet("tcp", "10.9.0.5", "10.9.0.1", 4444, 80, 77)


def recorded() -> bytes:
    return b"".join(bytes.fromhex(text) for text in RECORDED)


def test_a_recorded_trace_is_read_in_order() -> None:
    events = list(nft_trace.parse(recorded()))
    assert [(each.table, each.chain, each.kind, each.verdict) for each in events] == [
        ("t", "c", Kind.RULE, "continue"),
        ("t", "c", Kind.RULE, "continue"),
        ("t", "c", Kind.POLICY, "accept"),
        ("u", "c", Kind.RULE, "jump"),
        ("u", "d", Kind.RULE, "drop"),
    ]
    assert [each.handle for each in events] == [2, 0, 0, 4, 3]
    assert events[3].target == "d"
    assert [each.family for each in events] == ["bridge"] * 3 + ["ip"] * 2
    assert events[0].packet == events[3].packet == SYN
    assert events[0].ingress == 3


def test_a_trace_that_is_cut_anywhere_is_read_as_far_as_it_goes() -> None:
    whole = recorded()
    full = list(nft_trace.parse(whole))
    for length in range(0, len(whole), 3):
        assert len(list(nft_trace.parse(whole[:length]))) <= len(full)


def test_other_messages_and_unknown_kinds_are_passed_over() -> None:
    other = netlink.message(10 << 8 | 16, 0, bytes(4))
    unknown = netlink.message(10 << 8 | 17, 0, bytes(4) + netlink.attribute(4, b"\0\0\0\x63"))
    assert list(nft_trace.parse(other + unknown)) == []


# --- NFLOG
def logged(prefix: bytes, payload: bytes, number: int, stamp: bytes = b"") -> bytes:
    """A message as the kernel makes it."""
    body = struct.pack("!BBH", 2, 0, 0)
    body += netlink.attribute(10, prefix + b"\0") + netlink.attribute(9, payload)
    body += netlink.attribute(12, struct.pack("!I", number))
    if stamp:
        body += netlink.attribute(3, stamp)
    return netlink.message(4 << 8, 0, body)


def test_logged_packets_are_read_with_prefix_number_and_time() -> None:
    data = logged(b"chv:01234567:3:out ", packets.build(SYN), 5, struct.pack("!QQ", 1000, 250000))
    data += logged(b"chv:01234567:drop:in ", b"\x45", 6)
    first, second = nflog.parse(data)
    assert (first.prefix, first.number, first.time_s) == ("chv:01234567:3:out ", 5, 1000.25)
    assert packets.parse(first.packet) == SYN
    assert (second.number, second.time_s) == (6, 0.0)


@pytest.mark.parametrize("cut", range(0, 80, 7))
def test_a_log_that_is_cut_is_no_error(cut: int) -> None:
    data = logged(b"chv:01234567:3:out ", packets.build(SYN), 5)
    assert len(list(nflog.parse(data[:cut]))) <= 1


def test_an_event_knows_no_packet_where_the_kernel_sent_none() -> None:
    assert Event(1, "ip", "t", "c", Kind.RULE, "accept").packet is None
