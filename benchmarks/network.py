"""Networks: a real nwd with real namespaces, taps, rules and dnsmasq, without agent and guest.

`network.attach_*`, `…_change_*` and `…_create` are times of calls as a client sees them; what a
sync of the disk takes in the same minute is beside them, for every call waits for one. Traffic is
measured in `network_traffic`.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio

from benchmarks import network_traffic
from benchmarks.network_node import BenchNode, nwd, proportional_kib
from benchmarks.result import Results
from chv.common.wire import nwd as wire
from tests.integration.nwd_helpers import HOST_ADDRESS, IDS, lease, open_wire
from tests.integration.nwd_objects import OUT, rule, set_exposure

result = Results("network")
NICS = 1000
SIZES = (10, 30, 100, 300, 1000)
LAST = 200  # of them, at full size, are what attach_p50 is about
CHANGES = 20
NETWORKS = 100
RECONCILES = 5
LEASES = 10


def run() -> list[dict[str, Any]]:
    """Measure everything."""
    return [*anyio.run(_one_network), *anyio.run(_many_networks), *network_traffic.run()]


# --- one network with a thousand NICs
async def _one_network() -> list[dict[str, Any]]:
    async with nwd() as node, node.kept_line():
        network = await node.make_network()
        group = IDS.uid()
        await node.set_rules(group, _rules(group, 80))
        target = (await node.attach(network, security_groups=[group])).nic_id
        exposure = IDS.uid()
        await _expose(node, network, exposure, target, 1)
        syncs = _sync_ms(node)
        times, cpu_ms = await _attach(node, network, group, NICS - 1)
        return [
            *_attach_results(times, cpu_ms, [*syncs, *_sync_ms(node)]),
            *await _changes(node, network, group, exposure, target),
            await _reconciles(node, network),
            *await _leases(node, network),
        ]


def _rules(group: str, port: int) -> list[Any]:
    peers = {"cidrs": ["0.0.0.0/0", "::/0"], "groups": [group]}
    return [rule("ingress", "tcp", [str(port)], **peers), OUT]


async def _expose(
    node: BenchNode, network: str, exposure: str, target: str, generation: int
) -> None:
    await set_exposure(
        node,
        network,
        exposure,
        generation,
        addresses=[HOST_ADDRESS],
        port=8080,
        target_port=8000 + generation,
        targets=[target],
    )


async def _attach(
    node: BenchNode, network: str, group: str, count: int
) -> tuple[list[float], float]:
    """Return how long each call took, and nwd's processor time for each of the last ones."""
    times, cpu_s = [], 0.0
    for number in range(count):
        if number == count - LAST:
            cpu_s = node.cpu_s()
        request = node.attach_request(network, [group])
        begun = time.perf_counter()
        await node.call(wire.ATTACH_NIC, request)
        times.append(time.perf_counter() - begun)
    return times, (node.cpu_s() - cpu_s) / LAST * 1000


def _attach_results(times: list[float], cpu_ms: float, syncs: list[float]) -> list[dict[str, Any]]:
    last = sorted(times[-LAST:])
    p50, p95 = last[len(last) // 2] * 1000, last[int(len(last) * 0.95)] * 1000
    first = statistics.median(times[:LAST]) * 1000
    sync = f"a sync of 4 KiB: {statistics.median(syncs):.1f} ms, p95 {_p95(syncs):.1f}"
    totals = [(size, sum(times[:size])) for size in SIZES]
    return [
        result("attach_p50", p50, "ms", 6.0, f"processor {cpu_ms:.1f}; first {first:.1f}; {sync}"),
        result("attach_p95", p95, "ms", 15.0, sync),
        result("attach_exponent", _exponent(totals), "", 1.15, f"{totals[-1][1]:.1f} s for {NICS}"),
    ]


def _exponent(points: Sequence[tuple[int, float]]) -> float:
    """Return b of y = a * x^b by least squares."""
    logs = [(math.log(x), math.log(y)) for x, y in points]
    mean_x, mean_y = (statistics.mean(axis) for axis in zip(*logs, strict=True))
    over = sum((x - mean_x) * (y - mean_y) for x, y in logs)
    return float(over / sum((x - mean_x) ** 2 for x, _ in logs))


async def _changes(
    node: BenchNode, network: str, group: str, exposure: str, target: str
) -> list[dict[str, Any]]:
    groups = await _times(
        CHANGES, lambda number: node.set_rules(group, _rules(group, 80 + number), number + 2)
    )
    exposures = await _times(
        CHANGES, lambda number: _expose(node, network, exposure, target, number + 2)
    )
    sync = f"a sync: {statistics.median(_sync_ms(node)):.1f} ms, two of them in a change"
    return [
        result("group_change_p50", statistics.median(groups), "ms", 3.0, sync),
        result("exposure_change_p50", statistics.median(exposures), "ms", 3.0, sync),
    ]


async def _times(count: int, call: Callable[[int], Awaitable[object]]) -> list[float]:
    """Return the milliseconds of each call."""
    times = []
    for number in range(count):
        begun = time.perf_counter()
        await call(number)
        times.append((time.perf_counter() - begun) * 1000)
    return times


async def _reconciles(node: BenchNode, network: str) -> dict[str, Any]:
    again: dict[str, Any] = {"subnet": "10.64.0.0/16", "subnet6": "fd00:7::/64"}
    times = await _times(RECONCILES, lambda _: node.ensure(network, **again))
    name = f"reconcile_{NICS}_nics_p50"
    return result(name, statistics.median(times), "ms", 50.0, "nothing to do")


async def _leases(node: BenchNode, network: str) -> list[dict[str, Any]]:
    """Attach one more and be its guest: from the open tap to the acknowledged lease."""
    times = []
    for _ in range(LEASES):
        info = await node.attach(network)
        async with open_wire(node, info.nic_id) as guest:
            begun = time.perf_counter()
            await anyio.to_thread.run_sync(lease, guest, info.mac)
            times.append(time.perf_counter() - begun)
    note = f"p50 {statistics.median(times) * 1000:.0f} ms, beside {NICS} NICs"
    return [result("lease_max", max(times), "s", 2.0, note)]


# --- a hundred networks
async def _many_networks() -> list[dict[str, Any]]:
    async with nwd() as node, node.kept_line():
        before = proportional_kib(node.pid)
        made: list[str] = []

        async def make(number: int) -> None:
            made.append(await node.make_network(**_numbered(number)))

        times = await _times(NETWORKS, make)
        workers = [proportional_kib(worker.pid) for worker in node.workers()]
        growth = proportional_kib(node.pid) - before

        async def again(number: int) -> None:
            await node.ensure(made[number], **_numbered(number))

        reconciles = await _times(NETWORKS, again)
    each = (sum(workers) + growth) / NETWORKS / 1024
    parts = f"dnsmasq {statistics.median(workers) / 1024:.2f} MiB, nwd {growth / NETWORKS:.0f} KiB"
    note = f"the last ten {statistics.median(times[-10:]):.0f} ms"
    return [
        result("create_p50", statistics.median(times), "ms", 100.0, note),
        result(f"create_{NETWORKS}", sum(times) / 1000, "s", 10.0),
        result("memory", each, "MiB", 3.0, f"proportional: {parts}"),
        result("reconcile_p50", statistics.median(reconciles), "ms", 50.0, "nothing to do"),
    ]


def _numbered(number: int) -> dict[str, Any]:
    return {
        "name": f"net-{number}",
        "subnet": f"10.64.{number}.0/24",
        "subnet6": f"fd00:7:1:{number + 1:x}::/64",
    }


# --- beside
def _sync_ms(node: BenchNode, count: int = 20) -> list[float]:
    """Return what it takes to write and sync a page where the records are."""
    times = []
    with tempfile.TemporaryFile(dir=node.layout.state_root) as file:
        for _ in range(count):
            os.write(file.fileno(), bytes(4096))
            begun = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - begun) * 1000)
    return times


def _p95(times: Sequence[float]) -> float:
    return sorted(times)[int(len(times) * 0.95)]
