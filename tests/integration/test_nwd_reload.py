"""Rules that are loaded as a whole: no packet of a stream is lost, no new connection waits, and
what others did to our tables is gone.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator

import anyio
import anyio.to_thread
import pytest

from chv.common.wire.nwd import NicInfo
from chv.nwd.kernel import conntrack, netlink, netns, own_addresses
from chv.nwd.kernel.conntrack import TCP, Towards
from tests.integration.nwd_helpers import (
    IDS,
    Node,
    inside,
    needs_nwd,
    nft_in,
    open_guest,
    open_node,
)
from tests.integration.nwd_objects import OUT, echoing, rule, set_group

pytestmark = [pytest.mark.root, needs_nwd]

RELOADS = 30
LOST_S = 0.15  # TCP sends again after 200 ms, a connection is tried again after a second
DAMAGE = {
    "a chain": "add chain inet chv intruder { type filter hook forward priority -300; }",
    "a chain that is jumped to": "add chain inet chv lair; insert rule inet chv input jump lair",
    "a map that leads to a chain": (
        "add chain inet chv lair; add map inet chv lead { type inet_service : verdict; };"
        " add element inet chv lead { 80 : jump lair };"
        " insert rule inet chv input tcp dport vmap @lead"
    ),
    "a set of the bridge": "add set bridge chv more { type ether_addr; }",
    "another policy": "chain inet chv forward_in { policy accept; }",
    "an element": "add element inet chv members4 { 0x1 . 10.9.9.9 }",
    "a counter": "add counter inet chv tally",
    "another hook": (
        "delete chain inet chv checksums;"
        " add chain inet chv checksums { type filter hook output priority 5; }"
    ),
    "no tables": "delete table inet chv; delete table bridge chv",
}


class Traffic:
    """A stream of small messages, and connections that are opened one after the other."""

    def __init__(self, place: str, address: str) -> None:
        self.waits: list[float] = []
        self.opened: list[float] = []
        self.errors: list[str] = []
        self._over = threading.Event()
        self._stream = inside(place, lambda: socket.create_connection((address, 7000), 3.0))
        open_all = lambda: inside(place, lambda: self._open(address))  # noqa: E731
        self._threads = [threading.Thread(target=each) for each in (self._talk, open_all)]
        for thread in self._threads:
            thread.start()

    def _talk(self) -> None:
        self._stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream.settimeout(5.0)
        try:
            while not self._over.is_set():
                begun = time.perf_counter()
                self._stream.sendall(b"12345678")
                self._stream.recv(8, socket.MSG_WAITALL)
                self.waits.append(time.perf_counter() - begun)
        except OSError as error:
            self.errors.append(str(error))

    def _open(self, address: str) -> None:
        try:
            while not self._over.is_set():
                begun = time.perf_counter()
                with socket.create_connection((address, 7000), 5.0) as one:
                    one.sendall(b"12345678")  # who is not waited for fills the listener's queue
                    one.recv(8, socket.MSG_WAITALL)
                    self.opened.append(time.perf_counter() - begun)
        except OSError as error:
            self.errors.append(str(error))

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._stream.close()


@contextlib.contextmanager
def traffic(place: str, address: str) -> Iterator[Traffic]:
    """Have traffic in the block."""
    running = Traffic(place, address)
    try:
        yield running
    finally:
        running.end()


async def pair(node: Node) -> tuple[str, NicInfo, NicInfo]:
    """A network with two NICs that may talk."""
    network, group = IDS.uid(), IDS.uid()
    await node.ensure(network)
    await set_group(node, group, rule("ingress", "tcp", ["7000"], groups=[group]), OUT)
    one, two = [await node.attach(network, security_groups=[group]) for _ in range(2)]
    return network, one, two


async def test_reloads_cost_neither_a_packet_nor_a_connection() -> None:
    async with open_node() as node:
        network, one, two = await pair(node)
        async with open_guest(node, one) as server, open_guest(node, two) as client:
            server.configure()
            client.configure()
            with echoing(server.name, 7000), traffic(client.name, one.address) as running:
                node.forget_log()
                for number in range(RELOADS):
                    verb = "delete" if number % 2 else "add"
                    foreign = f"{verb} table inet foreign"
                    await anyio.to_thread.run_sync(nft_in, one.netns, foreign)
                    await node.ensure(network)
                loads = node.applied().count("load_rules")
        assert loads >= RELOADS // 2, "nothing was loaded"
        assert running.errors == []
        assert min(len(running.waits), len(running.opened)) > RELOADS
        assert max(*running.waits, *running.opened) < LOST_S
        assert "tables_replaced" not in node.log.read_text()


async def test_what_others_did_to_our_tables_is_gone_after_a_reload() -> None:
    async with open_node() as node:
        network, one, _ = await pair(node)
        truth = nft_in(one.netns, "list ruleset")
        for name, damage in DAMAGE.items():
            node.forget_log()
            nft_in(one.netns, damage)
            await node.ensure(network)
            assert "load_rules" in node.applied(), name  # seen by this call, or before it
            assert lines_of(nft_in(one.netns, "list ruleset")) == lines_of(truth), name


def lines_of(listing: str) -> list[str]:
    """Without counts, the order of chains and sets, and that of elements in a line."""
    listing = re.sub(r"packets \d+ bytes \d+", "", listing)
    return sorted(" ".join(sorted(line.replace(",", " ").split())) for line in listing.splitlines())


async def test_the_kernel_picks_the_connections_that_go_somewhere() -> None:
    async with open_node() as node:
        await pair(node)
        found = netns.call_in(f"/run/netns/{node.sandbox.host}", _counted)
    assert found.pop("all") >= 2
    assert found == {"4": 1, "4 any port": 1, "4 elsewhere": 0, "6": 1, "6 elsewhere": 0}


def _counted() -> dict[str, int]:
    with contextlib.ExitStack() as stack:
        for family, address, port in (
            (socket.AF_INET, "127.0.0.1", 5001),
            (socket.AF_INET6, "::1", 5002),
        ):
            stack.enter_context(socket.create_server((address, port), family=family))
            stack.enter_context(socket.create_connection((address, port), 3.0))
        asked = {
            "4": Towards(TCP, "127.0.0.1", 5001),
            "4 any port": Towards(TCP, "127.0.0.1"),
            "4 elsewhere": Towards(TCP, "127.0.0.2"),
            "6": Towards(TCP, "::1", 5002),
            "6 elsewhere": Towards(TCP, "::1", 5003),
        }
        asker = stack.enter_context(netlink.open_socket(netlink.NETFILTER))
        found = {name: conntrack.end(lambda _: False, [each]) for name, each in asked.items()}
        assert set(found.values()) == {0}
        listed: list[conntrack.Connection] = []

        def look(connection: conntrack.Connection) -> bool:
            listed.append(connection)
            return False

        counts = {"all": conntrack.count(asker)}
        for name, each in asked.items():
            listed.clear()
            conntrack.end(look, [each])
            counts[name] = len(listed)
        return counts


async def test_own_addresses_are_told_one_by_one() -> None:
    async with open_node() as node:
        await pair(node)
        host = f"/run/netns/{node.sandbox.host}"
        asked = ("198.18.7.2", "198.18.7.99", "127.0.0.1", "0.0.0.0", "::1", "fd00:99::1")
        found = netns.call_in(host, lambda: [each for each in asked if own_addresses.is_here(each)])
    assert found == ["198.18.7.2", "127.0.0.1", "::1"]
