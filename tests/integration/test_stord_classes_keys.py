"""LUKS over devices and servers: a guest's data are not on them, and no key costs others theirs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from chv.common.errors import ChvError, FailedPrecondition, NotFound, PermissionDenied
from chv.common.wire import stord as wire
from chv.stord import luks
from chv.stord.takeover import LOOK_BYTES
from tests.integration.class_places import (
    DEVICE_BYTES,
    FOREIGN,
    KINDS,
    Place,
    jobs_end,
    made,
    place_of,
)
from tests.integration.snapshot_rig import snapshot as take_snapshot
from tests.integration.stord_classes_helpers import SIZE_BYTES
from tests.integration.stord_helpers import IDS, Node, needs_qsd, open_node
from tests.integration.test_stord_encryption import (
    KEY,
    OTHER,
    TEXT,
    seen_in_files,
    seen_in_processes,
)
from tests.integration.vhost_client import VhostDisk
from tests.sampling import sampled

pytestmark = [pytest.mark.root, needs_qsd]
LOCKED = wire.Encryption(key="default/disk")
NEWER = wire.Encryption(key="default/other")


@asynccontextmanager
async def node_at(kind: str) -> AsyncIterator[tuple[Node, Place]]:
    async with place_of(kind) as place, open_node(storage=place.storage, start=False) as node:
        node.add_key("default/disk", KEY)
        node.add_key("default/other", OTHER)
        await node.start()
        yield node, place
        assert not node.workers()
        assert not (node.layout.run / "tools").exists() or not list(
            (node.layout.run / "tools").iterdir()
        )


async def used(node: Node, volume: str, *, write: bool = False, generation: int = 1) -> int:
    """Attach the volume, find the text in it or put it there, detach; return its size."""
    vm = IDS.uid()
    info = await node.attach(volume, vm, generation=generation)
    size_bytes = await anyio.to_thread.run_sync(_use, Path(info.export_path), write)
    await node.detach(volume, vm, generation=generation)
    return size_bytes


def _use(export: Path, write: bool) -> int:
    with VhostDisk(export) as disk:
        if write:
            assert disk.write(8, TEXT) == 0
            disk.flush()
        assert disk.read(8, len(TEXT)) == TEXT
        return disk.size_bytes


@pytest.mark.parametrize("kind", sampled(KINDS, 2, seed=5))
async def test_what_the_guest_writes_is_nowhere_in_the_clear_and_the_key_nowhere(kind: str) -> None:
    seen: list[str] = []
    async with node_at(kind) as (node, place):
        volume = IDS.uid()

        async def look() -> None:
            while True:
                seen.extend(await anyio.to_thread.run_sync(seen_in_processes, KEY))

        async with anyio.create_task_group() as watching:
            watching.start_soon(look)
            info = await made(node, volume, place.describe(encryption=LOCKED))
            size_bytes = await used(node, volume, write=True)
            watching.cancel_scope.cancel()

        assert (info.state, info.encryption_key) == ("open", "default/disk")
        assert size_bytes == info.size_bytes >= SIZE_BYTES
        assert seen == []
        assert seen_in_files(node, KEY) == []
        assert KEY not in node.log.read_bytes()
        if place.file is not None:
            assert info.size_bytes == DEVICE_BYTES - luks.PAYLOAD_BYTES
            assert place.content().startswith(luks.MAGIC)
            assert TEXT[:64] not in place.content()
        assert await used(node, volume) == size_bytes
        await node.delete(volume)


@pytest.mark.parametrize("kind", sampled(KINDS, 2, seed=6))
async def test_a_wrong_key_is_named_and_a_rotated_one_opens(kind: str) -> None:
    async with node_at(kind) as (node, place):
        volume, vm = IDS.uid(), IDS.uid()
        await made(node, volume, place.describe(encryption=LOCKED))
        await used(node, volume, write=True)

        node.add_key("default/disk", OTHER)
        with pytest.raises(PermissionDenied, match="the key default/disk does not open volume"):
            await node.attach(volume, vm)
        node.add_key("default/disk", KEY)
        rotated = await made(node, volume, place.describe(encryption=NEWER), generation=2)
        assert rotated.encryption_key == "default/other"
        (node.layout.keys / "default/disk").unlink()

        await used(node, volume, generation=2)
        node.add_key("default/disk", KEY)
        attached = await node.attach(volume, vm, generation=2)
        back = await made(node, volume, place.describe(encryption=LOCKED), generation=3)
        assert back.encryption_key == "default/disk"
        await anyio.to_thread.run_sync(_use, Path(attached.export_path), False)
        await node.detach(volume, vm, generation=3)
        await used(node, volume, generation=3)
        await node.delete(volume, generation=3)


@pytest.mark.parametrize("kind", sampled(FOREIGN, 2, seed=1))
async def test_data_of_others_are_not_written_over(kind: str) -> None:
    async with node_at(kind) as (node, place):
        volume = IDS.uid()
        assert place.file is not None
        with place.file.open("r+b") as stream:
            stream.seek(LOOK_BYTES - 512)
            stream.write(b"precious")
        before = place.content()

        info = await made(node, volume, place.describe(encryption=LOCKED))

        assert info.state == "creating"
        assert "holds data" in info.last_error
        assert place.content() == before
        await node.delete(volume)
        assert place.content() == before


@pytest.mark.parametrize("kind", sampled(FOREIGN, 2, seed=2))
async def test_a_deleted_volume_is_found_again_by_its_key_and_by_no_other(kind: str) -> None:
    async with node_at(kind) as (node, place):
        first, second, third = IDS.uid(), IDS.uid(), IDS.uid()
        await made(node, first, place.describe(encryption=LOCKED))
        await used(node, first, write=True)
        await node.delete(first)

        refused = await made(node, second, place.describe(encryption=NEWER))
        assert "the key default/other does not open volume" in refused.last_error
        await node.delete(second)
        found = await made(node, third, place.describe(encryption=LOCKED))

        assert found.state == "open", found.last_error
        await used(node, third)
        await node.delete(third)


async def test_a_device_that_has_no_room_for_the_header_is_refused_with_both_sizes() -> None:
    async with node_at("block") as (node, place):
        volume = IDS.uid()
        wanted = place.describe(encryption=LOCKED, size_bytes=DEVICE_BYTES)

        info = await made(node, volume, wanted)

        assert str(luks.PAYLOAD_BYTES) in info.last_error
        assert str(DEVICE_BYTES - luks.PAYLOAD_BYTES) in info.last_error
        await node.delete(volume)


async def test_a_key_that_is_not_there_is_named_and_nothing_is_made() -> None:
    async with node_at("block") as (node, place):
        with pytest.raises(NotFound, match="default/absent"):
            await made(
                node, IDS.uid(), place.describe(encryption=wire.Encryption(key="default/absent"))
            )
        assert node.volume_names() == []
        assert await node.volumes() == []


@pytest.mark.parametrize("kind", sampled(FOREIGN, 2, seed=3))
async def test_a_snapshot_of_a_locked_volume_is_locked_and_restored(kind: str) -> None:
    async with node_at(kind) as (node, place):
        volume = IDS.uid()
        await made(node, volume, place.describe(encryption=LOCKED))
        await used(node, volume, write=True)

        await take_snapshot(node, [volume])

        await used(node, volume)
        assert seen_in_files(node, TEXT[:64]) == []
        await node.delete(volume)


@pytest.mark.parametrize(
    "point",
    sampled(
        [
            "stord.fill.after_create",
            "stord.takeover.after_begin",
            "stord.takeover.after_header",
            "stord.fill.after_copy",
        ],
        2,
        seed=2,
    ),
)
async def test_a_kill_at_any_step_of_a_creation_ends_in_a_whole_volume(point: str) -> None:
    async with node_at("block") as (node, place):
        volume = IDS.uid()
        await node.end()
        await node.start(failpoints=f"{point}=kill")
        with pytest.raises(ChvError):
            await made(node, volume, place.describe(encryption=LOCKED))
        await node.ended()

        await node.start()
        await jobs_end(node)

        assert (await node.get(volume)).state == "open"
        await used(node, volume, write=True)
        await node.delete(volume)


async def test_a_locked_device_grows_when_it_has_grown() -> None:
    async with node_at("rbd") as (node, place):
        volume = IDS.uid()
        await made(node, volume, place.describe(encryption=LOCKED))
        await used(node, volume, write=True)

        larger = place.describe(encryption=LOCKED, size_bytes=2 * SIZE_BYTES)
        info = await made(node, volume, larger, generation=2)

        assert info.size_bytes == 2 * SIZE_BYTES
        assert await used(node, volume, generation=2) == 2 * SIZE_BYTES
        await node.delete(volume, generation=2)


async def test_encryption_is_never_added_to_a_volume_that_has_none() -> None:
    async with node_at("block") as (node, place):
        volume = IDS.uid()
        await made(node, volume, place.describe())
        with pytest.raises((FailedPrecondition, ChvError), match="keeps its"):
            await made(node, volume, place.describe(encryption=LOCKED), generation=2)
        await node.delete(volume)
