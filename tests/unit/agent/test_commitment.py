"""More than the machine has is never promised: refused when asked for, and held back at a start."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import pytest

from chv.agent.resources.capacity import Capacity
from chv.agent.resources.commitment import Budget
from chv.common.errors import ResourceExhausted
from chv.common.wire import agent as api
from chv.common.wire.agent_clone import CloneVm
from tests.sim.bench import Bench, bare, image, open_bench, volume
from tests.sim.virtual import simulated

GIB, MIB = 1 << 30, 1 << 20
SMALL = Capacity(machine_bytes=4 * GIB, reserve_bytes=512 * MIB)
CPUS = Capacity(cpus=2, vcpu_overcommit=2.0)


async def running(bench: Bench, *objects: dict[str, Any]) -> None:
    reply = await bench.apply(image(), *objects)
    for result in reply.results:
        if result.operation_id:
            operation = await bench.final(result.operation_id)
            assert operation.state is api.OperationState.SUCCEEDED, operation


def committed(bench: Bench) -> int:
    context = bench.engine._context
    budget, tables = context.budget, context.ledger.tables
    found = budget.committed(tables)
    # What it remembers of the VMs is what it would find anew.
    assert found == Budget(budget.capacity, budget.expect).committed(tables)
    return found.memory_bytes


@simulated
async def test_a_vm_larger_than_the_machine_is_refused_with_numbers_and_a_way_out() -> None:
    async with open_bench(capacity=SMALL) as bench:
        await running(bench, bare("small", memory="1Gi"))
        with pytest.raises(ResourceExhausted) as caught:
            await bench.apply(bare("big", memory="1Ti"))
        error = caught.value
        assert (error.resource, error.field) == ("VirtualMachine default/big", "spec.memory")
        assert "1028.2 GiB of memory is asked for" in error.message
        assert "is committed to other VMs" in error.message
        assert "is left (4096 MiB of the machine, less 512 MiB for the host)" in error.message
        assert "limits.memory_overcommit" in error.hint
        assert bench.engine.counts()["VirtualMachine"] == 1


@simulated
async def test_a_machine_that_nobody_could_measure_limits_nothing() -> None:
    async with open_bench(capacity=Capacity()) as bench:
        await running(bench, bare("big", memory="1Ti"))


@simulated
async def test_of_two_at_once_only_one_gets_the_last_memory() -> None:
    async with open_bench(capacity=SMALL) as bench:
        await running(bench)
        outcomes: list[str] = []

        async def create(name: str) -> None:
            try:
                await bench.apply(bare(name, memory="2Gi"))
                outcomes.append("admitted")
            except ResourceExhausted:
                outcomes.append("refused")

        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(create, f"vm{number}")
        assert sorted(outcomes) == ["admitted", "refused", "refused", "refused"]


@simulated
async def test_objects_of_one_request_count_together_and_fail_together() -> None:
    async with open_bench(capacity=SMALL) as bench:
        await running(bench)
        with pytest.raises(ResourceExhausted):
            await bench.apply(bare("one", memory="2Gi"), bare("two", memory="2Gi"))
        assert "VirtualMachine" not in bench.engine.counts()


@simulated
async def test_a_halted_vm_claims_nothing_until_it_is_started() -> None:
    async with open_bench(capacity=SMALL) as bench:
        await running(bench, bare("one", memory="2Gi"))
        await bench.apply(bare("two", memory="2Gi", runStrategy="Halted"))
        with pytest.raises(ResourceExhausted):
            await bench.act("start", "two")
        await bench.final((await bench.act("stop", "one")).id)
        operation = await bench.final((await bench.act("start", "two")).id)
        assert operation.state is api.OperationState.SUCCEEDED


@simulated
async def test_a_vm_waits_for_the_memory_of_one_that_is_being_stopped() -> None:
    async with open_bench(capacity=SMALL) as bench:
        await running(bench, bare("one", memory="2Gi"))
        process = bench.process("one")
        assert process is not None
        process.obedient = False
        stopping = await bench.act("stop", "one")
        reply = await bench.apply(bare("two", memory="2Gi"))
        await anyio.sleep(2)
        assert bench.process("two") is None
        assert bench.condition("VMMRunning", "two")[1] == "ResourcesCommitted"
        await bench.final(stopping.id)
        operation = await bench.final(reply.results[0].operation_id)
        assert operation.state is api.OperationState.SUCCEEDED


@simulated
async def test_growth_is_refused_and_the_vm_stays_as_it_is() -> None:
    async with open_bench(capacity=SMALL) as bench:
        await running(bench, bare("one", memory="1Gi", maxMemory="8Gi"))
        with pytest.raises(ResourceExhausted, match="is asked for"):
            await bench.apply(bare("one", memory="6Gi", maxMemory="8Gi"))
        assert bench.get("VirtualMachine", "one").spec.memory == "1Gi"


@simulated
async def test_a_clone_is_refused_for_which_there_is_no_memory() -> None:
    async with open_bench(capacity=SMALL) as bench:
        await running(bench, bare("one", memory="2Gi"))
        request = CloneVm(name="one", new_name="two", requester="test")
        with pytest.raises(ResourceExhausted):
            await bench.engine.clone(request)
        assert bench.engine.counts()["VirtualMachine"] == 1


@simulated
async def test_overcommit_is_taken_at_its_word() -> None:
    async with open_bench(capacity=replace(SMALL, memory_overcommit=2.0)) as bench:
        await running(bench, bare("one", memory="3Gi"), bare("two", memory="3Gi"))
        with pytest.raises(ResourceExhausted, match="times 2"):
            await bench.apply(bare("three", memory="1Gi"))


@simulated
async def test_huge_pages_are_not_for_vms() -> None:
    async with open_bench(capacity=replace(SMALL, hugepage_bytes=3 * GIB)) as bench:
        await running(bench)
        with pytest.raises(ResourceExhausted, match="huge pages"):
            await bench.apply(bare("one", memory="1Gi"))


@simulated
async def test_vcpus_have_a_limit_where_one_is_configured() -> None:
    async with open_bench(capacity=CPUS) as bench:
        await running(bench, bare("one", cpus=3))
        with pytest.raises(ResourceExhausted, match="2 CPUs times 2") as caught:
            await bench.apply(bare("two", cpus=2))
        assert caught.value.field == "spec.cpus"
        await running(bench, bare("two", cpus=1))


@simulated
async def test_a_smaller_limit_harms_no_vm_that_runs() -> None:
    async with open_bench(capacity=SMALL) as bench:
        await running(bench, bare("one", memory="2Gi"))
        machine, pid = bench.machine, bench.process("one")
    machine.host.exits = type(machine.host.exits)()
    machine.chaos.life += 1
    machine.limits = replace(machine.limits, capacity=replace(SMALL, machine_bytes=2 * GIB))
    async with open_bench(machine) as bench:
        await bench.until("VMMRunning", "one")
        assert bench.process("one") == pid
        await bench.final((await bench.act("reset", "one")).id)
        # What asks for no more is taken; what could not come back is not stopped.
        await running(bench, bare("one", memory="2Gi", shutdownTimeout="20s"))
        with pytest.raises(ResourceExhausted):
            await bench.act("restart", "one")
        await anyio.sleep(60)
        assert bench.process("one") == pid


@simulated
async def test_what_is_committed_follows_the_vms() -> None:
    async with open_bench(capacity=SMALL) as bench:
        assert committed(bench) == 0
        await running(bench, bare("one", memory="1Gi"))
        with_one = committed(bench)
        assert GIB < with_one < GIB + 200 * MIB
        await running(bench, bare("one", memory="2Gi"))  # takes effect at the next start
        assert committed(bench) == with_one + GIB + 2 * GIB // 500 - GIB // 500
        await running(bench, bare("one", memory="1Gi"))
        assert committed(bench) == with_one
        await running(bench, volume("d", size="8Gi", format="qcow2"))
        await running(bench, bare("one", memory="1Gi", disks=[{"name": "d", "volume": "d"}]))
        with_disk = committed(bench)
        assert with_disk > with_one
        await running(bench, volume("d", size="64Gi", format="qcow2"))
        assert committed(bench) == with_disk + 2 * (8 - 1) * MIB
        await bench.final((await bench.act("stop", "one")).id)
        assert committed(bench) == 0
