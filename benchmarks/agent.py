"""`agent.create_overhead_p50` and `agent.adopt_200`, on real daemons with the fake VMM.

The overhead of a create is the time from the accepted apply to VMMRunning, less what the VMM
process itself takes from spawn to ready, which is measured in the same run.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from typing import Any

import anyio
import msgspec

from benchmarks.node import fake_node, start
from chv.cli import manifests
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent
from chv.common.wire.types import API_VERSION
from chv.host import devnode

CREATES = 12
ADOPTED_VMS = 200
CREATE_BUDGET_MS = 150.0
ADOPT_BUDGET_S = 2.0
OWN_STEPS = ("spawn", "attach_console", "boot")


def run() -> list[dict[str, Any]]:
    """Measure both on one node."""
    with fake_node() as node:
        create = _create_overhead(node)
        adopt = _adopt(node)
    return [create, adopt]


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
            name = f"create-{number}"
            begun = time.perf_counter()
            results = _apply(client, _vm(name, with_disk=True))
            _await_running(client, name)
            total = time.perf_counter() - begun
            spawn = _spawn_seconds(client, results[-1].operation_id)
            spawns.append(spawn * 1000)
            overheads.append((total - spawn) * 1000)
    value = statistics.median(overheads)
    return {
        "id": "agent.create_overhead_p50",
        "value": round(value, 1),
        "unit": "ms",
        "budget": CREATE_BUDGET_MS,
        "ok": value <= CREATE_BUDGET_MS,
        "baseline": f"VMM spawn to ready: {statistics.median(spawns):.1f} ms",
        "runs": CREATES,
    }


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


def _adopt(node: devnode.DevNode) -> dict[str, Any]:
    """Kill the agent over many VMs; time from its start until every VM is adopted and observed."""
    with BlockingClient(node.socket) as client:
        names = [f"adopt-{number}" for number in range(ADOPTED_VMS - CREATES)]
        for first in range(0, len(names), 50):
            batch = [entry for name in names[first : first + 50]
                     for entry in _vm(name, with_disk=False)]  # fmt: skip
            _wait_operations(client, _apply(client, batch))
    running = devnode.agent_process(node)
    assert running is not None
    os.kill(running.pid, signal.SIGKILL)
    while devnode.agent_process(node) is not None:
        time.sleep(0.01)
    begun = time.perf_counter()
    anyio.run(start, node)
    answered = time.perf_counter() - begun
    with BlockingClient(node.socket) as client:
        while not _all_running(client):
            time.sleep(0.02)
    value = time.perf_counter() - begun
    return {
        "id": "agent.adopt_200",
        "value": round(value, 2),
        "unit": "s",
        "budget": ADOPT_BUDGET_S,
        "ok": value <= ADOPT_BUDGET_S,
        "baseline": f"node ready after {answered:.2f} s, interpreter start included",
        "runs": 1,
    }


def _all_running(client: BlockingClient) -> bool:
    items = client.call(agent.LIST, agent.ListObjects(kind="VirtualMachine")).items
    found = [msgspec.json.decode(item) for item in items]
    return len(found) == ADOPTED_VMS and all(item["status"]["phase"] == "Running" for item in found)
