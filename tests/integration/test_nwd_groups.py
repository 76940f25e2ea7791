"""Security groups in real namespaces: set, changed and deleted while connections stand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.to_thread
import pytest

from chv.common.errors import Conflict, InUse, NotFound, PermissionDenied, StaleGeneration
from chv.common.wire.nwd import NicInfo
from tests.integration.nwd_helpers import IDS, Guest, Node, needs_nwd, open_guest, open_node
from tests.integration.nwd_objects import (
    OUT,
    Stream,
    chattering,
    delete_group,
    echoing,
    groups,
    rule,
    set_group,
)

pytestmark = [pytest.mark.root, needs_nwd]
WEB = rule("ingress", "tcp", ["80"])
OTHER = rule("ingress", "tcp", ["81"])


@dataclass
class Pair:
    """A client without groups and a server with one, on one network."""

    node: Node
    network: str
    group: str
    client: Guest
    server: Guest
    server_nic: NicInfo
    vm_id: str

    async def reaches(self, port: int = 80) -> bool:
        address = self.server_nic.address
        return await anyio.to_thread.run_sync(lambda: self.client.connects(address, port, 0.4))

    async def stream(self, port: int = 80) -> Stream:
        address = self.server_nic.address
        return await anyio.to_thread.run_sync(lambda: Stream(self.client.name, address, port))

    async def regroup(self, generation: int, *group_ids: str) -> NicInfo:
        return await self.node.attach(
            self.network,
            self.server_nic.nic_id,
            generation,
            vm_id=self.vm_id,
            security_groups=list(group_ids),
        )


async def lives(stream: Stream) -> bool:
    return await anyio.to_thread.run_sync(stream.lives)


@asynccontextmanager
async def open_pair(node: Node, *rules: object) -> AsyncIterator[Pair]:
    network, group, vm_id = IDS.uid(), IDS.uid(), IDS.uid()
    await node.ensure(network)
    await set_group(node, group, *rules)
    client_nic = await node.attach(network)
    server_nic = await node.attach(network, vm_id=vm_id, security_groups=[group])
    async with open_guest(node, client_nic) as client, open_guest(node, server_nic) as server:
        client.configure()
        server.configure()
        with ExitStack() as stack:
            for port in (80, 81):
                stack.enter_context(echoing(server.name, port))
            yield Pair(node, network, group, client, server, server_nic, vm_id)


async def test_a_group_lets_in_what_its_rules_say_and_a_change_counts_at_once() -> None:
    async with open_node() as node, open_pair(node, WEB, OUT) as pair:
        assert await pair.reaches(80)
        assert not await pair.reaches(81)
        info = await set_group(node, pair.group, OTHER, OUT, generation=2)
        assert (info.status, info.members, info.networks) == ("ready", 1, [pair.network])
        assert not await pair.reaches(80)
        assert await pair.reaches(81)


async def test_dropping_a_rule_ends_its_connections_and_no_others() -> None:
    async with open_node() as node, open_pair(node, WEB, OTHER, OUT) as pair:
        gone, stays = await pair.stream(80), await pair.stream(81)
        assert await lives(gone)
        assert await lives(stays)
        await set_group(node, pair.group, OTHER, OUT, generation=2)
        assert not await lives(gone)
        assert await lives(stays)
        assert not await pair.reaches(80), "the guest cannot open it again by an answer"


async def test_a_guest_that_keeps_sending_does_not_revive_what_was_ended() -> None:
    async with (
        open_node() as node,
        open_pair(node, WEB, rule("ingress", "tcp", ["82"]), OUT) as pair,
    ):
        open_to_all, client = IDS.uid(), pair.client.info
        await set_group(node, open_to_all, rule("ingress", "any"), OUT)
        await node.attach(
            pair.network, client.nic_id, 2, vm_id=client.vm_id, security_groups=[open_to_all]
        )
        with chattering(pair.server.name, 82):
            stream = await pair.stream(82)
            assert await anyio.to_thread.run_sync(stream.hears)
            await set_group(node, pair.group, WEB, OUT, generation=2)
            assert not await anyio.to_thread.run_sync(stream.hears)


async def test_keep_leaves_standing_connections_and_refuses_new_ones() -> None:
    async with open_node() as node, open_pair(node, WEB, OUT) as pair:
        stream = await pair.stream(80)
        await set_group(node, pair.group, OUT, generation=2, existing="keep")
        assert await lives(stream)
        assert not await pair.reaches(80)


async def test_a_nic_changes_its_groups_without_losing_its_tap() -> None:
    async with open_node() as node, open_pair(node, WEB, OTHER, OUT) as pair:
        narrow = IDS.uid()
        await set_group(node, narrow, OTHER, OUT)
        gone, stays = await pair.stream(80), await pair.stream(81)
        node.forget_log()
        info = await pair.regroup(2, narrow)
        assert info.security_groups == [narrow]
        assert node.applied() == ["load_rules"]
        assert not await lives(gone)
        assert await lives(stays)
        assert (await groups(node))[pair.group].members == 0
        await pair.regroup(3)
        assert not await lives(stays), "without a group nothing comes in"
        assert not await pair.reaches(81)


async def test_members_of_a_group_reach_each_other_by_its_name() -> None:
    async with open_node() as node:
        network, group, vm_id = IDS.uid(), IDS.uid(), IDS.uid()
        await node.ensure(network)
        inner = rule("ingress", "tcp", ["80"], groups=[group])
        await set_group(node, group, inner, OUT)
        one = await node.attach(network, security_groups=[group])
        two = await node.attach(network, vm_id=vm_id, security_groups=[group])
        three = await node.attach(network)
        async with (
            open_guest(node, one) as member,
            open_guest(node, two) as server,
            open_guest(node, three) as stranger,
        ):
            for guest in (member, server, stranger):
                guest.configure()
            with echoing(server.name, 80):
                stream = await anyio.to_thread.run_sync(
                    lambda: Stream(member.name, two.address, 80)
                )
                assert await lives(stream)
                refused = await anyio.to_thread.run_sync(
                    lambda: stranger.connects(two.address, 80, 0.4)
                )
                assert not refused
                await node.attach(network, one.nic_id, 2, vm_id=one.vm_id)
                assert not await lives(stream), "it is no member any more"


async def test_a_change_loads_rules_only_and_a_restart_finds_them_right() -> None:
    async with open_node() as node, open_pair(node, WEB, OUT) as pair:
        stream = await pair.stream(80)
        node.forget_log()
        await set_group(node, pair.group, WEB, OTHER, OUT, generation=2)
        assert node.applied() == [], "no look at the network was needed"
        assert await pair.reaches(81)
        await node.end()
        node.forget_log()
        await node.start()
        assert node.applied() == []
        assert await lives(stream)
        assert await pair.reaches(81)
        await set_group(node, pair.group, OUT, generation=3)
        assert not await lives(stream)


async def test_a_group_in_use_is_not_deleted_and_says_by_whom() -> None:
    async with open_node() as node, open_pair(node, OUT) as pair:
        naming = IDS.uid()
        await set_group(node, naming, rule("ingress", "tcp", groups=[pair.group]))
        with pytest.raises(InUse, match=pair.server_nic.nic_id):
            await delete_group(node, pair.group)
        await pair.regroup(2)
        with pytest.raises(InUse, match=naming):
            await delete_group(node, pair.group)
        await delete_group(node, naming)
        await delete_group(node, pair.group, 2)
        assert await groups(node) == {}
        with pytest.raises(StaleGeneration):
            await set_group(node, pair.group, OUT, generation=2)
        await set_group(node, pair.group, OUT, generation=3)


async def test_generations_and_tenants_hold_for_groups() -> None:
    async with open_node() as node:
        group, other = IDS.uid(), IDS.uid()
        await set_group(node, group, WEB, generation=4)
        await set_group(node, group, WEB, generation=4)
        with pytest.raises(Conflict):
            await set_group(node, group, OTHER, generation=4)
        with pytest.raises(StaleGeneration):
            await set_group(node, group, WEB, generation=3)
        with pytest.raises(NotFound, match=other) as caught:
            await set_group(node, group, rule("ingress", "tcp", groups=[other]), generation=5)
        assert caught.value.field == "group.rules[0].groups[0]"
        await set_group(node, other, tenant="another")
        with pytest.raises(PermissionDenied):
            await set_group(node, group, rule("ingress", "tcp", groups=[other]), generation=5)
        network = IDS.uid()
        await node.ensure(network)
        with pytest.raises(PermissionDenied):
            await node.attach(network, security_groups=[other])
        health = await node.health()
        assert (health.groups, health.exposures) == (2, 0)


async def test_a_network_that_fails_degrades_the_group_and_is_made_good() -> None:
    async with open_node(start=False) as node:
        await node.start("nwd.set_group.before_load_rules=1*error(EIO);"
                         "nwd.set_group.rules_loaded=1*error(EIO)")  # fmt: skip
        async with open_pair(node, OUT) as pair:
            info = await set_group(node, pair.group, WEB, OUT, generation=2)
            if info.status == "ready":
                pytest.fail("the failpoints were not met")
            assert pair.network in info.message
            again = await set_group(node, pair.group, WEB, OUT, generation=2)
            assert again.status == "ready"
            assert await pair.reaches(80)
