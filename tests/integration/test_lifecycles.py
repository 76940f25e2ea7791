"""VMs made and deleted by the thousand leave nothing: descriptors, threads, processes, rows, files.

Real daemons, storage and network; the VMM is the shipped fake. CHV_LONG makes 2,000 lifecycles, of
which the daemons' memory may grow by less than 1 MiB each; CHV_LIFECYCLES says another count.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chv.agent.events_record import EVENTS_MAX
from chv.agent.tables import TOMBSTONES_MAX
from chv.cli import manifests
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent as api
from chv.common.wire.types import API_VERSION
from tests.integration.live_node import DAEMONS, LiveNode, live_node, need, traces_of, wait_for
from tests.sampling import LONG

pytestmark = [pytest.mark.root, need()]

COUNT = int(os.environ.get("CHV_LIFECYCLES", "2000" if LONG else "16"))
WARM = max(8, COUNT // 5)  # caches, pools and the allocator are as large as they get
AT_A_TIME = 4
# In a short run pools and caches still fill up.
GROWTH_MAX_KIB = 1024 if COUNT >= 1000 else 6144
FDS_MORE_MAX = 2  # a connection that is about to go
THREADS_MORE_MAX = 8  # of a pool that ends the idle ones by and by
# What is kept on purpose, and how much of it at most.
BOUNDED = {
    "agent.operations": 2400,
    "agent.steps": 2400 * 40,
    "agent.requests": 1200,
    "agent.tombstones": TOMBSTONES_MAX + 200,
    "agent.generations": 100 * 10 + 400,
    "agent.events": EVENTS_MAX + 2000,
    "stord.tombstones": 4096 + 200,
    "stord.jobs": 1000,
    "nwd.tombstones": 20_000,
    "nwd.released": 8192,
}


@dataclass(frozen=True)
class Sizes:
    """What the daemons hold, and what is on the machine for the instance."""

    fds: dict[str, int]
    threads: dict[str, int]
    anonymous_kib: dict[str, int]
    rows: dict[str, int]
    files: frozenset[str]
    traces: tuple[str, ...]  # processes, namespaces, mounts, sockets by the instance's name


def sizes(node: LiveNode) -> Sizes:
    pids = {name: node.daemon_pid(name) for name in DAEMONS}
    return Sizes(
        fds={name: len(list(Path(f"/proc/{pid}/fd").iterdir())) for name, pid in pids.items()},
        threads={name: status(pid, "Threads") for name, pid in pids.items()},
        anonymous_kib={name: status(pid, "RssAnon") for name, pid in pids.items()},
        rows=rows(node),
        files=files(node),
        traces=tuple(sorted(kind_of(each) for each in traces_of(node.dev.layout.instance))),
    )


def status(pid: int, key: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def rows(node: LiveNode) -> dict[str, int]:
    found = {}
    for daemon in DAEMONS:
        path = node.dev.layout.database(daemon)
        database = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        tables = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        for (table,) in tables:
            count = database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            found[f"{daemon}.{table}"] = count
        database.close()
    return found


def files(node: LiveNode) -> frozenset[str]:
    layout = node.dev.layout
    found = {str(path) for root in (layout.state, layout.run) for path in root.rglob("*")}
    return frozenset(path for path in found if not path.endswith((".log", "-wal", "-shm")))


def kind_of(trace: str) -> str:
    """A trace without what differs each time it is looked at: addresses and pids."""
    words = trace.split()
    return " ".join([words[0], *[word for word in words if "/" in word or "chv" in word]])


def objects(number: int) -> list[dict[str, Any]]:
    name = f"life-{number}"
    spec = {
        "memory": "64Mi",
        "disks": [{"name": "data", "volume": name}],
        "interfaces": [{"name": "eth0", "network": "lan"}],
    }
    return [
        manifest("Volume", name, {"size": "16Mi", "format": "raw"}),
        manifest("VirtualMachine", name, spec),
    ]


def manifest(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def live(socket: Path, number: int) -> None:
    """Make a VM with a disk and a NIC, see it run, delete both."""
    documents = objects(number)
    with BlockingClient(socket) as client:
        client.call(api.APPLY, api.Apply(objects=manifests.raw(documents), requester="lifecycles"))
        wait(client, "VirtualMachine", number, "VMMRunning")
        for kind in ("VirtualMachine", "Volume"):
            request = api.DeleteObject(kind=kind, name=f"life-{number}", requester="lifecycles")
            client.call(api.DELETE, request)
            wait(client, kind, number, "deleted")


def wait(client: BlockingClient, kind: str, number: int, condition: str) -> None:
    request = api.WaitCondition(
        kind=kind, name=f"life-{number}", condition=condition, timeout_s=120.0
    )
    client.call(api.WAIT_CONDITION, request, timeout_s=130.0)


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake") as running:
        running.apply(
            """
apiVersion: compute.chv.dev/v1alpha1
kind: Network
metadata: {name: lan}
spec: {subnet: 10.9.0.0/16}
"""
        )
        yield running


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_lifecycles_leave_nothing_and_the_daemons_do_not_grow(node: LiveNode) -> None:
    run(node, range(WARM))
    before = settled(node)
    begun = time.monotonic()
    run(node, range(WARM, WARM + COUNT))
    seconds = time.monotonic() - begun
    after = settled(node)
    for each in (before, after):
        print(each.fds, each.threads, each.anonymous_kib, each.rows)
    print(f"{COUNT} lifecycles in {seconds:.0f} s")
    assert after.files == before.files
    assert after.traces == before.traces
    for name in DAEMONS:
        assert after.threads[name] <= before.threads[name] + THREADS_MORE_MAX, name
        assert after.fds[name] <= before.fds[name] + FDS_MORE_MAX, name
        growth = after.anonymous_kib[name] - before.anonymous_kib[name]
        assert growth < GROWTH_MAX_KIB, f"{name} has grown by {growth} KiB"
    for table, count in after.rows.items():
        assert count <= max(before.rows[table], BOUNDED.get(table, 0)), table


def run(node: LiveNode, numbers: range) -> None:
    socket = node.dev.socket
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for _ in pool.map(lambda number: live(socket, number), numbers):
            pass


def settled(node: LiveNode) -> Sizes:
    """Sizes when nothing is under way any more: worker threads of the daemons rest for a while."""
    wait_for(lambda: not node.workers("vmm") and not node.workers("qsd"), 30, "no worker left")
    last: list[Sizes] = []

    def still() -> Sizes | None:
        last.append(sizes(node))
        seen = last[-2:]
        same = len(seen) == 2 and (seen[0].fds, seen[0].threads) == (seen[1].fds, seen[1].threads)
        time.sleep(0.5)
        return seen[1] if same else None

    found: Sizes = wait_for(still, 60, "the daemons to rest")
    return found
