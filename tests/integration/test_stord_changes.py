"""Changes of volumes for real: limits under I/O, growth that waits, late calls after a deletion."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from chv.common import config as configuration
from chv.common.errors import (
    FailedPrecondition,
    Internal,
    InUse,
    InvalidArgument,
    StaleGeneration,
    Unavailable,
)
from chv.common.ids import short_uid
from chv.common.wire import stord as wire
from chv.common.wire.types import HELLO, HelloRequest
from chv.stord import acl, clients, growth
from chv.stord.__main__ import prepare, serve
from tests.helpers import wait_until
from tests.integration.snapshot_rig import clone, snapshot
from tests.integration.stord_helpers import (
    IDS,
    MIB,
    Node,
    needs_qsd,
    open_node,
    qsd_major,
    shell,
    short_root,
    tells_new_sizes,
)
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]
QCOW2 = wire.VolumeFormat.QCOW2
TOO_LARGE_BYTES = 2**59
SLOW = wire.Limits(iops_total=wire.Rate(limit=100))


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_node() as node:
        yield node


def writes(disk: VhostDisk, count: int) -> float:
    """Seconds that so many writes took."""
    begin = time.monotonic()
    for index in range(count):
        assert disk.write(index % 8, b"w" * 512) == 0
    return time.monotonic() - begin


# --- limits
async def test_limits_change_under_a_vm_take_effect_at_once_and_are_read_back(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.ensure(volume)
    info = await node.attach(volume, vm)

    with VhostDisk(Path(info.export_path)) as disk:
        free_s = writes(disk, 60)
        slow = await node.ensure(volume, 2, limits=SLOW)
        writes(disk, 10)  # what the bucket still has
        slow_s = writes(disk, 60)
        freed = await node.ensure(volume, 3)
        freed_s = writes(disk, 60)

    assert (slow.limits, slow.limits_live) == (SLOW, True)
    assert (freed.limits, freed.limits_live) == (wire.Limits(), True)
    assert slow_s > 0.4
    assert max(free_s, freed_s) < slow_s / 2


async def test_limits_of_the_record_hold_from_the_first_request_and_after_a_recovery(
    node: Node,
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    created = await node.ensure(volume, limits=SLOW)
    info = await node.attach(volume, vm)
    seen = await node.get(volume)
    os.kill(info.backend_pid, signal.SIGKILL)
    await wait_until(lambda: is_lost(node))
    meanwhile = await node.ensure(volume, 2, limits=wire.Limits(bps_read=wire.Rate(limit=MIB)))

    await node.recover(vm)

    after = await node.get(volume)
    assert (created.limits, created.limits_live) == (SLOW, False)
    assert (seen.limits, seen.limits_live) == (SLOW, True)
    assert not meanwhile.limits_live
    assert (after.limits.bps_read.limit, after.limits_live) == (MIB, True)


async def is_lost(node: Node) -> bool:
    return [row.backend for row in await node.sessions()] == [wire.BackendState.LOST]


async def test_limits_that_qemu_refuses_are_refused_and_nothing_is_made_or_changed(
    node: Node,
) -> None:
    bad = wire.Limits(bps_total=wire.Rate(limit=10), bps_read=wire.Rate(limit=5))
    volume = IDS.uid()
    await node.ensure(volume)

    with pytest.raises(InvalidArgument) as caught:
        await node.ensure(IDS.uid(), limits=bad)
    with pytest.raises(InvalidArgument):
        await node.ensure(volume, 2, limits=bad)

    assert caught.value.field == "backend.limits.bps_total"
    assert caught.value.hint
    assert [(row.volume_id, row.generation) for row in await node.volumes()] == [(volume, 1)]


async def test_limits_that_a_dying_stord_did_not_set_are_set_by_the_same_call_again() -> None:
    async with open_node(start=False) as node:
        await node.start(failpoints="stord.limits.after_intent=1*error(EIO)")
        volume = IDS.uid()
        await node.ensure(volume)
        await node.attach(volume, IDS.uid())
        with pytest.raises(Internal):
            await node.ensure(volume, 2, limits=SLOW)

        again = await node.ensure(volume, 2, limits=SLOW)

        assert (again.limits, again.limits_live) == (SLOW, True)


# --- growth
@pytest.mark.parametrize("client", list(wire.VmmClient))
async def test_a_disk_whose_client_cannot_be_told_is_not_resized_whatever_the_caller_says(
    node: Node, client: wire.VmmClient
) -> None:
    """Storage daemons of every version: old ones tell nobody, new ones cut such a client off."""
    volume, vm = IDS.uid(), IDS.uid()
    await node.ensure(volume, size_bytes=MIB)
    info = await node.attach(volume, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        grown = await node.ensure(volume, 2, client, size_bytes=4 * MIB)
        assert disk.write(0, b"g" * 512) == 0

    assert (grown.applied, grown.size_bytes) == ("on_next_start", MIB)
    assert grown.pending_size_bytes == 4 * MIB
    assert (await node.recover(vm)).backend_pid == info.backend_pid


@pytest.mark.skipif(
    qsd_major() >= growth.MAJOR_MIN,
    reason=f"needs a storage daemon older than QEMU {growth.MAJOR_MIN}; here is {qsd_major()}",
)
async def test_a_storage_daemon_that_tells_nobody_is_not_asked_to_resize(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.ensure(volume, size_bytes=MIB)
    info = await node.attach(volume, vm)
    with VhostDisk(Path(info.export_path), channel=True):
        grown = await node.ensure(volume, 2, VMM, size_bytes=4 * MIB)

    assert (grown.applied, grown.size_bytes) == ("on_next_start", MIB)


@tells_new_sizes
@pytest.mark.parametrize("proxy", ["off", "auto"])
@pytest.mark.parametrize("format", ["raw", "qcow2"])
async def test_a_client_is_told_of_the_new_size_and_uses_it_at_once(
    format: str, proxy: str
) -> None:
    fields: dict[str, Any] = {"format": wire.VolumeFormat(format)}
    async with open_node(storage=f'proxy = "{proxy}"') as node:
        volume, vm = IDS.uid(), IDS.uid()
        await node.ensure(volume, size_bytes=MIB, **fields)
        info = await node.attach(volume, vm)
        with VhostDisk(Path(info.export_path), channel=True) as disk:
            grown = await node.ensure(volume, 2, VMM, size_bytes=4 * MIB, **fields)
            disk.await_news()
            assert disk.size_bytes == 4 * MIB
            assert disk.write(3 * 2048, b"g" * 512) == 0
            assert disk.read(3 * 2048, 512) == b"g" * 512
        assert (grown.applied, grown.size_bytes) == ("online", 4 * MIB)
        assert (await node.recover(vm)).backend_pid == info.backend_pid


@tells_new_sizes
async def test_one_disk_that_cannot_be_told_keeps_the_others_of_its_vm_from_growing(
    node: Node,
) -> None:
    """The storage daemon is one for all, and its channels do not say whose they are."""
    volumes, vm = [IDS.uid(), IDS.uid()], IDS.uid()
    for volume in volumes:
        await node.ensure(volume, size_bytes=MIB)
    paths = [Path((await node.attach(volume, vm)).export_path) for volume in volumes]

    with VhostDisk(paths[0], channel=True):
        with VhostDisk(paths[1]):
            beside = await node.ensure(volumes[0], 2, VMM, size_bytes=2 * MIB)
        alone = await settled_growth(node, volumes[0])

    assert (beside.applied, beside.size_bytes) == ("on_next_start", MIB)
    assert (alone.applied, alone.size_bytes) == ("online", 4 * MIB)


async def settled_growth(node: Node, volume: str) -> wire.VolumeInfo:
    """Grow once more; again while the storage daemon still closes a client that has left."""
    generations = itertools.count(3)

    async def grown() -> wire.VolumeInfo | None:
        info = await node.ensure(volume, next(generations), VMM, size_bytes=4 * MIB)
        return info if info.applied == "online" else None

    found = await wait_until(grown)
    assert found is not None
    return found


async def test_a_disk_grows_under_its_vm_where_that_is_safe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process: the guard believes that the storage daemon of this machine is new enough.

    QEMU 7 survives the command; its guests do not see the new size before the next attachment.
    """
    monkeypatch.setattr(growth, "MAJOR_MIN", 0)
    storage = 'proxy = "off"'
    async with open_node(start=False, storage=storage) as node, anyio.create_task_group() as tasks:
        prepare(node.layout)
        tasks.start_soon(serve, configuration.load(node.config), node.layout)
        await wait_until(lambda: is_ready(node))
        volume, vm = IDS.uid(), IDS.uid()
        await node.ensure(volume, format=QCOW2, size_bytes=MIB)
        info = await node.attach(volume, vm)
        alone = await node.ensure(volume, 2, VMM, format=QCOW2, size_bytes=2 * MIB)
        with VhostDisk(Path(info.export_path), channel=True) as disk:
            grown = await node.ensure(volume, 3, VMM, format=QCOW2, size_bytes=4 * MIB)
            assert disk.write(0, b"g" * 512) == 0
            assert disk.read(0, 512) == b"g" * 512
        await node.detach(volume, vm, generation=3)
        again = await node.attach(volume, vm, generation=3)
        with VhostDisk(Path(again.export_path)) as disk:
            assert disk.size_bytes == 4 * MIB
            assert disk.read(0, 512) == b"g" * 512
        await node.detach(volume, vm, generation=3)
        tasks.cancel_scope.cancel()
    assert (alone.applied, alone.size_bytes) == ("on_next_start", MIB)
    assert (grown.applied, grown.size_bytes, grown.pending_size_bytes) == ("online", 4 * MIB, 0)


VMM = wire.VmmClient.QEMU


async def is_ready(node: Node) -> bool:
    try:
        async with node.client() as client:
            return (await client.call(HELLO, HelloRequest())).state == "ready"
    except Unavailable:
        return False


async def test_the_configured_storage_daemon_is_the_one_that_runs() -> None:
    with short_root() as root:
        link = root / "another-qsd"
        shell("cp", shutil.which("qemu-storage-daemon") or "", link)
        async with open_node(storage=f'storage_daemon_binary = "{link}"') as node:
            volume, vm = IDS.uid(), IDS.uid()
            await node.ensure(volume, format=QCOW2)
            info = await node.attach(volume, vm)

            assert Path(f"/proc/{info.backend_pid}/exe").readlink() == link
            await node.end()
            await node.start()
            assert (await node.attach(volume, vm)).backend_pid == info.backend_pid
            await node.detach(volume, vm)
            assert node.workers() == []


async def test_several_growths_that_wait_become_one_and_survive_a_restart(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.ensure(volume, format=QCOW2, size_bytes=MIB)
    await node.attach(volume, vm)
    await node.ensure(volume, 2, format=QCOW2, size_bytes=2 * MIB)
    await node.ensure(volume, 3, format=QCOW2, size_bytes=3 * MIB)
    with pytest.raises(InvalidArgument, match="never becomes smaller"):
        await node.ensure(volume, 4, format=QCOW2, size_bytes=2 * MIB)
    await node.end()
    await node.start()
    assert (await node.get(volume)).pending_size_bytes == 3 * MIB

    await node.detach(volume, vm, generation=3)
    info = await node.attach(volume, vm, generation=3)

    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.size_bytes == 3 * MIB
    assert (await node.get(volume)).pending_size_bytes == 0


async def test_growth_that_fails_keeps_no_vm_from_starting_and_goes_on_waiting(
    node: Node,
) -> None:
    if takes_file_of(node.layout.run_root, TOO_LARGE_BYTES):
        pytest.skip(f"the file system of {node.layout.run_root} takes files of any size")
    volume, vm = IDS.uid(), IDS.uid()
    await node.ensure(volume, size_bytes=MIB)
    await node.attach(volume, vm)
    await node.ensure(volume, 2, size_bytes=TOO_LARGE_BYTES)
    await node.detach(volume, vm, generation=2)

    info = await node.attach(volume, vm, generation=2)

    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.size_bytes == MIB
    seen = await node.get(volume)
    assert seen.pending_size_bytes == TOO_LARGE_BYTES
    assert "takes no file" in seen.last_error


def takes_file_of(directory: Path, size_bytes: int) -> bool:
    """Tell whether the file system takes a file of that size: ext4 does not, tmpfs does."""
    with tempfile.TemporaryFile(dir=directory) as file:
        try:
            file.truncate(size_bytes)
        except OSError:
            return False
        return True


@pytest.mark.parametrize("proxy", ["off", "auto"])
async def test_who_is_connected_to_an_export_is_seen_and_whether_it_can_be_told(
    proxy: str,
) -> None:
    async with open_node(storage=f'proxy = "{proxy}"') as node:
        volume, vm = IDS.uid(), IDS.uid()
        await node.ensure(volume)
        info = await node.attach(volume, vm)
        bound, other = (node.layout.qsd(vm) / name for name in (f"{short_uid(volume)}.sock", "no"))
        proxies = [each.pid for each in node.workers() if each.pid != info.backend_pid]

        def seen() -> clients.Connected:
            return clients.look(info.backend_pid, [other, bound], proxies)

        at_rest = (bound,) if proxies else ()
        await wait_until(lambda: seen().exports == at_rest)  # a proxy is there before its VMM
        before = seen()
        with VhostDisk(Path(info.export_path)):
            mute = seen()
        await wait_until(lambda: seen() == before)
        with VhostDisk(Path(info.export_path), channel=True) as disk:
            assert disk.write(0, b"c" * 512) == 0  # the channel has arrived
            during = seen()
        await wait_until(lambda: seen() == before)

    assert bool(proxies) == (proxy == "auto")
    assert not before.can_all_be_told
    assert (mute.exports, mute.can_all_be_told) == ((bound,), False)
    assert (during.exports, during.can_all_be_told) == ((bound,), True)


# --- deletion
async def test_a_late_call_does_not_bring_a_deleted_volume_back(node: Node) -> None:
    volume = IDS.uid()
    await node.ensure(volume, 3)
    await node.delete(volume, generation=5)

    with pytest.raises(StaleGeneration, match="deleted at generation 5"):
        await node.ensure(volume, 4)
    await node.end()
    await node.start()
    with pytest.raises(StaleGeneration, match="deleted at generation 5"):
        await node.ensure(volume, 3)

    assert node.volume_names() == []
    assert (await node.ensure(volume, 6)).created


async def test_a_volume_of_a_lost_store_is_deleted_with_its_files() -> None:
    async with open_node() as node:
        volume = IDS.uid()
        await node.ensure(volume)
        await node.end()
        for path in node.layout.state.glob("stord.db*"):
            path.unlink()
        await node.start()

        await node.delete(volume, generation=2)

        assert node.volume_names() == []
        with pytest.raises(StaleGeneration):
            await node.ensure(volume)


# --- read by many
async def test_a_read_only_many_volume_is_read_by_many_and_written_by_nobody(node: Node) -> None:
    volume, vms = IDS.uid(), [IDS.uid() for _ in range(3)]
    data = os.urandom(4096)
    rox: dict[str, Any] = {"access": wire.AccessMode.READ_ONLY_MANY, "source": node.image(data)}
    await node.ensure(volume, **rox)
    disk_path = node.layout.volume(volume) / "disk.raw"

    infos = [
        await node.attach(volume, vm, slot=slot, read_only=True) for slot, vm in enumerate(vms)
    ]

    for info in infos:
        with VhostDisk(Path(info.export_path)) as disk:
            assert disk.read(0, 4096) == data
            assert disk.write(0, b"x" * 512) != 0
    assert len(node.workers()) == 3
    assert disk_path.stat().st_uid == 0
    seen = await node.get(volume)
    assert sorted([seen.attached_to, *seen.readers]) == sorted(vms)
    with pytest.raises(FailedPrecondition, match="attached read only"):
        await node.attach(volume, IDS.uid(), slot=4)
    with pytest.raises(InUse):
        await node.delete(volume)
    for vm in vms:
        await node.detach(volume, vm)
    assert node.workers() == []
    assert disk_path.stat().st_mode & 0o777 == 0o600
    await node.delete(volume)


# --- layers
async def test_a_volume_with_snapshots_grows_in_its_top_layer_and_keeps_what_lies_below(
    node: Node,
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    data = os.urandom(8192)
    await node.ensure(volume, size_bytes=MIB, source=(source := node.image(data)))
    await snapshot(node, [volume])

    grown = await node.ensure(volume, 2, size_bytes=3 * MIB, source=source)

    info = await node.attach(volume, vm, generation=2)
    assert (grown.size_bytes, grown.applied, grown.layers) == (3 * MIB, "detached", 2)
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.size_bytes == 3 * MIB
        assert disk.read(0, 8192) == data
        assert disk.read(2 * 2048, 4096) == bytes(4096)
        assert disk.write(5 * 1024, b"e" * 512) == 0
    assert (node.layout.volume(volume) / "disk.raw").stat().st_size == MIB


async def test_a_layer_below_clones_is_readable_for_exactly_as_long_as_one_of_them_is_attached(
    node: Node,
) -> None:
    parent, vm = IDS.uid(), IDS.uid()
    data = os.urandom(4096)
    await node.ensure(parent, size_bytes=8 * MIB, source=node.image(data))
    base = node.layout.volume(parent) / "disk.raw"
    taken = await snapshot(node, [parent])
    one, other = [(await clone(node, parent, taken)).volume_id for _ in range(2)]

    infos = [await node.attach(each, vm) for each in (one, other)]

    uid = node.layout.storage_uid(0)
    for info in infos:
        with VhostDisk(Path(info.export_path)) as disk:
            assert disk.read(0, 4096) == data
    assert (acl.readers(base), base.stat().st_uid) == ([uid], 0)
    await node.detach(one, vm)
    assert acl.readers(base) == [uid]
    with VhostDisk(Path(infos[1].export_path)) as disk:
        assert disk.read(0, 4096) == data
    await node.detach(other, vm)
    assert acl.readers(base) == []
    assert base.stat().st_mode & 0o777 == 0o600


async def test_a_parent_is_written_while_a_clone_of_it_is_attached_elsewhere(node: Node) -> None:
    parent, vms = IDS.uid(), [IDS.uid(), IDS.uid()]
    data = os.urandom(4096)
    await node.ensure(parent, size_bytes=8 * MIB, source=node.image(data))
    taken = await snapshot(node, [parent])
    linked = (await clone(node, parent, taken)).volume_id

    first = await node.attach(parent, vms[0])
    second = await node.attach(linked, vms[1], slot=1)

    with VhostDisk(Path(first.export_path)) as disk, VhostDisk(Path(second.export_path)) as copy:
        assert disk.write(0, b"p" * 4096) == 0
        assert copy.read(0, 4096) == data
        assert copy.write(0, b"c" * 4096) == 0
        assert disk.read(0, 4096) == b"p" * 4096
    await node.detach(parent, vms[0])
    with VhostDisk(Path(second.export_path)) as copy:
        assert copy.read(0, 4096) == b"c" * 4096
    with pytest.raises(InUse, match=linked):
        await node.delete(parent)


async def test_an_image_of_another_format_is_copied_by_a_job_that_can_be_given_up() -> None:
    async with open_node(start=False) as node:
        await node.start(failpoints="stord.fill.after_create=1*hang")
        data = os.urandom(MIB)
        source = qcow2_of(node, data)
        volume, vm = IDS.uid(), IDS.uid()

        begun = await node.ensure(volume, source=source)
        with pytest.raises(FailedPrecondition, match="creating"):
            await node.attach(volume, vm)
        again = await node.ensure(volume, source=source)
        await node.end()
        await node.start()  # it goes on with the job
        await wait_until(lambda: is_open(node, volume))
        info = await node.attach(volume, vm)

        assert (begun.state, again.state, again.job) == ("creating", "creating", begun.job)
        with VhostDisk(Path(info.export_path)) as disk:
            assert disk.read(0, MIB // 2) == data[: MIB // 2]
            assert disk.size_bytes == 16 * MIB


async def test_a_volume_that_is_still_being_filled_is_deleted_with_its_job() -> None:
    async with open_node(start=False) as node:
        await node.start(failpoints="stord.fill.after_create=1*delay(300)")
        volume = IDS.uid()
        await node.ensure(volume, source=qcow2_of(node, os.urandom(MIB)))

        await node.delete(volume)

        assert node.volume_names() == []
        assert await node.volumes() == []


async def test_a_copy_that_failed_says_why_and_is_begun_anew_by_the_next_call() -> None:
    async with open_node(start=False) as node:
        await node.start(failpoints="stord.fill.after_create=1*error(UNAVAILABLE)")
        volume = IDS.uid()
        source = qcow2_of(node, os.urandom(MIB))
        await node.ensure(volume, source=source)
        await wait_until(lambda: has_failed(node, volume))
        failed = await node.get(volume)

        await node.ensure(volume, source=source)
        await wait_until(lambda: is_open(node, volume))

        assert (failed.state, node.volume_names()) == ("creating", [volume])
        assert (await node.get(volume)).last_error == ""


async def test_a_copy_of_a_damaged_image_says_what_the_tool_says(node: Node) -> None:
    volume = IDS.uid()
    source = qcow2_of(node, os.urandom(MIB))
    with Path(source.path).open("r+b") as file:
        file.seek(0x30000)  # the first table of tables, where qemu-img puts it
        file.write(b"\x7f" * 64)

    await node.ensure(volume, source=source)
    await wait_until(lambda: has_failed(node, volume))
    failed = await node.get(volume)

    assert failed.state == "creating"
    assert "inside stord" not in failed.last_error
    assert "disk.raw" in failed.last_error or source.path in failed.last_error
    with pytest.raises(FailedPrecondition):
        await node.attach(volume, IDS.uid())
    await node.delete(volume)
    assert node.volume_names() == []


async def has_failed(node: Node, volume: str) -> bool:
    return bool((await node.get(volume)).last_error)


async def is_open(node: Node, volume: str) -> bool:
    return (await node.get(volume)).state == "open"


def qcow2_of(node: Node, data: bytes) -> wire.VolumeSource:
    raw = node.image(data)
    path = node.layout.image("77" * 32)
    shell("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw.path, path)
    path.chmod(0o644)
    return wire.VolumeSource(path=str(path), sha256="77" * 32, format=QCOW2)
