"""Storage: a real stord with real storage daemons, without agent and guest.

`storage.attach_*` are times of calls; `storage.io_*` are ratios of the same workload through our
export to direct io_uring on the same file, the two interleaved in rounds, medians of the ratios.
Both sides are measured by the same loop in `block_bench.c`, which needs a C compiler; without one
these results are left out and said so.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.result import Results
from benchmarks.storage_node import GIB, IDS, MIB, Stord, stord
from chv.common.wire import stord as wire
from chv.common.wire.types import ListPage

_result = Results("storage")
ATTACHES = 15
VOLUMES = 100
ROUNDS = 10
ROUND_S = 0.6
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


def run() -> list[dict[str, Any]]:
    """Measure everything."""
    with stord() as node:
        results = [*_attach_times(node), _open_many(node), _clone(node)]
    with stord() as node:
        results += [*_io_ratios(node), *_limits(node)]
    return results


# --- attach


def _attach_times(node: Stord) -> list[dict[str, Any]]:
    """Each round takes one VM with one disk and one with three, and plugs one into the first."""
    plain, proxied = Attaches(), Attaches()
    for _ in range(ATTACHES):
        plain.measure(node, wire.VolumeFormat.QCOW2)
        proxied.measure(node, wire.VolumeFormat.RAW)
    p50 = statistics.median
    results = [
        _result("attach_p50", p50(plain.first), "ms", 30, "with a new storage daemon, no proxy"),
        _result("attach_further_p50", p50(plain.further), "ms", 5, "each further disk at a start"),
        _shown("attach_plugged_p50", p50(plain.plugged), "ms", "a disk plugged in later, no proxy"),
        _result("daemon_pss_p50", p50(plain.daemon_pss), "MiB", 3, "one VM with three disks"),
        _result("attach_proxied_p50", p50(proxied.first), "ms", 120, "storage daemon and proxy"),
        _result("attach_proxied_further_p50", p50(proxied.further), "ms", 90, "a further proxy"),
        _shown("attach_proxied_plugged_p50", p50(proxied.plugged), "ms", "plugged in, with proxy"),
    ]
    if proxied.proxy_pss:
        results.append(_result("proxy_pss_p50", p50(proxied.proxy_pss), "MiB", 20, "one proxy"))
    return results


def _shown(name: str, value: float, unit: str, baseline: str) -> dict[str, Any]:
    """Return a result without a budget."""
    return _result(name, value, unit, 0, baseline) | {"budget": "-", "ok": True}


@dataclass
class Attaches:
    """Times in ms and sizes in MiB. `further`: what each disk beyond the first adds to a start."""

    first: list[float] = field(default_factory=list)
    further: list[float] = field(default_factory=list)
    plugged: list[float] = field(default_factory=list)
    daemon_pss: list[float] = field(default_factory=list)
    proxy_pss: list[float] = field(default_factory=list)

    def measure(self, node: Stord, format_: wire.VolumeFormat) -> None:
        """Take one round."""
        small, large, volumes = IDS.uid(), IDS.uid(), [IDS.uid() for _ in range(5)]
        for volume_id in volumes:
            node.open(volume_id, format_, GIB)
        one, _ = _timed(lambda: node.attach_all(volumes[:1], small))
        three, infos = _timed(lambda: node.attach_all(volumes[1:4], large))
        later, _ = _timed(lambda: [node.attach(volumes[4], small)])
        self.first.append(one)
        self.further.append((three - one) / 2)
        self.plugged.append(later)
        self.daemon_pss.append(_pss_mib(infos[0].backend_pid))
        self.proxy_pss += [_pss_mib(info.proxy_pid) for info in infos if info.proxy_pid]


def _timed(
    attach: Callable[[], list[wire.AttachmentInfo]],
) -> tuple[float, list[wire.AttachmentInfo]]:
    begun = time.perf_counter()
    infos = attach()
    return (time.perf_counter() - begun) * 1000, infos


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
        for number in range(ROUNDS):
            sides = [("file", info.path), ("vhost", export)]
            # Each is first as often as the other: a drift of the machine favours neither.
            order = sides if number % 2 else sides[::-1]
            seen = {side: _bench(program, side, path, load) for side, path in order}
            ratios.append(seen["vhost"][0] / seen["file"][0])
            latency.append(seen["vhost"][1])
        low, high = min(ratios), max(ratios)
        typical = f"p50 {statistics.median(latency):.0f} us"
        words = f"of direct io_uring; rounds {low:.2f} to {high:.2f}, {typical}"
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
    pid = node.client.call(wire.LIST_SESSIONS, ListPage()).sessions[-1].backend_pid
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
