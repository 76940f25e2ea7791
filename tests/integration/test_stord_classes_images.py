"""Images, clones and backups copied onto devices and servers, read back, and begun anew."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from chv.common.errors import ChvError, InvalidArgument
from chv.common.wire import stord as wire
from chv.stord.takeover import LOOK_BYTES
from tests.helpers import wait_until
from tests.integration.class_places import (
    DEVICE_BYTES,
    FOREIGN,
    KINDS,
    Place,
    jobs_end,
    made,
    place_of,
    qcow2_image,
)
from tests.integration.snapshot_rig import snapshot as take_snapshot
from tests.integration.stord_classes_helpers import SIZE_BYTES
from tests.integration.stord_helpers import IDS, MIB, Node, needs_qsd, open_node
from tests.integration.test_stord_encryption import KEY
from tests.integration.vhost_client import VhostDisk
from tests.sampling import paired, sampled

pytestmark = [pytest.mark.root, needs_qsd]
LOCKED = wire.Encryption(key="default/disk")
TEXT = b"this is an image" * 256
IMAGE = TEXT + bytes(2 * MIB) + TEXT
IMAGE_BYTES = 4 * MIB
CHUNK_BYTES = 512 * 1024


@asynccontextmanager
async def node_at(kind: str, **options: Any) -> AsyncIterator[tuple[Node, Place]]:
    async with place_of(kind) as place, open_node(storage=place.storage, start=False) as node:
        node.add_key("default/disk", KEY)
        await node.start(**options)
        yield node, place
        assert not node.workers()


async def content(node: Node, volume: str, generation: int = 1) -> bytes:
    """What a guest reads of the volume, up to the size that was asked for."""
    vm = IDS.uid()
    info = await node.attach(volume, vm, generation=generation)
    found = await anyio.to_thread.run_sync(_content, Path(info.export_path))
    await node.detach(volume, vm, generation=generation)
    return found


def _content(export: Path) -> bytes:
    with VhostDisk(export) as disk:
        assert disk.size_bytes >= SIZE_BYTES
        steps = range(0, SIZE_BYTES, CHUNK_BYTES)
        return b"".join(disk.read(at // 512, CHUNK_BYTES) for at in steps)


def expected() -> bytes:
    return IMAGE.ljust(SIZE_BYTES, b"\0")


@pytest.mark.parametrize("kind", sampled(KINDS, 3, seed=7))
async def test_a_volume_begins_as_its_image_with_zeros_behind_it(kind: str) -> None:
    async with node_at(kind) as (node, place):
        volume = IDS.uid()
        source = qcow2_image(node, IMAGE, IMAGE_BYTES)
        if place.file is not None:  # what was there, behind what is looked at
            with place.file.open("r+b") as stream:
                stream.seek(LOOK_BYTES)
                stream.write(b"\xff" * (SIZE_BYTES - LOOK_BYTES))

        info = await made(node, volume, place.describe(source=source))

        assert (info.state, info.last_error) == ("open", "")
        assert await content(node, volume) == expected()
        await node.delete(volume)


@pytest.mark.parametrize("kind", sampled(KINDS, 3, seed=8))
async def test_a_locked_volume_begins_as_its_image(kind: str) -> None:
    async with node_at(kind) as (node, place):
        volume = IDS.uid()
        source = node.image(IMAGE)

        info = await made(node, volume, place.describe(source=source, encryption=LOCKED))

        assert (info.state, info.last_error) == ("open", "")
        assert (await content(node, volume))[: len(IMAGE)] == IMAGE
        if place.file is not None:
            assert TEXT[:64] not in place.content()
        await node.delete(volume)


@pytest.mark.parametrize("kind", sampled(FOREIGN, 2, seed=4))
async def test_an_image_goes_over_no_data_and_says_how_to_make_room(kind: str) -> None:
    async with node_at(kind) as (node, place):
        volume, again = IDS.uid(), IDS.uid()
        assert place.file is not None
        with place.file.open("r+b") as stream:
            stream.write(b"precious")
        before = place.content()

        info = await made(node, volume, place.describe(source=node.image(IMAGE)))

        assert "holds data" in info.last_error
        assert str(LOOK_BYTES) in info.last_error
        assert place.content() == before
        await node.delete(volume)
        with place.file.open("r+b") as stream:
            stream.write(bytes(LOOK_BYTES))
        assert (await made(node, again, place.describe(source=node.image(IMAGE)))).state == "open"
        await node.delete(again)


async def test_an_image_larger_than_the_volume_is_refused_before_anything_is_written() -> None:
    async with node_at("block") as (node, place):
        source = qcow2_image(node, IMAGE, 2 * SIZE_BYTES)
        with pytest.raises(InvalidArgument, match=str(2 * SIZE_BYTES)):
            await made(node, IDS.uid(), place.describe(source=source))
        assert place.content() == bytes(DEVICE_BYTES)
        assert await node.volumes() == []


@pytest.mark.parametrize(("kind", "encryption"), paired(["block", "nbd"], [None, LOCKED]))
async def test_a_full_clone_of_a_snapshot_is_copied_there(
    kind: str, encryption: wire.Encryption | None
) -> None:
    async with node_at(kind) as (node, place):
        parent, clone = IDS.uid(), IDS.uid()
        await node.open(parent, source=node.image(IMAGE))
        taken = await take_snapshot(node, [parent])
        source = wire.SnapshotSource(volume_id=parent, snapshot_id=taken, mode=wire.CloneMode.FULL)

        info = await made(node, clone, place.describe(snapshot=source, encryption=encryption))

        assert (info.state, info.last_error) == ("open", "")
        assert await content(node, clone) == expected()
        await node.delete(clone)


@pytest.mark.parametrize(
    "point",
    sampled(
        ["takeover.after_begin", "fill.after_create", "fill.after_convert", "fill.after_copy"],
        2,
        seed=1,
    ),
)
async def test_a_kill_at_any_step_of_a_copy_ends_in_the_whole_image(point: str) -> None:
    async with node_at("block", failpoints=f"stord.{point}=kill") as (node, place):
        volume = IDS.uid()
        with pytest.raises(ChvError):
            await made(node, volume, place.describe(source=node.image(IMAGE)))
        await node.ended()

        await node.start()
        await jobs_end(node)

        assert (await node.get(volume)).state == "open"
        assert await content(node, volume) == expected()
        await node.delete(volume)


async def test_a_volume_given_up_half_way_may_be_begun_anew_over_what_it_wrote() -> None:
    async with node_at("block", failpoints="stord.fill.after_convert=error(EIO)") as (node, place):
        volume = IDS.uid()
        backend = place.describe(source=node.image(IMAGE))
        failed = await made(node, volume, backend)
        assert failed.state == "creating"
        await node.end()
        await node.start()

        info = await made(node, volume, backend)

        assert (info.state, info.last_error) == ("open", "")
        assert await content(node, volume) == expected()
        await node.delete(volume)


async def test_a_device_that_lost_a_write_is_told_and_the_volume_is_not_there() -> None:
    async with node_at("block", failpoints="stord.fill.after_convert=delay(1500)") as (node, place):
        volume = IDS.uid()
        backend = place.describe(source=node.image(IMAGE))
        assert place.file is not None
        async with anyio.create_task_group() as making:
            making.start_soon(made, node, volume, backend)
            await wait_until(lambda: place.content().startswith(TEXT), what="the copy")
            await anyio.to_thread.run_sync(_spoil, place.file)

        info = await node.get(volume)

        assert info.state == "creating"
        assert "lost writes" in info.last_error
        await node.delete(volume)


def _spoil(device: Path) -> None:
    with device.open("r+b") as stream:
        stream.write(b"spoilt")
        stream.flush()
        os.fsync(stream.fileno())
