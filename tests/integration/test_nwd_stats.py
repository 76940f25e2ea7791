"""Counters of a NIC: as the guest sees them, and why what it sent or was sent was dropped."""

from __future__ import annotations

import os
import socket

import anyio.to_thread
import pytest

from chv.common.wire.nwd import NicInfo
from chv.common.wire.nwd_policy import NIC_STATS, GetNicStats, NicStats
from chv.nwd import stats
from tests.helpers import wait_until
from tests.integration import nwd_frames as frames
from tests.integration.nwd_helpers import (
    IDS,
    WAN_ADDRESS,
    Guest,
    Node,
    Wire,
    inside,
    ip,
    needs_nwd,
    open_guest,
    open_node,
)

pytestmark = [pytest.mark.root, needs_nwd]


async def stats_of(node: Node, *nics: NicInfo) -> list[NicStats]:
    reply = await node.call(NIC_STATS, GetNicStats(nic_ids=[nic.nic_id for nic in nics]))
    found: list[NicStats] = reply.nics
    return found


async def connects(guest: Guest, address: str, port: int) -> bool:
    return await anyio.to_thread.run_sync(lambda: guest.connects(address, port, 0.3))


async def test_what_the_guest_sends_is_its_tx_and_what_it_gets_its_rx() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic, idle = await node.attach(network), await node.attach(network)
        async with open_guest(node, nic) as guest:
            guest.configure()
            (before,) = await stats_of(node, nic)

            def send() -> None:
                for _ in range(20):
                    assert guest.pings(nic.gateway)

            await anyio.to_thread.run_sync(send)
            (after,) = await stats_of(node, nic)
            own = ip("-n", guest.name, "-s", "link", "show", "eth0")
            assert 20 <= after.tx_packets - before.tx_packets < 40
            assert 20 <= after.rx_packets - before.rx_packets < 40
            assert after.tx_bytes - before.tx_bytes >= 20 * 42
            assert str(after.tx_packets) in own, own
            everybody = await stats_of(node)
            assert {each.nic_id for each in everybody} == {nic.nic_id, idle.nic_id}


async def test_drops_are_told_by_reason_and_nic() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic, other = await node.attach(network), await node.attach(network)
        async with open_guest(node, other) as guest:
            guest.configure()
            wire = Wire(await node.open(nic.nic_id))
            try:
                for _ in range(3):
                    wire.send(frames.dhcp(frames.DISCOVER, "02:00:00:00:00:99"))
                assert not await connects(guest, nic.address, 22), (
                    "nothing comes in without a group"
                )
                of_nic, of_other = await stats_of(node, nic, other)
            finally:
                os.close(wire.fd)
        assert of_nic.drops["spoofed_mac"] == 3
        assert of_nic.drops["not_allowed"] >= 1
        assert "spoofed_mac" not in of_other.drops


async def test_a_nic_that_is_not_there_has_no_statistics() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        await node.detach(nic.nic_id)
        assert await stats_of(node, nic) == []
        assert await stats_of(node) == []


def send_datagrams() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        for port in range(4000, 4010):
            sender.sendto(b"x", (WAN_ADDRESS, port))


async def test_connections_of_a_network_are_counted_in_its_namespace() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        before, limit = inside(nic.netns, stats._tracked)
        assert limit > 0
        async with open_guest(node, nic) as guest:
            guest.configure()
            guest.run(send_datagrams)
            await wait_until(lambda: inside(nic.netns, stats._tracked)[0] >= before + 10)
        assert not any("tracked" in text for text in (await node.health()).warnings)
