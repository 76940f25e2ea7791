"""What a VM takes of the host's memory besides the guest's own, against the bound for it.

`overhead.vmm_*`, `overhead.storage_*`: what was measured of a process as a share of what
`chv.agent.resources.overhead` allows it; beyond 1 the bound is none. One VM runs at a time, so
that what it would share with its like is counted in full. The guest works first: QEMU without KVM
keeps the code that it translated, and each page that is touched has its entry in a page table.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.node import real_node
from benchmarks.result import Results
from chv.agent.resources.overhead import (
    MIB,
    PROXY_BYTES,
    Shape,
    qcow2_cache_bytes,
    storage_bytes,
    vmm_bytes,
)
from chv.cli import manifests
from chv.common.process import scan
from chv.common.quantity import parse_bytes
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent
from chv.common.wire.types import API_VERSION, Empty
from chv.host import devnode

_result = Results("overhead")
SIZE = "256Mi"
WORK = (
    "mkdir -p /tmp/x && mount -t tmpfs -o size=90% none /tmp/x && "
    "dd if=/dev/zero of=/tmp/x/f bs=1M count={mib} 2>/dev/null; "
    "for i in 1 2 3; do find / -xdev >/dev/null; sha256sum /bin/busybox; "
    "gzip -c /bin/busybox | wc -c; done >/dev/null; "
    "for d in /dev/vd[a-d]; do test -b $d && dd if=$d of=/dev/null bs=1M; done 2>/dev/null; true"
)
# Name, cpus, memory, formats of its disks.
VMS = (
    ("one", 1, "256Mi", ()),
    ("raw", 2, "512Mi", ("raw", "raw")),
    ("qcow2", 4, "1Gi", ("qcow2",)),
)
GUEST_MEMORY = re.compile(r"/memfd:")
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")


def run() -> list[dict[str, Any]]:
    """Measure on all VMMs that run a guest here."""
    with real_node() as node, BlockingClient(node.socket) as client:
        images = [_object("Image", name, {"builtin": name}) for name in ("tiny", "probe")]
        _apply(client, [*images, _object("Network", "lan", {"subnet": "10.64.0.0/16"})])
        return list(_results(node, client))


def _results(node: devnode.DevNode, client: BlockingClient) -> Iterator[dict[str, Any]]:
    usable = {vmm.name for vmm in client.call(agent.NODE_STATUS, Empty()).vmms if vmm.usable}
    for vmm in ("qemu", "cloud-hypervisor"):
        if vmm not in usable:
            print(f"overhead: no usable {vmm}, its results are left out", file=sys.stderr)
            continue
        for name, cpus, memory, formats in VMS:
            spec = _spec(client, name, vmm, (cpus, memory, formats))
            yield from _one(node, client, f"{name}-{vmm}", spec)


def _spec(
    client: BlockingClient, name: str, vmm: str, sizes: tuple[int, str, tuple[str, ...]]
) -> dict[str, Any]:
    cpus, memory, formats = sizes
    volumes = [f"{name}-{vmm}-{number}" for number in range(len(formats))]
    made = [
        _object("Volume", volume, {"size": SIZE, "format": kind})
        for volume, kind in zip(volumes, formats, strict=True)
    ]
    if made:
        _apply(client, made)
    return {
        "vmm": vmm,
        "cpus": cpus,
        "memory": memory,
        # A stock kernel does not come up on every KVM that runs the probe.
        "boot": {"image": "tiny" if vmm == "qemu" else "probe"},
        "interfaces": [{"name": "eth0", "network": "lan"}],
        "disks": [{"name": f"d{index}", "volume": each} for index, each in enumerate(volumes)],
    }


def _one(
    node: devnode.DevNode, client: BlockingClient, name: str, spec: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Run a VM, let it work, count, delete it."""
    _apply(client, [_object("VirtualMachine", name, spec)])
    if spec["boot"]["image"] == "tiny":
        _work(node, client, name, parse_bytes(spec["memory"]) // MIB // 2)
    status = _status(client, name)
    disks = len(spec["disks"])
    layered = disks and "qcow2" in name
    shape = Shape(
        driver=spec["vmm"],
        accelerator=status["vmm"]["accelerator"],
        vcpus=spec["cpus"],
        memory_bytes=parse_bytes(spec["memory"]),
        disks=disks,
        nics=1,
        cache_bytes=qcow2_cache_bytes(parse_bytes(SIZE)) if layered else 0,
    )
    bounds = {"vmm": vmm_bytes(shape), "qsd": storage_bytes(shape), "proxy": PROXY_BYTES}
    names = {"vmm": "vmm", "qsd": "storage", "proxy": "proxy"}
    for kind, seen in _largest(node).items():
        bound = bounds[kind]
        baseline = f"{seen / MIB:.1f} of {bound / MIB:.1f} MiB"
        yield _result(f"{names[kind]}_{name}", seen / bound, "x", 1.0, baseline)
    request = agent.DeleteObject(kind="VirtualMachine", name=name, requester="benchmark")
    _await(client, client.call(agent.DELETE, request).operation.id)


def _largest(node: devnode.DevNode) -> dict[str, int]:
    """Return what the largest worker of each kind takes besides the guest's memory."""
    found: dict[str, int] = {}
    for worker in scan(node.layout.worker_prefix):
        kind = worker.worker_id.split(":")[2]
        if kind in ("vmm", "qsd", "proxy"):
            found[kind] = max(found.get(kind, 0), own_bytes(worker.pid))
    return found


def own_bytes(pid: int) -> int:
    """Return what a process takes besides guest memory: its pages and its page tables."""
    total, counts = 0, True
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if _MAPPING.match(line):
            counts = not GUEST_MEMORY.search(line)
        elif counts and line.startswith("Pss:"):
            total += int(line.split()[1]) << 10
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmPTE:"):
            total += int(line.split()[1]) << 10
    return total


def _work(node: devnode.DevNode, client: BlockingClient, name: str, mib: int) -> None:
    client.call(
        agent.WAIT_CONDITION,
        agent.WaitCondition(kind="VirtualMachine", name=name, condition="SSHReady", timeout_s=120),
        timeout_s=125,
    )
    argv = [sys.executable, "-m", "chv.cli", "--socket", str(node.socket), "ssh", name, "--"]
    subprocess.run([*argv, WORK.format(mib=mib)], check=True, timeout=300, env=dict(os.environ))


def _status(client: BlockingClient, name: str) -> dict[str, Any]:
    request = agent.ObjectRef(kind="VirtualMachine", name=name)
    status: dict[str, Any] = msgspec.json.decode(client.call(agent.GET, request).object)["status"]
    return status


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _apply(client: BlockingClient, documents: list[dict[str, Any]]) -> None:
    request = agent.Apply(objects=manifests.raw(documents), requester="benchmark")
    for result in client.call(agent.APPLY, request).results:
        _await(client, result.operation_id)


def _await(client: BlockingClient, operation_id: str) -> None:
    if operation_id:
        request = agent.WaitOperation(operation_id=operation_id, timeout_s=300)
        operation = client.call(agent.WAIT_OPERATION, request, timeout_s=305).operation
        if operation.state is not agent.OperationState.SUCCEEDED:
            raise SystemExit(f"{operation.verb} {operation.name}: {operation.message}")
