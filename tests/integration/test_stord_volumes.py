"""Volumes of class file for real: made whole or not at all, grown, refused, removed."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from chv.common.errors import (
    DataLoss,
    Internal,
    InUse,
    InvalidArgument,
    NotFound,
    OwnershipConflict,
    ResourceExhausted,
    StaleGeneration,
)
from chv.common.process import landlock_abi
from chv.common.wire import stord as wire
from chv.common.wire.types import Empty
from chv.stord import growth
from tests.integration.stord_helpers import (
    IDS,
    MIB,
    Node,
    mounted_tmpfs,
    needs_qsd,
    open_node,
    qsd_major,
    shell,
    short_root,
)
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_node() as node:
        yield node


async def test_a_raw_volume_is_sparse_and_opening_it_again_gives_the_same_answer(
    node: Node,
) -> None:
    volume = IDS.uid()

    first = await node.open(volume, size_bytes=1 << 30)
    again = await node.open(volume, size_bytes=1 << 30)

    assert first.created
    assert first.size_bytes == 1 << 30
    assert first.allocated_bytes == 0
    assert first.cache == "direct"
    assert again == msgspec.structs.replace(first, created=False, free_bytes=again.free_bytes)
    assert [info.volume_id for info in await node.volumes()] == [volume]


async def test_an_overlay_shows_the_image_and_keeps_writes_to_itself(node: Node) -> None:
    image = os.urandom(65536)
    source = node.image(image)
    volume, vm = IDS.uid(), IDS.uid()

    await node.open(volume, format="qcow2", size_bytes=4 * MIB, source=source)
    info = await node.attach(volume, vm)

    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.size_bytes == 4 * MIB
        assert disk.write_back
        assert disk.read(0, 65536) == image
        assert disk.read(128, 4096) == bytes(4096)
        assert disk.write(1, b"n" * 512) == 0
        disk.flush()
        assert disk.read(0, 1536) == image[:512] + b"n" * 512 + image[1024:1536]
    assert Path(source.path).read_bytes() == image


async def test_a_raw_volume_from_an_image_starts_with_its_content_and_is_as_large_as_asked(
    node: Node,
) -> None:
    image = os.urandom(8192)
    volume, vm = IDS.uid(), IDS.uid()

    await node.open(volume, size_bytes=2 * MIB, source=node.image(image))
    info = await node.attach(volume, vm)

    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.size_bytes == 2 * MIB
        assert disk.read(0, 8192) == image
        assert disk.read(16, 512) == bytes(512)


@pytest.mark.parametrize("volume_format", ["raw", "qcow2"])
async def test_a_newer_generation_grows_a_detached_volume_and_keeps_its_data(
    node: Node, volume_format: str
) -> None:
    image = os.urandom(8192)
    volume, vm = IDS.uid(), IDS.uid()
    source = node.image(image)
    await node.open(volume, format=volume_format, size_bytes=MIB, source=source)

    grown = await node.open(
        volume, format=volume_format, size_bytes=3 * MIB, source=source, generation=2
    )

    assert (grown.size_bytes, grown.generation) == (3 * MIB, 2)
    info = await node.attach(volume, vm, generation=2)
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.size_bytes == 3 * MIB
        assert disk.read(0, 8192) == image
        assert disk.read(2 * 2048, 512) == bytes(512)


async def test_an_attached_volume_grows_when_it_is_attached_next(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, size_bytes=MIB)
    await node.attach(volume, vm)

    pending = await node.open(volume, size_bytes=2 * MIB, generation=2)
    await node.detach(volume, vm, generation=2)
    info = await node.attach(volume, vm, generation=2)

    assert (pending.size_bytes, pending.pending_size_bytes) == (MIB, 2 * MIB)
    assert (pending.generation, pending.applied) == (2, "on_next_start")
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.size_bytes == 2 * MIB
    grown = await node.get(volume)
    assert (grown.size_bytes, grown.pending_size_bytes) == (2 * MIB, 0)


async def test_changes_that_would_lose_data_are_refused_and_change_nothing(node: Node) -> None:
    volume = IDS.uid()
    await node.open(volume, size_bytes=2 * MIB, generation=3)

    with pytest.raises(StaleGeneration):
        await node.open(volume, size_bytes=4 * MIB, generation=2)
    with pytest.raises(InvalidArgument, match="never becomes smaller"):
        await node.open(volume, size_bytes=MIB, generation=4)
    with pytest.raises(InvalidArgument, match="keeps its class, place, format and source"):
        await node.open(volume, format="qcow2", size_bytes=2 * MIB, generation=4)

    info = await node.get(volume)
    assert (info.size_bytes, info.generation, info.format) == (2 * MIB, 3, "raw")


async def test_an_equal_generation_changes_nothing_whatever_it_asks_for(node: Node) -> None:
    volume = IDS.uid()
    await node.open(volume, size_bytes=2 * MIB)

    assert (await node.open(volume, size_bytes=8 * MIB)).size_bytes == 2 * MIB


def image_at(path: Path, sha256: str = "ab" * 32) -> wire.VolumeSource:
    return wire.VolumeSource(path=str(path), sha256=sha256, format=wire.VolumeFormat.RAW)


async def test_images_outside_the_image_directory_are_refused_when_nothing_is_allowed(
    node: Node,
) -> None:
    inside = node.image(b"i" * 512)
    images = node.layout.images / "sha256"
    outside = node.layout.state_root / ("cd" * 32)
    outside.write_bytes(b"o" * 512)
    (images / ("ef" * 32)).symlink_to(outside)
    (images / ("01" * 32)).symlink_to(Path(inside.path))
    cases = {
        "directory that stord may read": image_at(outside, "cd" * 32),
        "holds '..'": image_at(images / ".." / ".." / ".." / outside.name, "cd" * 32),
        "leads out": image_at(images / ("ef" * 32), "ef" * 32),
        "name of its sha256": image_at(images / ("01" * 32), "01" * 32),
        "does not exist": image_at(images / ("23" * 32), "23" * 32),
    }

    for problem, source in cases.items():
        with pytest.raises((InvalidArgument, NotFound), match=problem):
            await node.open(IDS.uid(), format="qcow2", source=source)
    with pytest.raises(InvalidArgument, match="name of its sha256"):
        await node.open(IDS.uid(), source=image_at(Path(inside.path), "ff" * 32))

    assert await node.volumes() == []
    assert node.volume_names() == []


async def test_an_allowed_path_opens_its_directory_and_no_other() -> None:
    with short_root() as allowed:
        (allowed / ("ab" * 32)).write_bytes(b"a" * 512)
        (allowed / ("ab" * 32)).chmod(0o644)
        async with open_node(storage=f'allowed_paths = ["{allowed}"]') as node:
            info = await node.open(IDS.uid(), source=image_at(allowed / ("ab" * 32)))
            with pytest.raises(InvalidArgument, match="may read"):
                await node.open(IDS.uid(), source=image_at(Path("/etc/hostname")))

        assert info.created


async def test_images_that_name_other_files_or_lie_about_their_format_are_refused(
    node: Node,
) -> None:
    base = node.image(b"b" * 4096)
    overlay = Path(base.path).with_name("12" * 32)
    shell("qemu-img", "create", "-q", "-f", "qcow2", "-b", base.path, "-F", "raw", overlay)
    qcow2 = wire.VolumeFormat.QCOW2
    named = wire.VolumeSource(path=str(overlay), sha256="12" * 32, format=qcow2)
    lie = wire.VolumeSource(path=base.path, sha256=base.sha256, format=qcow2)

    with pytest.raises(InvalidArgument, match="refers to another file"):
        await node.open(IDS.uid(), format="qcow2", source=named)
    with pytest.raises(InvalidArgument, match="is not a qcow2 file"):
        await node.open(IDS.uid(), format="qcow2", source=lie)
    with pytest.raises(InvalidArgument, match="less than the 4096"):
        await node.open(IDS.uid(), size_bytes=512, source=base)

    assert node.volume_names() == []


def flat(node: Node) -> wire.VolumeSource:
    path = node.layout.image("34" * 32)
    shell("qemu-img", "create", "-q", "-f", "qcow2", path, "1M")
    return wire.VolumeSource(path=str(path), sha256="34" * 32, format=wire.VolumeFormat.QCOW2)


async def test_a_qcow2_image_can_lie_below_an_overlay(node: Node) -> None:
    node.image(b"")
    source = flat(node)
    shell("qemu-io", "-f", "qcow2", "-c", "write -P 0x61 0 4096", source.path)
    Path(source.path).chmod(0o644)
    volume = IDS.uid()

    await node.open(volume, format="qcow2", size_bytes=2 * MIB, source=source)
    info = await node.attach(volume, IDS.uid())

    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.read(0, 4096) == b"a" * 4096
        assert disk.size_bytes == 2 * MIB


async def test_a_volume_in_use_is_neither_closed_nor_deleted_and_a_deleted_one_leaves_nothing(
    node: Node,
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume)
    await node.attach(volume, vm)
    with pytest.raises(InUse, match=vm):
        await node.delete(volume)
    with pytest.raises(InUse, match=vm):
        await node.close(volume)
    await node.detach(volume, vm)

    await node.delete(volume)
    await node.delete(volume)

    assert node.volume_names() == []
    assert await node.volumes() == []
    with pytest.raises(NotFound):
        await node.get(volume)


async def test_a_closed_volume_keeps_its_data_and_opens_again(node: Node) -> None:
    volume = IDS.uid()
    await node.open(volume)
    await node.close(volume)
    await node.close(volume)

    closed = (await node.get(volume)).state
    opened = await node.open(volume)

    assert (closed, opened.state, opened.created) == ("closed", "open", False)


@pytest.mark.parametrize("volume_format", ["raw", "qcow2"])
async def test_a_full_disk_is_told_as_such_and_leaves_no_half_volume(volume_format: str) -> None:
    async with open_node(start=False) as node:
        volumes = node.layout.volume("x").parent
        with mounted_tmpfs(volumes, "400k"):
            await node.start()
            await refuses_for_lack_of_space(node, volumes / "ballast", volume_format)
            await node.end()


async def refuses_for_lack_of_space(node: Node, ballast: Path, volume_format: str) -> None:
    source = node.image(os.urandom(MIB)) if volume_format == "raw" else None
    ballast.write_bytes(bytes(300 * 1024))
    volume = IDS.uid()

    with pytest.raises(ResourceExhausted, match="no space"):
        await node.open(volume, format=volume_format, source=source)

    assert node.volume_names() == ["ballast"]
    assert await node.volumes() == []
    ballast.unlink()
    assert (await node.open(volume, format="qcow2")).created


@pytest.mark.parametrize("aio", ["threads", "io_uring"])
async def test_the_configured_way_of_io_serves_data(aio: str) -> None:
    async with open_node(storage=f'aio = "{aio}"') as node:
        volume = IDS.uid()
        await node.open(volume)
        info = await node.attach(volume, IDS.uid())

        with VhostDisk(Path(info.export_path)) as disk:
            assert disk.write(0, b"t" * 4096) == 0
            assert disk.read(0, 4096) == b"t" * 4096


async def test_a_volume_whose_file_is_gone_or_tampered_with_says_so_and_is_not_attached(
    node: Node,
) -> None:
    gone, broken = IDS.uid(), IDS.uid()
    await node.open(gone)
    await node.open(broken, format="qcow2")
    (node.layout.volume(gone) / "disk.raw").unlink()
    with (node.layout.volume(broken) / "disk.qcow2").open("r+b") as file:
        file.seek(72)
        file.write((4).to_bytes(8, "big"))  # the header now names an external data file

    states = {info.volume_id: info.state for info in await node.volumes()}

    assert states == {gone: "missing", broken: "broken"}
    for volume in (gone, broken):
        with pytest.raises(DataLoss, match="restore a backup"):
            await node.attach(volume, IDS.uid())
        async with node.client() as client:
            health = await client.call(wire.GET_VOLUME_HEALTH, wire.GetVolume(volume_id=volume))
        assert health.status == "failed"
        assert health.last_error


async def test_a_volume_without_a_record_is_found_again_and_another_one_is_left_alone() -> None:
    async with open_node() as node:
        volume = IDS.uid()
        await node.open(volume, size_bytes=MIB)
        (node.layout.volume(volume) / "disk.raw").write_bytes(b"k" * MIB)
        await node.end()
        for path in node.layout.state.glob("stord.db*"):
            path.unlink()
        await node.start()

        with pytest.raises(OwnershipConflict, match="holds another volume"):
            await node.open(volume, format="qcow2", size_bytes=MIB)
        found = await node.open(volume, size_bytes=MIB)

        assert not found.created
        assert (node.layout.volume(volume) / "disk.raw").read_bytes() == b"k" * MIB


async def test_the_health_of_the_daemon_names_version_space_and_numbers(node: Node) -> None:
    await node.open(IDS.uid())

    async with node.client() as client:
        health = await client.call(wire.STORD_HEALTH, Empty())

    assert health.status == "healthy"
    assert health.storage_daemon_version[0].isdigit()
    assert health.volumes == 1
    assert health.free_bytes > 0
    assert {feature.name: feature.present for feature in health.features} == {
        "qemu-storage-daemon": True,
        "in_flight_tracking": False,
        "online_grow": qsd_major() >= growth.MAJOR_MIN,
        "landlock": landlock_abi() > 0,
    }


@pytest.mark.parametrize("name", ["after_intent", "after_begin", "after_build", "after_create"])
async def test_an_open_that_failed_in_the_middle_works_when_it_is_made_again(name: str) -> None:
    async with open_node(start=False) as node:
        await node.start(failpoints=f"stord.open.{name}=1*error(EIO)")
        volume = IDS.uid()
        with pytest.raises(Internal):
            await node.open(volume, format="qcow2")

        assert (await node.open(volume, format="qcow2")).state == "open"
        assert node.volume_names() == [volume]


async def test_a_delete_that_failed_in_the_middle_is_completed_by_the_next_open() -> None:
    async with open_node(start=False) as node:
        await node.start(failpoints="stord.delete.after_intent=1*error(EIO)")
        volume = IDS.uid()
        await node.open(volume)
        with pytest.raises(Internal):
            await node.delete(volume)

        assert (await node.open(volume, format="qcow2", generation=2)).created


async def test_census_tells_what_no_record_explains(node: Node) -> None:
    volume, vm, stray = IDS.uid(), IDS.uid(), IDS.uid()
    await node.open(volume)
    info = await node.attach(volume, vm)
    node.layout.volume(stray).mkdir()

    items = {(item.kind, item.name): item for item in await node.census()}

    (worker,) = node.workers()
    assert items["process", worker.worker_id].known
    assert items["process", worker.worker_id].owner == vm
    assert items["socket", info.export_path].known
    assert items["file", str(node.layout.qsd(vm))].known
    assert items["file", str(node.layout.volume(volume))].known
    assert not items["file", str(node.layout.volume(stray))].known
    assert len(items) == 5


@pytest.mark.parametrize("format_name", ["raw", "qcow2"])
async def test_a_volume_that_was_cut_short_is_told_and_not_served(
    node: Node, format_name: str
) -> None:
    volume = IDS.uid()
    opened = await node.open(volume, size_bytes=4 * MIB, format=format_name)
    os.truncate(opened.path, 4096 if format_name == "raw" else 0)

    (seen,) = await node.volumes()
    with pytest.raises(DataLoss, match="the volume is broken"):
        await node.attach(volume, IDS.uid())

    assert seen.state == "broken"
    assert Path(opened.path).stat().st_size in (0, 4096)
