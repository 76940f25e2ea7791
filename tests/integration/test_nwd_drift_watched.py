"""What others do to a network while nwd runs is seen as it happens, and what nwd does is not."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio.lowlevel
import msgspec
import pytest

from chv.common.wire.nwd import NicInfo, Shape
from tests.helpers import wait_until
from tests.integration.nwd_helpers import (
    HOST_ADDRESS,
    IDS,
    SUBNET6,
    Node,
    ip,
    leased,
    needs_nwd,
    nft_in,
    open_node,
)
from tests.integration.nwd_objects import OUT, rule, set_exposure, set_group
from tests.integration.test_nwd_drift import DAMAGE, PUBLIC, Broken, truth_of, works

pytestmark = [pytest.mark.root, needs_nwd]
PATIENCE_S = 60.0
SEEN = "changed_by_others"
# What the kernel tells of. Files, neighbour entries and settings of single links wait for the
# resync; a dnsmasq is watched by its process.
WATCHED = (
    "tap deleted",
    "tap down",
    "tap off the bridge",
    "tap not isolated",
    "tap of another size",
    "a link of somebody",
    "rules flushed",
    "a rule added",
    "an element removed",
    "default route deleted",
    "bridge deleted",
    "bridge address deleted",
    "bridge address added",
    "bridge MAC changed",
    "uplink deleted inside",
    "uplink deleted outside",
    "uplink down",
    "host table deleted",
    "host rule deleted",
    "public route deleted",
    "public route added",
    "IPv6 route deleted",
    "IPv6 address deleted",
    "IPv6 address added",
    "bridge too small for IPv6",
    "uplink too small for IPv6",
    "host's end too small for IPv6",
    "bridge down",
    "uplink down inside",
    "IPv6 forwarding off",
    "forwarding off",
    "namespace deleted",
    "namespace replaced by a file",
)


def seen(node: Node) -> list[list[str]]:
    """What nwd says it has seen of others since `forget_log`, one list a look."""
    lines = (msgspec.json.decode(line) for line in node.log.read_bytes().splitlines())
    return [line["what"] for line in lines if line["event"] == SEEN]


@asynccontextmanager
async def open_net(**changes: Any) -> AsyncIterator[tuple[Node, str, NicInfo]]:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, **changes)
        yield node, network, await node.attach(network)


async def repaired(node: Node, nic: NicInfo, truth: list[str], name: str) -> None:
    """Wait until somebody's change was seen, not come upon, and everything is as it was."""

    def is_right() -> bool:
        try:
            return bool(seen(node)) and truth_of(node, nic) == truth
        except AssertionError:  # a link is away
            return False

    await wait_until(is_right, timeout_s=PATIENCE_S, what=name)


@pytest.mark.parametrize("name", WATCHED)
async def test_a_change_by_others_is_seen_and_repaired(
    name: str, net6: tuple[Node, NicInfo, list[str]]
) -> None:
    node, nic, truth = net6
    node.forget_log()
    DAMAGE[name](Broken(node, nic))
    await repaired(node, nic, truth, name)


@pytest.fixture
async def net6() -> AsyncIterator[tuple[Node, NicInfo, list[str]]]:
    async with open_net(subnet6=SUBNET6, public_addresses=[PUBLIC]) as (node, _, nic):
        yield node, nic, truth_of(node, nic)


async def test_everything_at_once_is_repaired_and_the_network_works() -> None:
    async with open_net() as (node, _, nic):
        truth = truth_of(node, nic)
        nft_in(nic.netns, "flush ruleset")
        ip("-n", nic.netns, "link", "delete", nic.tap)
        nft_in(node.sandbox.host, f"delete table inet {node.layout.host_table}")
        await repaired(node, nic, truth, "all of it")
        await works(node, nic)


async def test_what_nwd_does_itself_is_no_change_by_others() -> None:
    async with open_net(subnet6=SUBNET6) as (node, network, nic):
        group = IDS.uid()
        await set_group(node, group, OUT)
        for number in range(5):
            other = await node.attach(
                network, security_groups=[group], shape=Shape(egress_bps=10_000_000)
            )
            held = await node.open(other.nic_id)
            assert await leased(node, nic) == nic.address
            await set_group(node, group, OUT, rule("ingress", "tcp", [f"{80 + number}"]),
                            generation=2 + number)  # fmt: skip
            os.close(held)
            if number % 2:
                await node.detach(other.nic_id)
        wanted: dict[str, Any] = {"addresses": ["10.7.0.200", HOST_ADDRESS], "port": 8080}
        await set_exposure(node, network, IDS.uid(), targets=[nic.nic_id], **wanted)
        await node.ensure(network, 2, subnet6=SUBNET6, mtu=1400, public_addresses=[PUBLIC])
        second = IDS.uid()
        await node.ensure(second, subnet="10.8.0.0/24")
        await node.delete(second)
        ip("-n", nic.netns, "route", "delete", "default")
        await wait_until(lambda: seen(node), timeout_s=PATIENCE_S, what="the marker is seen")
        assert seen(node) == [["the route to 0.0.0.0/0 was changed"]]


async def test_the_last_nic_leaves_the_bridge_as_it_was() -> None:
    async with open_net() as (node, _, nic):
        before = ip("-n", nic.netns, "-br", "link", "show", "br0")
        mtu = ip("-n", nic.netns, "link", "show", "br0").split(" mtu ")[1].split()[0]
        await node.detach(nic.nic_id)
        assert ip("-n", nic.netns, "link", "show", "br0").split(" mtu ")[1].split()[0] == mtu
        assert ip("-n", nic.netns, "-br", "link", "show", "br0") == before


async def test_what_was_lost_is_looked_at() -> None:
    async with open_net() as (node, _, nic):
        truth = truth_of(node, nic)
        node.forget_log()
        assert node.process is not None
        os.kill(node.process.pid, 19)  # SIGSTOP: it reads nothing, and the kernel's queue fills
        try:
            batch = [f"link set lo mtu {1400 + number % 2}" for number in range(20_000)]
            script = node.layout.run / "flood"
            script.write_text("\n".join(batch))
            ip("-n", nic.netns, "-batch", str(script))
            ip("-n", nic.netns, "link", "delete", nic.tap)
        finally:
            os.kill(node.process.pid, 18)
        await repaired(node, nic, truth, "after an overflow")
        assert any("news were lost" in what for what in seen(node))


async def test_somebody_who_keeps_at_it_is_named_and_does_not_keep_nwd_busy() -> None:
    async with open_net() as (node, network, nic):
        truth = truth_of(node, nic)
        node.forget_log()

        async def fought() -> bool:
            nft_in(nic.netns, "flush ruleset")
            return "keeps changing it" in (await node.network(network)).message

        await wait_until(fought, timeout_s=PATIENCE_S, what="the fight is told")
        info, health = await node.network(network), await node.health()
        assert info.status == "ready"
        assert any("keeps changing it" in text and network in text for text in health.warnings)
        looks = len(seen(node))
        for _ in range(200):
            nft_in(nic.netns, "flush ruleset")
            await anyio.lowlevel.checkpoint()
        assert len(seen(node)) <= looks + 20, "looks become rare"
        await repaired(node, nic, truth, "the rules stand in the end")


async def test_a_deleted_network_leaves_no_socket_that_would_keep_its_namespace() -> None:
    async with open_net() as (node, network, nic):
        assert node.process is not None
        await node.detach(nic.nic_id)
        await node.delete(network)
        pid = node.process.pid
        before = _sockets(pid)
        for _ in range(3):
            other = IDS.uid()
            await node.ensure(other)
            await node.delete(other)
        await wait_until(lambda: _sockets(pid) <= before, what="every socket is closed")


async def test_many_networks_have_room_for_their_sockets() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with open_node(start=False) as node:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))  # as a plain service has less
        try:
            await node.start()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert node.process is not None
        limits = resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE)
        assert limits == (min(hard, 16384), hard)


async def test_looks_that_change_nothing_leave_no_socket() -> None:
    async with open_net() as (node, network, _):
        assert node.process is not None
        pid = node.process.pid
        before = _sockets(pid)
        for _ in range(5):
            await node.ensure(network)
        await wait_until(lambda: _sockets(pid) <= before, what="every socket is closed")


def _sockets(pid: int) -> int:
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += os.readlink(entry).startswith("socket:")  # noqa: PTH115
    return count
