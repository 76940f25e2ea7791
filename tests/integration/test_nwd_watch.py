"""What is seen of packets on real kernels: explanations, captures, logs, names."""

from __future__ import annotations

import socket
from typing import Any

import anyio
import anyio.to_thread
import pytest

from chv.common.errors import ChvError, FailedPrecondition, InvalidArgument, NotFound
from chv.common.wire import nwd_policy as policy
from tests.integration.nwd_helpers import (
    IDS,
    WAN_ADDRESS,
    Node,
    ip,
    needs_nwd,
    nft_in,
    open_guest,
    open_node,
    open_wire,
)

WITHIN_S = 10.0
pytestmark = [pytest.mark.root, needs_nwd]


async def explain(node: Node, nic_id: str, destination: str, **changes: Any) -> policy.PathReply:
    fields: dict[str, Any] = {"nic_id": nic_id, "destination": destination, "port": 443}
    request = policy.ExplainPath(**(fields | changes))
    reply: policy.PathReply = await node.call(policy.EXPLAIN_PATH, request)
    return reply


def places(reply: policy.PathReply) -> list[str]:
    return [step.place for step in reply.steps]


def whats(reply: policy.PathReply, place: str) -> str:
    return " | ".join(step.what for step in reply.steps if step.place == place)


def links_in(node: Node, network_id: str) -> list[str]:
    lines = ip("-n", node.layout.netns(network_id), "-br", "link").splitlines()
    return sorted(line.split()[0].partition("@")[0] for line in lines)


def tables_in(name: str) -> str:
    return nft_in(name, "list tables")


async def test_a_packet_to_the_outside_is_followed_through_nat_and_the_host() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        name = node.layout.netns(network)
        before = (links_in(node, network), tables_in(name), tables_in(node.sandbox.host))
        async with open_wire(node, nic.nic_id):
            reply = await explain(node, nic.nic_id, WAN_ADDRESS)
        assert reply.verdict == "forwarded", reply
        assert "it has no security groups, and may then open any connection" in reply.decided_by
        assert places(reply)[:3] == ["tap", "bridge", "route"]
        assert "198.18.7.2" in whats(reply, "host"), "the host's own address is what the world sees"
        assert "becomes" in whats(reply, "nat")
        assert before == (links_in(node, network), tables_in(name), tables_in(node.sandbox.host))


async def test_an_explanation_sets_off_no_repair() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        async with open_wire(node, nic.nic_id):
            await explain(node, nic.nic_id, WAN_ADDRESS)
            node.forget_log()
            await explain(node, nic.nic_id, WAN_ADDRESS)  # looks at the whole network first
            await node.ensure(network)
        assert node.applied() == []


async def test_a_guest_without_groups_is_not_reached_and_the_answer_says_so() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        one = await node.attach(network, hostname="one")
        two = await node.attach(network, hostname="two")
        async with open_wire(node, one.nic_id), open_guest(node, two) as other:
            other.configure()
            reply = await explain(node, one.nic_id, two.address)
        assert reply.verdict == "dropped"
        assert reply.decided_by.startswith("two: it has no security groups")


async def test_the_gateway_and_an_absent_guest_are_told_apart() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        async with open_wire(node, nic.nic_id):
            dns = await explain(node, nic.nic_id, nic.gateway, protocol="udp", port=53)
            assert dns.verdict == "delivered", dns
            itself = await explain(node, nic.nic_id, nic.address)
            assert "guest's own" in itself.decided_by
            other = await explain(node, nic.nic_id, nic.gateway, port=8080)
            assert other.verdict == "dropped"
            assert "the gateway takes DHCP, DNS" in other.decided_by


async def test_what_no_guest_would_send_is_refused() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        with pytest.raises(FailedPrecondition, match="nobody holds its tap"):
            await explain(node, nic.nic_id, WAN_ADDRESS)
        with pytest.raises(NotFound):
            await explain(node, IDS.uid(), WAN_ADDRESS)
        for refused in ("224.0.0.1", "255.255.255.255", "0.0.0.0", "127.0.0.1", "1.2.3"):
            with pytest.raises(InvalidArgument):
                await explain(node, nic.nic_id, refused)
        with pytest.raises(InvalidArgument, match="port"):
            await explain(node, nic.nic_id, WAN_ADDRESS, port=0)


async def test_a_drop_by_the_hosts_own_rules_is_named() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        nft_in(
            node.sandbox.host,
            "table inet blocker {\n chain guard {\n type filter hook forward priority 5;"
            " policy drop;\n }\n}\n",
        )
        async with open_wire(node, nic.nic_id):
            reply = await explain(node, nic.nic_id, WAN_ADDRESS)
        assert reply.verdict == "dropped"
        assert "table blocker, chain guard" in reply.decided_by


async def test_a_kill_in_the_middle_of_an_explanation_leaves_nothing() -> None:
    async with open_node(start=False) as node:
        await node.start("nwd.explain.ready=kill")
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        name = node.layout.netns(network)
        before = (links_in(node, network), tables_in(name), tables_in(node.sandbox.host))
        async with open_wire(node, nic.nic_id):
            with pytest.raises(ChvError):
                await explain(node, nic.nic_id, WAN_ADDRESS)
            await node.ended()
            assert "chvx0" in links_in(node, network), "it was killed in the middle"
            await node.start()
            assert before == (
                links_in(node, network),
                tables_in(name),
                tables_in(node.sandbox.host),
            )
            reply = await explain(node, nic.nic_id, WAN_ADDRESS)
            assert reply.verdict == "forwarded"


async def test_a_caller_that_leaves_in_the_middle_leaves_nothing() -> None:
    async with open_node(start=False) as node:
        await node.start("nwd.explain.ready=1*hang")
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        name = node.layout.netns(network)

        def world() -> tuple[list[str], str, str]:
            return links_in(node, network), tables_in(name), tables_in(node.sandbox.host)

        before = world()
        async with open_wire(node, nic.nic_id):
            async with anyio.create_task_group() as caller:
                caller.start_soon(explain, node, nic.nic_id, WAN_ADDRESS)
                with anyio.fail_after(WITHIN_S):
                    while "chvx0" not in links_in(node, network):
                        await anyio.sleep(0.02)
                caller.cancel_scope.cancel()
            with anyio.fail_after(WITHIN_S):
                while world() != before:
                    await anyio.sleep(0.05)
            node.forget_log()
            reply = await explain(node, nic.nic_id, WAN_ADDRESS)
            assert reply.verdict == "forwarded"
            await node.ensure(network)
        assert node.applied() == [], "its generation was carried on as well"


async def test_a_capture_sees_both_ways_and_outlives_the_daemon() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        async with node.client() as client:
            _, fds = await client.call_fds(
                policy.OPEN_CAPTURE, policy.OpenCapture(nic_id=nic.nic_id)
            )
        with socket.socket(fileno=fds[0]) as capture:
            capture.settimeout(3)
            async with open_guest(node, nic) as guest:
                guest.configure()
                await node.end()
                assert await anyio.to_thread.run_sync(guest.pings, nic.gateway)
            seen = [capture.recv(2048) for _ in range(20) if _readable(capture)]
        icmp = [frame[34] for frame in seen if frame[12:14] == b"\x08\x00" and frame[23] == 1]
        assert 8 in icmp and 0 in icmp, "the question and the answer"


def _readable(capture: socket.socket) -> bool:
    capture.settimeout(0.3)
    try:
        return bool(capture.recv(1, socket.MSG_PEEK))
    except TimeoutError:
        return False


async def test_a_name_is_what_the_networks_dns_says() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network, hostname="one")
        request = policy.ResolveName(network_id=network, name="one.net.test")
        found: policy.ResolvedName = await node.call(policy.RESOLVE_NAME, request)
        assert nic.address in found.addresses
        with pytest.raises(NotFound):
            await node.call(
                policy.RESOLVE_NAME, policy.ResolveName(network_id=network, name="no.net.test")
            )
