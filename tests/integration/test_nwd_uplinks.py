"""How networks meet the outside: routed, translated, not at all, public addresses; open bridges."""

from __future__ import annotations

import socket
from functools import partial
from typing import Any

import pytest

from chv.common.errors import InUse
from tests.integration import nwd_frames as frames
from tests.integration.nwd_helpers import (
    HOST_ADDRESS,
    HOST_ADDRESS6,
    IDS,
    SUBNET6,
    WAN_ADDRESS,
    WAN_ADDRESS6,
    Guest,
    Node,
    connects,
    inside,
    ip,
    needs_nwd,
    nft_in,
    open_guest,
    open_node,
    open_wire,
    pings,
)

pytestmark = [pytest.mark.root, needs_nwd]
PUBLIC = "198.51.100.7"


def route_in_the_world(node: Node, *subnets: str) -> None:
    for subnet in subnets:
        via = HOST_ADDRESS6 if ":" in subnet else HOST_ADDRESS
        ip("-n", node.sandbox.wan, "route", "add", subnet, "via", via)


def seen_from(node: Node, guest: Guest, target: str) -> str:
    """Connect to the world; return whom it sees."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    address = "::" if ":" in target else "0.0.0.0"
    with inside(
        node.sandbox.wan, lambda: socket.create_server((address, 80), family=family)
    ) as server:
        assert guest.connects(target, 80), target
        return str(server.accept()[1][0])


async def test_a_routed_network_is_reached_by_its_own_addresses() -> None:
    async with open_node() as node:
        await node.end()
        before = node.snapshot()
        await node.start()
        network = IDS.uid()
        await node.ensure(network, uplink="routed", subnet6=SUBNET6)
        groups = [await node.allow_all()]
        nic = await node.attach(network, security_groups=groups)
        closed = await node.attach(network)
        route_in_the_world(node, "10.7.0.0/24", SUBNET6)
        async with open_guest(node, nic) as guest, open_guest(node, closed) as other:
            for each in (guest, other):
                each.configure()
                each.configure6()
            assert seen_from(node, guest, WAN_ADDRESS) == nic.address
            assert seen_from(node, guest, WAN_ADDRESS6) == nic.address6
            with (
                guest.listen(80),
                guest.listen(81, socket.AF_INET6),
                other.listen(80),
                other.listen(81, socket.AF_INET6),
            ):
                for name in (node.sandbox.wan, node.sandbox.host):
                    assert inside(name, lambda: connects(nic.address, 80)), name
                    assert inside(name, lambda: connects(nic.address6, 81)), name
                    assert not inside(name, lambda: connects(closed.address, 80, 0.2)), name
                    assert not inside(name, lambda: connects(closed.address6, 81, 0.2)), name
        for nic_id in (nic.nic_id, closed.nic_id):
            await node.detach(nic_id)
        await node.delete(network)
        await node.end()
        after = node.snapshot()
        assert after == before, "rules, routes, links and settings of the host"


async def test_a_public_address_is_the_networks_and_not_translated_by_the_host() -> None:
    async with open_node() as node:
        network = IDS.uid()
        info = await node.ensure(network, public_addresses=[PUBLIC])
        assert info.public_addresses == [PUBLIC]
        nic = await node.attach(network)
        route_in_the_world(node, f"{PUBLIC}/32")
        async with open_guest(node, nic) as guest:
            guest.configure()
            assert seen_from(node, guest, WAN_ADDRESS) == PUBLIC
            assert not inside(node.sandbox.wan, lambda: connects(PUBLIC, 80, 0.2))
        await node.ensure(network, 2)
        assert PUBLIC not in "".join(node.host_routes())
        async with open_guest(node, nic) as guest:
            guest.configure()
            assert seen_from(node, guest, WAN_ADDRESS) == HOST_ADDRESS


async def test_a_network_without_uplink_is_alone() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, uplink="none", subnet6=SUBNET6)
        groups = [await node.allow_all()]
        one = await node.attach(network, security_groups=groups)
        two = await node.attach(network, security_groups=groups)
        async with open_guest(node, one) as guest, open_guest(node, two) as other:
            for each in (guest, other):
                each.configure()
                each.configure6()
            assert guest.pings(two.address)
            assert guest.pings(two.address6)
            assert not guest.run(lambda: pings(WAN_ADDRESS, 0.2))
            assert not guest.run(lambda: pings(WAN_ADDRESS6, 0.2))
        assert node.layout.uplink(network) not in node.host_links()


async def test_what_the_host_routes_is_refused_to_a_second_network() -> None:
    async with open_node() as node:
        first = IDS.uid()
        wanted: dict[str, Any] = {
            "uplink": "routed",
            "public_addresses": [PUBLIC],
            "subnet6": SUBNET6,
        }
        await node.ensure(first, name="one", **wanted)
        for changes in (
            {"subnet": "10.7.0.128/25", "uplink": "routed"},
            {"subnet": "10.8.0.0/24", "public_addresses": [PUBLIC]},
            {"subnet": "10.8.0.0/24", "uplink": "routed", "subnet6": "fd00:7::/112"},
        ):
            with pytest.raises(InUse, match=r"network one \(tenant default\)"):
                await node.ensure(IDS.uid(), **changes)
        await node.ensure(first, 2, name="one", **wanted)
        await node.ensure(IDS.uid(), name="two", subnet="10.7.0.0/24")


async def test_an_open_bridge_carries_broadcast_and_multicast_between_guests() -> None:
    async with open_node() as node:
        heard = {}
        for l2 in ("open", "isolated"):
            network = IDS.uid()
            await node.ensure(network, l2=l2, subnet6=SUBNET6)
            one, two = await node.attach(network), await node.attach(network)
            async with open_wire(node, one.nic_id) as left, open_wire(node, two.nic_id) as right:
                for mark, target, port in (
                    (b"all", frames.BROADCAST, 5000),
                    (b"some", "01:00:5e:00:00:fb", 5353),
                ):
                    address = "10.7.0.255" if mark == b"all" else "224.0.0.251"
                    packet = frames.udp((one.address, port), (address, port), mark)
                    left.send(frames.ethernet(target, one.mac, frames.IPV4, packet))
                    found = right.receive(partial(_with, mark), timeout_s=0.5)
                    heard[l2, mark] = found is not None
                forged = frames.udp(("10.7.0.99", 9), ("10.7.0.255", 9), b"forged")
                left.send(frames.ethernet(frames.BROADCAST, one.mac, frames.IPV4, forged))
                assert not right.receive(lambda frame: b"forged" in frame or None, timeout_s=0.3)
        assert heard == {(l2, mark): l2 == "open" for l2 in ("open", "isolated")
                         for mark in (b"all", b"some")}  # fmt: skip


def _with(mark: bytes, frame: bytes) -> bytes | None:
    return frame if mark in frame else None


async def test_guests_of_an_open_bridge_find_each_other_themselves() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, l2="open", subnet6=SUBNET6)
        one, two = await node.attach(network), await node.attach(network)
        async with open_guest(node, one) as guest, open_guest(node, two) as other:
            for each in (guest, other):
                each.configure()
                each.configure6()
            assert guest.pings(two.address)
            assert guest.pings(two.address6)
            neighbours = ip("-n", guest.name, "neigh")
            assert neighbours.count(two.mac) == 2, "in both families the guest itself answered"
            assert guest.pings(WAN_ADDRESS6)
        await node.ensure(network, 2, subnet6=SUBNET6)
        ports = ip("-n", one.netns, "-d", "link", "show", "type", "bridge_slave")
        assert ports.count("isolated on") == 2, "the mode can change"


async def test_another_network_is_the_world_to_a_guest() -> None:
    async with open_node() as node:
        ours, theirs = IDS.uid(), IDS.uid()
        await node.ensure(ours, name="ours")
        await node.ensure(theirs, name="theirs", subnet="10.9.0.0/24", uplink="routed")
        groups = [await node.allow_all()]
        nic = await node.attach(ours)
        open_one = await node.attach(theirs, security_groups=groups)
        closed = await node.attach(theirs)
        async with (
            open_guest(node, nic) as guest,
            open_guest(node, open_one) as reached,
            open_guest(node, closed) as other,
        ):
            for each in (guest, reached, other):
                each.configure()
            with reached.listen(80), other.listen(80):
                assert guest.connects(open_one.address, 80)
                assert not guest.connects(closed.address, 80, 0.3)
                assert not reached.connects(nic.address, 80, 0.3), "what is translated is hidden"


async def test_forwarding_is_put_back_unless_others_forward_by_then() -> None:
    async with open_node() as node:
        before = node.host_forwarding()
        network = IDS.uid()
        for others in (False, True):
            await node.ensure(network, 1 + 2 * others, subnet6=SUBNET6)
            assert node.host_forwarding()["4 all forwarding"] == "1\n"
            assert node.host_forwarding()["6 all forwarding"] == "1\n"
            await node.end()
            await node.start()
            if others:
                nft_in(
                    node.sandbox.host,
                    "table ip somebody { chain c { type filter hook forward priority 0; }; }",
                )
            await node.delete(network, 2 + 2 * others)
            assert (node.host_forwarding() == before) is not others
        assert not [name for name in node.run_files() if "forwarding" in name]


async def test_forwarding_of_a_family_is_put_back_while_networks_of_the_other_stay() -> None:
    async with open_node() as node:
        before = node.host_forwarding()
        four, six = IDS.uid(), IDS.uid()
        await node.ensure(four)
        await node.ensure(six, subnet6=SUBNET6)
        assert node.host_forwarding()["6 all forwarding"] == "1\n"
        await node.delete(six, 2)
        assert node.host_forwarding()["4 all forwarding"] == "1\n"
        assert node.host_forwarding()["6 all forwarding"] == before["6 all forwarding"] == "0\n"
        await node.delete(four, 2)
        assert node.host_forwarding() == before


async def test_a_host_that_lives_on_advertisements_keeps_its_route_and_is_told() -> None:
    async with open_node() as node:
        ip("-n", node.sandbox.host, "-6", "route", "add", "default", "via", "fe80::99", "dev",
           "wan0", "proto", "ra", "metric", "512")  # fmt: skip
        await node.ensure(IDS.uid(), subnet6=SUBNET6)
        assert node.host_forwarding()["6 all forwarding"] == "0\n"
        (warning,) = (await node.health()).warnings
        assert "wan0 would lose the routes" in warning
        assert "accept_ra" in warning
