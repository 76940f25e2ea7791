"""Networks and NICs through their lives: generations, isolation, removal, adoption, refusals."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chv.common.errors import (
    AlreadyExists,
    Conflict,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    StaleGeneration,
)
from chv.common.store import Store
from chv.common.wire import nwd as wire
from chv.common.wire.nwd import UplinkMode
from chv.nwd.kernel import conntrack, tap
from chv.nwd.records import MIGRATIONS, Records
from tests.helpers import wait_until
from tests.integration import nwd_frames as frames
from tests.integration.nwd_helpers import (
    IDS,
    WAN_ADDRESS,
    Node,
    Wire,
    inside,
    ip,
    lease,
    leased,
    meta,
    needs_nwd,
    nft_in,
    open_guest,
    open_node,
    open_wire,
)

pytestmark = [pytest.mark.root, needs_nwd]


async def test_two_tenants_with_the_same_subnet_do_not_meet() -> None:
    async with open_node() as node:
        one, two = IDS.uid(), IDS.uid()
        await node.ensure(one, tenant="a")
        await node.ensure(two, tenant="b")
        a, b = [await node.allow_all("a")], [await node.allow_all("b")]
        left = await node.attach(one, address="10.7.0.5", hostname="left", security_groups=a)
        right = await node.attach(two, address="10.7.0.6", hostname="right", security_groups=b)
        twin = await node.attach(two, address="10.7.0.5", hostname="left", security_groups=b)
        assert left.netns != right.netns
        async with (
            open_guest(node, left) as guest,
            open_guest(node, right) as other,
            open_guest(node, twin) as same,
        ):
            for each in (guest, other, same):
                each.configure()
            with other.listen(80), same.listen(80):
                assert other.connects("10.7.0.5", 80), "its own network's 10.7.0.5"
                assert not guest.connects("10.7.0.6", 80, 0.5), "another tenant's address"
                uplink = (await node.network(two)).uplink_address
                assert not guest.connects(uplink, 80, 0.5)


async def test_deletion_leaves_nothing_and_touches_nothing_else() -> None:
    async with open_node() as node:
        before = node.snapshot()
        assert "foreign" in before["rules"]
        network = IDS.uid()
        await node.ensure(network)
        nics = [await node.attach(network) for _ in range(3)]
        assert node.snapshot() != before
        assert all(item.known for item in await node.census())
        kinds = {item.kind for item in await node.census()}
        assert kinds == {"netns", "link", "nft", "process", "file"}
        with pytest.raises(InUse, match="3 NICs"):
            await node.delete(network)
        for nic in nics:
            await node.detach(nic.nic_id)
            await node.detach(nic.nic_id)
        await node.delete(network)
        await node.delete(network)
        assert node.snapshot() == before
        assert await node.census() == []
        with pytest.raises(NotFound):
            await node.network(network)


async def test_the_host_rules_differ_by_our_table_alone() -> None:
    async with open_node() as node:
        before = node.host_rules()
        await node.ensure(IDS.uid())
        table = f"table inet {node.layout.host_table}"
        ours = nft_in(node.sandbox.host, f"list {table}")
        assert node.host_rules().replace(ours, "") == before
        await node.end()
        nft_in(node.sandbox.host, "add table ip somebody")
        await node.start()
        assert "table ip somebody" in node.host_rules()
        assert node.applied() != [] or nft_in(node.sandbox.host, f"list {table}") == ours


async def test_a_network_without_uplink_has_no_way_out_and_no_host_table() -> None:
    async with open_node() as node:
        links = node.host_links()
        network = IDS.uid()
        info = await node.ensure(network, uplink=UplinkMode.NONE)
        assert (info.uplink_address, info.status) == ("", "ready")
        assert node.host_links() == links
        assert node.layout.host_table not in node.host_rules()
        nic = await node.attach(network)
        assert await leased(node, nic) == nic.address
        info = await node.ensure(network, 2, uplink=UplinkMode.NAT)
        assert len(node.host_links()) == len(links) + 1
        await node.ensure(network, 3, uplink=UplinkMode.NONE)
        assert node.host_links() == links
        assert node.layout.host_table not in node.host_rules()


async def test_generations_of_a_network() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, 3)
        node.forget_log()
        await node.ensure(network, 3)
        assert node.applied() == [], "an equal generation changes nothing"
        with pytest.raises(StaleGeneration):
            await node.ensure(network, 2)
        with pytest.raises(Conflict, match="another content"):
            await node.ensure(network, 3, mtu=1400)
        assert (await node.ensure(network, 4, mtu=1400)).mtu == 1400
        with pytest.raises(StaleGeneration):
            await node.delete(network, 3)
        await node.delete(network, 4)
        with pytest.raises(StaleGeneration, match="deleted"):
            await node.ensure(network, 4)
        await node.ensure(network, 5)


async def test_generations_of_a_nic() -> None:
    async with open_node() as node:
        network, nic_id, vm_id = IDS.uid(), IDS.uid(), IDS.uid()
        await node.ensure(network)
        first = await node.attach(network, nic_id, 2, vm_id=vm_id)
        node.forget_log()
        again = await node.attach(network, nic_id, 2, vm_id=vm_id)
        assert (again, node.applied()) == (first, [])
        with pytest.raises(StaleGeneration):
            await node.attach(network, nic_id, 1, vm_id=vm_id)
        with pytest.raises(Conflict, match="another content"):
            await node.attach(network, nic_id, 2, vm_id=vm_id, guest_ports=[80])
        newer = await node.attach(network, nic_id, 3, vm_id=vm_id, guest_ports=[80])
        assert (newer.address, newer.mac) == (first.address, first.mac), "kept for its life"
        assert "10.7.0.2 . 80" in nft_in(first.netns, "list set inet chv guest_ports4")
        with pytest.raises(Conflict, match="belongs to VM"):
            await node.attach(network, nic_id, 4)
        await node.detach(nic_id, 4)
        with pytest.raises(StaleGeneration):
            await node.attach(network, nic_id, 4, vm_id=vm_id)
        never = IDS.uid()
        await node.detach(never, 7)
        with pytest.raises(StaleGeneration):
            await node.attach(network, never, 7)


async def test_duplicates_name_their_owner() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network, hostname="one", address="10.7.0.9")
        with pytest.raises(InUse, match=nic.nic_id):
            await node.attach(network, address="10.7.0.9")
        with pytest.raises(AlreadyExists, match=nic.nic_id):
            await node.attach(network, hostname="one")
        with pytest.raises(AlreadyExists, match=nic.nic_id):
            await node.attach(network, mac=nic.mac)
        assert [each.nic_id for each in await node.nics()] == [nic.nic_id]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"address": "10.7.0.1"}, "gateway"),
        ({"address": "10.7.0.0"}, "network address"),
        ({"address": "10.7.0.255"}, "broadcast"),
        ({"address": "10.8.0.5"}, "not in"),
        ({"address": "999.1.1.1"}, "not an IPv4"),
        ({"mac": "01:00:5e:00:00:01"}, "unicast"),
        ({"mac": "02:00:00:00:00:01\n"}, None),
        ({"mac": '02:00" }; flush'}, None),
        ({"hostname": "a\nserver=10.0.0.1"}, None),
        ({"hostname": "evil\n"}, None),
        ({"hostname": "a.b"}, None),
        ({"hostname": "x" * 64}, None),
    ],
)
async def test_a_bad_nic_is_refused_and_nothing_is_made(
    changes: dict[str, Any], words: str | None
) -> None:
    async with open_node() as node:
        network = IDS.uid()
        info = await node.ensure(network)
        links = link_names(info.netns)
        with pytest.raises(InvalidArgument, match=words):
            await node.attach(network, **changes)
        assert await node.nics() == []
        assert link_names(info.netns) == links


def link_names(netns: str) -> list[str]:
    """Return which links there are; a link's state may still be settling."""
    return [line.split()[0] for line in ip("-n", netns, "-br", "link").splitlines()]


async def test_a_bad_network_is_refused_and_nothing_is_made() -> None:
    bad: list[tuple[dict[str, Any], str | None, str]] = [
        ({"subnet": "10.7.0.1/24"}, "network address", "spec.subnet"),
        ({"subnet": "10.7.0.0/31"}, "prefix", "spec.subnet"),
        ({"subnet": "0.0.0.0/0"}, "prefix", "spec.subnet"),
        ({"subnet": "198.18.0.0/16"}, "198.18.7.2/24", "spec.subnet"),
        ({"subnet": "10.99.1.0/24"}, "route to 10.99.0.0/16", "spec.subnet"),
        ({"subnet": "172.20.0.0/16"}, "network.reserved", "spec.subnet"),
        ({"subnet": "127.0.0.0/8"}, "loopback", "spec.subnet"),
        ({"subnet": "169.254.0.0/16"}, "link-local", "spec.subnet"),
        ({"subnet": "224.0.0.0/8"}, "multicast", "spec.subnet"),
        ({"subnet": "192.168.77.0/24"}, "uplink pool", "spec.subnet"),
        ({"gateway": "10.8.0.1"}, "not in", "spec.gateway"),
        ({"gateway": "10.7.0.255"}, "broadcast", "spec.gateway"),
        ({"dns_domain": "net.test\n"}, None, ""),
        ({"dns_domain": "a..b"}, None, "spec.dns.domain"),
        ({"dns_domain": "x/1.2.3.4#y"}, None, ""),
        ({"forwarders": ["127.0.0.53"]}, "cannot be reached", "spec.dns.forwarders[0]"),
        ({"forwarders": ["1.2.3.400"]}, "not an address", "spec.dns.forwarders[0]"),
    ]
    network = 'uplink_pool = "192.168.0.0/16"\nreserved = ["172.16.0.0/12"]'
    async with open_node(network=network) as node:
        ip("-n", node.sandbox.host, "route", "add", "10.99.0.0/16", "via", "198.18.7.1")
        before = node.snapshot()
        for changes, words, field in bad:
            with pytest.raises(InvalidArgument, match=words) as refused:
                await node.ensure(IDS.uid(), **changes)
            assert field in ("", refused.value.field), changes
            topology = node.topology(IDS.uid(), **changes)
            with pytest.raises(InvalidArgument):
                await node.call(wire.CHECK_NETWORK, wire.CheckNetworkTopology(topology=topology))
        assert node.snapshot() == before


async def test_a_subnet_cannot_move_under_its_guests() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        with pytest.raises(InUse, match="1 NICs"):
            await node.ensure(network, 2, subnet="10.9.0.0/24")
        await node.detach(nic.nic_id)
        info = await node.ensure(network, 2, subnet="10.9.0.0/24")
        assert info.gateway == "10.9.0.1"
        moved = await node.attach(network)
        assert await leased(node, moved) == moved.address == "10.9.0.2"


async def test_addresses_run_out_and_the_longest_free_comes_back_first() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, subnet="10.7.0.0/29")
        nics = [await node.attach(network) for _ in range(5)]
        assert [nic.address for nic in nics] == [f"10.7.0.{n}" for n in range(2, 7)]
        with pytest.raises(ResourceExhausted, match="all 5 addresses"):
            await node.attach(network)
        async with open_wire(node, nics[3].nic_id):
            assert await leased(node, nics[1]) == nics[1].address
        for index in (3, 1):
            await node.detach(nics[index].nic_id)
        reused = await node.attach(network)
        assert reused.address == nics[3].address
        last = await node.attach(network)
        assert last.address == nics[1].address
        assert await leased(node, last) == last.address, "the old lease does not stand in the way"


async def test_the_next_guest_does_not_inherit_connections() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic, other = await node.attach(network), await node.attach(network)
        server = inside(node.sandbox.wan, lambda: socket.create_server(("0.0.0.0", 80)))
        async with open_guest(node, nic) as guest, open_guest(node, other) as neighbour:
            with server:
                for each in (guest, neighbour):
                    each.configure()
                    assert each.connects(WAN_ADDRESS, 80)
            tracked = inside(nic.netns, conntrack.tracked)
            assert {nic.address, other.address} <= tracked, "the control"
        await node.detach(nic.nic_id)
        tracked = inside(nic.netns, conntrack.tracked)
        assert (nic.address in tracked, other.address in tracked) == (False, True)


async def test_a_held_tap_is_in_use_until_it_is_closed() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        fd = await node.open(nic.nic_id)
        with pytest.raises(InUse, match=nic.tap):
            await node.open(nic.nic_id)
        os.close(fd)
        os.close(await node.open(nic.nic_id))


async def test_a_lease_survives_dnsmasq_and_an_empty_lease_file() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nics = [await node.attach(network) for _ in range(3)]
        assert await leased(node, nics[2]) == nics[2].address
        (worker,) = node.workers()
        assert worker.uid == node.layout.dns_uid
        os.kill(worker.pid, signal.SIGKILL)
        started = time.monotonic()
        (again,) = await wait_until(
            lambda: [each for each in node.workers() if each.pid != worker.pid], timeout_s=2
        )
        assert time.monotonic() - started < 2
        assert again.worker_id != worker.worker_id
        await wait_until(lambda: _is_ready(node, network), timeout_s=2)
        for nic in reversed(nics):
            assert await leased(node, nic) == nic.address


async def _is_ready(node: Node, network: str) -> bool:
    # Answered under the network's lock, thus after the restart.
    await node.ensure(network)
    return (await node.network(network)).status == "ready"


async def test_a_dnsmasq_that_keeps_ending_makes_the_network_degraded() -> None:
    async with open_node(limits="restarts_max = 2") as node:
        network = IDS.uid()
        await node.ensure(network)
        killed: set[int] = set()

        async def degraded() -> bool:
            for worker in node.workers():
                if worker.pid not in killed:
                    os.kill(worker.pid, signal.SIGKILL)
                    killed.add(worker.pid)
            return (await node.network(network)).status == "degraded"

        await wait_until(degraded, timeout_s=10)
        info = await node.network(network)
        assert "dnsmasq ended 3 times" in info.message
        assert len(killed) == 3
        health = await node.health()
        assert (health.status, network in health.last_error) == ("degraded", True)
        assert (await node.ensure(network)).status == "ready", "asked for again"


async def test_nothing_is_rebuilt_after_a_boot_until_asked_for() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        await node.end()
        await _pretend_boot(node)
        await node.start()
        assert node.namespaces() == []
        assert (await node.network(network)).status == "absent"
        assert (await node.nic(nic.nic_id)).state == "absent"
        with pytest.raises(FailedPrecondition):
            await node.attach(network)
        await node.ensure(network)
        with pytest.raises(FailedPrecondition):
            await node.open(nic.nic_id)
        other = await node.attach(network)
        assert other.address != nic.address, "still kept for its owner"
        request: dict[str, Any] = {"vm_id": nic.vm_id, "hostname": nic.hostname}
        assert await node.attach(network, nic.nic_id, **request) == nic
        assert await leased(node, nic) == nic.address


async def _pretend_boot(node: Node) -> None:
    """What a boot takes away, and records that carry another boot's id."""
    for worker in node.workers():
        os.kill(worker.pid, signal.SIGKILL)
    for name in node.namespaces():
        ip("netns", "delete", name)
    async with Store.open(node.layout.database("nwd"), MIGRATIONS) as store:
        records = await Records.load(store)
        for row in list(records.networks.values()):
            await records.put_network(msgspec.structs.replace(row, boot_id="another"))
        for nic in list(records.nics.values()):
            await records.put_nic(msgspec.structs.replace(nic, boot_id="another"))


async def test_health_tells_features_and_what_the_host_gets_in_the_way() -> None:
    async with open_node() as node:
        health = await node.health()
        assert (health.status, health.warnings) == ("healthy", [])
        present = {feature.name for feature in health.features if feature.present}
        assert {"netns", "tun", "dnsmasq", "nft_bridge", "nft_inet_nat"} <= present
        await node.ensure(IDS.uid())
        nft_in(
            node.sandbox.host,
            "table ip docker { chain FORWARD"
            " { type filter hook forward priority 0; policy drop; }; }",
        )
        (warning,) = (await node.health()).warnings
        assert warning.startswith("HostForwardBlocked: chain ip docker FORWARD")
        inside(node.sandbox.host, lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("0"))
        assert any("HostForwardingOff" in text for text in (await node.health()).warnings)


async def test_a_guest_may_call_itself_what_it_likes() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network, hostname="honest")
        async with open_wire(node, nic.nic_id) as guest:
            first, _ = lease(guest, nic.mac, client_id=b"\x01first")
            second, options = lease(guest, nic.mac, client_id=b"\xffsecond")
        assert first == second == nic.address
        assert options[12] == b"honest"


async def test_unknown_nics_get_no_address() -> None:
    async with open_node() as node:
        network = IDS.uid()
        info = await node.ensure(network)
        nic = await node.attach(network)
        await node.end()  # or it would put the rules back
        nft_in(info.netns, "delete table bridge chv")
        (fd,) = inside(info.netns, lambda: tap.open_for_vmm(nic.tap))
        guest = Wire(fd)
        guest.send(frames.dhcp(frames.DISCOVER, "02:00:00:00:00:99"))
        assert guest.receive(frames.dhcp_reply, timeout_s=0.3) is None
        guest.send(frames.dhcp(frames.DISCOVER, nic.mac))
        assert guest.receive(frames.dhcp_reply) is not None, "the control"
        os.close(fd)


async def test_meta_is_checked() -> None:
    async with open_node() as node:
        with pytest.raises(InvalidArgument):
            await node.call(
                wire.DELETE_NETWORK, wire.NetworkRef(meta=meta(), network_id="../../etc")
            )
        with pytest.raises(NotFound):
            await node.attach(IDS.uid())
