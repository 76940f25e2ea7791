"""Frames that a guest must not get through, each with proof that it gets through without rules."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import anyio.to_thread
import pytest

from chv.common.wire.nwd import NicInfo
from tests.integration import nwd_frames as frames
from tests.integration.nwd_helpers import (
    IDS,
    Node,
    Wire,
    inside,
    needs_nwd,
    nft_in,
    open_node,
    open_wire,
)

pytestmark = [pytest.mark.root, needs_nwd]

MARK = b"CHV-MARK"
BARRIER = 0x0EEE
NOBODY = "00:00:00:00:00:00"
STRANGER = "02:00:00:00:0b:02"
GATEWAY = "10.7.0.1"


def udp(mac: str, source: str, source_port: int = 5555, target_port: int = 5555) -> bytes:
    packet = frames.udp((source, source_port), ("10.7.0.255", target_port), MARK)
    return frames.ethernet(frames.BROADCAST, mac, frames.IPV4, packet)


def attacks(me: NicInfo, victim: NicInfo) -> dict[str, bytes]:
    """Frames by name; each carries a mark or a sender that tells it apart."""
    mac, mine, theirs = me.mac, me.address, victim.address
    advertisement = frames.router_advertisement("fe80::ff:fe00:1")
    tagged = b"\x00\x05" + struct.pack("!H", frames.IPV4)
    return {
        "another source MAC": udp(STRANGER, mine),
        "the victim's address": udp(mac, theirs),
        "the gateway's address": udp(mac, GATEWAY),
        "an address of nobody": udp(mac, "10.7.0.77"),
        "an outside address": udp(mac, "203.0.113.9"),
        "no address on another port": udp(mac, "0.0.0.0"),
        "ARP reply for the gateway": frames.arp(2, (mac, GATEWAY), (victim.mac, theirs)),
        "ARP announcing the victim": frames.arp(1, (mac, theirs), (NOBODY, theirs)),
        "ARP with another inner MAC": frames.arp(
            2, (STRANGER, mine), (victim.mac, theirs), outer=mac
        ),
        "a DHCP server": udp(mac, mine, 67, 68),
        "a DHCP server by the gateway's address": udp(mac, GATEWAY, 67, 68),
        "IPv6 router advertisement": frames.ethernet(
            "33:33:00:00:00:01", mac, frames.IPV6, advertisement
        ),
        "IPv6 datagram": frames.ethernet(
            "33:33:00:00:00:01",
            mac,
            frames.IPV6,
            frames.ipv6("fe80::1", "ff02::1", 17, b"\0" * 8 + MARK),
        ),
        "VLAN tag": frames.ethernet(frames.BROADCAST, mac, 0x8100, tagged + udp(mac, theirs)[14:]),
        "unknown protocol": frames.ethernet(frames.BROADCAST, mac, 0x88B5, MARK * 8),
    }


def allowed(me: NicInfo, victim: NicInfo) -> dict[str, bytes]:
    mac, mine = me.mac, me.address
    return {
        "own broadcast": udp(mac, mine),
        "own ARP request": frames.arp(1, (mac, mine), (NOBODY, victim.address)),
        "ARP probe": frames.arp(1, (mac, "0.0.0.0"), (NOBODY, mine)),
        "RARP announcement": frames.ethernet(frames.BROADCAST, mac, frames.RARP, b"\0" * 28),
    }


class Listeners:
    """What arrives at the gateway's bridge and at the victim."""

    def __init__(self, bridge: socket.socket, victim: Wire) -> None:
        self._bridge = bridge
        self._victim = victim

    def sees(self, attacker: Wire, frame: bytes, me: NicInfo) -> bool:
        """Send a frame and one that is allowed after it; tell whether the first came through."""
        barrier = frames.ethernet(
            frames.BROADCAST,
            me.mac,
            frames.IPV4,
            frames.udp((me.address, BARRIER), ("10.7.0.255", BARRIER), MARK),
        )
        attacker.send(frame)
        attacker.send(barrier)
        seen = False
        while True:
            received = self._bridge.recv(4096)
            if received[:60] == barrier[:60]:
                return seen or self._victim_has(frame)
            seen = seen or received[:60] == frame[:60] or self._untagged(received, frame)

    def _untagged(self, received: bytes, frame: bytes) -> bool:
        """A packet socket gets the tag beside the frame, not in it."""
        return frame[12:14] == b"\x81\x00" and received[14:50] == frame[18:54]

    def _victim_has(self, frame: bytes) -> bool:
        accepts = self._victim.receive(
            lambda received: True if received[:60] == frame[:60] else None, timeout_s=0.05
        )
        return bool(accepts)


@contextmanager
def listening(me: NicInfo, victim: Wire) -> Iterator[Listeners]:
    def make() -> socket.socket:
        bridge = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
        bridge.bind(("br0", 3))
        bridge.settimeout(5)
        return bridge

    with inside(me.netns, make) as bridge:
        yield Listeners(bridge, victim)


async def seen_frames(
    node: Node, me: NicInfo, listeners: Listeners, attacker: Wire, sent: dict[str, bytes]
) -> set[str]:
    def run() -> set[str]:
        return {name for name, frame in sent.items() if listeners.sees(attacker, frame, me)}

    return await anyio.to_thread.run_sync(run)


async def test_no_forged_frame_passes_and_each_would_without_the_rules() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        me, victim = await node.attach(network), await node.attach(network)
        forged, honest = attacks(me, victim), allowed(me, victim)
        async with open_wire(node, me.nic_id) as wire, open_wire(node, victim.nic_id) as other:
            with listening(me, other) as listeners:
                assert await seen_frames(node, me, listeners, wire, forged) == set()
                assert await seen_frames(node, me, listeners, wire, honest) == set(honest)
                await node.end()  # or it would put the rules back
                nft_in(me.netns, "delete table bridge chv")
                assert await seen_frames(node, me, listeners, wire, forged) == set(forged)


async def test_a_frame_reaches_the_bridge_and_never_another_port() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        me, victim = await node.attach(network), await node.attach(network)
        async with open_wire(node, me.nic_id) as wire, open_wire(node, victim.nic_id) as other:
            wire.send(udp(me.mac, me.address))
            unicast = frames.udp((me.address, 5555), (victim.address, 5555), MARK)
            wire.send(frames.ethernet(victim.mac, me.mac, frames.IPV4, unicast))
            assert other.receive(lambda frame: MARK in frame or None, timeout_s=0.3) is None


async def test_a_guest_cannot_reach_metadata_the_host_or_the_gateways_services() -> None:
    async with open_node() as node:
        network = IDS.uid()
        info = await node.ensure(network)
        me = await node.attach(network)
        targets = {
            "metadata": ("169.254.169.254", 80),
            "the host's end of the uplink": (_host_end(info.uplink_address), 80),
            "the host": ("198.18.7.2", 80),
            "a gateway's port": (GATEWAY, 22),
        }
        listener = inside(node.sandbox.host, lambda: socket.create_server(("0.0.0.0", 80)))
        inner = inside(me.netns, lambda: socket.create_server(("0.0.0.0", 22)))
        gateway_mac = _mac_of_bridge(me.netns)
        with listener, inner:
            async with open_wire(node, me.nic_id) as wire:
                for name, target in targets.items():
                    syn = frames.tcp_syn((me.address, 4000), target)
                    wire.send(frames.ethernet(gateway_mac, me.mac, frames.IPV4, syn))
                    answer = wire.receive(_from(target), timeout_s=0.3)
                    assert answer is None, name


def _host_end(uplink_address: str) -> str:
    head, _, last = uplink_address.rpartition(".")
    return f"{head}.{int(last) - 1}"


def _mac_of_bridge(name: str) -> str:
    return inside(name, lambda: _interface_mac("br0"))


def _interface_mac(interface: str) -> str:
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as packets:
        packets.bind((interface, 0))
        return ":".join(f"{byte:02x}" for byte in packets.getsockname()[4])


def _from(target: tuple[str, int]):  # type: ignore[no-untyped-def]
    def accept(frame: bytes) -> bool | None:
        tcp = frame[12:14] == b"\x08\x00" and frame[23] == 6
        return True if tcp and frame[26:30] == socket.inet_aton(target[0]) else None

    return accept
