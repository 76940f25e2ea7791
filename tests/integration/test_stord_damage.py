"""Damaged, vanished and misplaced files for real: typed errors that name file and remedy."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chv.common.errors import (
    DataLoss,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    OwnershipConflict,
)
from chv.common.wire import stord as wire
from tests.helpers import wait_until
from tests.integration.stord_helpers import (
    IDS,
    MIB,
    Node,
    mounted_tmpfs,
    needs_qsd,
    open_node,
    shell,
    short_root,
)
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]
QCOW2 = wire.VolumeFormat.QCOW2
# Where a fresh qcow2 of qemu-img with clusters of 64 KiB counts the users of its clusters.
REFCOUNTS_OFFSET = 0x20000
L1_TABLE_FIELD = 40  # of the header


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_node() as node:
        yield node


async def lost(node: Node, *, backing: wire.VolumeSource | None = None) -> tuple[str, str, Path]:
    """A written qcow2 volume whose storage daemon was killed under its VM."""
    volume, vm = IDS.uid(), IDS.uid()
    opened = await node.ensure(volume, format=QCOW2, source=backing)
    info = await node.attach(volume, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        disk.write(0, b"d" * 4096)
        disk.flush()
    os.kill(info.backend_pid, signal.SIGKILL)

    async def is_lost() -> bool:
        return (await node.sessions())[0].backend is wire.BackendState.LOST

    await wait_until(is_lost)
    return volume, vm, Path(opened.path)


def damage(path: Path) -> None:
    """Let the clusters in use be counted as free."""
    with path.open("r+b") as file:
        file.seek(REFCOUNTS_OFFSET)
        file.write(bytes(64))


def checks(node: Node) -> int:
    return node.log.read_text().count('"volume_checked"')


async def test_a_qcow2_that_was_cut_off_is_checked_once_before_it_is_served_again(
    node: Node,
) -> None:
    volume, vm, _path = await lost(node)

    recovered = await node.recover(vm)

    assert checks(node) == 1
    assert (recovered.losses, recovered.backend) == (1, wire.BackendState.SERVING)
    assert "served again" in recovered.last_loss
    await node.detach(volume, vm)
    await node.attach(volume, vm)
    assert checks(node) == 1


async def test_a_qcow2_that_is_found_corrupt_is_not_served_until_it_was_repaired(
    node: Node,
) -> None:
    volume, vm, path = await lost(node)
    damage(path)

    with pytest.raises(DataLoss, match=f"chv volume repair {volume}") as recovering:
        await node.recover(vm)
    await node.detach(volume, vm)
    with pytest.raises(DataLoss, match=str(path)):
        await node.attach(volume, vm)

    assert str(path) in recovering.value.message
    assert node.workers() == []
    assert (path.stat().st_uid, path.stat().st_mode & 0o777) == (0, 0o600)
    assert "damaged" in (await node.get(volume)).last_error
    shell("qemu-img", "check", "-q", "-r", "all", path)
    assert (await node.attach(volume, vm)).backend is wire.BackendState.SERVING


async def test_a_disk_that_does_not_open_is_refused_in_the_words_of_the_monitor(
    node: Node,
) -> None:
    """It ends the storage daemon that was to start with it; the next one can say why."""
    volume, other, vm = IDS.uid(), IDS.uid(), IDS.uid()
    opened = await node.ensure(volume, format=QCOW2)
    await node.ensure(other, format=QCOW2)
    with Path(opened.path).open("r+b") as file:
        file.seek(L1_TABLE_FIELD)
        offset = file.read(8)
        file.seek(L1_TABLE_FIELD)
        file.write(b"\0\0\0\0\0\0\0\x07")  # of no cluster

    with pytest.raises(Internal, match=r"blockdev-add: .*L1 table"):
        await node.attach(volume, vm)

    assert node.log.read_text().count('"started_again"') == 1
    assert node.workers() == []
    assert (await node.attach(other, vm)).backend is wire.BackendState.SERVING
    with Path(opened.path).open("r+b") as file:
        file.seek(L1_TABLE_FIELD)
        file.write(offset)
    assert (await node.attach(volume, vm)).backend is wire.BackendState.SERVING


async def test_the_need_of_a_check_outlives_stord_and_a_raw_volume_has_none(node: Node) -> None:
    volume, vm, path = await lost(node)
    raw, other_vm = IDS.uid(), IDS.uid()
    await node.ensure(raw)
    info = await node.attach(raw, other_vm, slot=1)
    await node.detach(volume, vm)
    await node.end()
    os.kill(info.backend_pid, signal.SIGKILL)
    damage(path)
    await wait_until(lambda: not node.workers())
    await node.start()

    with pytest.raises(DataLoss, match="repair"):
        await node.attach(volume, vm)
    await node.recover(other_vm)

    assert checks(node) == 1


async def test_a_missing_image_below_a_volume_is_named_with_its_remedy(node: Node) -> None:
    source = node.image(os.urandom(4096))
    volume, vm = IDS.uid(), IDS.uid()
    await node.ensure(volume, format=QCOW2, source=source)
    Path(source.path).unlink()

    with pytest.raises(DataLoss, match="put the file back") as caught:
        await node.attach(volume, vm)

    assert source.path in caught.value.message
    assert node.workers() == []
    assert node.run_files() == []


async def test_a_read_only_file_system_is_named_with_its_remedy() -> None:
    async with open_node(start=False, storage="space_critical_bytes = 0") as node:
        volumes = node.layout.volume("x").parent
        with mounted_tmpfs(volumes, "8m"):
            await node.start()
            volume, vm = IDS.uid(), IDS.uid()
            await node.ensure(volume, size_bytes=MIB)
            shell("mount", "-o", "remount,ro", volumes)

            with pytest.raises(FailedPrecondition, match="remount") as attaching:
                await node.attach(volume, vm)
            with pytest.raises(FailedPrecondition, match="remount"):
                await node.ensure(IDS.uid())

            assert str(volumes) in attaching.value.message
            assert node.workers() == []
            shell("mount", "-o", "remount,rw", volumes)
            await node.attach(volume, vm)
            await node.detach(volume, vm)
            await node.end()


# --- pools
async def test_a_volume_in_a_pool_has_its_bytes_there_and_its_lock_here() -> None:
    with short_root() as pool:
        async with open_node(storage=f'pools = {{ fast = "{pool}" }}') as node:
            volume, vm = IDS.uid(), IDS.uid()
            data = os.urandom(4096)
            info = await node.ensure(volume, pool="fast", source=node.image(data))
            attached = await node.attach(volume, vm)

            with VhostDisk(Path(attached.export_path)) as disk:
                assert disk.read(0, 4096) == data
            assert info.path == str(pool / volume / "disk.raw")
            assert (info.pool, info.location) == ("fast", info.path)
            assert sorted(p.name for p in node.layout.volume(volume).iterdir()) == [
                "lock",
                "volume.json",
            ]
            await node.detach(volume, vm)
            assert Path(info.path).stat().st_uid == 0
            await node.delete(volume)
            assert list(pool.iterdir()) == []
            assert node.volume_names() == []


async def test_pools_that_are_unknown_gone_or_taken_are_refused() -> None:
    with short_root() as pool, short_root() as elsewhere:
        pools = f'pools = {{ fast = "{pool}", gone = "{pool}/gone" }}'
        async with open_node(storage=pools) as node:
            linked, taken = IDS.uid(), IDS.uid()
            (pool / linked).symlink_to(elsewhere)
            (pool / taken).mkdir()

            with pytest.raises(InvalidArgument, match="known: fast, gone"):
                await node.ensure(IDS.uid(), pool="slow")
            with pytest.raises(FailedPrecondition, match="mount it"):
                await node.ensure(IDS.uid(), pool="gone")
            with pytest.raises(InvalidArgument, match="leads out"):
                await node.ensure(linked, pool="fast")
            with pytest.raises(OwnershipConflict, match="left alone"):
                await node.ensure(taken, pool="fast")

            assert await node.volumes() == []
            assert sorted(p.name for p in pool.iterdir()) == sorted([linked, taken])
            assert list(elsewhere.iterdir()) == []


async def test_a_pool_that_vanished_makes_its_volumes_missing_and_no_others() -> None:
    with short_root() as base:
        pool = base / "pool"
        pool.mkdir(mode=0o711)
        async with open_node(storage=f'pools = {{ fast = "{pool}" }}') as node:
            here, there = IDS.uid(), IDS.uid()
            await node.ensure(here)
            await node.ensure(there, pool="fast")
            pool.rename(base / "away")

            states = {info.volume_id: info.state for info in await node.volumes()}
            with pytest.raises(DataLoss, match="put the file back"):
                await node.attach(there, IDS.uid())

            assert states == {here: "open", there: "missing"}
            (base / "away").rename(pool)
            assert (await node.get(there)).state == "open"
