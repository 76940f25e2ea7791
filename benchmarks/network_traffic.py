"""What packets notice: throughput with and without rules, gaps of live connections.

Throughput is between two guests of one network, whose taps are exchanged for virtual cables of the
same names once nwd has ended: every rule then holds for what two kernels send as fast as they can.
The plain bridge beside it has the same cables and nothing else; rounds alternate, the median of
their ratios counts. Gaps are those of small messages that go back and forth, over taps.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import anyio
import anyio.to_thread

from benchmarks.network_node import SUBNET, SUBNET6, BenchNode, nwd
from chv.common.wire.nwd import NicInfo
from tests.integration.nwd_helpers import (
    HOST_ADDRESS,
    IDS,
    WAN_ADDRESS,
    inside,
    ip,
    nft_in,
    open_guest,
)
from tests.integration.nwd_objects import OUT, echoing, rule, set_exposure

ROUNDS = 7
ROUND_S = 1.0
CHUNK = bytes(1 << 17)
PORT = 5001
MANY_GROUPS, MANY_RULES = 40, 250
FEW_RULES = 10
REAPPLIES = 50
QUIET_S = 2.0
PAUSE_S = 0.001


def run() -> list[dict[str, Any]]:
    """Measure both."""
    return [*anyio.run(_throughput), *anyio.run(_live)]


# --- throughput
async def _throughput() -> list[dict[str, Any]]:
    async with nwd() as node:
        few = await _pair(node, 0)
        many = await _pair(node, MANY_GROUPS)
        await node.end()
        with ExitStack() as stack:
            pairs = {
                "plain": stack.enter_context(_plain(node)),
                "few": stack.enter_context(_cabled(node, "few", few)),
                "many": stack.enter_context(_cabled(node, "many", many)),
            }
            rounds = [_round(pairs) for _ in range(ROUNDS)]
    return [
        _ratio("throughput_vs_bridge", rounds, "few", "plain", 0.85),
        _ratio("throughput_10000_rules_vs_10", rounds, "many", "few", 0.8),
    ]


def _ratio(
    name: str, rounds: list[dict[str, float]], of: str, to: str, budget: float
) -> dict[str, Any]:
    ratios = [each[of] / each[to] for each in rounds]
    value = statistics.median(ratios)
    gbit = {key: statistics.median(each[key] for each in rounds) * 8 / 1e9 for key in (of, to)}
    return {
        "id": f"network.{name}",
        "value": round(value, 3),
        "unit": "ratio",
        "budget": budget,
        "ok": value >= budget,
        "baseline": f"{of} {gbit[of]:.1f} Gbit/s, {to} {gbit[to]:.1f}; "
        f"rounds {min(ratios):.2f} to {max(ratios):.2f}",
    }


async def _pair(node: BenchNode, others: int) -> list[NicInfo]:
    """Return two NICs that may talk; `others`: groups with many rules of a third one."""
    subnet, subnet6 = ("10.65.0.0/16", "fd00:8::/64") if others else (SUBNET, SUBNET6)
    network = await node.make_network(subnet=subnet, subnet6=subnet6, name=f"net-{others}")
    own = IDS.uid()
    peers = {"groups": [own]}
    allowed = [rule("ingress", "tcp", [str(2000 + n)], **peers) for n in range(FEW_RULES - 2)]
    await node.set_rules(own, [*allowed, rule("ingress", "tcp", [str(PORT)], **peers), OUT])
    crowd = [IDS.uid() for _ in range(others)]
    for number, group in enumerate(crowd):
        rules = [
            rule("ingress", "tcp", [str(1 + n)], cidrs=[f"172.16.{number}.{n}/32"])
            for n in range(MANY_RULES)
        ]
        await node.set_rules(group, rules)
    for first in range(0, others, 10):
        await node.attach(network, security_groups=crowd[first : first + 10])
    return [await node.attach(network, security_groups=[own]) for _ in range(2)]


@contextmanager
def _cabled(node: BenchNode, name: str, nics: list[NicInfo]) -> Iterator[list[tuple[str, str]]]:
    """Yield (namespace, address) of two guests on cables in the place of their taps."""
    names = [f"nwdb-{node.layout.instance}-{name}{number}" for number in (1, 2)]
    try:
        for guest, nic in zip(names, nics, strict=True):
            ip("-n", nic.netns, "link", "delete", nic.tap)
            _cable(guest, (nic.netns, nic.tap, "br0"), nic.mac)
            ip("-n", nic.netns, "link", "set", nic.tap, "type", "bridge_slave", "isolated", "on")
            ip("-n", guest, "address", "add", f"{nic.address}/{nic.prefix_length}", "dev", "eth0")
        yield [(guest, nic.address) for guest, nic in zip(names, nics, strict=True)]
    finally:
        for guest in names:
            ip("netns", "delete", guest, check=False)


@contextmanager
def _plain(node: BenchNode) -> Iterator[list[tuple[str, str]]]:
    """Yield the same on a bridge with nothing beside."""
    place, *names = [
        f"nwdb-{node.layout.instance}-{name}" for name in ("bridge", "plain1", "plain2")
    ]
    try:
        ip("netns", "add", place)
        ip("-n", place, "link", "add", "br0", "type", "bridge")
        ip("-n", place, "link", "set", "br0", "up")
        for number, guest in enumerate(names, 1):
            _cable(guest, (place, f"p{number}", "br0"), f"02:00:00:00:99:0{number}")
            ip("-n", guest, "address", "add", f"10.66.0.{number}/24", "dev", "eth0")
        yield [(guest, f"10.66.0.{number}") for number, guest in enumerate(names, 1)]
    finally:
        for name in (place, *names):
            ip("netns", "delete", name, check=False)


def _cable(guest: str, port: tuple[str, str, str], mac: str) -> None:
    place, name, bridge = port
    ip("netns", "add", guest)
    ip("-n", place, "link", "add", name, "type", "veth",
       "peer", "name", "eth0", "netns", guest)  # fmt: skip
    ip("-n", place, "link", "set", name, "master", bridge, "up")
    ip("-n", guest, "link", "set", "eth0", "address", mac, "up")
    ip("-n", guest, "link", "set", "lo", "up")


def _round(pairs: dict[str, list[tuple[str, str]]]) -> dict[str, float]:
    return {name: _bytes_a_second(*pair) for name, pair in pairs.items()}


def _bytes_a_second(sender: tuple[str, str], receiver: tuple[str, str]) -> float:
    """Return what one TCP connection carries."""
    listener = inside(receiver[0], lambda: socket.create_server((receiver[1], PORT)))
    with listener:
        target = (receiver[1], PORT)
        sending = inside(sender[0], lambda: socket.create_connection(target, 5.0))
        receiving, _ = listener.accept()
    thread = threading.Thread(target=_send, args=(sending, time.perf_counter() + ROUND_S))
    thread.start()
    buffer, total, begun = bytearray(1 << 20), 0, time.perf_counter()
    with receiving:
        while count := receiving.recv_into(buffer):
            total += count
        took = time.perf_counter() - begun
    thread.join()
    return total / took


def _send(connection: socket.socket, until: float) -> None:
    with connection:
        while time.perf_counter() < until:
            connection.sendall(CHUNK)


# --- live connections
class Pulse:
    """Sends eight bytes, waits for them to come back, and again; notes how long it took."""

    def __init__(self, place: str, address: str, port: int) -> None:
        self.gaps: list[tuple[float, float]] = []
        self.error = ""
        self._socket = inside(place, lambda: socket.create_connection((address, port), 3.0))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.settimeout(5.0)
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_over:
                begun = time.perf_counter()
                self._socket.sendall(b"%08d" % (len(self.gaps) % 10**8))
                left = 8
                while left:
                    data = self._socket.recv(left)
                    if not data:
                        raise ConnectionResetError("closed")
                    left -= len(data)
                self.gaps.append((begun, time.perf_counter() - begun))
                time.sleep(PAUSE_S)
        except OSError as error:
            self.error = str(error)

    def since(self, begun: float) -> float:
        """Return the longest gap in milliseconds."""
        return max((gap for at, gap in self.gaps if at >= begun), default=60.0) * 1000

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        self._socket.close()


async def _live() -> list[dict[str, Any]]:
    async with nwd() as node:
        network = await node.make_network()
        group = IDS.uid()
        await node.set_rules(group, [rule("ingress", "tcp", ["7000"], groups=[group]), OUT])
        one, two = [await node.attach(network, security_groups=[group]) for _ in range(2)]
        await set_exposure(
            node, network, IDS.uid(), addresses=[HOST_ADDRESS], port=7100, target_port=7000,
            targets=[one.nic_id],
        )  # fmt: skip
        async with open_guest(node, one) as left, open_guest(node, two) as right:
            for guest in (left, right):
                guest.configure()
            with echoing(left.name, 7000), echoing(node.sandbox.wan, 7001):
                return await _phases(node, network, group, _pulses(node, right.name, one.address))


def _pulses(node: BenchNode, guest: str, neighbour: str) -> dict[str, Pulse]:
    return {
        "exposure": Pulse(node.sandbox.wan, HOST_ADDRESS, 7100),
        "NAT": Pulse(guest, WAN_ADDRESS, 7001),
        "east-west": Pulse(guest, neighbour, 7000),
    }


async def _phases(
    node: BenchNode, network: str, group: str, pulses: dict[str, Pulse]
) -> list[dict[str, Any]]:
    phases: dict[str, Callable[[], Awaitable[object]]] = {
        "nothing": lambda: anyio.sleep(QUIET_S),
        "re-apply": lambda: _reapply(node, network),
        "change": lambda: _change(node, group),
        "kill": lambda: _kill(node),
        "dnsmasq": lambda: _exchange_dnsmasq(node),
    }
    longest: dict[str, float] = {}
    for name, phase in phases.items():
        begun = time.perf_counter()
        await phase()
        await anyio.sleep(0.3)
        longest[name] = max(pulse.since(begun) for pulse in pulses.values())
    errors = [f"{name}: {pulse.error}" for name, pulse in pulses.items() if pulse.error]
    for pulse in pulses.values():
        pulse.close()
    quiet = longest.pop("nothing")
    value = max(longest.values())
    each = ", ".join(f"{name} {gap:.0f}" for name, gap in longest.items())
    verdict = "; ".join(errors) or "no error"
    return [
        {
            "id": "network.live_gap_max",
            "value": round(value, 1),
            "unit": "ms",
            "budget": 50.0,
            "ok": not errors and value <= 50.0,
            "baseline": f"while nothing happens {quiet:.0f}; {each}; {verdict}",
        }
    ]


async def _reapply(node: BenchNode, network: str) -> None:
    """A rule of somebody else makes nwd load everything anew."""
    name = node.layout.netns(network)
    for number in range(REAPPLIES):
        verb = "delete" if number % 2 else "add"
        await anyio.to_thread.run_sync(nft_in, name, f"{verb} table inet foreign")
        await node.ensure(network, subnet=SUBNET, subnet6=SUBNET6)


async def _change(node: BenchNode, group: str) -> None:
    for number in range(REAPPLIES):
        web = rule("ingress", "tcp", ["7000", str(8000 + number)], groups=[group])
        await node.set_rules(group, [web, OUT], number + 2)


async def _kill(node: BenchNode) -> None:
    await node.end(signal.SIGKILL)
    await node.start()


async def _exchange_dnsmasq(node: BenchNode) -> None:
    (old,) = node.workers()
    os.kill(old.pid, signal.SIGKILL)
    with anyio.fail_after(20):
        while not (new := node.workers()) or new[0].pid == old.pid:
            await anyio.sleep(0.01)
