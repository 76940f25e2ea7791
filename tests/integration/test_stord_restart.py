"""A storage daemon is replaced under a guest that goes on writing, or that is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from chv.common.errors import FailedPrecondition, NotFound, OutcomeUnknown, Unavailable
from chv.common.wire import stord as wire
from tests.integration.snapshot_rig import snapshot
from tests.integration.stord_helpers import IDS, Node, needs_qsd, open_node, qsd_version
from tests.integration.test_stord_proxy import AUTO, progress, served, session, writing
from tests.integration.vhost_client import VhostDisk
from tests.sampling import LONG, sampled

pytestmark = [pytest.mark.root, needs_qsd]
RESTARTS = 25 if LONG else 5
FAILPOINTS = (
    "stord.planned.after_intent",
    "stord.planned.after_stop",
    "stord.planned.after_record",
    "stord.restart.after_grant",
    "stord.restart.before_spawn",
    "stord.restart.after_spawn",
    "stord.restart.after_worker_record",
    "stord.restart.after_prime",
    "stord.restart.after_rename",
    "stord.planned.before_end",
)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_node(storage=AUTO) as node:
        yield node


async def test_a_writer_at_full_depth_goes_on_through_planned_restarts(node: Node) -> None:
    vm = IDS.uid()
    info = await served(node, vm)
    pids = {info.backend_pid}
    async with writing(info.export_path) as writer:
        for _ in range(RESTARTS):
            after = await node.restart(vm)
            assert after.backend is wire.BackendState.SERVING
            assert after.version == qsd_version()
            assert after.backend_pid not in pids
            assert str(after.backend_pid) in after.last_restart
            assert "1 disks are connected again" in after.last_restart
            pids.add(after.backend_pid)
            await progress(writer)
    row = await session(node, vm)
    assert (row.losses, row.last_loss) == (0, "")
    assert row.attachments[0].proxy_pid == info.proxy_pid
    await node.detach(info.volume_id, vm)
    assert node.workers() == []


async def test_one_operation_restarts_once(node: Node) -> None:
    vm, operation = IDS.uid(), IDS.operation()
    info = await served(node, vm)
    first = await node.restart(vm, operation)
    assert first.backend_pid != info.backend_pid
    assert await node.restart(vm, operation) == first
    assert (await node.restart(vm)).backend_pid != first.backend_pid


async def test_it_is_refused_where_the_guest_would_lose_what_it_was_told_is_written(
    node: Node,
) -> None:
    vm = IDS.uid()
    info = await served(node, vm, "qcow2")
    with VhostDisk(Path(info.export_path)) as disk:
        with pytest.raises(FailedPrecondition, match=f"{info.volume_id}.*qcow2") as refusal:
            await node.restart(vm)
        assert "stop and start" in refusal.value.hint
        assert disk.write(0, b"d" * 512) == 0
    assert (await session(node, vm)).backend_pid == info.backend_pid


async def test_it_is_refused_after_a_snapshot_and_without_a_proxy(node: Node) -> None:
    vm = IDS.uid()
    info = await served(node, vm)
    await snapshot(node, [info.volume_id], vm)
    with pytest.raises(FailedPrecondition, match="has snapshots"):
        await node.restart(vm)
    async with open_node(storage='proxy = "off"') as other:
        await served(other, vm)
        with pytest.raises(FailedPrecondition, match="no in-flight proxy"):
            await other.restart(vm)


async def test_a_vm_without_disks_has_nothing_to_restart(node: Node) -> None:
    with pytest.raises(NotFound, match="no storage daemon"):
        await node.restart(IDS.uid())


async def test_a_lost_storage_daemon_is_not_restarted_but_recovered() -> None:
    async with open_node() as node:
        vm = IDS.uid()
        info = await served(node, vm, "qcow2")
        os.kill(info.backend_pid, signal.SIGKILL)
        with pytest.raises((FailedPrecondition, Unavailable)):
            await node.restart(vm)


async def test_a_vmm_that_does_not_come_back_is_given_up_to_be_reset(node: Node) -> None:
    vm = IDS.uid()
    info = await served(node, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.write(0, b"d" * 512) == 0
        with pytest.raises(FailedPrecondition, match="did not come back"):
            await node.restart(vm)
    row = await session(node, vm)
    assert row.backend is wire.BackendState.LOST
    assert "did not come back" in row.last_loss
    assert (await node.recover(vm)).backend is wire.BackendState.SERVING


@pytest.mark.parametrize("name", sampled(FAILPOINTS, 4, seed=19))
async def test_a_kill_of_stord_in_the_middle_is_no_loss_and_the_repeat_finishes_it(
    name: str,
) -> None:
    async with open_node(start=False, storage=AUTO) as node:
        await node.start(failpoints=f"{name}=1*kill")
        vm, operation = IDS.uid(), IDS.operation()
        info = await served(node, vm)
        async with writing(info.export_path) as writer:
            with pytest.raises((OutcomeUnknown, Unavailable)):
                await node.restart(vm, operation)
            assert await node.ended() == -signal.SIGKILL
            await node.start()
            await progress(writer)
            after = await node.restart(vm, operation)
            assert after.backend_pid != info.backend_pid
            await progress(writer)
        assert after.attachments[0].crash_class is wire.CrashClass.KEEP_VM
        daemons = [found for found in node.workers() if ":qsd:" in found.worker_id]
        assert [found.pid for found in daemons] == [after.backend_pid]
        await node.detach(info.volume_id, vm)
        assert node.workers() == []
