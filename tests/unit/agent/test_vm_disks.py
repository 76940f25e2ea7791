"""Disks of a running VM on the simulated machine: plugged, unplugged, grown, frozen, held."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from chv.agent.ports import VmHandle
from chv.agent.records import PutWorker
from chv.agent.vm import freeze, plugging
from chv.agent.vm.clients import CLIENTS, connected_client
from chv.agent.vm.desired import handle_of
from chv.common.errors import Conflict, DeadlineExceeded, FailedPrecondition, Unavailable
from chv.common.wire import agent as api
from chv.common.wire.agent import OperationState
from chv.common.wire.stord import StorageEvent, VmmClient
from chv.vmm.driver import VmmState
from tests.sim.bench import Bench, bare, everything, image, open_bench, vm, volume
from tests.sim.virtual import simulated
from tests.sim.vmms import SimProcess

FIRST = {"name": "data", "volume": "data"}
SECOND = {"name": "more", "volume": "more"}


def live(bench: Bench, name: str = "web") -> SimProcess:
    process = bench.process(name)
    assert process is not None
    return process


def handle(bench: Bench) -> VmHandle:
    stored = bench.engine._context.stored(live(bench).vm_uid)
    assert stored is not None
    return handle_of(stored)


async def applied(bench: Bench, *objects: dict[str, Any]) -> api.Operation:
    reply = await bench.apply(*objects)
    return await bench.final(reply.results[-1].operation_id)


async def started(bench: Bench) -> SimProcess:
    assert (await applied(bench, *everything())).state is OperationState.SUCCEEDED
    await applied(bench, volume("more"))
    return live(bench)


def names(bench: Bench, process: SimProcess) -> dict[str, str]:
    uids = {bench.get("Volume", name).metadata.uid: name for name in ("data", "more")}
    return {disk_id: uids[uid] for disk_id, uid in process.disks.items()}


async def until(probe: Any) -> None:
    with anyio.fail_after(120):
        while not probe():  # noqa: ASYNC110
            await anyio.sleep(0.5)


@simulated
async def test_a_disk_comes_and_goes_under_a_running_vm() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        done = await applied(bench, vm(disks=[FIRST, SECOND]))
        assert (done.state, done.message) == (OperationState.SUCCEEDED, "running")
        assert names(bench, process) == {"disk-data": "data", "disk-more": "more"}
        assert bench.get("VirtualMachine", "web").status.disks[1].export
        await applied(bench, vm(disks=[FIRST]))
        assert names(bench, process) == {"disk-data": "data"}
        assert bench.get("Volume", "more").status.attached_to == ""
        assert live(bench) is process
        assert process.resets == 0


@simulated
async def test_a_volume_goes_from_one_running_vm_to_another() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        await applied(bench, bare("other", disks=[SECOND]))
        await bench.apply(vm(disks=[FIRST, SECOND]), bare("other"))
        await until(lambda: len(process.disks) == 2)
        assert live(bench, "other").disks == {}


@simulated
async def test_another_volume_under_the_same_name_is_another_disk() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        await applied(bench, vm(disks=[{"name": "data", "volume": "more"}]))
        assert names(bench, process) == {"disk-data": "more"}


@simulated
async def test_a_guest_that_clings_to_its_disk_keeps_it_attached_until_it_lets_go() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        process.clings = 3
        reply = await bench.apply(vm(disks=[]))
        await until(lambda: process.clings < 3)
        assert bench.condition("VolumesReady") == ("False", "Unplugging")
        assert bench.get("Volume", "data").status.attached_to == "default/web"
        done = await bench.final(reply.results[0].operation_id)
        assert done.state is OperationState.SUCCEEDED
        assert bench.get("Volume", "data").status.attached_to == ""


@simulated
async def test_what_a_running_vm_has_booted_or_how_it_reads_a_disk_does_not_change() -> None:
    async with open_bench() as bench:
        await started(bench)
        with pytest.raises(FailedPrecondition, match="readOnly"):
            await bench.apply(vm(disks=[{**FIRST, "readOnly": True}]))
        await applied(bench, volume("root"), bare("disk", boot={}, disks=[ROOT]))
        with pytest.raises(FailedPrecondition) as caught:
            await bench.apply(bare("disk", boot={}, disks=[SECOND, ROOT]))
        assert caught.value.field == "spec.disks[0]"
        done = await applied(bench, bare("disk", boot={}, disks=[ROOT, SECOND]))
        assert done.state is OperationState.SUCCEEDED


ROOT = {"name": "root", "volume": "root"}


@simulated
async def test_a_read_only_volume_is_plugged_into_several_running_vms() -> None:
    async with open_bench() as bench:
        await applied(bench, image(), bare(), bare("other"))
        base = {"path": "/images/base", "sha256": "d" * 64, "format": "raw"}
        source = {"image": "base"}
        await applied(
            bench,
            image("base", disk=base),
            volume("shared", accessMode="ReadOnlyMany", source=source),
        )
        disk = {"name": "s", "volume": "shared", "readOnly": True}
        for name in ("web", "other"):
            assert (await applied(bench, bare(name, disks=[disk]))).message == "running"
        readers = {"default/web", "default/other"}
        await until(lambda: set(bench.get("Volume", "shared").status.readers) == readers)


@simulated
async def test_a_volume_grows_under_its_vm_when_that_is_asked_for_and_not_before() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        uid = bench.get("Volume", "data").metadata.uid
        await applied(bench, volume(size="128Mi"))
        await anyio.sleep(60)
        sim = bench.machine.host.stord.volumes[uid]
        assert (sim.size_bytes, sim.attachments) == (64 << 20, 1)
        request = api.ActOnVolume(verb=api.VolumeVerb.GROW_NOW, name="data", requester="test")
        reply = await bench.engine.act_on_volume(request)
        done = await bench.final(reply.operation.id)
        assert done.state is OperationState.SUCCEEDED
        assert (sim.size_bytes, sim.attachments) == (128 << 20, 2)
        await until(lambda: process.disks == {"disk-data": uid})
        assert live(bench) is process


# --- loss, restart, space


@simulated
async def test_a_storage_daemon_that_comes_back_by_itself_costs_the_vm_nothing() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        stord = bench.machine.host.stord
        session = stord.sessions[process.vm_uid]
        session.losses, session.restarting_until = 1, stord.now() + 5
        bench.engine.notify_storage_event(
            StorageEvent(kind="backend_restarted", vm_id=process.vm_uid)
        )
        await until(lambda: bench.condition("StorageLost") == ("False", "Restarting"))
        assert bench.condition("VolumesReady") == ("False", "BackendRestarting")
        await until(lambda: bench.condition("StorageLost") == ("False", "Kept"))
        assert process.resets == 0
        assert process.state is VmmState.RUNNING


@simulated
async def test_every_loss_is_told_with_what_was_done_also_by_a_new_agent() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        for _ in range(2):
            bench.machine.host.lose_storage(process.vm_uid)
            resets = process.resets
            await until(lambda resets=resets: process.resets == resets + 2)
        await until(lambda: bench.condition("StorageLost") == ("False", "Recovered"))
    machine = bench.machine
    machine.host.exits = type(machine.host.exits)()
    async with open_bench(machine) as bench:
        await anyio.sleep(60)
        conditions = bench.get("VirtualMachine", "web").status.conditions
        lost = next(c for c in conditions if c.type == "StorageLost")
        assert lost.reason == "Recovered"
        assert "lost under the VM: 2" in lost.message
        assert "came back: 2" in lost.message


@simulated
async def test_a_vm_without_space_stands_over_the_end_of_its_agent_and_can_be_stopped() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        uid = bench.get("Volume", "data").metadata.uid
        bench.machine.host.stord.volumes[uid].full = True
        bench.engine.notify_storage_event(StorageEvent(kind="space", volume_id=uid))
        await until(lambda: bench.condition("Paused") == ("True", "StorageSpace"))
        assert process.state is VmmState.PAUSED
    machine = bench.machine
    machine.host.exits = type(machine.host.exits)()
    async with open_bench(machine) as bench:
        await anyio.sleep(60)
        assert process.state is VmmState.PAUSED
        machine.host.stord.volumes[uid].full = False
        bench.engine.notify_storage_event(StorageEvent(kind="space", volume_id=uid))
        await until(lambda: bench.condition("Paused") == ("False", "VcpusRun"))
        machine.host.stord.volumes[uid].full = True
        await until(lambda: bench.condition("Paused") == ("True", "StorageSpace"))
        done = await bench.final((await bench.act("stop")).id)
        assert done.state is OperationState.SUCCEEDED
        assert bench.process() is None


@simulated
async def test_a_volume_that_only_reports_stops_nobody() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        await applied(bench, volume(spacePolicy="Report"))
        uid = bench.get("Volume", "data").metadata.uid
        bench.machine.host.stord.volumes[uid].full = True
        await anyio.sleep(60)
        assert process.state is VmmState.RUNNING


# --- freeze


@simulated
async def test_a_guest_is_frozen_for_as_long_as_somebody_acts_and_not_longer() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        context = bench.engine._context
        async with freeze.frozen(context, process.vm_uid, 10):
            assert process.frozen
            with pytest.raises(Conflict):
                async with freeze.frozen(context, process.vm_uid, 10):
                    pass
            await anyio.sleep(5)  # a pass of the VM's worker does not thaw it
            assert process.frozen
        await until(lambda: not process.frozen)
        with pytest.raises(DeadlineExceeded):
            async with freeze.frozen(context, process.vm_uid, 10):
                await anyio.sleep(11)
        await until(lambda: not process.frozen)
        assert not bench.engine._ledger.tables.workers[process.vm_uid].frozen


@simulated
async def test_a_guest_that_is_not_there_is_not_frozen() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        context = bench.engine._context
        process.state = VmmState.PAUSED
        with pytest.raises((FailedPrecondition, Unavailable)):
            async with freeze.frozen(context, process.vm_uid, 10):
                raise AssertionError("not frozen")
        await bench.final((await bench.act("stop", force=True)).id)
        with pytest.raises(FailedPrecondition):
            async with freeze.frozen(context, process.vm_uid, 10):
                raise AssertionError("not frozen")


@simulated
async def test_a_guest_that_an_agent_left_frozen_is_thawed_by_the_next() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        await freeze._mark(bench.engine._context, process.vm_uid, frozen=True)
        process.frozen = True
    machine = bench.machine
    machine.host.exits = type(machine.host.exits)()
    async with open_bench(machine) as bench:
        await until(lambda: not process.frozen)
        await until(lambda: not machine.store.tables.workers[process.vm_uid].frozen)


# --- who is connected


@simulated
async def test_a_client_is_named_only_where_it_is_seen_to_be_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_bench() as bench:
        process = await started(bench)
        context = bench.engine._context
        data, more = (bench.get("Volume", name).metadata.uid for name in ("data", "more"))
        assert await connected_client(context, data) is VmmClient.NONE  # the fake takes up no size
        monkeypatch.setitem(CLIENTS, "fake", VmmClient.QEMU)
        assert await connected_client(context, data) is VmmClient.QEMU
        assert await connected_client(context, more) is VmmClient.NONE
        bench.machine.host.stord.sessions[process.vm_uid].restarting_until = 1e9
        assert await connected_client(context, data) is VmmClient.NONE
        bench.machine.host.stord.sessions[process.vm_uid].restarting_until = 0
        process.disks.clear()
        assert await connected_client(context, data) is VmmClient.NONE


@simulated
async def test_a_disk_that_is_struck_out_leaves_the_mark_of_a_freeze_that_began_meanwhile() -> None:
    async with open_bench() as bench:
        process, context = await started(bench), bench.engine._context
        context.freezing.add(process.vm_uid)
        async with anyio.create_task_group() as group, context.ledger.writing() as tables:
            group.start_soon(plugging.unplug, context, handle(bench), "disk-data")
            await until(lambda: not process.disks)
            await anyio.lowlevel.checkpoint()
            row = msgspec.structs.replace(tables.workers[process.vm_uid], frozen=True)
            await context.ledger.commit_held(PutWorker(row=row))
        row = context.ledger.tables.workers[process.vm_uid]
        assert row.frozen
        assert "disk-data" not in [disk.id for disk in row.config.disks]
