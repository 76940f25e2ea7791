"""Snapshots, merges and clones of real volumes under a writing guest; content after every step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from chv.common.errors import (
    ChvError,
    Conflict,
    FailedPrecondition,
    InUse,
    NotFound,
    ResourceExhausted,
)
from chv.common.wire import stord as wire
from chv.guest.tiny import load_tiny
from chv.images import ImageStore, builtin, ensure_builtin
from chv.stord.layers import LAYERS_MAX
from tests.helpers import wait_until
from tests.integration.inflight_client import StampedWriter
from tests.integration.snapshot_rig import (
    CHUNKS,
    SIZE_BYTES,
    Content,
    DeepDisk,
    Writer,
    call,
    cancel,
    clone,
    content,
    delete,
    ended,
    fill,
    get,
    get_job,
    layer_files,
    opened,
    put,
    ref,
    restore,
    snapshot,
    snapshots,
    write_all,
)
from tests.integration.stord_helpers import (
    IDS,
    MIB,
    Node,
    meta,
    mounted_tmpfs,
    needs_qsd,
    open_node,
    short_root,
)
from tests.integration.tiny_vm import BOOT_TIMEOUT_S, TinyVm, boot
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]
FORMATS = pytest.mark.parametrize("format", ["raw", "qcow2"])
KEY = "team/disk"
CACHE = Path("/var/cache/chv")
TEXT = 0x4142434445464748


async def volume(node: Node, format: str = "raw", **options: str) -> str:
    volume_id = IDS.uid()
    await node.open(volume_id, format=format, size_bytes=SIZE_BYTES, **options)  # type: ignore[arg-type]
    return volume_id


async def served(node: Node, volume_id: str, vm_id: str) -> Path:
    return Path((await node.attach(volume_id, vm_id)).export_path)


async def session(node: Node, vm_id: str) -> wire.VmBackendInfo:
    return next(each for each in await node.sessions() if each.vm_id == vm_id)


# --- snapshots
@FORMATS
async def test_a_snapshot_keeps_the_state_under_a_guest_that_writes_on(format: str) -> None:
    async with open_node() as node:
        volume_id, vm_id = await volume(node, format), IDS.uid()
        path = await served(node, volume_id, vm_id)
        await anyio.to_thread.run_sync(write_all, path, {0: 1, 1: 1})
        snapshot_id = await snapshot(node, [volume_id], vm_id)
        assert (await session(node, vm_id)).crash_class is wire.CrashClass.RESET_VM
        await anyio.to_thread.run_sync(write_all, path, {1: 2, 2: 2})
        linked = await clone(node, volume_id, snapshot_id)
        assert await content(node, linked.volume_id) == {0: 1, 1: 1}
        await node.detach(volume_id, vm_id)
        assert await content(node, volume_id) == {0: 1, 1: 2, 2: 2}
        info = await node.get(volume_id)
        assert info.layers == 2
        assert [each.snapshot_id for each in info.snapshots] == [snapshot_id]
        assert info.size_bytes == SIZE_BYTES


async def test_the_same_snapshot_again_is_the_same_answer_and_another_set_a_conflict() -> None:
    async with open_node() as node:
        one, other, vm_id = await volume(node), await volume(node), IDS.uid()
        await served(node, one, vm_id)
        await served(node, other, vm_id)
        snapshot_id = await snapshot(node, [one], vm_id)
        before = await snapshots(node, one)
        await snapshot(node, [one], vm_id, snapshot_id)
        assert await snapshots(node, one) == before
        assert layer_files(node, one) == ["layer-1.qcow2"]
        with pytest.raises(Conflict):
            await snapshot(node, [one, other], vm_id, snapshot_id)
        assert layer_files(node, other) == []


async def test_several_volumes_are_frozen_in_the_same_instant() -> None:
    """A guest that writes n to the first, then n to the second: no snapshot has second > first."""
    async with open_node() as node:
        ids, vm_id = [await volume(node), await volume(node, "qcow2")], IDS.uid()
        paths = [await served(node, each, vm_id) for each in ids]
        stop = threading.Event()

        def count() -> None:
            number = 0
            with VhostDisk(paths[0]) as first, VhostDisk(paths[1]) as second:
                while not stop.is_set():
                    number += 1
                    put(first, 0, number)
                    put(second, 0, number)

        taken: list[str] = []
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, count)
            for _ in range(5):
                await anyio.sleep(0.02)
                taken.append(await snapshot(node, ids, vm_id))
            stop.set()
        for snapshot_id in taken:
            found = []
            for each in ids:
                linked = (await clone(node, each, snapshot_id)).volume_id
                found.append((await content(node, linked)).get(0, 0))
            assert found[1] <= found[0] <= found[1] + 1, found


async def test_a_snapshot_of_several_is_of_all_or_of_none() -> None:
    async with open_node() as node:
        ids, vm_id = sorted([await volume(node), await volume(node)]), IDS.uid()
        for each in ids:
            await served(node, each, vm_id)
        # Something stands where the overlay of the second is made.
        blocker = node.layout.volume(ids[1]) / "layer-1.qcow2.new"
        blocker.mkdir()
        with pytest.raises(Exception, match=r"."):
            await snapshot(node, ids, vm_id)
        blocker.rmdir()
        for each in ids:
            assert layer_files(node, each) == []
            assert await snapshots(node, each) == {}
            assert (await node.get(each)).layers == 1
        await snapshot(node, ids, vm_id)


async def test_snapshots_that_make_no_sense_are_refused() -> None:
    async with open_node() as node:
        free, held, vm_id = await volume(node), await volume(node), IDS.uid()
        await served(node, held, vm_id)
        with pytest.raises(FailedPrecondition, match=vm_id):
            await snapshot(node, [held])
        with pytest.raises(FailedPrecondition):
            await snapshot(node, [free], vm_id)
        with pytest.raises(NotFound):
            await snapshot(node, [IDS.uid()])
        await node.close(free)
        with pytest.raises(FailedPrecondition, match="closed"):
            await snapshot(node, [free])


async def test_a_read_only_many_volume_takes_no_snapshot() -> None:
    async with open_node() as node:
        volume_id = IDS.uid()
        backend = wire.VolumeBackend(
            class_name=wire.VolumeClass.FILE,
            format=wire.VolumeFormat.RAW,
            size_bytes=SIZE_BYTES,
            access=wire.AccessMode.READ_ONLY_MANY,
        )
        await call(
            node,
            wire.OPEN_VOLUME,
            wire.OpenVolume(meta=meta(), volume_id=volume_id, backend=backend),
        )
        with pytest.raises(FailedPrecondition, match="ReadOnlyMany"):
            await snapshot(node, [volume_id])


async def test_a_snapshot_is_refused_where_space_is_critical() -> None:
    with short_root() as root, mounted_tmpfs(root / "small", "64m"):
        node = Node(root, state=root / "small" / "state", storage="space_critical_bytes = 40000000")
        try:
            await node.start()
            volume_id = await volume(node)
            (root / "small" / "ballast").write_bytes(bytes(32 * MIB))
            with pytest.raises(ResourceExhausted, match="bytes are left"):
                await snapshot(node, [volume_id])
        finally:
            await node.cleanup()


async def test_a_chain_has_a_limit_that_is_told() -> None:
    async with open_node() as node:
        volume_id = await volume(node, "qcow2")
        for number in range(LAYERS_MAX - 1):
            await snapshot(node, [volume_id])
            if number % 10 == 0:
                await fill(node, volume_id, {number: number + 1})
        with pytest.raises(ResourceExhausted, match=str(LAYERS_MAX)):
            await snapshot(node, [volume_id])
        assert await content(node, volume_id) == {0: 1, 10: 11, 20: 21, 30: 31}


@pytest.mark.slow
async def test_an_encrypted_volume_has_encrypted_layers() -> None:
    async with open_node() as node:
        node.add_key(KEY, b"correct horse battery")
        volume_id = await volume(node, "raw", key=KEY)
        vm_id = IDS.uid()
        path = await served(node, volume_id, vm_id)
        # What was never written of an encrypted raw disk reads as noise.
        before = dict.fromkeys(range(CHUNKS), TEXT)
        await anyio.to_thread.run_sync(write_all, path, before)
        first = await snapshot(node, [volume_id], vm_id)
        await anyio.to_thread.run_sync(write_all, path, {1: TEXT + 1})
        await node.detach(volume_id, vm_id)
        for name in ("disk.raw", "layer-1.qcow2"):
            data = (node.layout.volume(volume_id) / name).read_bytes()
            assert TEXT.to_bytes(8, "little") not in data, name
        copy = await clone(node, volume_id, first, key=KEY)
        assert await content(node, copy.volume_id) == before
        await node.delete(copy.volume_id)
        for refused in ("", "team/other"):
            with pytest.raises(ChvError, match=refused or "encrypted"):
                await clone(node, volume_id, first, key=refused)
        assert await content(node, volume_id) == before | {1: TEXT + 1}
        assert (await delete(node, volume_id, first)).state is wire.JobState.DONE
        assert await content(node, volume_id) == before | {1: TEXT + 1}


# --- deletion
@FORMATS
@pytest.mark.parametrize("order", ["012", "210", "102"])
async def test_deletion_in_any_order_under_a_guest_keeps_every_write(
    format: str, order: str
) -> None:
    async with open_node() as node:
        volume_id, vm_id = await volume(node, format), IDS.uid()
        path = await served(node, volume_id, vm_id)
        before = (await session(node, vm_id)).crash_class
        with Writer(path, seed=1) as guest:
            taken = []
            for _ in range(3):
                await guest.after(100)
                taken.append(await snapshot(node, [volume_id], vm_id))
            for index in order:
                await guest.after(100)
                job = await delete(node, volume_id, taken[int(index)])
                assert job.state is wire.JobState.DONE, job
            await guest.after(100)
            expected = guest.finish()
        assert layer_files(node, volume_id) == []
        assert (await session(node, vm_id)).crash_class is before
        await node.detach(volume_id, vm_id)
        assert await content(node, volume_id) == expected
        info = await node.get(volume_id)
        assert (info.layers, info.snapshots, info.job) == (1, [], "")


@pytest.mark.parametrize("order", ["012", "210", "102"])
async def test_deletion_in_any_order_without_a_guest(order: str) -> None:
    async with open_node() as node:
        volume_id = await volume(node, "raw")
        states: dict[str, Content] = {}
        written: Content = {}
        for number in range(3):
            await fill(node, volume_id, {number: number + 1, 9: number + 1})
            written |= {number: number + 1, 9: number + 1}
            states[await snapshot(node, [volume_id])] = dict(written)
        await fill(node, volume_id, {9: 99})
        taken = list(states)
        for index in order:
            gone = taken[int(index)]
            assert (await delete(node, volume_id, gone)).state is wire.JobState.DONE
            del states[gone]
            assert await content(node, volume_id) == {0: 1, 1: 2, 2: 3, 9: 99}
            for left, state in states.items():
                copy = (await clone(node, volume_id, left)).volume_id
                assert await content(node, copy) == state
                await node.delete(copy)
        assert layer_files(node, volume_id) == []


@pytest.mark.parametrize("online", [True, False])
async def test_a_volume_that_grew_above_its_snapshots_keeps_its_size_when_they_go(
    online: bool,
) -> None:
    async with open_node() as node:
        volume_id, vm_id = await volume(node), IDS.uid()
        await fill(node, volume_id, {0: 1})
        taken = [await snapshot(node, [volume_id]), await snapshot(node, [volume_id])]
        await node.open(volume_id, size_bytes=2 * SIZE_BYTES, generation=2)
        path = Path((await node.attach(volume_id, vm_id, generation=2)).export_path)
        with VhostDisk(path) as disk:
            assert disk.size_bytes == 2 * SIZE_BYTES
            put(disk, 2 * CHUNKS - 1, 7)
            disk.flush()
        if not online:
            await node.detach(volume_id, vm_id, generation=2)
        for snapshot_id in reversed(taken):
            assert (await delete(node, volume_id, snapshot_id)).state is wire.JobState.DONE
        if online:
            await node.detach(volume_id, vm_id, generation=2)
        info = await node.get(volume_id)
        assert (info.layers, info.size_bytes) == (1, 2 * SIZE_BYTES)
        path = Path((await node.attach(volume_id, vm_id, generation=2)).export_path)
        with VhostDisk(path) as disk:
            assert disk.size_bytes == 2 * SIZE_BYTES
            assert (get(disk, 0), get(disk, 2 * CHUNKS - 1)) == (1, 7)


async def test_the_same_deletion_again_is_the_same_job() -> None:
    async with open_node() as node:
        volume_id = await volume(node)
        request = ref(volume_id, await snapshot(node, [volume_id]))
        begun = await call(node, wire.DELETE_SNAPSHOT, request)
        await ended(node, begun.job_id)
        again = await call(node, wire.DELETE_SNAPSHOT, request)
        assert (again.job_id, again.state) == (begun.job_id, wire.JobState.DONE)
        with pytest.raises(NotFound):
            await call(node, wire.DELETE_SNAPSHOT, ref(volume_id, request.snapshot_id))


async def test_nothing_else_happens_to_a_volume_during_its_job() -> None:
    async with open_node(start=False) as node:
        await node.start("stord.merge.before_qemu_img=1*delay(700)")
        volume_id = await volume(node)
        first, second = await snapshot(node, [volume_id]), await snapshot(node, [volume_id])
        begun = await call(node, wire.DELETE_SNAPSHOT, ref(volume_id, first))
        for refused in (
            snapshot(node, [volume_id]),
            restore(node, volume_id, second),
            delete(node, volume_id, second),
            node.delete(volume_id),
            clone(node, volume_id, second),
        ):
            with pytest.raises(Conflict, match=begun.job_id):
                await refused
        assert (await node.get(volume_id)).job == begun.job_id
        assert (await ended(node, begun.job_id)).state is wire.JobState.DONE


async def test_a_cancelled_deletion_leaves_the_volume_whole_and_can_be_finished() -> None:
    async with open_node(start=False) as node:
        await node.start("stord.merge.after_commit=1*delay(500)")
        volume_id, vm_id = await volume(node), IDS.uid()
        path = await served(node, volume_id, vm_id)
        with Writer(path, seed=2) as guest:
            await guest.after(50)
            snapshot_id = await snapshot(node, [volume_id], vm_id)
            await guest.after(50)
            begun = await call(node, wire.DELETE_SNAPSHOT, ref(volume_id, snapshot_id))
            await cancel(node, begun.job_id)
            assert (await ended(node, begun.job_id)).state is wire.JobState.CANCELLED
            await guest.after(50)
            assert (await snapshots(node, volume_id))[snapshot_id].deleting
            with pytest.raises(FailedPrecondition, match="is being deleted"):
                await clone(node, volume_id, snapshot_id)
            assert (await delete(node, volume_id, snapshot_id)).state is wire.JobState.DONE
            await guest.after(50)
            expected = guest.finish()
        await node.detach(volume_id, vm_id)
        assert await content(node, volume_id) == expected


@pytest.mark.parametrize("place", ["after_commit", "after_complete", "after_pivot"])
async def test_an_error_in_a_merge_leaves_a_guest_that_writes_on_and_can_be_got_over(
    place: str,
) -> None:
    async with open_node(start=False) as node:
        await node.start(f"stord.merge.{place}=1*error(INTERNAL)")
        volume_id, vm_id = await volume(node), IDS.uid()
        path = await served(node, volume_id, vm_id)
        with Writer(path, seed=5) as guest:
            await guest.after(50)
            snapshot_id = await snapshot(node, [volume_id], vm_id)
            await guest.after(50)
            job = await delete(node, volume_id, snapshot_id)
            assert (job.state, job.error and job.error.code) == (wire.JobState.FAILED, "INTERNAL")
            await guest.after(50)
            with pytest.raises(FailedPrecondition, match="merge"):
                await snapshot(node, [volume_id], vm_id)
            assert (await delete(node, volume_id, snapshot_id)).state is wire.JobState.DONE
            expected = guest.finish()
        await node.detach(volume_id, vm_id)
        assert await content(node, volume_id) == expected


async def test_a_stop_of_stord_in_a_merge_holds_no_guest_back_and_the_next_one_goes_on() -> None:
    async with open_node(start=False) as node:
        log = node.config.with_name("hits")
        await node.start("stord.merge.at_pending=1*delay(700)", failpoints_log=log)
        volume_id, vm_id = await volume(node), IDS.uid()
        path = await served(node, volume_id, vm_id)
        with Writer(path, seed=6) as guest:
            await guest.after(50)
            snapshot_id = await snapshot(node, [volume_id], vm_id)
            begun = await call(node, wire.DELETE_SNAPSHOT, ref(volume_id, snapshot_id))
            await wait_until(lambda: "merge.at_pending" in log.read_text())
            assert await node.end(signal.SIGTERM) == 0
            await guest.after(200)
            await node.start()
            assert (await ended(node, begun.job_id)).state is wire.JobState.DONE
            expected = guest.finish()
        await node.detach(volume_id, vm_id)
        assert await content(node, volume_id) == expected


async def test_a_cancelled_deletion_without_a_guest_leaves_the_volume_whole() -> None:
    async with open_node(start=False) as node:
        log = node.config.with_name("hits")
        await node.start("stord.merge.before_qemu_img=1*delay(20000)", failpoints_log=log)
        volume_id = await volume(node)
        await fill(node, volume_id, {0: 1})
        snapshot_id = await snapshot(node, [volume_id])
        await fill(node, volume_id, {0: 2})
        begun = await call(node, wire.DELETE_SNAPSHOT, ref(volume_id, snapshot_id))
        await wait_until(lambda: "merge.before_qemu_img" in log.read_text())
        await cancel(node, begun.job_id)
        assert (await ended(node, begun.job_id)).state is wire.JobState.CANCELLED
        assert await content(node, volume_id) == {0: 2}
        assert (await delete(node, volume_id, snapshot_id)).state is wire.JobState.DONE
        assert await content(node, volume_id) == {0: 2}


async def test_a_merge_goes_on_when_the_vm_stops_in_the_middle() -> None:
    async with open_node(start=False) as node:
        await node.start("stord.merge.after_commit=1*delay(500)")
        volume_id, vm_id = await volume(node), IDS.uid()
        path = await served(node, volume_id, vm_id)
        await anyio.to_thread.run_sync(write_all, path, {0: 1, 1: 1})
        snapshot_id = await snapshot(node, [volume_id], vm_id)
        await anyio.to_thread.run_sync(write_all, path, {1: 2})
        begun = await call(node, wire.DELETE_SNAPSHOT, ref(volume_id, snapshot_id))
        await node.detach(volume_id, vm_id)
        assert (await ended(node, begun.job_id)).state is wire.JobState.DONE
        assert await content(node, volume_id) == {0: 1, 1: 2}
        assert layer_files(node, volume_id) == []


async def test_a_vm_that_starts_does_not_wait_for_a_merge() -> None:
    async with open_node(start=False) as node:
        log = node.config.with_name("hits")
        await node.start("stord.merge.before_qemu_img=1*delay(20000)", failpoints_log=log)
        volume_id, vm_id = await volume(node), IDS.uid()
        await fill(node, volume_id, {0: 1})
        snapshot_id = await snapshot(node, [volume_id])
        await fill(node, volume_id, {1: 2})
        begun = await call(node, wire.DELETE_SNAPSHOT, ref(volume_id, snapshot_id))
        await wait_until(lambda: "merge.before_qemu_img" in log.read_text())
        path = await served(node, volume_id, vm_id)
        with Writer(path, seed=3, expected={0: 1, 1: 2}) as guest:
            assert (await ended(node, begun.job_id)).state is wire.JobState.DONE
            await guest.after(50)
            expected = guest.finish()
        await node.detach(volume_id, vm_id)
        assert await content(node, volume_id) == expected


@pytest.mark.parametrize(
    "place", ["after_commit", "at_pending", "after_pivot", "after_finalize", "after_record"]
)
async def test_a_storage_daemon_that_is_killed_in_a_merge_loses_no_flushed_write(
    place: str,
) -> None:
    async with open_node(start=False) as node:
        await node.start(f"stord.merge.{place}=1*delay(1500)")
        volume_id, vm_id = await volume(node), IDS.uid()
        path = await served(node, volume_id, vm_id)
        await anyio.to_thread.run_sync(write_all, path, {0: 1, 1: 1})
        snapshot_id = await snapshot(node, [volume_id], vm_id)
        await anyio.to_thread.run_sync(write_all, path, {1: 2, 2: 2})
        begun = await call(node, wire.DELETE_SNAPSHOT, ref(volume_id, snapshot_id))
        await anyio.sleep(0.6)  # it stands at the place now
        (worker,) = [each for each in node.workers() if "storage-daemon" in each.executable]
        os.kill(worker.pid, signal.SIGKILL)

        async def lost() -> bool:
            now = await session(node, vm_id)
            return now.backend is not wire.BackendState.SERVING or now.backend_pid != worker.pid

        await wait_until(lost, timeout_s=10)
        await node.recover(vm_id)
        assert (await ended(node, begun.job_id)).state is wire.JobState.DONE
        await node.detach(volume_id, vm_id)
        assert await content(node, volume_id) == {0: 1, 1: 2, 2: 2}
        assert layer_files(node, volume_id) == []


# --- restore
async def test_restore_brings_the_state_back_and_the_guest_writes_on() -> None:
    async with open_node() as node:
        volume_id = await volume(node)
        await fill(node, volume_id, {0: 1})
        snapshot_id = await snapshot(node, [volume_id])
        for number in (2, 3):
            await fill(node, volume_id, {0: number, number: number})
            info = await restore(node, volume_id, snapshot_id)
            assert info.layers == 2
            assert await content(node, volume_id) == {0: 1}
        await fill(node, volume_id, {5: 5})
        assert await content(node, volume_id) == {0: 1, 5: 5}
        assert len(layer_files(node, volume_id)) == 1
        await delete(node, volume_id, snapshot_id)
        assert await content(node, volume_id) == {0: 1, 5: 5}


async def test_restore_is_refused_under_a_vm_and_below_later_snapshots() -> None:
    async with open_node() as node:
        volume_id, vm_id = await volume(node), IDS.uid()
        await fill(node, volume_id, {0: 1})
        first = await snapshot(node, [volume_id])
        await fill(node, volume_id, {0: 2})
        second = await snapshot(node, [volume_id])
        with pytest.raises(FailedPrecondition, match=second):
            await restore(node, volume_id, first)
        await served(node, volume_id, vm_id)
        with pytest.raises(InUse, match=vm_id):
            await restore(node, volume_id, second)
        await node.detach(volume_id, vm_id)
        with pytest.raises(NotFound):
            await restore(node, volume_id, IDS.uid())
        await delete(node, volume_id, second)
        await restore(node, volume_id, first)
        assert await content(node, volume_id) == {0: 1}


# --- clones
@FORMATS
async def test_a_linked_clone_and_its_running_parent_do_not_see_each_other(format: str) -> None:
    async with open_node() as node:
        parent, vm_id = await volume(node, format), IDS.uid()
        path = await served(node, parent, vm_id)
        with Writer(path, seed=4) as guest:
            await guest.after(100)
            snapshot_id = await snapshot(node, [parent], vm_id)
            one = (await clone(node, parent, snapshot_id)).volume_id
            frozen = await content(node, one)
            await fill(node, one, {0: 1000})
            await guest.after(100)
            other = (await clone(node, parent, snapshot_id)).volume_id
            assert await content(node, other) == frozen
            assert await content(node, one) == frozen | {0: 1000}
            nested = await snapshot(node, [one])
            await fill(node, one, {1: 2000})
            third = (await clone(node, one, nested)).volume_id
            assert await content(node, third) == frozen | {0: 1000}
            assert await content(node, one) == frozen | {0: 1000, 1: 2000}
            expected = guest.finish()
        await node.detach(parent, vm_id)
        assert await content(node, parent) == expected
        assert (await node.get(third)).parent == one
        assert set((await snapshots(node, parent))[snapshot_id].used_by) == {one, other}


async def test_what_a_linked_clone_rests_on_stays() -> None:
    async with open_node() as node:
        parent = await volume(node)
        first = await snapshot(node, [parent])
        second = await snapshot(node, [parent])
        linked = (await clone(node, parent, second)).volume_id
        for refused in (
            delete(node, parent, first),  # the clone has both layers open
            delete(node, parent, second),
            node.delete(parent),
        ):
            with pytest.raises(InUse, match=linked):
                await refused
        await node.delete(linked)
        await delete(node, parent, first)
        await delete(node, parent, second)
        await node.delete(parent)
        assert node.volume_names() == []


async def test_a_clone_that_can_not_be_is_refused_and_leaves_nothing() -> None:
    async with open_node() as node:
        parent = await volume(node)
        snapshot_id = await snapshot(node, [parent])
        with pytest.raises(Exception, match="bytes are less"):
            await clone(node, parent, snapshot_id, size_bytes=MIB)
        with pytest.raises(NotFound):
            await clone(node, parent, IDS.uid())
        with pytest.raises(NotFound):
            await clone(node, IDS.uid(), snapshot_id)
        with pytest.raises(Exception, match="raw"):
            await clone(node, parent, snapshot_id, format="raw")
        assert node.volume_names() == [parent]


@FORMATS
async def test_a_full_clone_needs_nothing_when_it_is_there(format: str) -> None:
    async with open_node() as node:
        parent, vm_id = await volume(node, "qcow2"), IDS.uid()
        path = await served(node, parent, vm_id)
        await anyio.to_thread.run_sync(write_all, path, {0: 1, 3: 3})
        snapshot_id = await snapshot(node, [parent], vm_id)
        await anyio.to_thread.run_sync(write_all, path, {0: 2})
        begun = await clone(
            node, parent, snapshot_id, mode="full", format=format, size_bytes=2 * SIZE_BYTES
        )
        if begun.state == "creating":
            assert begun.job
        await opened(node, begun.volume_id)
        await node.detach(parent, vm_id)
        assert (await delete(node, parent, snapshot_id)).state is wire.JobState.DONE
        await node.delete(parent)
        assert await content(node, begun.volume_id) == {0: 1, 3: 3}
        info = await node.get(begun.volume_id)
        assert (info.size_bytes, info.parent) == (2 * SIZE_BYTES, "")


async def test_a_clone_of_ten_gibibytes_takes_no_time() -> None:
    async with open_node() as node:
        parent = IDS.uid()
        await node.open(parent, format="raw", size_bytes=10 << 30)
        await fill(node, parent, {0: 1})
        snapshot_id = await snapshot(node, [parent])
        times = []
        for _ in range(9):
            begun = time.monotonic()
            linked = await clone(node, parent, snapshot_id, size_bytes=10 << 30)
            times.append(time.monotonic() - begun)
        assert min(times) < 0.1, times  # whatever else the machine does
        assert await content(node, linked.volume_id) == {0: 1}


# --- jobs
async def test_jobs_are_listed_and_an_unknown_one_is_not_found() -> None:
    async with open_node() as node:
        volume_id = await volume(node)
        job = await delete(node, volume_id, await snapshot(node, [volume_id]))
        assert (await get_job(node, job.job_id)) == job
        with pytest.raises(NotFound):
            await get_job(node, "op-none")
        with pytest.raises(FailedPrecondition):
            await cancel(node, job.job_id)


# --- load
@FORMATS
async def test_a_merge_comes_to_its_end_under_a_guest_that_never_pauses(format: str) -> None:
    """32 requests are always in flight; none fails, none is lost, none waits for long."""
    async with open_node() as node:
        volume_id = IDS.uid()
        await node.open(volume_id, format=format, size_bytes=256 * MIB)
        async with _busy(node, volume_id) as writer:
            taken = []
            for count in (500, 2000):
                await wait_until(lambda: writer.writes > count, timeout_s=30)  # noqa: B023
                taken.append(await snapshot(node, [volume_id], writer.vm_id))
            for snapshot_id in taken:
                assert (await delete(node, volume_id, snapshot_id)).state is wire.JobState.DONE
        assert writer.longest_gap_s < 3


@FORMATS
async def test_limits_hold_while_and_after_layers_are_merged(format: str) -> None:
    """No burst while the merge looks for its end, and no pause that makes up for one."""
    iops, seconds = 400, 3.0
    async with open_node() as node:
        volume_id = IDS.uid()
        await _open_limited(node, volume_id, format, iops)
        async with _busy(node, volume_id) as writer:
            began, before = time.monotonic(), writer.writes
            for _ in range(3):
                snapshot_id = await snapshot(node, [volume_id], writer.vm_id)
                assert (await delete(node, volume_id, snapshot_id)).state is wire.JobState.DONE
            passed = time.monotonic() - began
            # What is in flight when a graph is changed is let through at once.
            assert writer.writes - before < iops * passed + 3 * 10 * writer.disk.depth
            before = writer.writes
            await anyio.sleep(seconds)
            assert 0.7 * iops * seconds < writer.writes - before < 1.3 * iops * seconds


async def _open_limited(node: Node, volume_id: str, format: str, iops: int) -> None:
    backend = wire.VolumeBackend(
        class_name=wire.VolumeClass.FILE,
        format=wire.VolumeFormat(format),
        size_bytes=256 * MIB,
        limits=wire.Limits(iops_total=wire.Rate(limit=iops)),
    )
    request = wire.OpenVolume(meta=meta(), volume_id=volume_id, backend=backend)
    await call(node, wire.OPEN_VOLUME, request)


class BusyWriter(StampedWriter):
    """A writer of a VM."""

    vm_id: str


@asynccontextmanager
async def _busy(node: Node, volume_id: str) -> AsyncIterator[BusyWriter]:
    """Attach a volume and keep 32 requests in flight; at the end every one must have been done."""
    vm_id = IDS.uid()
    path = Path((await node.attach(volume_id, vm_id)).export_path)
    stop, begun = threading.Event(), list[BusyWriter]()

    def guest() -> None:
        with DeepDisk(path, 32) as disk:
            writer = BusyWriter(disk, blocks=6_000)
            writer.vm_id = vm_id
            begun.append(writer)
            writer.run(stop.is_set)
            writer.verify()

    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, guest)
        try:
            await wait_until(lambda: bool(begun) and begun[0].writes > 0, timeout_s=30)
            yield begun[0]
        finally:
            stop.set()
    assert (begun[0].errors, begun[0].hung, begun[0].bad) == (0, 0, 0)
    assert begun[0].disk.connections == 1
    await node.detach(volume_id, vm_id)


# --- a real guest
WRITER = """
cat > /tmp/write <<'END'
i=0
while [ ! -e /tmp/stop ]; do
  i=$((i + 1)); at=$((i % 64 * 16))
  printf '%016d' $i | dd of=/dev/vdc bs=4096 seek=$at conv=sync,notrunc,fsync 2> /dev/null \\
    || echo write $i >> /tmp/bad
  got=$(dd if=/dev/vdc bs=4096 skip=$at count=1 iflag=direct 2>/dev/null | head -c 16)
  [ "$got" = "$(printf '%016d' $i)" ] || echo read $i: $got >> /tmp/bad
  echo $i > /tmp/count
done
END
rm -f /tmp/bad; echo 0 > /tmp/count; (sh /tmp/write > /dev/null 2>&1 &)
"""


@pytest.mark.slow
async def test_a_real_guest_writes_and_verifies_through_snapshots_and_merges(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    await ensure_builtin("tiny", CACHE, ImageStore(tmp_path_factory.mktemp("store")), print)
    image = load_tiny(CACHE / f"tiny-{builtin.codename()}")
    assert image is not None
    async with open_node() as node:
        volume_id, vm_id = await volume(node), IDS.uid()
        path = await served(node, volume_id, vm_id)
        memory = "memory-backend-memfd,id=mem,size=256M,share=on"
        disk = ["-chardev", f"socket,id=vu,path={path}"]
        disk += ["-device", "vhost-user-blk-pci,chardev=vu,num-queues=1,addr=0x10"]  # /dev/vdc
        extra = ["-object", memory, "-machine", "memory-backend=mem", *disk]
        async with boot(image, tmp_path, seeded=True, extra=extra) as vm:
            await wait_until(lambda: _answers(vm), timeout_s=BOOT_TIMEOUT_S)
            assert await vm.ssh(WRITER) == (0, "")
            taken = []
            for _ in range(3):
                taken.append(await snapshot(node, [volume_id], vm_id))
                await _wrote(vm, 5)
            for snapshot_id in (taken[1], taken[0], taken[2]):
                assert (await delete(node, volume_id, snapshot_id)).state is wire.JobState.DONE
                await _wrote(vm, 5)
            code, text = await vm.ssh("touch /tmp/stop; sleep 1; cat /tmp/bad; cat /tmp/count")
            assert code in (0, 1)
            assert "write" not in text and "read" not in text, text
            code, text = await vm.ssh("dmesg | grep -i 'I/O error'")
            assert (code, text) == (1, "")
        await node.detach(volume_id, vm_id)
        assert (await node.get(volume_id)).layers == 1


async def _answers(vm: TinyVm) -> bool:
    return (await vm.ssh("true"))[0] == 0


async def _wrote(vm: TinyVm, count: int) -> None:
    """Wait until the guest has made that many further rounds."""

    async def rounds() -> int:
        return int((await vm.ssh("cat /tmp/count"))[1] or 0)

    goal = await rounds() + count

    async def reached() -> bool:
        return await rounds() >= goal

    await wait_until(reached, timeout_s=60)
