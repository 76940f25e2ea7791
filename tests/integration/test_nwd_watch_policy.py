"""Explanations and logs where security groups and exposures decide, through the whole nwd."""

from __future__ import annotations

import select
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from chv.common.wire import nwd_policy as policy
from chv.nwd.kernel import injection, netns, packet_socket, packets
from tests.integration.nwd_helpers import (
    IDS,
    WAN_ADDRESS,
    Guest,
    Node,
    ip,
    meta,
    needs_nwd,
    open_guest,
    open_node,
    open_wire,
)
from tests.integration.test_nwd_watch import explain, whats

pytestmark = [pytest.mark.root, needs_nwd]
ANYWHERE = ["0.0.0.0/0", "::/0"]
WITHIN_S = 5.0


def rule(direction: str, protocol: str = "tcp", **fields: Any) -> policy.SecurityRule:
    fields = {"cidrs": [] if "groups" in fields else ANYWHERE} | fields
    return policy.SecurityRule(
        direction=policy.Direction(direction), protocol=policy.IpProtocol(protocol), **fields
    )


async def set_group(
    node: Node, name: str, rules: list[policy.SecurityRule], *, uid: str = "", **fields: Any
) -> str:
    group = policy.SecurityGroup(
        group_id=uid or IDS.uid(), name=name, tenant="default", rules=rules, **fields
    )
    await node.call(policy.SET_GROUP, policy.SetSecurityGroup(meta=meta(), group=group))
    return group.group_id


async def log_of(node: Node, network: str, **fields: Any) -> policy.NetworkLogReply:
    request = policy.GetNetworkLog(network_id=network, **fields)
    reply: policy.NetworkLogReply = await node.call(policy.NETWORK_LOG, request)
    return reply


async def entries_of(node: Node, network: str, count: int) -> list[policy.LogEntry]:
    """Wait for so many entries; what is there when the time is over."""
    reply = policy.NetworkLogReply()
    with anyio.move_on_after(WITHIN_S):
        while len(reply.entries) < count:
            reply = await log_of(node, network)
            await anyio.sleep(0.05)
    return reply.entries


async def connects(guest: Guest, address: str, port: int) -> bool:
    return await anyio.to_thread.run_sync(lambda: guest.connects(address, port, 0.5))


async def test_what_groups_allow_is_named_by_group_and_rule() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        web = await set_group(node, "web", [rule("ingress", "udp"), rule("egress", ports=["80"])])
        db = await set_group(node, "db", [rule("ingress", ports=["80-90"], groups=[web])])
        one = await node.attach(network, hostname="one", security_groups=[web])
        two = await node.attach(network, hostname="two", security_groups=[db])
        async with open_wire(node, one.nic_id), open_guest(node, two) as other:
            other.configure()
            allowed = await explain(node, one.nic_id, two.address, port=80)
            assert allowed.verdict == "delivered", allowed
            assert "one, egress: rule egress[0] of security group web" in allowed.decided_by
            assert "two, ingress: rule ingress[0] of security group db" in allowed.decided_by
            assert "handed to two" in whats(allowed, "tap")
            out = await explain(node, one.nic_id, two.address, port=443)
            assert (out.verdict, out.decided_by) == (
                "dropped",
                f"no rule of its security groups (web) allows egress tcp 443 to {two.address}",
            )


async def test_what_the_receivers_groups_do_not_allow_is_told_of_the_receiver() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        db = await set_group(node, "db", [rule("ingress", ports=["5432"])])
        one = await node.attach(network, hostname="one")
        two = await node.attach(network, hostname="two", security_groups=[db])
        async with open_wire(node, one.nic_id), open_guest(node, two) as other:
            other.configure()
            reply = await explain(node, one.nic_id, two.address, port=22)
            assert reply.verdict == "dropped"
            assert reply.decided_by == (
                f"two: no rule of its security groups (db) allows ingress tcp 22 from {one.address}"
            )


async def test_ipv6_is_explained_alike() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, subnet6="fd07:1::/64")
        db = await set_group(node, "db", [rule("ingress", ports=["80"])])
        one = await node.attach(network, hostname="one")
        two = await node.attach(network, hostname="two", security_groups=[db])
        async with open_wire(node, one.nic_id), open_guest(node, two) as other:
            ip("-n", other.name, "address", "add", f"{two.address6}/64", "dev", "eth0", "nodad")
            allowed = await explain(node, one.nic_id, two.address6, port=80)
            denied = await explain(node, one.nic_id, two.address6, port=81)
            pinged = await explain(node, one.nic_id, two.gateway6, protocol="icmp")
        assert allowed.verdict == "delivered", allowed
        assert denied.verdict == "dropped"
        assert "allows ingress tcp 81" in denied.decided_by
        assert pinged.verdict == "delivered"


async def test_an_exposure_is_followed_to_its_target_and_its_refusal_is_told() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        client = await node.attach(network, hostname="client")
        server = await node.attach(network, hostname="server")
        exposure = policy.Exposure(
            exposure_id=IDS.uid(),
            name="shop",
            network_id=network,
            protocol=policy.IpProtocol.TCP,
            addresses=["10.7.0.200"],
            port=80,
            target_port=8080,
            targets=[server.nic_id],
            sources=["10.7.0.0/24"],
        )
        await node.call(policy.SET_EXPOSURE, policy.SetExposure(meta=meta(), exposure=exposure))
        async with open_wire(node, client.nic_id), open_guest(node, server) as guest:
            guest.configure()
            reply = await explain(node, client.nic_id, "10.7.0.200", port=80)
            assert reply.verdict == "delivered", reply
            assert reply.decided_by.startswith("exposure shop")
            assert f"10.7.0.200:80 becomes {server.address}:8080" in whats(reply, "nat")
        empty = policy.SetExposure(
            meta=meta(2),
            exposure=policy.Exposure(
                exposure_id=exposure.exposure_id,
                name="shop",
                network_id=network,
                protocol=policy.IpProtocol.TCP,
                addresses=["10.7.0.200"],
                port=80,
                sources=["10.7.0.0/24"],
            ),
        )
        await node.call(policy.SET_EXPOSURE, empty)
        async with open_wire(node, client.nic_id):
            refused = await explain(node, client.nic_id, "10.7.0.200", port=80)
            assert refused.verdict == "dropped"
            assert refused.decided_by == "exposure shop has no healthy target, and refuses"


async def test_allowed_and_dropped_packets_are_logged() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        rules = [rule("egress"), rule("ingress", ports=["80"], log=True)]
        web = await set_group(node, "web", rules, log_dropped=True)
        one = await node.attach(network, hostname="one")
        two = await node.attach(network, hostname="two", security_groups=[web])
        async with open_guest(node, one) as guest, open_guest(node, two) as other:
            guest.configure()
            other.configure()
            await _until_listening(node, network)
            with other.listen(80):
                assert await connects(guest, two.address, 80)
            assert not await connects(guest, two.address, 81)
            entries = await entries_of(node, network, 2)
        told = [(each.verdict, each.rule, each.destination_port) for each in entries[:2]]
        assert told == [("allowed", 1, 80), ("dropped", -1, 81)]
        for entry in entries:
            assert entry.group_id == web
            assert entry.nic_id == two.nic_id
            assert (entry.protocol, entry.direction) == ("tcp", "ingress")
            assert (entry.source, entry.destination) == (one.address, two.address)
        newest = await log_of(node, network, lines_max=1)
        assert newest.entries == entries[-1:]
        assert (await log_of(node, network, after=newest.next)).entries == []
        assert (await log_of(node, network, nic_id=one.nic_id)).entries == []
        assert newest.lost == 0


async def test_a_log_goes_on_after_a_kill_and_a_reader_of_before_misses_nothing() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        web = await set_group(node, "web", [rule("ingress", ports=["80"])], log_dropped=True)
        one = await node.attach(network, hostname="one")
        two = await node.attach(network, hostname="two", security_groups=[web])
        async with open_guest(node, one) as guest:
            guest.configure()
            await _until_listening(node, network)
            assert not await connects(guest, two.address, 81)
            assert await entries_of(node, network, 1)
            before = await log_of(node, network)
            await node.end()
            await node.start()
            await _until_listening(node, network)
            assert not await connects(guest, two.address, 82)
            assert await entries_of(node, network, 1)
            after = await log_of(node, network, after=before.next)
        assert {each.destination_port for each in after.entries} == {82}


async def _until_listening(node: Node, network: str) -> None:
    """Wait until nwd listens: what is told before is for nobody."""
    name = node.layout.netns(network)

    def listeners() -> list[str]:
        return Path("/proc/thread-self/net/netfilter/nfnetlink_log").read_text().splitlines()

    with anyio.fail_after(WITHIN_S):
        while not netns.call_in(f"/run/netns/{name}", listeners):
            await anyio.sleep(0.02)


async def test_nothing_but_the_nics_own_frames_gets_in_by_the_way_of_explanations() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        path = f"/run/netns/{node.layout.netns(network)}"
        mark = 4711

        def seen(source_mac: str, source: str) -> list[str]:
            packet = packets.Packet("tcp", source, WAN_ADDRESS, 50000, 443, mark)
            watcher = packet_socket.open_sightings(mark, 4)
            with watcher, injection.make(nic.tap, nic.mac, "chv:test") as sender:
                target = "02:00:00:00:00:01"
                sender.send(packets.ethernet(target, source_mac, packets.build(packet)))
                found: list[str] = []
                while select.select([watcher], [], [], 0.3)[0]:
                    found += [each.link for each in packet_socket.receive(watcher)]
            injection.remove()
            return found

        async with open_wire(node, nic.nic_id):
            own = await anyio.to_thread.run_sync(
                netns.call_in, path, lambda: seen(nic.mac, nic.address)
            )
            other = await anyio.to_thread.run_sync(
                netns.call_in, path, lambda: seen("02:00:00:00:00:77", nic.address)
            )
        assert nic.tap in own, "the positive control"
        assert nic.tap not in other
