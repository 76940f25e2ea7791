"""A place of each class beyond `file`, with real servers: what a node must allow, and its bytes."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from chv.common.wire import stord as wire
from chv.common.wire.types import Empty
from tests.integration.stord_classes_helpers import (
    CEPH_POOL,
    ceph_cluster,
    has,
    iscsi_target,
    loop_device,
    nbd_server,
    spec,
)
from tests.integration.stord_helpers import MIB, Node, meta
from tests.integration.tiny_vm import free_port

TARGET = "iqn.2026-01.chv.test:places"
# A device is larger than what is asked for: a LUKS header takes two MiB of it.
DEVICE_BYTES = 20 * MIB
needs_ceph = pytest.mark.skipif(
    not has("ceph-mon", "ceph-osd", "ceph", "rbd"), reason="needs ceph-mon, ceph-osd, ceph-common"
)
needs_tgt = pytest.mark.skipif(not has("tgtd", "tgtadm"), reason="needs tgt")
KINDS = [
    "block",
    "nbd",
    "nbd-unix",
    pytest.param("iscsi", marks=needs_tgt),
    pytest.param("rbd", marks=needs_ceph),
]
FOREIGN = KINDS[:4]


@dataclass(frozen=True)
class Place:
    """One place: what the node's `[storage]` must say, and how a volume there is described."""

    storage: str
    describe: Callable[..., wire.VolumeBackend]
    # The bytes as they are there, whoever made them.
    file: Path | None

    def content(self) -> bytes:
        assert self.file is not None
        return self.file.read_bytes()


def disk(directory: Path, name: str) -> Path:
    """Make an empty file of the size of all places."""
    path = directory / name
    with path.open("ab") as stream:
        stream.truncate(DEVICE_BYTES)
    return path


@asynccontextmanager
async def place_of(kind: str) -> AsyncIterator[Place]:
    """Yield a place of a class; its server ends with the block."""
    with tempfile.TemporaryDirectory(prefix="chv-places-") as name:
        directory = Path(name)
        directory.chmod(0o711)
        async with _PLACES[kind](directory) as place:
            yield place


@asynccontextmanager
async def _block(directory: Path) -> AsyncIterator[Place]:
    path = disk(directory, "disk")
    with loop_device(path, DEVICE_BYTES) as device:

        def describe(**options: Any) -> wire.VolumeBackend:
            return spec("block", block=wire.BlockDevice(device=str(device)), **options)

        yield Place('allowed_devices = ["/dev/loop*"]', describe, device)


@asynccontextmanager
async def _nbd(directory: Path) -> AsyncIterator[Place]:
    path, port = disk(directory, "disk"), free_port()

    def describe(**options: Any) -> wire.VolumeBackend:
        at = wire.NbdPlace(host="127.0.0.1", port=port, export="vol")
        return spec("nbd", nbd=at, **options)

    async with nbd_server(path, port):
        yield Place(f'remotes = ["nbd://127.0.0.1:{port}"]', describe, path)


@asynccontextmanager
async def _nbd_unix(directory: Path) -> AsyncIterator[Place]:
    path, socket = disk(directory, "disk"), directory / "nbd.sock"

    def describe(**options: Any) -> wire.VolumeBackend:
        return spec("nbd", nbd=wire.NbdPlace(socket=str(socket), export="vol"), **options)

    async with nbd_server(path, socket):
        socket.chmod(0o600)
        yield Place(f'remotes = ["nbd+unix://{socket}"]', describe, path)


@asynccontextmanager
async def _iscsi(directory: Path) -> AsyncIterator[Place]:
    lun = disk(directory, "lun")
    async with iscsi_target(directory, TARGET) as port:

        def describe(**options: Any) -> wire.VolumeBackend:
            at = wire.IscsiPlace(host="127.0.0.1", port=port, target=TARGET, lun=1)
            return spec("iscsi", iscsi=at, **options)

        yield Place(f'remotes = ["iscsi://127.0.0.1:{port}/{TARGET}"]', describe, lun)


@asynccontextmanager
async def _rbd(directory: Path) -> AsyncIterator[Place]:
    with ceph_cluster(directory) as conf:

        def describe(**options: Any) -> wire.VolumeBackend:
            at = wire.RbdPlace(pool=CEPH_POOL, user="chv", conf=str(conf))
            return spec("rbd", rbd=at, **options)

        yield Place(f'remotes = ["rbd://{CEPH_POOL}"]', describe, None)


_PLACES = {
    "block": _block,
    "nbd": _nbd,
    "nbd-unix": _nbd_unix,
    "iscsi": _iscsi,
    "rbd": _rbd,
}


async def made(
    node: Node, volume: str, backend: wire.VolumeBackend, generation: int = 1
) -> wire.VolumeInfo:
    """Open a volume and wait until it is there, or its creation has failed."""
    request = wire.OpenVolume(meta=meta(generation), volume_id=volume, backend=backend)
    async with node.client() as client:
        info = await client.call(wire.OPEN_VOLUME, request)
    if info.job:
        await node.job(info.job)
    return await node.get(volume)


async def jobs_end(node: Node) -> None:
    """Wait until nothing is under way."""
    with anyio.fail_after(60):
        while True:
            async with node.client() as client:
                jobs = (await client.call(wire.LIST_JOBS, Empty())).jobs
            if all(job.state is not wire.JobState.RUNNING for job in jobs):
                return
            await anyio.sleep(0.05)


def qcow2_image(node: Node, data: bytes, size_bytes: int) -> wire.VolumeSource:
    """Put a qcow2 image that begins with `data` where the node's images are."""
    raw = node.image(data)
    path = Path(raw.path)
    converted = path.with_name("converting")
    argv = ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", str(path), str(converted)]
    subprocess.run(argv, check=True, capture_output=True)
    resize = ["qemu-img", "resize", "-f", "qcow2", str(converted), str(size_bytes)]
    subprocess.run(resize, check=True, capture_output=True)
    converted.replace(path)
    return wire.VolumeSource(path=raw.path, sha256=raw.sha256, format=wire.VolumeFormat.QCOW2)
