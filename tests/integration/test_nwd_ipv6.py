"""IPv6 on real kernels: leases and advertisements, names, the outside, neighbours, repairs."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial

import pytest

from tests.integration import nwd_frames as frames
from tests.integration.nwd_dhcp6 import DNS_SERVERS, SEARCH, lease6
from tests.integration.nwd_helpers import (
    HOST_ADDRESS6,
    IDS,
    SUBNET6,
    WAN_ADDRESS,
    WAN_ADDRESS6,
    Guest,
    inside,
    ip,
    needs_nwd,
    open_guest,
    open_node,
)

pytestmark = [pytest.mark.root, needs_nwd]
DEADLINE_S = 8.0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def resolve(guest: Guest, name: str, kind: int, server: str) -> tuple[int, list[bytes]]:
    def ask() -> bytes:
        family = socket.AF_INET6 if ":" in server else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as client:
            client.settimeout(2)
            client.sendto(frames.dns_query(name, kind), (server, 53))
            return client.recv(512)

    return frames.dns_answers(guest.run(ask))


def packed6(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6, address)


def shown_in(guest: Guest, *arguments: str) -> str:
    return ip("-n", guest.name, *arguments)


async def test_a_guest_configures_itself_and_reaches_the_outside() -> None:
    async with open_node() as node:
        network = IDS.uid()
        info = await node.ensure(network, subnet6=SUBNET6, search=["corp.test"])
        assert (info.subnet6, info.gateway6) == (SUBNET6, "fd00:7::1")
        nic = await node.attach(network, hostname="one")
        assert (nic.address, nic.address6) == ("10.7.0.2", "fd00:7::2")
        async with open_guest(node, nic) as guest:
            until(lambda: "default" in shown_in(guest, "-6", "route"), "advertised router")
            until(lambda: "tentative" not in shown_in(guest, "address"), "link-local")
            route = shown_in(guest, "-6", "route")
            assert "default via fe80::1 dev eth0 proto ra" in route
            assert "fd00:7::" not in shown_in(guest, "address"), "none of its own making"
            address, options = guest.run(lambda: lease6("eth0", nic.mac))
            assert address == nic.address6
            assert options[DNS_SERVERS] == packed6("fd00:7::1")
            assert options[SEARCH] == b"\x03net\x04test\x00\x04corp\x04test\x00"
            # Duplicate address detection is on, as in any guest.
            ip("-n", guest.name, "address", "add", f"{address}/128", "dev", "eth0")
            until(lambda: " tentative " not in shown_in(guest, "address"), "settled")
            assert "dadfailed" not in shown_in(guest, "address"), "nobody answers for it to itself"
            assert guest.pings("fd00:7::1")
            assert guest.pings(WAN_ADDRESS6)
            with inside(node.sandbox.wan, lambda: _server(80)) as server:
                assert guest.connects(WAN_ADDRESS6, 80)
                _, peer = server.accept()
                assert peer[0] == HOST_ADDRESS6, "the world sees the host's address"


def _server(port: int) -> socket.socket:
    return socket.create_server(("::", port), family=socket.AF_INET6)


async def test_names_and_their_reverse_have_both_families() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, subnet6=SUBNET6)
        one = await node.attach(network, hostname="one")
        two = await node.attach(network, hostname="two")
        async with open_guest(node, one) as guest:
            guest.configure()
            guest.configure6()
            for server in ("10.7.0.1", "fd00:7::1"):
                assert resolve(guest, "two", 28, server) == (0, [packed6(two.address6)])
                assert resolve(guest, "two.net.test", 1, server)[1] == [
                    socket.inet_aton(two.address)
                ]
            nibbles = ".".join(reversed(packed6(two.address6).hex()))
            code, found = resolve(guest, f"{nibbles}.ip6.arpa", 12, "fd00:7::1")
            assert (code, found) == (0, [b"\x03two\x03net\x04test\x00"])
            unknown = nibbles.replace("3.", "9.", 1)
            assert resolve(guest, f"{unknown}.ip6.arpa", 12, "fd00:7::1")[0] == 3


async def test_isolated_guests_reach_each_other_through_the_gateway() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, subnet6=SUBNET6)
        groups = [await node.allow_all()]
        one = await node.attach(network, security_groups=groups)
        two = await node.attach(network, security_groups=groups)
        stranger = await node.attach(network)
        async with (
            open_guest(node, one) as guest,
            open_guest(node, two) as other,
            open_guest(node, stranger) as third,
        ):
            for each in (guest, other, third):
                each.configure6()
            assert guest.pings(two.address6)
            with other.listen(80, socket.AF_INET6), third.listen(80, socket.AF_INET6):
                assert guest.connects(two.address6, 80)
                assert not guest.connects(stranger.address6, 80, 0.3), "it is in no group"
            gateway = (await node.network(network)).gateway6
            macs = {
                line.split()[0]: line.split()[4]
                for line in shown_in(guest, "-6", "neigh").splitlines()
                if "lladdr" in line
            }
            assert macs[two.address6] == macs.get(gateway, macs[two.address6])
            assert macs[two.address6] != two.mac, "the gateway answers for it"


async def test_an_address_that_is_given_again_is_leased_to_the_next_guest() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, subnet6=SUBNET6)
        first = await node.attach(network, address6="fd00:7::77")
        async with open_guest(node, first) as guest:
            until(lambda: "tentative" not in shown_in(guest, "address"), "link-local")
            assert guest.run(lambda: lease6("eth0", first.mac))[0] == "fd00:7::77"
        await node.detach(first.nic_id)
        second = await node.attach(network, address6="fd00:7::77")
        async with open_guest(node, second) as guest:
            until(lambda: "tentative" not in shown_in(guest, "address"), "link-local")
            assert guest.run(lambda: lease6("eth0", second.mac))[0] == "fd00:7::77"


async def test_a_guest_that_starts_with_another_identity_gets_the_same_address() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, subnet6=SUBNET6)
        nic = await node.attach(network)
        for duid in (b"", b"\x00\x04" + bytes(range(16)), b"\x00\x04" + bytes(16)):
            async with open_guest(node, nic) as guest:
                until(lambda: "tentative" not in shown_in(guest, "address"), "link-local")
                found = guest.run(partial(lease6, "eth0", nic.mac, duid=duid))
                assert found[0] == nic.address6


async def test_ipv6_comes_and_goes_with_the_network_and_its_guests() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        assert nic.address6 == ""
        await node.ensure(network, 2, subnet6=SUBNET6)
        with_v6 = await node.attach(network, hostname="six")
        async with open_guest(node, with_v6) as guest:
            guest.configure6()
            assert guest.pings("fd00:7::1")
            assert guest.pings(WAN_ADDRESS6)
        await node.detach(with_v6.nic_id)
        await node.ensure(network, 3)
        links = ip("-n", nic.netns, "-6", "address", "show", "dev", "br0")
        assert links == "", "no IPv6 is left on the bridge"
        assert (await node.network(network)).gateway6 == ""


async def test_lost_proxies_routes_and_addresses_are_repaired() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, subnet6=SUBNET6)
        nic = await node.attach(network)
        damages: list[tuple[list[str], list[str]]] = [
            (["-6", "neigh", "del", "proxy", nic.address6, "dev", "br0"], ["add_proxy"]),
            (["-6", "neigh", "add", "proxy", "fd00:7::99", "dev", "br0"], ["delete_proxy"]),
            (["-6", "route", "del", "default"], ["set_default_route"]),
            (["address", "del", "fd00:7::1/64", "dev", "br0"], ["add_address"]),
            (["address", "add", "fd00:9::1/64", "dev", "br0"], ["delete_address"]),
        ]
        for damage, repair in damages:
            ip("-n", nic.netns, *damage)
            node.forget_log()
            await node.ensure(network, subnet6=SUBNET6)
            assert node.applied() == repair, damage
        node.forget_log()
        await node.ensure(network, subnet6=SUBNET6)
        assert node.applied() == []
        await node.detach(nic.nic_id)
        assert ip("-n", nic.netns, "-6", "neigh", "show", "proxy").strip() == ""


async def test_an_ipv4_network_has_no_ipv6_at_all() -> None:
    async with open_node() as node:
        network = IDS.uid()
        info = await node.ensure(network)
        nic = await node.attach(network)
        for name, link in ((nic.netns, "br0"), (nic.netns, nic.tap), (nic.netns, "up0")):
            assert ip("-n", name, "-6", "address", "show", "dev", link) == ""
        uplink = node.layout.uplink(network)
        assert ip("-n", node.sandbox.host, "-6", "address", "show", "dev", uplink) == ""
        assert info.uplink_address6 == ""
        async with open_guest(node, nic) as guest:
            guest.configure()
            assert guest.pings(WAN_ADDRESS)
