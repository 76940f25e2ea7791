"""Frames that a guest must not get through, in both families, on isolated and on open segments.

Each is sent as it is by a raw socket, and looked for at the gateway's bridge and at another guest;
without the bridge's table every one of them is seen at one of the two.
"""

from __future__ import annotations

import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import anyio.to_thread
import pytest

from chv.common.wire.nwd import L2Mode
from chv.nwd.nft import counters
from chv.nwd.nft.spoof import LOCALS_MAX
from tests.integration import nwd_frames as frames
from tests.integration.nwd_frames import IPV4, IPV6, checksum, ethernet, ipv6, mac_bytes
from tests.integration.nwd_policy_rig import (
    BRIDGE,
    GATEWAY,
    GATEWAY6,
    Guest,
    Rig,
    inside,
    needs_namespaces,
    open_rig,
)

pytestmark = [pytest.mark.root, needs_namespaces]
MARK, BARRIER = b"CHV-MARK", 0x0EEE
NOBODY, STRANGER = "00:00:00:00:00:00", "02:00:00:00:0b:77"
GATEWAY_MAC = "02:00:00:00:0a:01"
ALL_NODES, ALL_NODES_MAC = "ff02::1", "33:33:00:00:00:01"
LOCAL = "fe80::b:1"
ICMPV6, UDP, FRAGMENT, DESTINATION_OPTIONS = 58, 17, 44, 60
PF_ALL = 3


def packed(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, address)


def upper6(source: str, target: str, protocol: int, body: bytes) -> bytes:
    """Return a message with its checksum: at 2 for ICMPv6, at 6 for UDP."""
    pseudo = packed(source) + packed(target) + struct.pack("!II", len(body), protocol)
    at = 6 if protocol == UDP else 2
    return body[:at] + struct.pack("!H", checksum(pseudo + body)) + body[at + 2 :]


def six(mac: str, source: str, protocol: int, body: bytes, *, through: bytes = b"") -> bytes:
    """Return a frame to all nodes; `through`: an extension header, its first byte to be filled."""
    message = upper6(source, ALL_NODES, protocol, body)
    if through:
        message = bytes((protocol,)) + through[1:] + message
        protocol = through[0]
    return ethernet(ALL_NODES_MAC, mac, IPV6, ipv6(source, ALL_NODES, protocol, message))


def udp6(mac: str, source: str, ports: tuple[int, int] = (5555, 5555)) -> bytes:
    return six(mac, source, UDP, struct.pack("!HHHH", *ports, 8 + len(MARK), 0) + MARK)


def udp4(mac: str, source: str, ports: tuple[int, int] = (5555, 5555)) -> bytes:
    packet = frames.udp((source, ports[0]), ("10.7.0.255", ports[1]), MARK)
    return ethernet(frames.BROADCAST, mac, IPV4, packet)


def router(mac: str) -> bytes:
    return struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0) + bytes((1, 1)) + mac_bytes(mac)


def redirect(mac: str, target: str) -> bytes:
    return struct.pack("!BBHI", 137, 0, 0, 0) + packed(target) * 2


def neighbour(mac: str, target: str, *, solicited: bool = False) -> bytes:
    """Return an advertisement, or a solicitation without a link-layer option."""
    if solicited:
        return struct.pack("!BBHI", 135, 0, 0, 0) + packed(target)
    head = struct.pack("!BBHI", 136, 0, 0, 0xA0000000) + packed(target)
    return head + bytes((2, 1)) + mac_bytes(mac)


def forged4(me: Guest, victim: Guest) -> dict[str, bytes]:
    mac, mine, theirs = me.nic.mac, me.address, victim.address
    inner = struct.pack("!H", IPV4) + udp4(mac, mine)[14:]
    lldp, bpdu = "01:80:c2:00:00:0e", "01:80:c2:00:00:00"
    return {
        "another source MAC": udp4(STRANGER, mine),
        "the victim's MAC": udp4(victim.nic.mac, theirs),
        "the victim's address": udp4(mac, theirs),
        "the gateway's address": udp4(mac, GATEWAY),
        "an outside address": udp4(mac, "203.0.113.9"),
        "no address on another port": udp4(mac, "0.0.0.0"),
        "ARP reply for the gateway": frames.arp(2, (mac, GATEWAY), (victim.nic.mac, theirs)),
        "ARP announcing the victim": frames.arp(1, (mac, theirs), (NOBODY, theirs)),
        "ARP with another inner MAC": frames.arp(
            2, (STRANGER, mine), (victim.nic.mac, theirs), outer=mac
        ),
        "a DHCP server": udp4(mac, mine, (67, 68)),
        "VLAN tag": ethernet(frames.BROADCAST, mac, 0x8100, b"\0\5" + inner),
        "two VLAN tags": ethernet(frames.BROADCAST, mac, 0x88A8, b"\0\5\x81\0\0\6" + inner),
        "LLDP": ethernet(lldp, mac, 0x88CC, MARK * 5),
        "spanning tree": ethernet(bpdu, mac, 38, b"\x42\x42\x03" + bytes(35)),
        "an unknown protocol": ethernet(frames.BROADCAST, mac, 0x88B5, MARK * 6),
        "RARP with another MAC": ethernet(frames.BROADCAST, STRANGER, frames.RARP, bytes(28)),
    }


def forged6(me: Guest, victim: Guest) -> dict[str, bytes]:
    mac, mine = me.nic.mac, me.address6
    options, fragment = bytes((DESTINATION_OPTIONS, 0, 1, 4, 0, 0, 0, 0)), bytes((FRAGMENT,))
    return {
        "another source MAC, IPv6": udp6(STRANGER, mine),
        "the victim's IPv6 address": udp6(mac, victim.address6),
        "the gateway's IPv6 address": udp6(mac, GATEWAY6),
        "the gateway's link-local address": udp6(mac, "fe80::1"),
        "no IPv6 address": udp6(mac, "::"),
        "router advertisement": six(mac, LOCAL, ICMPV6, router(mac)),
        "router advertisement behind options": six(
            mac, LOCAL, ICMPV6, router(mac), through=options
        ),
        "router advertisement in a fragment": six(
            mac, LOCAL, ICMPV6, router(mac), through=fragment + bytes(6) + b"\x4d"
        ),
        "redirect": six(mac, LOCAL, ICMPV6, redirect(mac, GATEWAY6)),
        "advertising the gateway": six(mac, LOCAL, ICMPV6, neighbour(mac, GATEWAY6)),
        "advertising the gateway's link-local": six(mac, LOCAL, ICMPV6, neighbour(mac, "fe80::1")),
        "advertising the victim": six(mac, LOCAL, ICMPV6, neighbour(mac, victim.address6)),
        "advertising the victim, own source": six(
            mac, mine, ICMPV6, neighbour(mac, victim.address6)
        ),
        "asking whether the victim is there, as nobody": six(
            mac, "::", ICMPV6, neighbour(mac, victim.address6, solicited=True)
        ),
        "a DHCPv6 server": udp6(mac, LOCAL, (547, 546)),
        "a first fragment that hides its protocol": six(
            mac, mine, 0, b"\x2b\x02" + bytes(6), through=fragment + b"\0\0\x01" + bytes(4)
        ),
    }


def honest(me: Guest, victim: Guest) -> dict[str, bytes]:
    mac, mine, mine6 = me.nic.mac, me.address, me.address6
    return {
        "own broadcast": udp4(mac, mine),
        "own ARP request": frames.arp(1, (mac, mine), (NOBODY, victim.address)),
        "ARP probe": frames.arp(1, (mac, "0.0.0.0"), (NOBODY, mine)),
        "RARP announcement": ethernet(frames.BROADCAST, mac, frames.RARP, bytes(28)),
        "DHCP question": frames.dhcp(frames.DISCOVER, mac),
        "own multicast": udp6(mac, mine6),
        "link-local multicast": udp6(mac, LOCAL),
        "DHCPv6 question": udp6(mac, LOCAL, (546, 547)),
        "advertising itself": six(mac, mine6, ICMPV6, neighbour(mac, mine6)),
        "advertising its link-local": six(mac, LOCAL, ICMPV6, neighbour(mac, LOCAL)),
        "asking for the victim": six(
            mac, mine6, ICMPV6, neighbour(mac, victim.address6, solicited=True)
        ),
        "router solicitation": six(mac, LOCAL, ICMPV6, struct.pack("!BBHI", 133, 0, 0, 0)),
        "a fragment": six(
            mac, mine6, UDP, struct.pack("!HHHH", 5, 5, 16, 0) + MARK,
            through=fragment_of_datagram(),
        ),
    }  # fmt: skip


def fragment_of_datagram() -> bytes:
    return bytes((FRAGMENT, 0, 0, 1)) + b"frag"


class Places:
    """Raw sockets at the sender, the bridge and the victim."""

    def __init__(self, me: Guest, sender: socket.socket, seen_by: list[socket.socket]) -> None:
        self._me = me
        self._sender = sender
        self._seen_by = seen_by

    def seen(self, sent: dict[str, bytes]) -> set[str]:
        return {name for name, frame in sent.items() if self._sees(frame)}

    def _sees(self, frame: bytes) -> bool:
        """Send a frame and an honest one behind it, which the bridge sees in any case."""
        barrier = udp4(self._me.nic.mac, self._me.address, (BARRIER, BARRIER))
        self._sender.send(frame)
        self._sender.send(barrier)
        bridge, victim = self._seen_by
        return self._until(bridge, frame, barrier) | self._until(victim, frame, None)

    def _until(self, place: socket.socket, frame: bytes, barrier: bytes | None) -> bool:
        seen = False
        place.settimeout(2 if barrier else 0)  # whoever floods has done so before the bridge saw
        while True:
            try:
                received = place.recv(4096)
            except BlockingIOError:
                return seen
            seen = seen or received[:60] == frame[:60] or _untagged(received, frame)
            if received[:60] == barrier:
                return seen


def _untagged(received: bytes, frame: bytes) -> bool:
    """A packet socket gets the outer tag beside the frame, not in it."""
    return frame[12:14] in (b"\x81\0", b"\x88\xa8") and received[14:50] == frame[18:54]


@contextmanager
def places(rig: Rig, me: Guest, victim: Guest) -> Iterator[Places]:
    def make(interface: str) -> socket.socket:
        packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(PF_ALL))
        packets.bind((interface, PF_ALL))
        return packets

    with ExitStack() as stack:
        sender = stack.enter_context(inside(me.namespace, lambda: make("eth0")))
        bridge = stack.enter_context(inside(rig.tenant, lambda: make(BRIDGE)))
        other = stack.enter_context(inside(victim.namespace, lambda: make("eth0")))
        yield Places(me, sender, [bridge, other])


@pytest.mark.parametrize("l2", list(L2Mode))
async def test_no_forged_frame_passes_and_each_would_without_the_table(l2: L2Mode) -> None:
    async with open_rig(2, l2) as rig:
        me, victim = rig.guests
        forged = forged4(me, victim) | forged6(me, victim)
        assert len(forged) == 32
        own = honest(me, victim)
        with places(rig, me, victim) as at:
            assert await anyio.to_thread.run_sync(at.seen, forged) == set()
            assert await anyio.to_thread.run_sync(at.seen, own) == set(own)
            rig.nft_text("delete table bridge chv")
            assert await anyio.to_thread.run_sync(at.seen, forged) == set(forged)


async def test_a_network_without_ipv6_passes_none_of_it() -> None:
    async with open_rig(2) as rig:
        await rig.apply(subnet6="", gateway6="")
        me, victim = rig.guests
        sent = forged6(me, victim) | {"honest": udp6(me.nic.mac, me.address6)}
        with places(rig, me, victim) as at:
            assert await anyio.to_thread.run_sync(at.seen, sent) == set()


async def test_drops_are_counted_for_the_port_that_sent_and_by_reason() -> None:
    async with open_rig(2) as rig:
        me, victim = rig.guests
        four, six_ = forged4(me, victim), forged6(me, victim)
        sent = {
            "spoofed_mac": [four["another source MAC"], four["the victim's MAC"]],
            "spoofed_address": [four["the victim's address"], six_["the victim's IPv6 address"]],
            "spoofed_arp": [four["ARP reply for the gateway"]],
            "spoofed_nd": [six_["advertising the gateway"]] * 3,
            "rogue_dhcp": [four["a DHCP server"], six_["a DHCPv6 server"]],
            "rogue_ra": [six_["router advertisement"], six_["redirect"]],
            "unknown_protocol": [four["LLDP"], four["VLAN tag"]],
        }
        with places(rig, me, victim) as at:
            for each in sent.values():
                for frame in each:
                    at.seen({"": frame})
        listing = await rig.nft.list_counters(f"/run/netns/{rig.tenant}", counters.COMMANDS)
        found = counters.drops(listing)
        expected = {reason: len(each) for reason, each in sent.items()}
        assert counters.drops_of(found, me.nic.tap, me.nic.addresses) == expected
        assert counters.drops_of(found, victim.nic.tap, victim.nic.addresses) == {}


def solicitation(mac: str, source: str) -> bytes:
    """Return what makes the gateway remember its sender: a question with a link-layer address."""
    body = neighbour(mac, GATEWAY6, solicited=True) + bytes((1, 1)) + mac_bytes(mac)
    message = upper6(source, GATEWAY6, ICMPV6, body)
    return ethernet(GATEWAY_MAC, mac, IPV6, ipv6(source, GATEWAY6, ICMPV6, message))


async def test_a_guest_that_makes_up_addresses_does_not_fill_the_table_of_neighbours() -> None:
    async with open_rig(2) as rig:
        me, victim = rig.guests

        def remembered() -> set[str]:
            listing = inside(rig.tenant, lambda: run(["ip", "-6", "neigh", "show", "dev", BRIDGE]))
            return {line.split()[0] for line in listing.splitlines()}.intersection(sources)

        # Its kernel's own counts as well, and is sent from at a moment of its own.
        sources = [me.link_local, *(f"fe80::bad:{number:x}" for number in range(199))]
        made_up = [solicitation(me.nic.mac, source) for source in sources]
        with places(rig, me, victim) as at:
            seen = [at.seen({"": frame}) for frame in made_up]
            assert sum(map(len, seen)) == LOCALS_MAX
            assert len(remembered()) == LOCALS_MAX
            assert at.seen({"": made_up[0]}), "one that is known stays so"
            other = solicitation(me.nic.mac, me.address6)
            assert at.seen({"": other}), "its own address is no matter of this"
        with places(rig, victim, me) as at:
            assert at.seen({"": solicitation(victim.nic.mac, LOCAL)}), "nor are other guests"
            rig.nft_text("delete table bridge chv")
        with places(rig, me, victim) as at:
            assert all(at.seen({"": frame}) for frame in made_up)
            assert len(remembered()) == len(made_up)


def run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def test_whether_an_own_address_is_a_duplicate_is_asked_in_vain_and_not_counted() -> None:
    async with open_rig(2) as rig:  # the gateway, which answers for it, would say yes
        me, victim = rig.guests
        for target, passes in ((me.address6, False), (LOCAL, True)):
            question = six(me.nic.mac, "::", ICMPV6, neighbour(me.nic.mac, target, solicited=True))
            with places(rig, me, victim) as at:
                assert at.seen({"question": question}) == ({"question"} if passes else set())
        listing = await rig.nft.list_counters(f"/run/netns/{rig.tenant}", counters.COMMANDS)
        assert counters.drops(listing) == {}
