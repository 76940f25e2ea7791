"""fio in a guest: our export against the VMM's own file disk, in the same boot, interleaved.

The guest is the tiny image under emulation, so what it shows is that the export is not the
bottleneck there; the cost of the export itself is in `benchmarks.storage` (`io_*`). Needs fio on
the machine: it is put on a disk for the guest together with its libraries.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from benchmarks.storage_node import MIB, Stord, stord
from chv.common.ids import Ids
from chv.common.wire import stord as wire
from chv.guest.tiny import build_tiny, load_tiny
from tests.integration.tiny_vm import TinyVm, boot

IDS = Ids()
CACHE = Path("/var/cache/chv/bench-tiny")
DISK_BYTES = 256 * MIB
ROUNDS = 5
# name, fio's options
JOBS = (
    ("randwrite_qd1", "--rw=randwrite --bs=4k --iodepth=1"),
    ("randread_qd32", "--rw=randread --bs=4k --iodepth=32"),
    ("write_128k_qd8", "--rw=write --bs=128k --iodepth=8"),
)
_LIBRARY = re.compile(r"(/\S+\.so\S*)")


def run() -> list[dict[str, Any]]:
    """Measure the ratios; empty where fio is missing."""
    fio = shutil.which("fio")
    if fio is None:
        print("guest_io: left out, no fio", file=sys.stderr)
        return []
    with stord() as node, tempfile.TemporaryDirectory(prefix="chv-bench-") as name:
        directory = Path(name)
        toolbox = _toolbox(directory, Path(fio))
        return anyio.run(_measure, node, directory, toolbox)


def _toolbox(directory: Path, fio: Path) -> Path:
    """Make an ext4 disk with fio, its libraries and the program that loads them."""
    tree = directory / "tree"
    tree.mkdir()
    listed = subprocess.run(["ldd", str(fio)], check=True, capture_output=True, text=True).stdout
    for library in set(_LIBRARY.findall(listed)):
        shutil.copy(library, tree / Path(library).name)
    shutil.copy(fio, tree / "fio")
    image = directory / "toolbox"
    with image.open("wb") as file:
        file.truncate(256 * MIB)
    subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", str(tree), str(image)], check=True)
    shutil.rmtree(tree)
    return image


async def _measure(node: Stord, directory: Path, toolbox: Path) -> list[dict[str, Any]]:
    volume_id, vm_id = IDS.uid(), IDS.uid()
    node.open(volume_id, wire.VolumeFormat.RAW, DISK_BYTES)
    export = node.attach(volume_id, vm_id).export_path
    plain = directory / "plain"
    with plain.open("wb") as file:
        file.truncate(DISK_BYTES)
    results = []
    async with _guest(directory, export, plain, toolbox) as vm:
        for name, options in JOBS:
            ratios = []
            for _ in range(ROUNDS):
                theirs = await _fio(vm, "own", options)
                ours = await _fio(vm, "ours", options)
                ratios.append(ours / theirs)
            results.append(_result(name, ratios))
    return results


@asynccontextmanager
async def _guest(directory: Path, export: str, plain: Path, toolbox: Path) -> AsyncIterator[TinyVm]:
    image = load_tiny(CACHE) or await build_tiny(CACHE, CACHE / "debs", progress=lambda _: None)
    extra = [
        "-object", "memory-backend-memfd,id=mem,size=256M,share=on", "-machine",
        "memory-backend=mem",
        "-chardev", f"socket,id=vu,path={export}",
        "-device", "vhost-user-blk-pci,chardev=vu,num-queues=1",
        "-blockdev", f"driver=raw,node-name=own,file.driver=file,file.filename={plain},"
        "file.cache.direct=on,file.aio=native",
        "-device", "virtio-blk-pci,drive=own,num-queues=1,serial=own",
        "-blockdev", f"driver=raw,node-name=box,read-only=on,file.driver=file,"
        f"file.filename={toolbox}",
        "-device", "virtio-blk-pci,drive=box,serial=box",
    ]  # fmt: skip
    async with boot(image, directory, seeded=True, extra=extra) as vm:
        await vm.seen("chv-guest: ready")
        await _told(vm, _SETUP)
        yield vm


_SETUP = """
mkdir -p /box
for d in /sys/block/vd*; do
  n=/dev/${d##*/}
  case "$(cat $d/serial)" in
    box) mount -o ro $n /box ;;
    own) ln -sf $n /tmp/own ;;
    vhost_user_blk) ln -sf $n /tmp/ours ;;
  esac
done
test -e /tmp/own && test -e /tmp/ours && test -e /box/fio
"""


async def _fio(vm: TinyVm, disk: str, options: str) -> float:
    """Return requests per second."""
    loader = "/box/ld-linux-x86-64.so.2 --library-path /box /box/fio"
    words = await _told(
        vm,
        f"cd /tmp && {loader} --name=x --filename=$(readlink /tmp/{disk}) --direct=1 "
        f"--ioengine=libaio --time_based --runtime=3 --output-format=json {options}",
    )
    job = json.loads(words[words.index("{") :])["jobs"][0]
    return float(job["read"]["iops"] + job["write"]["iops"])


async def _told(vm: TinyVm, command: str) -> str:
    code, words = await vm.ssh(command)
    if code != 0:
        raise SystemExit(f"in the guest: {command!r} ended with {code}: {words}")
    return words


def _result(name: str, ratios: list[float]) -> dict[str, Any]:
    low, high = min(ratios), max(ratios)
    return {
        "id": f"guest_io.{name}",
        "value": round(statistics.median(ratios), 3),
        "unit": "ratio",
        "budget": "-",
        "ok": True,
        "baseline": f"of the VMM's own file disk, fio under emulation; {low:.2f} to {high:.2f}",
    }
