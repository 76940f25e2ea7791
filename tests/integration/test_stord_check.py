"""Checks and repairs for real: of what is detached, with the damage counted and mended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chv.common.errors import DataLoss, FailedPrecondition
from chv.common.wire import stord as wire
from tests.integration.storage_writer import write
from tests.integration.stord_helpers import IDS, MIB, Node, meta, needs_qsd, open_node
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]
KEY = b"correct-horse-battery-staple-0123456789"
CORRUPT_BYTE = 79  # the lowest byte of the incompatible features, big endian
CLUSTER = 65536


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_node(start=False) as node:
        node.add_key("default/disk", KEY)
        await node.start()
        yield node


async def check(node: Node, volume: str, *, repair: bool = False) -> wire.JobInfo:
    request = wire.CheckVolume(meta=meta(), volume_id=volume, repair=repair)
    async with node.client() as client:
        job = await client.call(wire.CHECK_VOLUME, request)
    return await node.job(job.job_id)


async def written(node: Node, *, format: str, key: str = "") -> tuple[str, Path]:
    """A detached volume with data, and its file."""
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format=format, key=key)
    info = await node.attach(volume, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        for block in range(16):
            write(disk, block, b"%d" % block)
    await node.detach(volume, vm)
    return volume, node.layout.volume(volume) / f"disk.{format}"


@pytest.mark.parametrize("format", ["raw", "qcow2"])
@pytest.mark.parametrize("key", ["", "default/disk"])
async def test_a_volume_in_order_has_no_errors(node: Node, format: str, key: str) -> None:
    volume, _disk = await written(node, format=format, key=key)
    ended = await check(node, volume)
    assert ended.state is wire.JobState.DONE, ended.error
    assert ended.kind is wire.JobKind.CHECK
    assert ended.result == {"errors": "0", "leaks": "0", "fixed": "0"}


async def test_leaks_are_counted_and_a_repair_mends_them(node: Node) -> None:
    volume, disk = await written(node, format="qcow2")
    leak(disk)
    found = await check(node, volume)
    assert int(found.result["leaks"]) > 0
    repaired = await check(node, volume, repair=True)
    assert repaired.kind is wire.JobKind.REPAIR
    assert int(repaired.result["fixed"]) > 0
    assert (await check(node, volume)).result == {"errors": "0", "leaks": "0", "fixed": "0"}
    assert disk.stat().st_uid == 0


async def test_a_volume_that_says_it_is_corrupt_is_refused_and_repaired(node: Node) -> None:
    volume, disk = await written(node, format="qcow2")
    with disk.open("r+b") as file:
        file.seek(CORRUPT_BYTE)
        bits = file.read(1)[0]
        file.seek(CORRUPT_BYTE)
        file.write(bytes([bits | 2]))
    assert (await node.get(volume)).state == "broken"
    with pytest.raises(DataLoss, match="broken"):
        await node.attach(volume, IDS.uid())
    repaired = await check(node, volume, repair=True)
    assert repaired.state is wire.JobState.DONE, repaired.error
    assert (await node.get(volume)).state == "open"
    info = await node.attach(volume, IDS.uid())
    with VhostDisk(Path(info.export_path)) as served:
        assert served.read(CLUSTER // 512, 512)[:1] == b"1"


async def test_a_file_that_is_no_qcow2_any_more_is_data_loss_with_its_name(node: Node) -> None:
    volume, disk = await written(node, format="qcow2")
    with disk.open("r+b") as file:
        file.write(bytes(CLUSTER))
    ended = await check(node, volume)
    assert ended.error is not None
    assert ended.error.code == "DATA_LOSS"
    assert "disk.qcow2" in ended.error.message
    assert "backup" in ended.error.hint


async def test_a_raw_disk_that_was_cut_short_has_an_error(node: Node) -> None:
    volume, disk = await written(node, format="raw")
    os.truncate(disk, 8 * MIB)
    ended = await check(node, volume)
    assert ended.result["errors"] == "1"


async def test_an_attached_volume_is_not_checked(node: Node) -> None:
    volume = IDS.uid()
    await node.open(volume, format="qcow2")
    await node.attach(volume, IDS.uid())
    with pytest.raises(FailedPrecondition, match="attached to VM"):
        await check(node, volume)


async def test_every_layer_is_checked(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="qcow2")
    await node.attach(volume, vm)
    snapshot = wire.CreateSnapshot(
        meta=meta(), snapshot_id=IDS.uid(), volume_ids=[volume], vm_id=vm
    )
    async with node.client() as client:
        await client.call(wire.CREATE_SNAPSHOT, snapshot)
    await node.detach(volume, vm)
    (overlay,) = node.layout.volume(volume).glob("layer-*")
    leak(overlay)
    assert int((await check(node, volume)).result["leaks"]) > 0
    assert int((await check(node, volume, repair=True)).result["fixed"]) > 0


def leak(disk: Path) -> None:
    """Give a cluster beyond the end a reference that nothing explains."""
    end = -(-disk.stat().st_size // CLUSTER)
    os.truncate(disk, (end + 1) * CLUSTER)
    # Refcounts are 16 bits wide; the first block of the table is at the offset that the header has.
    with disk.open("r+b") as file:
        file.seek(48)
        file.seek(int.from_bytes(file.read(8), "big"))
        block = int.from_bytes(file.read(8), "big")
        file.seek(block + 2 * end)
        file.write((1).to_bytes(2, "big"))
    said = subprocess.run(
        ["qemu-img", "check", "-q", "-f", "qcow2", disk], check=False, capture_output=True
    )
    assert said.returncode == 3, said.stderr
