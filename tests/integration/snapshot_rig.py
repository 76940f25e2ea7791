"""What the tests of snapshots share: calls, a guest that writes and verifies, content of volumes.

A volume's content is told in chunks: chunk i is the 4 KiB at i * 64 KiB.
"""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import msgspec

from chv.common.rpc import Method
from chv.common.wire import stord as wire
from chv.common.wire.types import Empty
from tests.helpers import wait_until
from tests.integration import vhost_client
from tests.integration.inflight_client import InflightDisk
from tests.integration.stord_helpers import IDS, MIB, Node, meta
from tests.integration.vhost_client import VhostDisk

CHUNK_BYTES, STRIDE_BYTES, SECTOR_BYTES = 4096, 64 << 10, 512
SIZE_BYTES = 8 * MIB
CHUNKS = SIZE_BYTES // STRIDE_BYTES
JOB_TIMEOUT_S = 60.0
Content = dict[int, int]
R = TypeVar("R", bound=msgspec.Struct)


async def call(node: Node, method: Method[Any, R], request: msgspec.Struct) -> R:
    async with node.client() as client:
        return await client.call(method, request)


# --- snapshots and jobs
async def snapshot(
    node: Node, volume_ids: list[str], vm_id: str = "", snapshot_id: str = ""
) -> str:
    snapshot_id = snapshot_id or IDS.uid()
    request = wire.CreateSnapshot(
        meta=meta(), snapshot_id=snapshot_id, volume_ids=volume_ids, vm_id=vm_id
    )
    reply = await call(node, wire.CREATE_SNAPSHOT, request)
    assert {each.volume_id for each in reply.snapshots} == set(volume_ids)
    return snapshot_id


def ref(volume_id: str, snapshot_id: str) -> wire.SnapshotRef:
    return wire.SnapshotRef(meta=meta(), volume_id=volume_id, snapshot_id=snapshot_id)


async def delete(node: Node, volume_id: str, snapshot_id: str) -> wire.JobInfo:
    """Delete a snapshot and wait until that is over."""
    begun = await call(node, wire.DELETE_SNAPSHOT, ref(volume_id, snapshot_id))
    return await ended(node, begun.job_id)


async def get_job(node: Node, job_id: str) -> wire.JobInfo:
    return await call(node, wire.GET_JOB, wire.JobRef(job_id=job_id))


async def cancel(node: Node, job_id: str) -> wire.JobInfo:
    return await call(node, wire.CANCEL_JOB, wire.JobRef(job_id=job_id))


async def ended(node: Node, job_id: str) -> wire.JobInfo:
    async def final() -> wire.JobInfo | None:
        job = await get_job(node, job_id)
        return None if job.state is wire.JobState.RUNNING else job

    job = await wait_until(final, timeout_s=JOB_TIMEOUT_S, what=f"end of {job_id}")
    assert job is not None
    return job


async def restore(node: Node, volume_id: str, snapshot_id: str) -> wire.VolumeInfo:
    return await call(node, wire.RESTORE_SNAPSHOT, ref(volume_id, snapshot_id))


async def snapshots(node: Node, volume_id: str) -> dict[str, wire.SnapshotInfo]:
    reply = await call(node, wire.LIST_SNAPSHOTS, Empty())
    return {each.snapshot_id: each for each in reply.snapshots if each.volume_id == volume_id}


async def clone(
    node: Node,
    parent: str,
    snapshot_id: str,
    *,
    mode: str = "linked",
    format: str = "qcow2",
    size_bytes: int = SIZE_BYTES,
    volume_id: str = "",
    key: str = "",
) -> wire.VolumeInfo:
    volume_id = volume_id or IDS.uid()
    backend = wire.VolumeBackend(
        class_name=wire.VolumeClass.FILE,
        format=wire.VolumeFormat(format),
        size_bytes=size_bytes,
        snapshot=wire.SnapshotSource(
            volume_id=parent, snapshot_id=snapshot_id, mode=wire.CloneMode(mode)
        ),
        encryption=wire.Encryption(key=key) if key else None,
    )
    request = wire.OpenVolume(meta=meta(), volume_id=volume_id, backend=backend)
    return await call(node, wire.OPEN_VOLUME, request)


async def opened(node: Node, volume_id: str) -> wire.VolumeInfo:
    """Wait until a volume that a job fills is open."""

    async def is_open() -> wire.VolumeInfo | None:
        info = await node.get(volume_id)
        return info if info.state == "open" else None

    info = await wait_until(is_open, timeout_s=JOB_TIMEOUT_S)
    assert info is not None
    return info


# --- content
def put(disk: VhostDisk, chunk: int, value: int) -> None:
    data = struct.pack("<QQ", chunk, value) * (CHUNK_BYTES // 16)
    assert disk.write(chunk * STRIDE_BYTES // SECTOR_BYTES, data) == 0


def get(disk: VhostDisk, chunk: int) -> int:
    data = disk.read(chunk * STRIDE_BYTES // SECTOR_BYTES, CHUNK_BYTES)
    assert data == data[:16] * (CHUNK_BYTES // 16), f"chunk {chunk} is torn"
    there, value = struct.unpack_from("<QQ", data)
    assert there in (chunk, 0), f"chunk {chunk} holds chunk {there}"
    return int(value)


def read_all(path: Path) -> Content:
    with VhostDisk(path) as disk:
        found = {chunk: get(disk, chunk) for chunk in range(min(CHUNKS, chunks_of(disk)))}
    return {chunk: value for chunk, value in found.items() if value}


def chunks_of(disk: VhostDisk) -> int:
    return disk.size_bytes // STRIDE_BYTES


def write_all(path: Path, content: Content) -> None:
    with VhostDisk(path) as disk:
        for chunk, value in content.items():
            put(disk, chunk, value)
        disk.flush()


@asynccontextmanager
async def attached(
    node: Node, volume_id: str, *, slot: int = 9, read_only: bool = False
) -> AsyncIterator[Path]:
    """Attach a volume to a VM of its own for the length of the block."""
    vm_id = IDS.uid()
    info = await node.attach(volume_id, vm_id, slot=slot, read_only=read_only)
    try:
        yield Path(info.export_path)
    finally:
        await node.detach(volume_id, vm_id)


async def content(node: Node, volume_id: str) -> Content:
    """Return what a guest would read of a volume that nobody has."""
    async with attached(node, volume_id) as path:
        return await anyio.to_thread.run_sync(read_all, path)


async def fill(node: Node, volume_id: str, chunks: Content) -> None:
    """Write to a volume that nobody has."""
    async with attached(node, volume_id) as path:
        await anyio.to_thread.run_sync(write_all, path, chunks)


class Writer(threading.Thread):
    """A guest: writes chunks, reads others back, flushes; any error ends it and is kept."""

    def __init__(self, path: Path, seed: int, expected: Content | None = None) -> None:
        super().__init__(daemon=True)
        self.expected: Content = dict(expected or {})
        self.flushed: Content = {}
        self.error: BaseException | None = None
        self.requests = 0
        self._path = path
        self._random = random.Random(seed)
        self._ending = threading.Event()

    def run(self) -> None:
        try:
            with VhostDisk(self._path) as disk:
                while not self._ending.is_set():
                    self._one(disk)
                for chunk in range(CHUNKS):
                    assert get(disk, chunk) == self.expected.get(chunk, 0), chunk
                disk.flush()
        except BaseException as error:
            self.error = error

    def _one(self, disk: VhostDisk) -> None:
        chunk, other = self._random.randrange(CHUNKS), self._random.randrange(CHUNKS)
        value = self.requests + 1
        put(disk, chunk, value)
        self.expected[chunk] = value
        assert get(disk, other) == self.expected.get(other, 0), other
        self.requests += 1
        if self.requests % 16 == 0:
            disk.flush()
            self.flushed = dict(self.expected)

    def finish(self) -> Content:
        """Stop, verify everything, and return what the volume must hold."""
        self._ending.set()
        self.join(30)
        assert not self.is_alive(), "the guest hangs"
        if self.error is not None:
            raise AssertionError(f"the guest saw an error: {self.error!r}") from self.error
        return self.expected

    async def after(self, count: int) -> None:
        """Wait until it has made that many further requests."""
        target = self.requests + count

        def reached() -> bool:
            assert self.error is None, self.error
            return self.requests >= target

        await wait_until(reached, timeout_s=20)

    def __enter__(self) -> Writer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._ending.set()
        self.join(30)


class DeepDisk(InflightDisk):
    """A master with several requests in flight on an export without in-flight tracking."""

    def _negotiate(self) -> None:
        self._send(vhost_client.SET_OWNER)
        (features,) = struct.unpack("<Q", self._ask(vhost_client.GET_FEATURES)[0])
        self._ask(vhost_client.GET_PROTOCOL_FEATURES)
        self._send(vhost_client.SET_PROTOCOL_FEATURES, struct.pack("<Q", 0))
        accepted = vhost_client.VERSION_1 | vhost_client.PROTOCOL_FEATURES | vhost_client.FLUSH
        self._send(vhost_client.SET_FEATURES, struct.pack("<Q", features & accepted))


def layer_files(node: Node, volume_id: str) -> list[str]:
    directory = node.layout.volume(volume_id)
    return sorted(path.name for path in directory.glob("layer-*"))
