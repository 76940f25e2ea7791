"""Whatever somebody breaks behind nwd's back is repaired, at start and by the periodic look."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chv.common.errors import OwnershipConflict
from chv.common.wire.nwd import NicInfo
from chv.nwd.kernel import netns
from tests.helpers import wait_until
from tests.integration.nwd_helpers import (
    HOST_ADDRESS,
    IDS,
    SUBNET6,
    WAN_ADDRESS,
    WAN_ADDRESS6,
    Node,
    inside,
    ip,
    leased,
    needs_nwd,
    nft_in,
    open_guest,
    open_node,
)
from tests.sampling import sampled

PUBLIC = "198.51.100.7"
pytestmark = [pytest.mark.root, needs_nwd]


class Broken:
    """What there is to break."""

    def __init__(self, node: Node, nic: NicInfo) -> None:
        self.node = node
        self.nic = nic
        self.host = node.sandbox.host
        self.uplink = node.layout.uplink(nic.network_id)
        self.directory = node.layout.network_run(nic.network_id)

    def inner(self, *arguments: str) -> None:
        ip("-n", self.nic.netns, *arguments)

    def kill(self) -> None:
        for worker in self.node.workers():
            os.kill(worker.pid, signal.SIGKILL)

    def replace_netns_by_a_file(self) -> None:
        ip("netns", "delete", self.nic.netns)
        Path(netns.path_of(self.nic.netns)).touch()

    def sysctl(self, name: str, value: str) -> None:
        inside(self.nic.netns, lambda: Path(f"/proc/sys/net/{name}").write_text(value))

    def unlink(self, name: str) -> None:
        (self.directory / name).unlink()

    def scribble(self, name: str) -> None:
        (self.directory / name).write_text("02:00:00:00:00:05,10.7.0.66,evil\n")


IN_CI = 10  # kinds of damage; the long run takes all
DAMAGE: dict[str, Callable[[Broken], object]] = {
    "tap deleted": lambda b: b.inner("link", "delete", b.nic.tap),
    "tap down": lambda b: b.inner("link", "set", b.nic.tap, "down"),
    "tap off the bridge": lambda b: b.inner("link", "set", b.nic.tap, "nomaster"),
    "tap not isolated": lambda b: b.inner(
        "link", "set", b.nic.tap, "type", "bridge_slave", "isolated", "off"
    ),
    "tap of another size": lambda b: b.inner("link", "set", b.nic.tap, "mtu", "1300"),
    "a link of somebody": lambda b: b.inner("link", "add", "intruder", "type", "bridge"),
    "rules flushed": lambda b: nft_in(b.nic.netns, "flush ruleset"),
    "a rule added": lambda b: nft_in(b.nic.netns, "insert rule inet chv forward_in accept"),
    "an element removed": lambda b: nft_in(
        b.nic.netns, f'delete element bridge chv port_mac {{ "{b.nic.tap}" . {b.nic.mac} }}'
    ),
    "dnsmasq killed": lambda b: b.kill(),
    "default route deleted": lambda b: b.inner("route", "delete", "default"),
    "bridge deleted": lambda b: b.inner("link", "delete", "br0"),
    "bridge address deleted": lambda b: b.inner("address", "flush", "dev", "br0"),
    "bridge address added": lambda b: b.inner("address", "add", "10.66.0.1/24", "dev", "br0"),
    "bridge MAC changed": lambda b: b.inner("link", "set", "br0", "address", "02:00:00:00:00:77"),
    "uplink deleted inside": lambda b: b.inner("link", "delete", "up0"),
    "uplink deleted outside": lambda b: ip(
        "-n", b.host, "link", "delete", b.node.layout.uplink(b.nic.network_id)
    ),
    "uplink down": lambda b: ip(
        "-n", b.host, "link", "set", b.node.layout.uplink(b.nic.network_id), "down"
    ),
    "host table deleted": lambda b: nft_in(b.host, f"delete table inet {b.node.layout.host_table}"),
    "host rule deleted": lambda b: nft_in(
        b.host, f"flush chain inet {b.node.layout.host_table} from_tenant"
    ),
    "public route deleted": lambda b: ip("-n", b.host, "route", "delete", PUBLIC),
    "public route added": lambda b: ip(
        "-n", b.host, "route", "add", "198.51.100.99", "dev", b.uplink
    ),
    "IPv6 route deleted": lambda b: b.inner("-6", "route", "delete", "default"),
    "IPv6 address deleted": lambda b: b.inner("address", "delete", "fd00:7::1/64", "dev", "br0"),
    "IPv6 address added": lambda b: b.inner("address", "add", "fd00:9::1/64", "dev", "br0"),
    "proxy deleted": lambda b: b.inner(
        "-6", "neigh", "delete", "proxy", b.nic.address6, "dev", "br0"
    ),
    "proxy added": lambda b: b.inner("-6", "neigh", "add", "proxy", "fd00:7::99", "dev", "br0"),
    "bridge too small for IPv6": lambda b: b.inner("link", "set", "br0", "mtu", "1000"),
    "uplink too small for IPv6": lambda b: b.inner("link", "set", "up0", "mtu", "1000"),
    "host's end too small for IPv6": lambda b: ip(
        "-n", b.host, "link", "set", b.uplink, "mtu", "1000"
    ),
    "bridge down": lambda b: b.inner("link", "set", "br0", "down"),
    "uplink down inside": lambda b: b.inner("link", "set", "up0", "down"),
    "IPv6 off on the bridge": lambda b: b.sysctl("ipv6/conf/br0/disable_ipv6", "1"),
    "IPv6 off on the host's end": lambda b: inside(
        b.host, lambda: Path(f"/proc/sys/net/ipv6/conf/{b.uplink}/disable_ipv6").write_text("1")
    ),
    "IPv6 forwarding off": lambda b: b.sysctl("ipv6/conf/all/forwarding", "0"),
    "advertisements accepted": lambda b: b.sysctl("ipv6/conf/up0/accept_ra", "2"),
    "NDP proxy off": lambda b: b.sysctl("ipv6/conf/br0/proxy_ndp", "0"),
    "namespace deleted": lambda b: ip("netns", "delete", b.nic.netns),
    "namespace replaced by a file": lambda b: b.replace_netns_by_a_file(),
    "forwarding off": lambda b: b.sysctl("ipv4/ip_forward", "0"),
    "IPv6 off for the next link no longer": lambda b: b.sysctl(
        "ipv6/conf/default/disable_ipv6", "0"
    ),
    "hosts file deleted": lambda b: b.unlink("hosts"),
    "hosts file overwritten": lambda b: b.scribble("hosts"),
    "notes of rules deleted": lambda b: b.unlink("rules.json"),
    "notes of rules spoiled": lambda b: b.scribble("rules.json"),
    "marker deleted": lambda b: b.unlink("told"),
    "all files deleted": lambda b: shutil.rmtree(b.directory.parent),
}


async def works(node: Node, nic: NicInfo) -> None:
    """Everything a guest needs, on real packets."""
    assert await leased(node, nic) == nic.address
    server = inside(node.sandbox.wan, lambda: socket.create_server(("0.0.0.0", 80)))
    async with open_guest(node, nic) as guest:
        guest.configure()
        if nic.address6:
            guest.configure6()
            assert guest.pings(WAN_ADDRESS6)
        with server, guest.listen(22):
            assert guest.connects(WAN_ADDRESS, 80)
            (await node.connect_guest(nic.nic_id, 22)).close()


async def test_every_damage_is_repaired_by_one_start_and_the_next_changes_nothing() -> None:
    async with open_node() as node:
        network = IDS.uid()
        wanted: dict[str, Any] = {"subnet6": SUBNET6, "public_addresses": [PUBLIC]}
        await node.ensure(network, **wanted)
        ip("-n", node.sandbox.wan, "route", "add", PUBLIC, "via", HOST_ADDRESS)
        nic = await node.attach(network)
        other = await node.attach(network)
        await works(node, nic)
        truth = truth_of(node, nic)
        for name, damage in sampled(list(DAMAGE.items()), IN_CI, seed=1):
            await node.end()
            damage(Broken(node, nic))
            node.forget_log()
            await node.start()
            assert (await node.network(network)).status == "ready", name
            # The host's table is told apart by its listing, not as a step of a network.
            assert node.applied() or "host" in name or "notes" in name, f"{name}: nothing was done"
            assert truth_of(node, nic) == truth, name
            assert await leased(node, other) == other.address, name
            node.forget_log()
            await node.ensure(network, **wanted)
            assert node.applied() == [], name
        await works(node, nic)


def truth_of(node: Node, nic: NicInfo) -> list[str]:
    """The network as tools show it, without what changes by itself."""
    links = ip("-n", nic.netns, "-br", "link").splitlines()
    host_links = ip("-n", node.sandbox.host, "-br", "link").splitlines()
    return [
        *sorted(f"{line.split()[0].partition('@')[0]} {'UP>' in line}" for line in links),
        *sorted(line.split()[0].partition("@")[0] for line in host_links),
        *(_routes(nic.netns, family) for family in ("-4", "-6")),
        *node.host_routes(),
        *(_addresses(nic.netns, link) for link in ("br0", "up0")),
        ip("-n", nic.netns, "-6", "neigh", "show", "proxy"),
        _sorted_elements(nft_in(nic.netns, "list ruleset")),
        _sorted_elements(nft_in(node.sandbox.host, "list ruleset")),
    ]


def _addresses(name: str, link: str) -> str:
    return " ".join(sorted(ip("-n", name, "-br", "address", "show", "dev", link).split()[2:]))


def _routes(name: str, family: str) -> str:
    lines = ip("-n", name, family, "route").replace("linkdown", "").splitlines()
    return "\n".join(sorted(" ".join(line.split()) for line in lines))


def _sorted_elements(listing: str) -> str:
    counted = ("packets", "expires", "ct count over")  # who has connections comes and goes
    lines = [
        line
        for line in listing.splitlines()
        if "add @" in line or not any(word in line for word in counted)
    ]
    return "\n".join(" ".join(sorted(line.replace(",", " ").split())) for line in lines)


@pytest.mark.slow
async def test_damage_is_repaired_while_nwd_runs() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        nft_in(nic.netns, "flush ruleset")
        ip("-n", nic.netns, "link", "delete", nic.tap)
        nft_in(node.sandbox.host, f"delete table inet {node.layout.host_table}")

        def repaired() -> bool:
            here = nft_in(nic.netns, "list tables").count("chv") == 2
            there = node.layout.host_table in node.host_rules()
            return here and there and nic.tap in ip("-n", nic.netns, "-br", "link")

        await wait_until(repaired, timeout_s=30)
        await works(node, nic)


async def test_files_that_are_deleted_while_nwd_runs_come_back() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        shutil.rmtree(node.layout.run / "net")
        await node.ensure(network)
        assert {"host-rules.json"} < set(node.run_files())
        await works(node, nic)


async def test_rules_stand_again_though_the_rest_cannot_be_repaired() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        rules = _sorted_elements(nft_in(nic.netns, "list ruleset"))
        base = node.layout.run / "net"
        kept = base.rename(base.with_name("kept"))
        base.touch()
        nft_in(nic.netns, "flush ruleset")
        with pytest.raises(OwnershipConflict, match="not a directory"):
            await node.ensure(network)
        assert _sorted_elements(nft_in(nic.netns, "list ruleset")) == rules
        assert (await node.network(network)).status == "degraded"
        base.unlink()
        kept.rename(base)
        await node.ensure(network)
        assert (await node.network(network)).status == "ready"


async def test_attach_and_open_repair_what_they_need_at_once() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        ip("-n", nic.netns, "link", "delete", nic.tap)
        assert await leased(node, nic) == nic.address
        ip("netns", "delete", nic.netns)
        other = await node.attach(network)
        assert await leased(node, other) == other.address
        assert await leased(node, nic) == nic.address


async def test_a_nic_has_carrier_only_while_a_process_holds_the_tap_that_is_there() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network)
        assert not (await node.nic(nic.nic_id)).carrier, "nobody has opened it"
        held = await node.open(nic.nic_id)
        try:
            other = await node.attach(network)
            seen = {each.nic_id: each.carrier for each in await node.nics()}
            assert seen == {nic.nic_id: True, other.nic_id: False}
            ip("-n", nic.netns, "link", "delete", nic.tap)
            assert not (await node.nic(nic.nic_id)).carrier, "deleted"
            await node.attach(network, nic.nic_id, 2, vm_id=nic.vm_id)
            assert (await node.nic(nic.nic_id)).state == "attached"
            assert not (await node.nic(nic.nic_id)).carrier, "another tap of the same name"
        finally:
            os.close(held)
        held = await node.open(nic.nic_id)
        assert (await node.nic(nic.nic_id)).carrier
        ip("netns", "delete", nic.netns)
        assert not (await node.nic(nic.nic_id)).carrier, "its namespace is gone"
        os.close(held)
