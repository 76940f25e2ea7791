"""Guests on real VMMs: how long until the probe says its first line, and what of it is ours.

`vmm.calls_*`: the driver's calls and the same ones by hand, a process for each as a shell script
has them (`vmm_calls`). `vmm.first_line_*`: from the accepted apply to the first line that the
console recorded; on QEMU as a ratio to the same command line started by hand. What needs a VMM
that is not here is left out and said so.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from benchmarks import vmm_bare, vmm_calls
from benchmarks.node import real_node
from benchmarks.result import Results
from chv.cli import manifests
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent
from chv.common.wire.types import API_VERSION
from chv.host import devnode

_result = Results("vmm")
ROUNDS = 15
QEMU_ROUNDS = 8
PROBES = 50
AT_A_TIME = 8
FIRST_LINE = " @0 boot "
FIRST_LINE_S_MAX = 60.0
CALLS_BUDGET = 1.3
FIRST_LINE_BUDGET_MS = 150.0
QEMU_BUDGET = 1.3
VERIFY_BUDGET_S = 5.0
WORLD = (
    ("Image", "probe", {"builtin": "probe"}),
    ("Network", "lan", {"subnet": "10.64.0.0/16"}),
)


def run() -> list[dict[str, Any]]:
    """Measure everything that this machine has a VMM for."""
    results = []
    binary = vmm_calls.cloud_hypervisor()
    if binary:
        results.append(_calls(binary))
    else:
        print("vmm: no usable Cloud Hypervisor, its results are left out", file=sys.stderr)
    with real_node() as node, BlockingClient(node.socket) as client:
        _await(client, _apply(client, [_object(*entry) for entry in WORLD]))
        if binary:
            results += [_first_line(node), _many(node)]
        results += [_against_bare(node), _verify(node)]
    return results


def _calls(binary: str) -> dict[str, Any]:
    ours, by_hand, how = vmm_calls.measure(binary, ROUNDS)
    value = statistics.median(a / b for a, b in zip(ours, by_hand, strict=True))
    baseline = f"{statistics.median(by_hand):.1f} ms by {how}, ours {statistics.median(ours):.1f}"
    return _result("calls_vs_by_hand", value, "x", CALLS_BUDGET, baseline)


# --- through the agent


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _vm(name: str, vmm: str, volume: str = "") -> dict[str, Any]:
    spec: dict[str, Any] = {"vmm": vmm, "memory": "128Mi", "boot": {"image": "probe"}}
    if volume:
        spec["disks"] = [{"name": "data", "volume": volume}]
        spec["interfaces"] = [{"name": "eth0", "network": "lan"}]
    return _object("VirtualMachine", name, spec)


def _volume(name: str) -> dict[str, Any]:
    return _object("Volume", name, {"size": "64Mi", "format": "raw"})


def _apply(client: BlockingClient, documents: list[dict[str, Any]]) -> list[agent.AppliedObject]:
    request = agent.Apply(objects=manifests.raw(documents), requester="benchmark")
    return client.call(agent.APPLY, request).results


def _await(client: BlockingClient, results: list[agent.AppliedObject]) -> None:
    for result in results:
        if result.operation_id:
            request = agent.WaitOperation(operation_id=result.operation_id, timeout_s=600)
            client.call(agent.WAIT_OPERATION, request, timeout_s=605)


def _delete(client: BlockingClient, kind: str, name: str) -> None:
    request = agent.DeleteObject(kind=kind, name=name, requester="benchmark")
    operation = client.call(agent.DELETE, request).operation.id
    wait = agent.WaitOperation(operation_id=operation, timeout_s=120)
    client.call(agent.WAIT_OPERATION, wait, timeout_s=125)


def _uid(client: BlockingClient, name: str) -> str:
    request = agent.ObjectRef(kind="VirtualMachine", name=name)
    item = client.call(agent.GET, request).object
    return str(msgspec.json.decode(item)["metadata"]["uid"])


def _start_ms(node: devnode.DevNode, client: BlockingClient, document: dict[str, Any]) -> float:
    """Return how long a VM takes from its accepted apply to its guest's first line."""
    _apply(client, [document])
    accepted = time.time()
    uid = _uid(client, document["metadata"]["name"])
    return (_said_at(node.layout.vm_state(uid) / "console.log") - accepted) * 1000


def _said_at(log: Path) -> float:
    """Return when the guest's first line came, by the stamp that the console gave it."""
    deadline = time.monotonic() + FIRST_LINE_S_MAX
    while time.monotonic() < deadline:
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        for line in lines:
            if FIRST_LINE in line:
                return datetime.fromisoformat(line.split(" ")[0].replace("Z", "+00:00")).timestamp()
        time.sleep(0.005)
    heard = log.read_text(errors="replace")[-2000:] if log.exists() else "no console"
    raise SystemExit(f"no first line in {log}: {heard}")


def _first_line(node: devnode.DevNode) -> dict[str, Any]:
    """With a disk behind a proxy and a NIC, beside one that has neither."""
    with BlockingClient(node.socket) as client:
        _await(client, _apply(client, [_volume("data")]))
        whole, plain = list[float](), list[float]()
        for _ in range(ROUNDS):
            for times, volume in ((whole, "data"), (plain, "")):
                times.append(_start_ms(node, client, _vm("p", "cloud-hypervisor", volume)))
                _delete(client, "VirtualMachine", "p")
        _delete(client, "Volume", "data")
    baseline = f"with raw disk and NIC; with neither {statistics.median(plain):.0f} ms"
    value = statistics.median(whole)
    return _result("first_line_p50", value, "ms", FIRST_LINE_BUDGET_MS, baseline)


def _many(node: devnode.DevNode) -> dict[str, Any]:
    """So many probes with disk and NIC, so many at a time; the volumes are there before."""
    names = [f"many-{number}" for number in range(PROBES)]

    def start(name: str) -> float:
        with BlockingClient(node.socket) as client:
            return _start_ms(node, client, _vm(name, "cloud-hypervisor", name))

    def end(name: str) -> None:
        with BlockingClient(node.socket) as client:
            _delete(client, "VirtualMachine", name)
            _delete(client, "Volume", name)

    with BlockingClient(node.socket) as client:
        _await(client, _apply(client, [_volume(name) for name in names]))
        begun = time.perf_counter()
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            times = list(pool.map(start, names))
            took_s = time.perf_counter() - begun
            list(pool.map(end, names))
    p95 = statistics.quantiles(times, n=20)[-1]
    baseline = (
        f"{PROBES} in {took_s:.1f} s, {AT_A_TIME} at a time; p50 {statistics.median(times):.0f} ms"
    )
    return _result("first_line_p95_of_50", p95, "ms", float("inf"), baseline)


def _against_bare(node: devnode.DevNode) -> dict[str, Any]:
    """QEMU: through the agent, and the same command line by hand, in turns."""
    ours, bare = [], []
    with BlockingClient(node.socket) as client, TemporaryDirectory() as scratch:
        for _ in range(QEMU_ROUNDS):
            ours.append(_start_ms(node, client, _vm("p", "qemu")))
            argv = vmm_bare.command_line(node.layout, _uid(client, "p"), Path(scratch))
            bare.append(vmm_bare.first_line_ms(argv, Path(scratch)))
            _delete(client, "VirtualMachine", "p")
    value = statistics.median(a / b for a, b in zip(ours, bare, strict=True))
    baseline = f"{statistics.median(bare):.0f} ms bare, ours {statistics.median(ours):.0f}"
    return _result("first_line_vs_bare_qemu", value, "x", QEMU_BUDGET, baseline)


def _verify(node: devnode.DevNode) -> dict[str, Any]:
    argv = [sys.executable, "-m", "chv.cli", "--socket", str(node.socket), "verify", "--json"]
    begun = time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    value = time.perf_counter() - begun
    report = msgspec.json.decode(done.stdout) if done.stdout else {"vmm": done.stderr, "checks": []}
    baseline = f"{len(report['checks'])} checks on {report['vmm']}, exit code {done.returncode}"
    return _result("verify_node", value, "s", VERIFY_BUDGET_S, baseline)
