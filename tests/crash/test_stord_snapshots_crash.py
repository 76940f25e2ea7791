"""stord is killed at every step of snapshots, merges, restores and clones; the next one converges.

The first scenario has a guest that writes and verifies all the time: its storage daemon outlives
stord, so it must see no error. In the second everything dies at once, as a host would. Every call
that was cut short is made again with the same ids. Content is compared after every step.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import pytest

from chv.common.errors import OutcomeUnknown, Unavailable
from chv.common.process import FoundWorker, wait_gone
from chv.common.wire import stord as wire
from tests.helpers import wait_until
from tests.integration import vhost_client
from tests.integration.snapshot_rig import (
    SIZE_BYTES,
    Content,
    Writer,
    attached,
    call,
    clone,
    content,
    ended,
    layer_files,
    opened,
    read_all,
    ref,
    restore,
    snapshot,
    snapshots,
    write_all,
)
from tests.integration.stord_helpers import IDS, Node, needs_qsd, open_node

pytestmark = [pytest.mark.root, needs_qsd]
LONG = bool(os.environ.get("CHV_LONG"))
IN_CI = 4
T = TypeVar("T")

ONLINE = (
    "stord.merge.after_close",
    "stord.merge.after_commit",
    "stord.merge.after_complete",
    "stord.merge.after_finalize",
    "stord.merge.after_hold",
    "stord.merge.after_intent",
    "stord.merge.after_pivot",
    "stord.merge.after_record",
    "stord.merge.after_remove",
    "stord.merge.at_pending",
    "stord.job.after_end",
    "stord.job.after_record",
    "stord.job.before_end",
    "stord.overlay.after_create",
    "stord.snapshot.after_blockdev",
    "stord.snapshot.after_intent",
    "stord.snapshot.after_overlays",
    "stord.snapshot.after_record",
    "stord.snapshot.after_transaction",
)
OFFLINE = (
    "stord.copy.after_fill",
    "stord.fill.after_copy",
    "stord.fill.after_create",
    "stord.merge.after_qemu_img",
    "stord.merge.before_qemu_img",
    "stord.restore.after_overlay",
    "stord.restore.after_record",
)


def some(points: tuple[str, ...]) -> tuple[str, ...]:
    """All of them in a long run, a sample that differs from run to run otherwise."""
    if LONG:
        return points
    # Workers of one run must agree on what there is to run: its id is their seed.
    chosen = os.environ.get("CHV_SEED") or os.environ.get("PYTEST_XDIST_TESTRUNUID")
    seed = chosen or str(random.randrange(1 << 30))
    return tuple(sorted(random.Random(seed).sample(points, min(IN_CI, len(points)))))


@pytest.fixture(autouse=True)
def patient_guest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest's write may stand still until the next stord has come."""
    monkeypatch.setattr(vhost_client, "TIMEOUT_S", 30.0)


class Scenario:
    """The life of two volumes with snapshots; each step can be made again."""

    def __init__(self, node: Node, *, with_host: bool = False) -> None:
        self.node = node
        self.vm, self.one, self.other = IDS.uid(), IDS.uid(), IDS.uid()
        self.kills = 0
        self.with_host = with_host

    async def step(self, make: Callable[[], Awaitable[T]]) -> T:
        """Make a call; where it kills stord, start the next one and make it again."""
        try:
            return await make()
        except (OutcomeUnknown, Unavailable):
            await self.revive()
        return await make()

    async def revive(self) -> None:
        assert await self.node.ended() == -signal.SIGKILL
        self.kills += 1
        if self.with_host:
            for worker in daemons(self.node):
                os.kill(worker.pid, signal.SIGKILL)
                await wait_gone(worker.record())
        await self.node.start()
        if self.with_host and any(each.vm_id == self.vm for each in await self.node.sessions()):
            await self.node.recover(self.vm)

    async def snapshot(self, *volume_ids: str, vm: bool = False) -> str:
        snapshot_id, vm_id = IDS.uid(), self.vm if vm else ""
        await self.step(lambda: snapshot(self.node, list(volume_ids), vm_id, snapshot_id))
        for volume_id in volume_ids:
            found = await snapshots(self.node, volume_id)
            assert snapshot_id in found
        return snapshot_id

    async def delete(self, volume_id: str, snapshot_id: str) -> None:
        request = ref(volume_id, snapshot_id)
        begun = await self.step(lambda: self._begin(request))
        if begun is not None:
            job = await self.step(lambda: ended(self.node, begun.job_id))
            assert job.state is wire.JobState.DONE, job
        assert snapshot_id not in await snapshots(self.node, volume_id)

    async def _begin(self, request: wire.SnapshotRef) -> wire.JobInfo | None:
        return await call(self.node, wire.DELETE_SNAPSHOT, request)

    async def content(self, volume_id: str) -> Content:
        return await self.step(lambda: content(self.node, volume_id))

    async def state(self, volume_id: str, snapshot_id: str) -> Content:
        """Return the content of a snapshot, read through a clone."""
        copy = (await clone(self.node, volume_id, snapshot_id)).volume_id
        try:
            return await content(self.node, copy)
        finally:
            await self.node.delete(copy)

    async def online(self) -> Content:
        """Return what the first volume must hold."""
        node = self.node
        await node.open(self.one, size_bytes=SIZE_BYTES)
        await node.open(self.other, format="qcow2", size_bytes=SIZE_BYTES)
        path = Path((await node.attach(self.one, self.vm)).export_path)
        await node.attach(self.other, self.vm)
        with Writer(path, seed=7) as guest:
            await guest.after(30)
            first = await self.snapshot(self.one, self.other, vm=True)
            await guest.after(30)
            second = await self.snapshot(self.one, vm=True)
            await guest.after(30)
            await self.delete(self.one, first)
            await guest.after(30)
            await self.delete(self.one, second)
            await guest.after(30)
            expected = guest.finish()
        await self.delete(self.other, first)
        await node.detach(self.one, self.vm)
        await node.detach(self.other, self.vm)
        assert await content(node, self.one) == expected
        return expected

    async def offline(self, before: Content) -> None:
        node, one = self.node, self.one
        third = await self.snapshot(one)
        await self.fill(one, {0: 70})
        fourth = await self.snapshot(one)
        await self.fill(one, {1: 80})
        full = IDS.uid()
        await self.step(lambda: clone(node, one, fourth, mode="full", volume_id=full))
        await self.step(lambda: opened(node, full))
        assert await self.content(full) == before | {0: 70}
        await self.delete(one, third)
        assert await self.content(one) == before | {0: 70, 1: 80}
        assert await self.state(one, fourth) == before | {0: 70}
        await self.step(lambda: restore(node, one, fourth))
        assert await self.content(one) == before | {0: 70}
        await self.delete(one, fourth)
        assert await self.content(one) == before | {0: 70}
        assert layer_files(node, one) == []
        for volume_id in (one, self.other, full):
            await node.delete(volume_id)

    async def fill(self, volume_id: str, chunks: Content) -> None:
        async with attached(self.node, volume_id) as path:
            await anyio.to_thread.run_sync(write_all, path, chunks)


def daemons(node: Node) -> list[FoundWorker]:
    return [each for each in node.workers() if each.executable.endswith("qemu-storage-daemon")]


async def leaves_nothing(node: Node) -> None:
    assert node.workers() == []
    assert node.run_files() == []
    assert node.volume_names() == []
    assert await node.census() == []
    assert list((node.layout.state / "grants").glob("*")) == []


@pytest.mark.parametrize("name", some(ONLINE))
async def test_a_guest_sees_nothing_of_a_kill_of_stord_in_a_snapshot_or_merge(name: str) -> None:
    async with open_node(start=False) as node:
        await node.start(failpoints=f"{name}=1*kill")
        scenario = Scenario(node)
        await scenario.online()
        assert scenario.kills == 1
        for volume_id in (scenario.one, scenario.other):
            assert layer_files(node, volume_id) == []
            await node.delete(volume_id)
        await leaves_nothing(node)


@pytest.mark.parametrize("name", some(OFFLINE))
async def test_a_kill_in_work_on_volumes_that_nobody_has_converges(name: str) -> None:
    async with open_node(start=False) as node:
        await node.start(failpoints=f"{name}=1*kill")
        scenario = Scenario(node)
        expected = await scenario.online()
        await scenario.offline(expected)
        assert scenario.kills == 1
        await leaves_nothing(node)


@pytest.mark.parametrize("name", some(tuple(each for each in ONLINE if "job" not in each)))
async def test_when_everything_dies_nothing_that_was_flushed_is_lost(name: str) -> None:
    async with open_node(start=False) as node:
        await node.start(failpoints=f"{name}=1*kill")
        scenario = Scenario(node, with_host=True)
        one, vm = scenario.one, scenario.vm
        await node.open(one, size_bytes=SIZE_BYTES)
        info = await node.attach(one, vm)
        await write(info, {0: 1, 1: 1})
        first = await scenario.snapshot(one, vm=True)
        await write(await node.attach(one, vm), {1: 2, 2: 2})
        second = await scenario.snapshot(one, vm=True)
        await write(await node.attach(one, vm), {2: 3, 3: 3})
        assert await scenario.state(one, first) == {0: 1, 1: 1}
        assert await scenario.state(one, second) == {0: 1, 1: 2, 2: 2}
        await scenario.delete(one, first)
        assert await scenario.state(one, second) == {0: 1, 1: 2, 2: 2}
        await scenario.delete(one, second)
        path = Path((await node.attach(one, vm)).export_path)
        assert await anyio.to_thread.run_sync(read_all, path) == {0: 1, 1: 2, 2: 3, 3: 3}
        await write(await node.attach(one, vm), {4: 4})
        await node.detach(one, vm)
        assert await content(node, one) == {0: 1, 1: 2, 2: 3, 3: 3, 4: 4}
        assert layer_files(node, one) == []
        assert scenario.kills == 1
        await node.delete(one)
        await leaves_nothing(node)


async def write(info: wire.AttachmentInfo, chunks: Content) -> None:
    await anyio.to_thread.run_sync(write_all, Path(info.export_path), chunks)


@pytest.mark.parametrize("name", ["stord.merge.after_abandon", "stord.merge.after_cancel"])
async def test_a_kill_in_a_cancel_leaves_a_whole_volume(name: str) -> None:
    async with open_node(start=False) as node:
        log = node.config.with_name("hits")
        points = f"stord.merge.after_commit=1*delay(400);{name}=1*kill"
        await node.start(failpoints=points, failpoints_log=log)
        scenario = Scenario(node)
        one, vm = scenario.one, scenario.vm
        await node.open(one, size_bytes=SIZE_BYTES)
        path = Path((await node.attach(one, vm)).export_path)
        with Writer(path, seed=8) as guest:
            await guest.after(30)
            first = await scenario.snapshot(one, vm=True)
            await guest.after(30)
            begun = await call(node, wire.DELETE_SNAPSHOT, ref(one, first))
            await wait_until(lambda: "merge.after_commit" in log.read_text())
            await call(node, wire.CANCEL_JOB, wire.JobRef(job_id=begun.job_id))
            job = await scenario.step(lambda: ended(node, begun.job_id))
            assert job.state is wire.JobState.CANCELLED
            await guest.after(30)
            expected = guest.finish()
        assert scenario.kills == 1
        await node.detach(one, vm)
        assert await content(node, one) == expected
        await scenario.delete(one, first)
        assert await content(node, one) == expected


async def test_every_failpoint_that_the_scenarios_pass_is_in_a_list() -> None:
    async with open_node(start=False) as node:
        log = node.config.with_name("hits")
        await node.start(failpoints="stord.never=off", failpoints_log=log)
        scenario = Scenario(node)
        await scenario.offline(await scenario.online())
        areas = ("copy", "fill", "job", "merge", "overlay", "restore", "snapshot")
        names = {name for name in log.read_text().split() if name.split(".")[1] in areas}
    assert names == {*ONLINE, *OFFLINE}
