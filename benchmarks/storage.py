"""Storage: a real stord with real storage daemons, without agent and guest.

`storage.attach_*` are times of calls; `storage.io_*` are ratios of the same workload through our
export to direct io_uring on the same file, the two interleaved in rounds, medians of the ratios.
Both sides are measured by the same loop in `block_bench.c`, which needs a C compiler; without one
these results are left out and said so.
"""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import choose_provider, scan, wait_gone
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import stord as wire
from chv.common.wire.types import CallMeta, Empty

IDS = Ids()
MIB = 1 << 20
GIB = 1 << 30
ATTACHES = 15
VOLUMES = 100
ROUNDS = 5
ROUND_S = 1.0
FILE_BYTES = 1 * GIB
SOURCE = Path(__file__).with_name("block_bench.c")
# name, workload, block bytes, depth, budget of the ratio
WORKLOADS = (
    ("randread_qd1", "randread", 4096, 1, 0.65),
    ("randwrite_qd1", "randwrite", 4096, 1, 0.65),
    ("randread_qd32", "randread", 4096, 32, 0.80),
    ("randwrite_qd32", "randwrite", 4096, 32, 0.80),
    ("read_128k_qd8", "read", 131072, 8, 0.80),
    ("write_128k_qd8", "write", 131072, 8, 0.80),
)


@dataclass
class Stord:
    """A stord of an instance of its own, and a client."""

    root: Path
    layout: Layout
    process: subprocess.Popen[bytes]
    client: BlockingClient
    slots: dict[str, int] = field(default_factory=dict)

    def open(
        self, volume_id: str, format_: wire.VolumeFormat, size_bytes: int, **backend: Any
    ) -> wire.VolumeInfo:
        """Open a volume of class `file`."""
        request = wire.OpenVolume(
            meta=_meta(backend.pop("generation", 1)),
            volume_id=volume_id,
            backend=wire.VolumeBackend(
                class_name=wire.VolumeClass.FILE, format=format_, size_bytes=size_bytes, **backend
            ),
        )
        return self.client.call(wire.OPEN_VOLUME, request)

    def attach(self, volume_id: str, vm_id: str, generation: int = 1) -> wire.AttachmentInfo:
        """Attach to a VM; each VM has uids of its own."""
        slot = self.slots.setdefault(vm_id, len(self.slots))
        request = wire.AttachVolumeToVm(
            meta=_meta(generation),
            volume_id=volume_id,
            vm_id=vm_id,
            storage_uid=self.layout.storage_uid(slot),
            vm_gid=self.layout.vmm_uid(slot),
        )
        return self.client.call(wire.ATTACH_VOLUME, request)

    def detach(self, volume_id: str, vm_id: str, generation: int = 1) -> None:
        """Detach."""
        request = wire.DetachVolumeFromVm(meta=_meta(generation), volume_id=volume_id, vm_id=vm_id)
        self.client.call(wire.DETACH_VOLUME, request)


def run() -> list[dict[str, Any]]:
    """Measure everything."""
    with stord() as node:
        results = [*_attach_times(node), _open_many(node), _clone(node)]
    with stord() as node:
        results += [*_io_ratios(node), *_limits(node)]
    return results


@contextmanager
def stord(storage: str = "") -> Iterator[Stord]:
    """Run a stord; nothing of it is left at the end."""
    root = Path(tempfile.mkdtemp(prefix="chv-bench-", dir="/run"))
    state = Path(tempfile.mkdtemp(prefix="chv-bench-", dir="/var/tmp"))
    for directory in (root, state):
        directory.chmod(0o711)
    layout = Layout(IDS.instance(), root, state)
    config = root / "chv.toml"
    config.write_text(
        f'[node]\ninstance = "{layout.instance}"\nrun_dir = "{root}"\nstate_dir = "{state}"\n'
        f"[storage]\n{storage}\n"
    )
    process = _started(config, root / "stord.log")
    try:
        with BlockingClient(layout.socket("stord")) as client:
            yield Stord(root, layout, process, client)
    finally:
        process.kill()
        process.wait()
        anyio.run(_end_workers, layout)
        for directory in (root, state):
            shutil.rmtree(directory)


def _started(config: Path, log: Path) -> subprocess.Popen[bytes]:
    reader, writer = os.pipe()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "chv.stord", "--config", str(config)],
            env={**os.environ, "CHV_READY_FD": str(writer)},
            pass_fds=[writer],
            stderr=output,
        )
    os.close(writer)
    with os.fdopen(reader, "rb") as ready:
        if ready.read() != b"ready\n":
            raise SystemExit(f"stord did not start: {log.read_text()[-2000:]}")
    return process


async def _end_workers(layout: Layout) -> None:
    provider = choose_provider(layout)
    for worker in scan(layout.worker_prefix):
        await provider.kill(worker.record(), signal.SIGKILL)
        await wait_gone(worker.record())
    await provider.retire()


def _meta(generation: int = 1) -> CallMeta:
    return CallMeta(operation_id=IDS.operation(), generation=generation)


def _result(
    name: str, value: float, unit: str, budget: float, baseline: str, *, at_least: bool = False
) -> dict[str, Any]:
    return {
        "id": f"storage.{name}",
        "value": round(value, 3),
        "unit": unit,
        "budget": budget,
        "ok": value >= budget if at_least else value <= budget,
        "baseline": baseline,
    }


# --- attach


def _attach_times(node: Stord) -> list[dict[str, Any]]:
    first, further, proxied, proxied_more = [], [], [], []
    daemon_pss, proxy_pss = [], []
    for _ in range(ATTACHES):
        times, info = _one_vm(node, wire.VolumeFormat.QCOW2)
        first.append(times[0])
        further += times[1:]
        daemon_pss.append(_pss_mib(info.backend_pid))
        times, info = _one_vm(node, wire.VolumeFormat.RAW)
        proxied.append(times[0])
        proxied_more += times[1:]
        if info.proxy_pid:
            proxy_pss.append(_pss_mib(info.proxy_pid))
    median = statistics.median
    results = [
        _result("attach_p50", median(first), "ms", 30, "with a new storage daemon, no proxy"),
        _result("attach_further_p50", median(further), "ms", 5, "each further disk, no proxy"),
        _result("daemon_pss_p50", median(daemon_pss), "MiB", 3, "one VM with three disks"),
        _result("attach_proxied_p50", median(proxied), "ms", 120, "storage daemon and proxy"),
        _result("attach_proxied_further_p50", median(proxied_more), "ms", 90, "a further proxy"),
    ]
    if proxy_pss:
        results.append(_result("proxy_pss_p50", median(proxy_pss), "MiB", 20, "one proxy"))
    return results


def _one_vm(node: Stord, format_: wire.VolumeFormat) -> tuple[list[float], wire.AttachmentInfo]:
    """Attach three disks to a new VM; return the times in ms and the last answer."""
    vm_id, volumes, times = IDS.uid(), [IDS.uid() for _ in range(3)], []
    for volume_id in volumes:
        node.open(volume_id, format_, GIB)
    for volume_id in volumes:
        begun = time.perf_counter()
        info = node.attach(volume_id, vm_id)
        times.append((time.perf_counter() - begun) * 1000)
    return times, info


def _pss_mib(pid: int) -> float:
    with Path(f"/proc/{pid}/smaps_rollup").open() as file:
        line = next(line for line in file if line.startswith("Pss:"))
    return int(line.split()[1]) / 1024


def _open_many(node: Stord) -> dict[str, Any]:
    ids = [IDS.uid() for _ in range(VOLUMES)]
    begun = time.perf_counter()
    for volume_id in ids:
        node.open(volume_id, wire.VolumeFormat.QCOW2, GIB)
    value = time.perf_counter() - begun
    return _result("open_100", value, "s", 5, "100 new qcow2 volumes, one after the other")


def _clone(node: Stord) -> dict[str, Any]:
    """A qcow2 volume on top of a 10 GiB image, as content-addressed images are."""
    sha256 = "ab" * 32
    image = node.layout.image(sha256)
    for directory in reversed(image.parents):
        directory.mkdir(exist_ok=True, mode=0o755)
    with image.open("wb") as file:
        file.truncate(10 * GIB)
    image.chmod(0o644)
    source = wire.VolumeSource(path=str(image), sha256=sha256, format=wire.VolumeFormat.RAW)
    times = []
    for _ in range(ATTACHES):
        begun = time.perf_counter()
        node.open(IDS.uid(), wire.VolumeFormat.QCOW2, 10 * GIB, source=source)
        times.append((time.perf_counter() - begun) * 1000)
    return _result("clone_10gib_p50", statistics.median(times), "ms", 100, "overlay on an image")


# --- I/O


def _io_ratios(node: Stord) -> list[dict[str, Any]]:
    program = _compiled(node.root)
    if program is None:
        print("storage.io_*: left out, no C compiler", file=sys.stderr)
        return []
    volume_id, vm_id = IDS.uid(), IDS.uid()
    info = node.open(volume_id, wire.VolumeFormat.RAW, FILE_BYTES)
    _write_all(Path(info.path))
    export = node.attach(volume_id, vm_id).export_path
    results = []
    for name, workload, block, depth, budget in WORKLOADS:
        load, ratios, latency = Load(workload, block, depth), list[float](), list[float]()
        for _ in range(ROUNDS):
            direct = _bench(program, "file", info.path, load)
            ours = _bench(program, "vhost", export, load)
            ratios.append(ours[0] / direct[0])
            latency.append(ours[1])
        low, high = min(ratios), max(ratios)
        words = f"of direct io_uring; rounds {low:.2f} to {high:.2f}, p50 {latency[0]:.0f} us"
        value = statistics.median(ratios)
        results.append(_result(f"io_{name}", value, "ratio", budget, words, at_least=True))
    node.detach(volume_id, vm_id)
    return results


def _compiled(directory: Path) -> Path | None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    program = directory / "block_bench"
    subprocess.run([compiler, "-O2", "-o", str(program), str(SOURCE)], check=True)
    return program


def _write_all(path: Path) -> None:
    """Allocate every block, so that neither side measures allocation."""
    chunk = os.urandom(MIB)
    with path.open("r+b") as file:
        for _ in range(FILE_BYTES // MIB):
            file.write(chunk)
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Load:
    """One workload of `block_bench`."""

    workload: str
    block_bytes: int
    depth: int
    seconds: float = ROUND_S
    span_bytes: int = FILE_BYTES

    def argv(self, program: Path, side: str, path: str) -> list[str]:
        """Return the command line."""
        numbers = (self.block_bytes, self.depth, self.seconds, self.span_bytes)
        return [str(program), side, path, self.workload, *map(str, numbers)]


def _bench(program: Path, side: str, path: str, load: Load) -> tuple[float, float]:
    """Return requests per second and the median latency in microseconds."""
    argv = load.argv(program, side, path)
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    requests, elapsed, median, _p99 = done.stdout.split()
    return int(requests) / float(elapsed), float(median)


# --- limits


def _limits(node: Stord) -> list[dict[str, Any]]:
    """How far the measured rate is from the limit, and how soon a change is felt."""
    program = _compiled(node.root)
    if program is None:
        return []
    volume_id, vm_id = IDS.uid(), IDS.uid()
    node.open(volume_id, wire.VolumeFormat.RAW, 256 * MIB)
    export = node.attach(volume_id, vm_id).export_path
    off = []
    for generation, limits, block in (
        (2, wire.Limits(iops_total=wire.Rate(limit=500)), 4096),
        (3, wire.Limits(bps_write=wire.Rate(limit=8 * MIB)), 65536),
        (4, wire.Limits(iops_write=wire.Rate(limit=300)), 4096),
    ):
        _set_limits(node, volume_id, generation, limits)
        load = Load("randwrite", block, 16, 4.0, 256 * MIB)
        rate = _bench(program, "vhost", export, load)[0]
        wanted = (
            limits.iops_total.limit or limits.iops_write.limit or limits.bps_write.limit / block
        )
        off.append(abs(rate / wanted - 1) * 100)
    felt = _time_to_effect(node, program, volume_id, export)
    return [
        _result("limit_error_max", max(off), "%", 10, "measured rate against the limit"),
        _result("limit_change", felt, "s", 1, "from the call to the new rate, under load"),
    ]


def _set_limits(node: Stord, volume_id: str, generation: int, limits: wire.Limits) -> None:
    info = node.open(
        volume_id, wire.VolumeFormat.RAW, 256 * MIB, limits=limits, generation=generation
    )
    if info.limits != limits or not info.limits_live:
        raise SystemExit(f"limits read back as {info.limits}, not {limits}")


def _time_to_effect(node: Stord, program: Path, volume_id: str, export: str) -> float:
    """Change a limit under load; return when the rate first was near the new one."""
    load = subprocess.Popen(
        Load("randwrite", 4096, 16, 3.0, 256 * MIB).argv(program, "vhost", export),
        stdout=subprocess.DEVNULL,
    )
    pid = node.client.call(wire.LIST_SESSIONS, Empty()).sessions[-1].backend_pid
    time.sleep(1.0)
    begun = time.perf_counter()
    _set_limits(node, volume_id, 5, wire.Limits(iops_total=wire.Rate(limit=2000)))
    try:
        while True:
            before, since = _written(pid), time.perf_counter()
            time.sleep(0.2)
            rate = (_written(pid) - before) / 4096 / (time.perf_counter() - since)
            if rate > 1600:
                return since - begun
            if since - begun > 2.5:
                return since - begun
    finally:
        load.wait()


def _written(pid: int) -> int:
    with Path(f"/proc/{pid}/io").open() as file:
        return int(next(line for line in file if line.startswith("write_bytes")).split()[1])
