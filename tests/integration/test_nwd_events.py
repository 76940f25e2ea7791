"""What nwd shows in another way it tells of at once; what only the node can tell it is asked."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from chv.common.errors import InUse, InvalidArgument
from chv.common.wire import nwd_policy as wire
from chv.common.wire.types import Done, Empty
from tests.helpers import wait_until
from tests.integration.nwd_helpers import (
    HOST_ADDRESS,
    HOST_ADDRESS6,
    IDS,
    WAN_ADDRESS,
    Node,
    inside,
    ip,
    needs_nwd,
    nft_in,
    open_guest,
    open_node,
)
from tests.integration.nwd_objects import (
    ANYWHERE,
    OUT,
    delete_exposure,
    exposure,
    set_exposure,
    set_group,
)

pytestmark = [pytest.mark.root, needs_nwd]
PATIENCE_S = 60.0
NEW_ADDRESS = "198.18.7.77"
CHECK = wire.HealthCheck(
    protocol=wire.HealthProtocol.TCP, interval_s=0.2, timeout_s=0.2, rise=1, fall=1
)


@asynccontextmanager
async def watched(node: Node) -> AsyncIterator[list[tuple[str, str]]]:
    """Everything that nwd tells of within the block, once it has begun to."""
    told: list[tuple[str, str]] = []

    async def listen() -> None:
        async with node.client() as client:
            await client.stream(
                wire.WATCH_NETWORKS, Empty(), lambda event: told.append((event.kind, event.uid))
            )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(listen)
        await wait_until(lambda: told == [("node", "")], what="the first event")
        told.clear()
        yield told
        tasks.cancel_scope.cancel()


async def comes(told: list[tuple[str, str]], kind: str, uid: str) -> None:
    await wait_until(lambda: (kind, uid) in told, timeout_s=PATIENCE_S, what=f"{kind} {uid}")
    told.clear()


async def check(node: Node, *addresses: str, port: int = 8080) -> Done:
    asked = wire.Exposure(
        exposure_id=IDS.uid(),
        name="web",
        network_id=IDS.uid(),
        protocol=wire.IpProtocol.TCP,
        addresses=list(addresses),
        port=port,
        sources=ANYWHERE,
    )
    done: Done = await node.call(wire.CHECK_EXPOSURE, wire.CheckExposure(exposure=asked))
    return done


async def test_each_thing_that_is_shown_otherwise_is_told_of() -> None:
    async with open_node() as node, watched(node) as told:
        network, group, site = IDS.uid(), IDS.uid(), IDS.uid()
        await node.ensure(network)
        await comes(told, "network", network)
        nic = await node.attach(network)
        await comes(told, "network", network)
        await set_group(node, group, OUT)
        await comes(told, "group", group)
        wanted: dict[str, Any] = {"addresses": [HOST_ADDRESS], "targets": [nic.nic_id]}
        await set_exposure(node, network, site, port=8080, health=CHECK, **wanted)
        await comes(told, "exposure", site)
        async with open_guest(node, nic) as guest:
            guest.configure()
            await wait_until(lambda: _state(node, site, "unhealthy"), timeout_s=PATIENCE_S)
            told.clear()
            with guest.listen(8080):
                await comes(told, "exposure", site)
                assert await _state(node, site, "healthy")
        await delete_exposure(node, site, 2)
        await comes(told, "exposure", site)


async def _state(node: Node, exposure_id: str, state: str) -> bool:
    return (await exposure(node, exposure_id)).targets[0].state == state


async def test_what_changes_nothing_is_told_of_to_nobody() -> None:
    async with open_node() as node:
        network, other = IDS.uid(), IDS.uid()
        await node.ensure(network)
        async with watched(node) as told:
            await node.ensure(network)
            nft_in((await node.network(network)).netns, "flush ruleset")
            await node.ensure(other, subnet="10.8.0.0/24")
            await wait_until(lambda: ("network", other) in told, timeout_s=PATIENCE_S)
            assert set(told) == {("network", other)}


async def test_only_addresses_of_the_node_pass_the_check() -> None:
    async with open_node() as node:
        await node.ensure(IDS.uid())
        await check(node, HOST_ADDRESS, HOST_ADDRESS6)
        with pytest.raises(InvalidArgument) as caught:
            await check(node, HOST_ADDRESS, WAN_ADDRESS)
        assert caught.value.field == "exposure.addresses[1]"
        assert WAN_ADDRESS in caught.value.message
        assert HOST_ADDRESS in caught.value.hint
        assert "169.254." not in caught.value.hint, "the uplinks are no addresses to expose"


async def test_a_port_that_the_node_listens_on_does_not_pass() -> None:
    async with open_node() as node:
        with inside(node.sandbox.host, lambda: socket.create_server((HOST_ADDRESS, 8080))):
            with pytest.raises(InUse) as caught:
                await check(node, HOST_ADDRESS)
            assert caught.value.field == "exposure.port"
            await check(node, HOST_ADDRESS, port=8081)


async def test_an_address_that_the_node_loses_and_gets_again_is_noticed() -> None:
    async with open_node() as node:
        network, site = IDS.uid(), IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        wanted: dict[str, Any] = {"addresses": [NEW_ADDRESS], "port": 8080, "targets": [nic.nic_id]}
        async with watched(node) as told:
            ip("-n", node.sandbox.host, "address", "add", f"{NEW_ADDRESS}/24", "dev", "wan0")
            await comes(told, "node", "")  # one that comes and goes unseen is no change
            await wait_until(lambda: _passes(node, NEW_ADDRESS), timeout_s=PATIENCE_S)
            assert (await set_exposure(node, network, site, **wanted)).status == "ready"
            await comes(told, "exposure", site)
            ip("-n", node.sandbox.host, "address", "delete", f"{NEW_ADDRESS}/24", "dev", "wan0")
            both = {("exposure", site), ("node", "")}  # in whichever order
            await wait_until(lambda: both <= set(told), timeout_s=PATIENCE_S)
            seen = await exposure(node, site)
            assert seen.status == "degraded"
            assert NEW_ADDRESS in seen.message
            told.clear()
            ip("-n", node.sandbox.host, "address", "add", f"{NEW_ADDRESS}/24", "dev", "wan0")
            await wait_until(lambda: ("exposure", site) in told, timeout_s=PATIENCE_S)
            assert (await exposure(node, site)).status == "ready"


async def _passes(node: Node, address: str) -> bool:
    try:
        await check(node, address)
    except InvalidArgument:
        return False
    return True
