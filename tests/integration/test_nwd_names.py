"""Names on real packets: static records, search domains, forwarders, no query lost to changes."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chv.common.errors import AlreadyExists, InvalidArgument
from chv.common.wire.nwd import DnsRecord
from chv.nwd.kernel import netns
from tests.integration import nwd_frames as frames
from tests.integration.nwd_helpers import (
    IDS,
    SUBNET6,
    WAN_ADDRESS,
    WAN_ADDRESS6,
    Node,
    inside,
    lease,
    leased,
    needs_nwd,
    open_guest,
    open_node,
    open_wire,
)
from tests.integration.stord_helpers import short_root
from tests.integration.test_nwd_ipv6 import packed6, resolve

pytestmark = [pytest.mark.root, needs_nwd]
NAME_ERROR = 3
SERVED_WITHIN_S = 0.150
QUERY_S = 0.5
GATEWAY = "10.7.0.1"


def record(name: str, *addresses: str) -> DnsRecord:
    return DnsRecord(name=name, addresses=list(addresses))


async def test_static_records_are_served_both_ways_and_change_without_a_restart() -> None:
    async with open_node() as node:
        network = IDS.uid()
        records = [record("db", "10.7.0.50", "fd00:7::50"), record("a.b", "192.0.2.9")]
        await node.ensure(network, subnet6=SUBNET6, records=records)
        nic = await node.attach(network)
        (before,) = node.workers()
        async with open_guest(node, nic) as guest:
            guest.configure()
            for name in ("db", "db.net.test"):
                assert resolve(guest, name, 1, GATEWAY) == (0, [socket.inet_aton("10.7.0.50")])
                assert resolve(guest, name, 28, GATEWAY) == (0, [packed6("fd00:7::50")])
            assert resolve(guest, "a.b.net.test", 1, GATEWAY)[1] == [socket.inet_aton("192.0.2.9")]
            reverse = resolve(guest, "50.0.7.10.in-addr.arpa", 12, GATEWAY)
            assert reverse == (0, [b"\x02db\x03net\x04test\x00"])
            assert resolve(guest, "cache.net.test", 1, GATEWAY)[0] == NAME_ERROR
            await node.ensure(network, 2, subnet6=SUBNET6, records=[record("cache", "10.7.0.51")])
            found = resolve_until(guest_query(node, nic.netns), "cache.net.test")
            assert found == socket.inet_aton("10.7.0.51")
            assert resolve(guest, "db.net.test", 1, GATEWAY)[0] == NAME_ERROR
        (after,) = node.workers()
        assert after.pid == before.pid


def guest_query(node: Node, name: str) -> socket.socket:
    """A socket in the network's namespace that asks its dnsmasq; the caller's to close."""

    def ask() -> socket.socket:
        udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        udp.bind((GATEWAY, 0))
        udp.connect((GATEWAY, 53))
        udp.settimeout(QUERY_S)
        return udp

    return inside(name, ask)


def resolve_until(udp: socket.socket, name: str, timeout_s: float = 3.0) -> bytes:
    """Ask until there is an answer with an address."""
    deadline = time.monotonic() + timeout_s
    with udp:
        while time.monotonic() < deadline:
            udp.send(frames.dns_query(name))
            code, found = frames.dns_answers(udp.recv(512))
            if not code and found:
                return found[0]
            time.sleep(0.005)
    raise AssertionError(f"{name} is not served")


async def test_a_record_and_a_guest_cannot_have_one_name() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, records=[record("db", "10.7.0.50")])
        with pytest.raises(AlreadyExists, match="static record"):
            await node.attach(network, hostname="db")
        nic = await node.attach(network, hostname="web")
        with pytest.raises(AlreadyExists, match=f"'web' belongs to NIC {nic.nic_id}"):
            await node.ensure(network, 2, records=[record("web", "10.7.0.51")])
        for name in ("a\nb", 'a"b', "a{b", "a,b", "--", "ä", "a b", "*", "a#b"):
            with pytest.raises(InvalidArgument):
                await node.ensure(network, 2, records=[record(name, "10.7.0.51")])


async def test_search_domains_reach_a_guest() -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, search=["corp.test"])
        nic = await node.attach(network)
        async with open_wire(node, nic.nic_id) as wire:
            _, options = lease(wire, nic.mac)
        assert options[119] == b"\x03net\x04test\x00\x04corp\xc0\x04"


@contextmanager
def name_server(node: Node, address: str) -> Iterator[list[bytes]]:
    """In the pretend world: answers every query with 192.0.2.77, notes who asked for what."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    asked: list[bytes] = []

    def bind() -> socket.socket:
        udp = socket.socket(family, socket.SOCK_DGRAM)
        udp.bind((address, 53))
        udp.settimeout(0.1)
        return udp

    udp, done = inside(node.sandbox.wan, bind), threading.Event()

    def serve() -> None:
        while not done.is_set():
            try:
                query, peer = udp.recvfrom(512)
            except TimeoutError:
                continue
            asked.append(query)
            end = query.index(b"\0", 12) + 5
            answer = b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x0a\x00\x04" + bytes((192, 0, 2, 77))
            head = query[:2] + b"\x81\x80\x00\x01\x00\x01\x00\x00\x00\x00"
            udp.sendto(head + query[12:end] + answer, peer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield asked
    finally:
        done.set()
        thread.join()
        udp.close()


@pytest.mark.parametrize("server", [WAN_ADDRESS, WAN_ADDRESS6])
async def test_other_names_are_asked_of_the_forwarders_and_ours_never(server: str) -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network, subnet6=SUBNET6, forwarders=[server])
        nic = await node.attach(network)
        async with open_guest(node, nic) as guest:
            guest.configure()
            with name_server(node, server) as asked:
                found = resolve(guest, "elsewhere.example", 1, GATEWAY)
                assert found == (0, [bytes((192, 0, 2, 77))])
                assert asked
                asked.clear()
                nibbles = ".".join(reversed(packed6("fd00:7::99").hex()))
                for name, kind in (
                    ("nobody.net.test", 1),
                    ("99.0.7.10.in-addr.arpa", 12),
                    (f"{nibbles}.ip6.arpa", 12),
                ):
                    assert resolve(guest, name, kind, GATEWAY)[0] == NAME_ERROR, name
                assert not asked


async def test_a_new_host_among_a_thousand_is_served_soon_and_no_query_is_lost() -> None:
    async with open_node() as node:
        network = IDS.uid()
        records = [record(f"r{number}", "192.0.2.1") for number in range(1000)]
        await node.ensure(network, subnet="10.7.0.0/16", records=records)
        first = await node.attach(network, hostname="first")
        lost, served, done = [], [0], threading.Event()

        def ask_always() -> None:
            with guest_query(node, first.netns) as udp:
                while not done.is_set():
                    udp.send(frames.dns_query("first.net.test"))
                    try:
                        served[0] += frames.dns_answers(udp.recv(512))[0] == 0
                    except TimeoutError:
                        lost.append(time.monotonic())
                    time.sleep(0.002)

        thread = threading.Thread(target=ask_always)
        thread.start()
        try:
            delays = []
            for number in range(10):
                nic = await node.attach(network, hostname=f"new{number}")
                start = time.monotonic()
                found = resolve_until(guest_query(node, nic.netns), f"new{number}.net.test")
                delays.append(time.monotonic() - start)
                assert found == socket.inet_aton(nic.address)
        finally:
            done.set()
            thread.join()
        assert not lost
        assert served[0] > 10
        assert sorted(delays)[len(delays) // 2] <= SERVED_WITHIN_S, delays
        assert await leased(node, nic) == nic.address


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A dnsmasq of the test's own, first in the search path."""
    found = shutil.which("dnsmasq")
    assert found is not None
    with short_root() as root:
        root.chmod(0o755)
        monkeypatch.setenv("PATH", f"{root}:{os.environ['PATH']}")
        yield Path(shutil.copy(found, root / "dnsmasq"))


async def test_another_dnsmasq_program_takes_over_with_every_lease_and_name(
    program: Path,
) -> None:
    async with open_node() as node:
        network = IDS.uid()
        await node.ensure(network)
        nic = await node.attach(network, hostname="one")
        assert await leased(node, nic) == nic.address
        (before,) = node.workers()
        await node.ensure(network)
        assert [worker.pid for worker in node.workers()] == [before.pid], "nothing has changed"
        Path(shutil.copy(program, program.with_name("new"))).replace(program)
        lost = []
        done = threading.Event()

        def ask_always() -> None:
            with guest_query(node, nic.netns) as udp:
                udp.settimeout(0.1)
                while not done.is_set():
                    try:
                        udp.send(frames.dns_query("one.net.test"))
                        assert frames.dns_answers(udp.recv(512))[0] == 0
                    except OSError:
                        lost.append(time.monotonic())
                    time.sleep(0.01)

        thread = threading.Thread(target=ask_always)
        thread.start()
        try:
            await node.ensure(network)
        finally:
            done.set()
            thread.join()
        (after,) = node.workers()
        assert after.pid != before.pid
        assert not lost or lost[-1] - lost[0] <= 0.25, "the gap"
        assert await leased(node, nic) == nic.address
        node.forget_log()
        await node.ensure(network)
        assert node.applied() == []
        assert netns.inode(f"/proc/{after.pid}/ns/net") == netns.inode(f"/run/netns/{nic.netns}")
