"""The storage daemon of a VM: what it starts with, and how it is replaced under the guest."""

from __future__ import annotations

import anyio
import pytest

from chv.agent.vm.disks import raise_failures
from chv.common.errors import FailedPrecondition, InUse
from chv.common.wire import stord
from chv.common.wire.agent import OperationState
from tests.sim.bench import Bench, bare, everything, image, open_bench, vm, volume
from tests.sim.stord import SimSession
from tests.sim.virtual import simulated

DISKS = [{"name": "data", "volume": "data"}, {"name": "more", "volume": "more"}]


def session(bench: Bench) -> SimSession:
    (found,) = bench.machine.host.stord.sessions.values()
    return found


async def started(bench: Bench) -> None:
    reply = await bench.apply(*everything())
    operation = await bench.final(reply.results[-1].operation_id)
    assert operation.state is OperationState.SUCCEEDED, operation


@simulated
async def test_all_disks_of_a_start_are_attached_in_one_go() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything()[1:], volume("more"))
        reply = await bench.apply(vm(disks=DISKS))
        operation = await bench.final(reply.results[-1].operation_id)
        names = [step.name.split()[0] for step in operation.steps]
        assert names.count("attach_volumes") == 1
        assert "attach_volume" not in names
        assert len(session(bench).attachments) == 2
        exports = [disk.export for disk in bench.get("VirtualMachine", "web").status.disks]
        assert len(set(exports)) == 2


def failed(volume_id: str, error: Exception) -> stord.AttachOutcome:
    assert isinstance(error, InUse | FailedPrecondition)
    return stord.AttachOutcome(volume_id=volume_id, error=error.data())


def test_the_error_of_one_volume_names_it_and_those_of_several_are_all_told() -> None:
    fine = stord.AttachOutcome(volume_id="a")
    raise_failures([fine])
    with pytest.raises(InUse, match="VM x has it") as caught:
        raise_failures([fine, failed("b", InUse("VM x has it"))])
    assert caught.value.resource == "b"
    with pytest.raises(InUse, match="volume b: taken; volume c: not open") as caught:
        raise_failures([failed("b", InUse("taken")), failed("c", FailedPrecondition("not open"))])


@simulated
async def test_the_storage_daemon_is_replaced_once_and_the_vm_goes_on() -> None:
    async with open_bench() as bench:
        await started(bench)
        process = bench.process("web")
        operation = await bench.final((await bench.act("restart_storage")).id)
        assert operation.state is OperationState.SUCCEEDED
        assert operation.message == "2 follows 1"
        await anyio.sleep(60)
        assert (session(bench).incarnation, session(bench).losses) == (2, 0)
        assert bench.process("web") is process
        assert process is not None
        assert process.resets == 0


@simulated
async def test_a_refusal_is_the_outcome_of_the_operation_and_no_trouble_of_the_vm() -> None:
    async with open_bench() as bench:
        await started(bench)
        bench.machine.host.stord.keeps_vms = False
        operation = await bench.final((await bench.act("restart_storage")).id)
        assert operation.state is OperationState.FAILED
        assert operation.error is not None
        assert operation.error.code == "FAILED_PRECONDITION"
        await anyio.sleep(60)
        assert session(bench).incarnation == 1
        assert bench.get("VirtualMachine", "web").status.phase == "Running"
        bench.machine.host.stord.keeps_vms = True
        operation = await bench.final((await bench.act("restart_storage")).id)
        assert operation.state is OperationState.SUCCEEDED


@simulated
async def test_where_stord_is_away_the_restart_waits_for_it() -> None:
    async with open_bench() as bench:
        await started(bench)
        bench.machine.host.stord.down_until = bench.machine.host.stord.now() + 30
        operation = await bench.act("restart_storage")
        await anyio.sleep(10)
        assert session(bench).incarnation == 1
        assert (await bench.final(operation.id)).state is OperationState.SUCCEEDED
        assert session(bench).incarnation == 2


@simulated
async def test_a_vm_that_does_not_run_or_has_no_volumes_has_nothing_to_restart() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare(runStrategy="Halted"))
        with pytest.raises(FailedPrecondition, match="no volumes"):
            await bench.act("restart_storage")
    async with open_bench() as bench:
        await bench.apply(*everything(runStrategy="Halted"))
        with pytest.raises(FailedPrecondition, match="every start has a new one"):
            await bench.act("restart_storage")
