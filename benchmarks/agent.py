"""What the agent costs, on real daemons with the fake VMM.

The overhead of a create is the time from the accepted apply to VMMRunning, less what the VMM
process itself takes from spawn to ready, which is measured in the same run; one at a time, and
eight at a time. Then 200 VMs stand: adoption after a kill and when the API answers, and what the
three daemons take while nothing happens, without a VM and beside 200; lists of 500 while a VMM
hangs.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import msgspec

from benchmarks.node import fake_node, start
from benchmarks.result import Results
from chv.cli import manifests
from chv.common.errors import ChvError
from chv.common.pages import whole_blocking
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent
from chv.common.wire.types import API_VERSION, Empty
from chv.host import devnode

_result = Results("agent")
CREATES = 12
TOGETHER = 32
AT_A_TIME = 8
ADOPTED_VMS = 200
LISTED_VMS = 500
LISTS = 200
SETTLED_S = 15.0
IDLE_S = 60.0
CREATE_BUDGET_MS = 150.0
CREATE_P95_BUDGET_MS = 400.0
ADOPT_BUDGET_S = 2.0
ANSWER_BUDGET_S = 0.5
LIST_BUDGET_MS = 10.0
IDLE_PSS_BUDGET_MIB = 120.0
IDLE_CPU_BUDGET_PERCENT = 1.0
DAEMONS = ("agent", "stord", "nwd")
OWN_STEPS = ("spawn", "create", "attach_console", "boot")


def run() -> list[dict[str, Any]]:
    """Measure everything on one node."""
    with fake_node() as node:
        return [
            *_idle(node),
            _create_overhead(node),
            _create_together(node),
            *_adopt(node),
            *_beside_many(node),
            _list_beside_a_hung_vmm(node),
        ]


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _vm(name: str, *, with_disk: bool) -> list[dict[str, Any]]:
    spec: dict[str, Any] = {"memory": "64Mi", "boot": {"image": "tiny"}}
    if not with_disk:
        return [_object("VirtualMachine", name, spec)]
    spec["interfaces"] = [{"name": "eth0", "network": "lan"}]
    spec["disks"] = [{"name": "data", "volume": name}]
    volume = _object("Volume", name, {"size": "64Mi", "format": "raw"})
    return [volume, _object("VirtualMachine", name, spec)]


def _apply(client: BlockingClient, documents: list[dict[str, Any]]) -> list[agent.AppliedObject]:
    request = agent.Apply(objects=manifests.raw(documents), requester="benchmark")
    return client.call(agent.APPLY, request).results


def _await_running(client: BlockingClient, name: str) -> None:
    client.call(
        agent.WAIT_CONDITION,
        agent.WaitCondition(
            kind="VirtualMachine", name=name, condition="VMMRunning", timeout_s=120
        ),
        timeout_s=125,
    )


def _create_overhead(node: devnode.DevNode) -> dict[str, Any]:
    overheads, spawns = [], []
    with BlockingClient(node.socket) as client:
        image = _object("Image", "tiny", {"builtin": "tiny"})
        network = _object("Network", "lan", {"subnet": "10.64.0.0/16"})
        results = _apply(client, [image, network])
        _wait_operations(client, results)
        for number in range(CREATES):
            overhead, spawn = _create_ms(client, f"create-{number}")
            spawns.append(spawn)
            overheads.append(overhead)
    baseline = f"VMM spawn to ready: {statistics.median(spawns):.1f} ms"
    value = statistics.median(overheads)
    return _result("create_overhead_p50", value, "ms", CREATE_BUDGET_MS, baseline)


def _create_ms(client: BlockingClient, name: str) -> tuple[float, float]:
    """Create a VM; return what it took us and what it took the VMM, in milliseconds."""
    begun = time.perf_counter()
    results = _apply(client, _vm(name, with_disk=True))
    _await_running(client, name)
    total = time.perf_counter() - begun
    spawn = _spawn_seconds(client, results[-1].operation_id)
    return (total - spawn) * 1000, spawn * 1000


def _create_together(node: devnode.DevNode) -> dict[str, Any]:
    def create(number: int) -> float:
        with BlockingClient(node.socket) as client:
            return _create_ms(client, f"together-{number}")[0]

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        times = list(pool.map(create, range(TOGETHER)))
    value = statistics.quantiles(times, n=20)[-1]
    baseline = f"{TOGETHER} VMs, {AT_A_TIME} at a time; p50 {statistics.median(times):.0f} ms"
    return _result("create_overhead_p95_of_8", value, "ms", CREATE_P95_BUDGET_MS, baseline)


def _wait_operations(client: BlockingClient, results: list[agent.AppliedObject]) -> None:
    for result in results:
        if result.operation_id:
            request = agent.WaitOperation(operation_id=result.operation_id, timeout_s=600)
            client.call(agent.WAIT_OPERATION, request, timeout_s=605)


def _spawn_seconds(client: BlockingClient, operation_id: str) -> float:
    """Return what the VMM itself took: its start, the wait for its sockets, its boot."""
    request = agent.WaitOperation(operation_id=operation_id, timeout_s=60)
    operation = client.call(agent.WAIT_OPERATION, request).operation
    own = [step for step in operation.steps if step.name.split(" ")[0] in OWN_STEPS]
    return sum(_seconds(step.ended_at) - _seconds(step.started_at) for step in own)


def _seconds(stamp: str) -> float:
    from datetime import datetime

    return datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()


def _adopt(node: devnode.DevNode) -> list[dict[str, Any]]:
    """Kill the agent over many VMs; time from its start until every VM is adopted and observed."""
    with BlockingClient(node.socket) as client:
        names = [f"adopt-{number}" for number in range(ADOPTED_VMS - CREATES - TOGETHER)]
        for first in range(0, len(names), 50):
            batch = [entry for name in names[first : first + 50]
                     for entry in _vm(name, with_disk=False)]  # fmt: skip
            _wait_operations(client, _apply(client, batch))
    running = devnode.agent_process(node)
    assert running is not None
    os.kill(running.pid, signal.SIGKILL)
    while devnode.agent_process(node) is not None:
        time.sleep(0.01)
    with ThreadPoolExecutor(1) as pool:
        begun = time.perf_counter()
        answers = pool.submit(_answers_after, node, begun)
        anyio.run(start, node)
        ready = time.perf_counter() - begun
        with BlockingClient(node.socket) as client:
            while not _all_running(client):
                time.sleep(0.02)
        value = time.perf_counter() - begun
    note = f"node ready after {ready:.2f} s, interpreter start included"
    return [
        _result("adopt_200", value, "s", ADOPT_BUDGET_S, note),
        _result("api_answers", answers.result(), "s", ANSWER_BUDGET_S, "from the process's start"),
    ]


def _answers_after(node: devnode.DevNode, begun: float) -> float:
    """Return when the API first answered, in seconds after `begun`."""
    while time.perf_counter() - begun < ADOPT_BUDGET_S * 10:
        try:
            with BlockingClient(node.socket) as client:
                client.call(agent.NODE_STATUS, Empty())
            return time.perf_counter() - begun
        except (ChvError, OSError):
            time.sleep(0.005)
    return float("inf")


def _list_beside_a_hung_vmm(node: devnode.DevNode) -> dict[str, Any]:
    with BlockingClient(node.socket) as client:
        halted = [_halted(f"halted-{number}") for number in range(LISTED_VMS - ADOPTED_VMS)]
        for first in range(0, len(halted), 100):
            _wait_operations(client, _apply(client, halted[first : first + 100]))
        request = agent.ObjectRef(kind="VirtualMachine", name="create-0")
        vm = msgspec.json.decode(client.call(agent.GET, request).object)
        pid = vm["status"]["vmm"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        times = []
        for _ in range(LISTS):
            begun = time.perf_counter()
            _all_vms(client)
            times.append((time.perf_counter() - begun) * 1000)
            time.sleep(0.05)
        os.kill(pid, signal.SIGCONT)
    value = statistics.quantiles(times, n=100)[-1]
    note = f"{LISTED_VMS} VMs, {ADOPTED_VMS} with a VMM, one of them stopped"
    note += f"; p50 {statistics.median(times):.1f} ms"
    return _result("list_hung_p99", value, "ms", LIST_BUDGET_MS, note)


def _halted(name: str) -> dict[str, Any]:
    spec = {"memory": "64Mi", "boot": {"image": "tiny"}, "runStrategy": "Halted"}
    return _object("VirtualMachine", name, spec)


def _idle(node: devnode.DevNode) -> list[dict[str, Any]]:
    """What the daemons take while there is nothing to do."""
    percent, pss, count = _taken(node)
    note = f"{count} daemons, no VM"
    return [
        _result("idle_pss", pss, "MiB", IDLE_PSS_BUDGET_MIB, note),
        _result("idle_cpu", percent, "%", IDLE_CPU_BUDGET_PERCENT, f"{note}, {IDLE_S:.0f} s"),
    ]


def _beside_many(node: devnode.DevNode) -> list[dict[str, Any]]:
    """What they take beside many VMs while nobody asks anything; each VM is looked at."""
    with BlockingClient(node.socket) as client:
        while not _all_running(client):
            time.sleep(0.1)
    percent, pss, count = _taken(node)
    note = f"{count} daemons beside {ADOPTED_VMS} VMs"
    infinite = float("inf")
    return [
        _result("pss_200", pss, "MiB", infinite, note),
        _result("cpu_200", percent, "%", infinite, f"{note}, {IDLE_S:.0f} s"),
    ]


def _taken(node: devnode.DevNode) -> tuple[float, float, int]:
    """Return processor time in percent of one core, proportional memory, and how many daemons."""
    time.sleep(SETTLED_S)
    with BlockingClient(node.socket) as client:
        status = client.call(agent.NODE_STATUS, Empty())
    pids = [status.pid, *(daemon.pid for daemon in status.daemons if daemon.name in DAEMONS)]
    before = sum(map(_cpu_s, pids))
    time.sleep(IDLE_S)
    percent = (sum(map(_cpu_s, pids)) - before) / IDLE_S * 100
    return percent, sum(map(_pss_mib, pids)), len(pids)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no Pss of {pid}")


def _all_running(client: BlockingClient) -> bool:
    found = [msgspec.json.decode(item) for item in _all_vms(client)]
    return len(found) == ADOPTED_VMS and all(item["status"]["phase"] == "Running" for item in found)


def _all_vms(client: BlockingClient) -> list[msgspec.Raw]:
    request = agent.ListObjects(kind="VirtualMachine")
    return whole_blocking(client.call, agent.LIST, request, "items").items
