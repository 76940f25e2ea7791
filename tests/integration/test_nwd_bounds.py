"""A guest for which nobody says a bound cannot fill the table that all guests share."""

from __future__ import annotations

import itertools
import socket
from functools import partial

import anyio.to_thread
import pytest

from chv.nwd.bounds import connections_default
from chv.nwd.kernel import sysctl
from tests.helpers import wait_until
from tests.integration.nwd_helpers import (
    IDS,
    WAN_ADDRESS,
    inside,
    needs_nwd,
    nft_in,
    open_guest,
    open_node,
)

pytestmark = [pytest.mark.root, needs_nwd]
COUNT = "net.netfilter.nf_conntrack_count"
BURST = 500
OTHERS = 16  # what is tracked beside: a ping, the neighbours of the gateway


def expected() -> int:
    return connections_default(sysctl.read("net.netfilter.nf_conntrack_max"))


async def test_the_bound_of_a_nic_is_shown_and_stands() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        assert nic.connections_max == expected()
        assert nic.address in nft_in(nic.netns, "list map inet chv limits4")
        other = await node.attach(network, connections_max=100)
        assert other.connections_max == 100
        changed = await node.attach(
            network, other.nic_id, 2, vm_id=other.vm_id, hostname=other.hostname
        )
        assert changed.connections_max == expected()


async def test_a_guest_that_opens_connections_without_end_stays_within_its_bound() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        async with open_guest(node, nic) as guest:
            guest.configure()
            assert guest.pings(WAN_ADDRESS)
            ports = itertools.cycle(range(10_000, 60_000))

            def burst() -> int:
                with inside(guest.name, partial(socket.socket, type=socket.SOCK_DGRAM)) as sender:
                    for port in itertools.islice(ports, BURST):
                        sender.sendto(b"x", (WAN_ADDRESS, port))
                return int(inside(nic.netns, partial(sysctl.read, COUNT)))

            async def is_full() -> bool:
                return await anyio.to_thread.run_sync(burst) >= nic.connections_max

            await wait_until(is_full, timeout_s=60, what="the bound is reached")
            for _ in range(6):
                assert await anyio.to_thread.run_sync(burst) <= nic.connections_max + OTHERS
