"""The main path on real kernels: a network, NICs, DHCP, DNS, NAT and a connection into a guest."""

from __future__ import annotations

import socket

import pytest

from chv.common.errors import PermissionDenied, Unavailable
from tests.integration import nwd_frames as frames
from tests.integration.nwd_helpers import (
    HOST_ADDRESS,
    IDS,
    WAN_ADDRESS,
    Guest,
    Node,
    connects,
    inside,
    ip,
    lease,
    needs_nwd,
    open_guest,
    open_node,
    open_wire,
)

pytestmark = [pytest.mark.root, needs_nwd]


def resolve(guest: Guest, name: str, kind: int = 1) -> tuple[int, list[bytes]]:
    def ask() -> bytes:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.settimeout(2)
            client.sendto(frames.dns_query(name, kind), (guest.info.gateway, 53))
            return client.recv(512)

    return frames.dns_answers(guest.run(ask))


async def test_a_guest_gets_its_address_names_and_the_outside() -> None:
    async with open_node() as node:
        network = IDS.uid()
        info = await node.ensure(network)
        assert (info.status, info.gateway) == ("ready", "10.7.0.1")
        one = await node.attach(network, hostname="one")
        two = await node.attach(network, hostname="two")
        async with open_wire(node, one.nic_id) as wire:
            address, options = lease(wire, one.mac)
        assert address == one.address == "10.7.0.2"
        assert options[26] == (1450).to_bytes(2, "big")
        assert options[3] == options[6] == socket.inet_aton("10.7.0.1")
        assert options[15] == b"net.test"
        async with open_guest(node, one) as guest, open_guest(node, two) as other:
            guest.configure()
            other.configure()
            assert resolve(guest, "two") == (0, [socket.inet_aton(two.address)])
            assert resolve(guest, "two.net.test") == (0, [socket.inet_aton(two.address)])
            code, names = resolve(guest, "3.0.7.10.in-addr.arpa", 12)
            assert (code, names[0]) == (0, b"\x03two\x03net\x04test\x00")
            assert guest.pings("10.7.0.1")
            with other.listen(8080):
                assert not guest.connects(two.address, 8080, 0.3), "no group of it allows that"
            with inside(node.sandbox.wan, lambda: socket.create_server(("0.0.0.0", 80))) as server:
                assert guest.connects(WAN_ADDRESS, 80)
                _, peer = server.accept()
                assert peer[0] == "198.18.7.2", "the world sees the host's address"


async def test_the_gateway_connects_to_declared_ports_alone() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network, guest_ports=[22])
        async with open_guest(node, nic) as guest:
            guest.configure()
            with pytest.raises(Unavailable, match="refused"):
                await node.connect_guest(nic.nic_id, 22)
            with guest.listen(22) as listener, await node.connect_guest(nic.nic_id, 22) as out:
                inner, peer = listener.accept()
                assert peer[0] == "10.7.0.1"
                inner.sendall(b"SSH-2.0-x\r\n")
                assert out.recv(100) == b"SSH-2.0-x\r\n"
                await node.end()  # the stream does not depend on us
                out.sendall(b"still here")
                assert inner.recv(100) == b"still here"
            await node.start()
            with pytest.raises(PermissionDenied, match="8080"):
                await node.connect_guest(nic.nic_id, 8080)


async def test_the_uplink_cannot_open_a_connection_to_a_guest() -> None:
    async with open_node() as node:
        network = IDS.uid()
        info = await node.ensure(network)
        nic = await node.attach(network)
        async with open_guest(node, nic) as guest:
            guest.configure()
            with guest.listen(8080):
                add_route(node, "10.7.0.0/24", info.uplink_address)
                assert not inside(node.sandbox.host, lambda: connects(nic.address, 8080))
                assert not inside(node.sandbox.wan, lambda: connects(nic.address, 8080))


def add_route(node: Node, subnet: str, via: str) -> None:
    """Give the host and the world the route that an attacker would use."""
    ip("-n", node.sandbox.host, "route", "add", subnet, "via", via)
    ip("-n", node.sandbox.wan, "route", "add", subnet, "via", HOST_ADDRESS)
