"""Moves for real: the guest writes on while its disk changes place, and the old place is gone."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from chv.common.errors import FailedPrecondition, InUse, InvalidArgument
from chv.common.wire import stord as wire
from tests.integration.storage_writer import BLOCK, content, write, writing
from tests.integration.stord_helpers import (
    IDS,
    MIB,
    Node,
    meta,
    mounted_tmpfs,
    needs_qsd,
    open_node,
)
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]
KEY = b"correct-horse-battery-staple-0123456789"
SIZE = 16 * MIB


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_node(start=False) as node:
        pool = node.config.parent / "pool"
        pool.mkdir(mode=0o711)
        pool.chmod(0o711)
        text = f'[storage]\npools = {{ fast = "{pool}" }}\nallowed_devices = ["/dev/loop*"]\n'
        node.config.write_text(node.config.read_text().replace("[storage]\n", text))
        node.add_key("default/disk", KEY)
        await node.start()
        yield node


@contextmanager
def loop_device(node: Node) -> Iterator[str]:
    image = node.config.parent / "device.raw"
    image.write_bytes(b"\xff" * SIZE)  # what was there before must not shine through
    done = subprocess.run(
        ["losetup", "--find", "--show", str(image)], check=True, capture_output=True, text=True
    )
    device = done.stdout.strip()
    try:
        yield device
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def place(
    *, format: str = "raw", pool: str = "", device: str = "", key: str = "", size: int = SIZE
) -> wire.VolumeBackend:
    return wire.VolumeBackend(
        class_name=wire.VolumeClass.BLOCK if device else wire.VolumeClass.FILE,
        format=wire.VolumeFormat(format),
        size_bytes=size,
        pool=pool,
        block=wire.BlockDevice(device=device) if device else None,
        encryption=wire.Encryption(key=key) if key else None,
    )


async def begin(
    node: Node, volume: str, backend: wire.VolumeBackend, bps_max: int = 0
) -> wire.JobInfo:
    request = wire.MoveVolume(meta=meta(), volume_id=volume, backend=backend, bps_max=bps_max)
    async with node.client() as client:
        return await client.call(wire.MOVE_VOLUME, request)


async def move(node: Node, volume: str, backend: wire.VolumeBackend) -> wire.JobInfo:
    ended = await node.job((await begin(node, volume, backend)).job_id)
    assert ended.state is wire.JobState.DONE, ended.error
    return ended


def disks(node: Node, volume: str) -> list[str]:
    """Every base of the volume, wherever it is."""
    roots = [node.layout.volume(volume), node.config.parent / "pool" / volume]
    return sorted(
        str(path.relative_to(node.config.parent)).replace(volume, "V")
        for root in roots
        for path in root.glob("disk*")
    )


PLACES = [
    ("raw", "qcow2", "", ["disk.qcow2"]),
    ("qcow2", "raw", "fast", ["pool/V/disk.raw"]),
    ("qcow2", "qcow2", "fast", ["pool/V/disk.qcow2"]),
]


@pytest.mark.parametrize(("format", "to", "pool", "left"), PLACES)
@pytest.mark.parametrize("attached", [True, False])
async def test_a_volume_is_the_same_at_its_new_place(
    node: Node, format: str, to: str, pool: str, left: list[str], attached: bool
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format=format, source=node.image(b"image text".ljust(BLOCK, b"i")))
    info = await node.attach(volume, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        write(disk, 3, b"before the move")
        write(disk, 0, b"")  # over the image: zeros must stay zeros
    before = await anyio.to_thread.run_sync(content, info.export_path)
    if attached:
        with writing(info.export_path):
            await move(node, volume, place(format=to, pool=pool))
        with VhostDisk(Path(info.export_path)) as disk:
            write(disk, 4, b"after the move")
        before = await anyio.to_thread.run_sync(content, info.export_path)
        await node.detach(volume, vm)
    else:
        await node.detach(volume, vm)
        await move(node, volume, place(format=to, pool=pool))
    assert [
        name.removeprefix(f"state/{node.layout.instance}/volumes/V/")
        for name in disks(node, volume)
    ] == left
    moved = await node.get(volume)
    assert (moved.format.value, moved.pool) == (to, pool)
    info = await node.attach(volume, vm)
    assert await anyio.to_thread.run_sync(content, info.export_path) == before
    await node.detach(volume, vm)
    await node.delete(volume)
    assert disks(node, volume) == []


@pytest.mark.parametrize("attached", [True, False])
async def test_to_a_device_and_back(node: Node, attached: bool) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="qcow2")
    info = await node.attach(volume, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        write(disk, 3, b"text")
    before = await anyio.to_thread.run_sync(content, info.export_path)
    if not attached:
        await node.detach(volume, vm)
    with loop_device(node) as device:
        await move(node, volume, place(device=device))
        assert disks(node, volume) == []
        if attached:
            assert await anyio.to_thread.run_sync(content, info.export_path) == before
        await move(node, volume, place(format="raw"))
        if attached:
            assert await anyio.to_thread.run_sync(content, info.export_path) == before
            await node.detach(volume, vm)
    info = await node.attach(volume, vm)
    assert await anyio.to_thread.run_sync(content, info.export_path) == before


@pytest.mark.parametrize("attached", [True, False])
async def test_an_encrypted_volume_stays_encrypted(node: Node, attached: bool) -> None:
    text = b"plain text of the guest " * 100
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="raw", key="default/disk")
    info = await node.attach(volume, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        write(disk, 3, text)
    if not attached:
        await node.detach(volume, vm)
    await move(node, volume, place(format="qcow2", pool="fast", key="default/disk"))
    (name,) = disks(node, volume)
    assert text[:24] not in (node.config.parent / name.replace("V", volume)).read_bytes()
    if not attached:
        info = await node.attach(volume, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.read(3 * BLOCK // 512, BLOCK)[: len(text)] == text


async def test_a_cancelled_move_leaves_the_old_place_whole_and_nothing_of_the_new(
    node: Node,
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="raw")
    info = await node.attach(volume, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        for block in range(200):
            write(disk, block, b"%d" % block)
    with writing(info.export_path):
        job = await begin(node, volume, place(format="qcow2", pool="fast"), bps_max=MIB)
        async with node.client() as client:
            await client.call(wire.CANCEL_JOB, wire.JobRef(job_id=job.job_id))
        assert (await node.job(job.job_id)).state is wire.JobState.CANCELLED
    assert [Path(name).name for name in disks(node, volume)] == ["disk.raw"]
    assert not (node.config.parent / "pool" / volume).exists()
    await move(node, volume, place(format="qcow2", pool="fast"))


async def test_a_full_target_fails_the_move_and_not_the_guest(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    (node.config.parent / "pool").rmdir()
    with mounted_tmpfs(node.config.parent / "pool", "3m"):
        (node.config.parent / "pool").chmod(0o711)
        await node.open(volume, format="raw")
        info = await node.attach(volume, vm)
        with VhostDisk(Path(info.export_path)) as disk:
            for block in range(200):
                write(disk, block, b"x" * BLOCK)
        with writing(info.export_path):
            ended = await node.job(
                (await begin(node, volume, place(format="qcow2", pool="fast"))).job_id
            )
        assert ended.state is wire.JobState.FAILED
        assert ended.error is not None
        assert ended.error.code == "RESOURCE_EXHAUSTED"
        assert list((node.config.parent / "pool").iterdir()) == []
        with VhostDisk(Path(info.export_path)) as disk:
            assert disk.read(0, 512) == b"x" * 512
        await node.detach(volume, vm)


async def test_what_cannot_move_is_refused(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="qcow2")
    with pytest.raises(FailedPrecondition, match="there already"):
        await begin(node, volume, place(format="qcow2"))
    with pytest.raises(InvalidArgument, match="alone"):
        await begin(node, volume, place(format="raw", size=2 * SIZE))
    with pytest.raises(InvalidArgument, match="no pool 'slow'"):
        await begin(node, volume, place(format="raw", pool="slow"))
    await node.attach(volume, vm)
    snapshot = wire.CreateSnapshot(
        meta=meta(), snapshot_id=IDS.uid(), volume_ids=[volume], vm_id=vm
    )
    async with node.client() as client:
        await client.call(wire.CREATE_SNAPSHOT, snapshot)
    with pytest.raises(FailedPrecondition, match="snapshots"):
        await begin(node, volume, place(format="raw"))
    clone = IDS.uid()
    request = wire.OpenVolume(
        meta=meta(),
        volume_id=clone,
        backend=wire.VolumeBackend(
            class_name=wire.VolumeClass.FILE,
            format=wire.VolumeFormat.QCOW2,
            size_bytes=SIZE,
            snapshot=wire.SnapshotSource(volume_id=volume, snapshot_id=snapshot.snapshot_id),
        ),
    )
    async with node.client() as client:
        await client.call(wire.OPEN_VOLUME, request)
    with pytest.raises(InUse, match=clone):
        await begin(node, volume, place(format="raw"))


async def test_a_moved_volume_grows_takes_snapshots_and_backups_and_moves_again(
    node: Node,
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="raw")
    info = await node.attach(volume, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        write(disk, 1, b"first")
    await move(node, volume, place(format="qcow2", pool="fast"))
    await move(node, volume, place(format="raw", pool="fast"))
    snapshot = wire.SnapshotRef(meta=meta(), volume_id=volume, snapshot_id=IDS.uid())
    request = wire.CreateSnapshot(
        meta=meta(), snapshot_id=snapshot.snapshot_id, volume_ids=[volume], vm_id=vm
    )
    async with node.client() as client:
        await client.call(wire.CREATE_SNAPSHOT, request)
        with VhostDisk(Path(info.export_path)) as disk:
            write(disk, 2, b"second")
        job = await client.call(wire.DELETE_SNAPSHOT, snapshot)
    assert (await node.job(job.job_id)).state is wire.JobState.DONE
    await node.detach(volume, vm)
    grown = await node.open(volume, format="raw", pool="fast", size_bytes=2 * SIZE, generation=2)
    assert grown.size_bytes == 2 * SIZE
    await move(node, volume, place(format="qcow2", size=2 * SIZE))
    info = await node.attach(volume, vm, generation=2)
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.size_bytes == 2 * SIZE
        assert disk.read(BLOCK // 512, 512)[:5] == b"first"
        assert disk.read(2 * BLOCK // 512, 512)[:6] == b"second"
    await node.detach(volume, vm, generation=2)
    await node.delete(volume, generation=2)
    assert disks(node, volume) == []
    assert not (node.config.parent / "pool" / volume).exists()
