"""What is cancelled, until when, and what remains; joins and keys of every verb."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from chv.agent.cancelling import INSTEAD, RULES
from chv.common.errors import Conflict, FailedPrecondition
from chv.common.wire import agent as api
from chv.common.wire.agent import Operation, OperationState
from chv.common.wire.agent_clone import CloneVm
from chv.common.wire.agent_history import Rollback
from chv.common.wire.agent_node import ActOnNode, NodeVerb
from chv.common.wire.resources import CloneModeName
from tests.sim.bench import Bench, bare, everything, image, network, open_bench, vm, volume
from tests.sim.chaos import Chaos
from tests.sim.virtual import simulated
from tests.sim.world import Machine

DOCUMENT = Path(__file__).parents[3] / "docs" / "operations.md"


def still() -> Machine:
    machine = Machine(1, Chaos(random.Random(1), delays_s=(0.0,)))
    machine.chaos.quiet = True
    machine.host.stord.mishaps = False
    return machine


async def cancelled(bench: Bench, operation: Operation, reason: str = "wrong one") -> Operation:
    request = api.CancelOperation(operation_id=operation.id, requester="bob", reason=reason)
    return (await bench.engine.cancel(request)).operation


async def stopped(bench: Bench, *more: object) -> None:
    """A VM that was running and is stopped."""
    await bench.apply(*everything())
    await bench.until("VMMRunning")
    await bench.final((await bench.act("stop")).id)


async def held(bench: Bench) -> None:
    """No VM starts for now."""
    bench.machine.gate.open = False


def test_the_document_has_the_table_of_the_code() -> None:
    text = DOCUMENT.read_text()
    for rule in RULES:
        assert f"| {rule.what} | {rule.until} | {rule.remains} |" in text


# --- a start


@simulated
async def test_a_start_that_has_no_vmm_yet_is_taken_back() -> None:
    async with open_bench() as bench:
        await stopped(bench)
        before = bench.get("VirtualMachine", "web")
        await held(bench)
        operation = await bench.act("start")
        ended = await cancelled(bench, operation)
        assert ended.state is OperationState.CANCELLED
        assert "by bob: wrong one" in ended.message
        after = bench.get("VirtualMachine", "web")
        assert after.spec == before.spec
        assert after.metadata.generation == operation.generation + 1
        bench.machine.gate.open = True
        await bench.until("phase=Stopped")
        await anyio.sleep(60)
        assert bench.process() is None
        rows = await bench.engine._context.ledger.store.history(after.metadata.uid)
        assert (rows[0].verb, rows[0].requester, rows[0].reason) == ("cancel", "bob", "wrong one")


@simulated
async def test_a_cancelled_start_of_a_vm_that_was_given_up_leaves_it_given_up() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), network(), volume(), vm(runStrategy="Manual"))
        await held(bench)
        operation = await bench.act("start")
        await cancelled(bench, operation)
        bench.machine.gate.open = True
        await anyio.sleep(60)
        assert bench.process() is None
        assert bench.get("VirtualMachine", "web").spec.run_strategy.value == "Manual"


@simulated
async def test_a_start_with_a_vmm_is_not_cancelled_and_stop_is_named() -> None:
    async with open_bench() as bench:
        await stopped(bench)
        operation = await bench.act("start")
        while bench.process() is None:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        with pytest.raises(FailedPrecondition) as caught:
            await cancelled(bench, operation)
        assert "chv stop web" in str(caught.value) or "it has ended" in str(caught.value)


@simulated
async def test_a_cancelled_start_stays_so_over_the_death_of_the_agent() -> None:
    machine = still()
    async with open_bench(machine) as bench:
        await stopped(bench)
        await held(bench)
        operation = await bench.act("start")
        await cancelled(bench, operation)
    machine.chaos.life += 1
    machine.gate.open = True
    async with open_bench(machine) as bench:
        await anyio.sleep(60)
        assert bench.process() is None
        assert (await bench.final(operation.id)).state is OperationState.CANCELLED


# --- a clone


@simulated
async def test_a_cancelled_clone_goes_with_its_volumes_and_its_source_stays() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything())
        await bench.until("VMMRunning")
        await held(bench)
        reply = await bench.engine.clone(
            CloneVm(name="web", new_name="two", mode=CloneModeName.FULL, requester="ann")
        )
        await anyio.sleep(5)
        ended = await cancelled(bench, reply.operation)
        assert ended.state is OperationState.CANCELLED
        await bench.until("deleted", "two")
        await bench.until("deleted", "two-data", "Volume")
        await bench.until("deleted", "two-source", "VolumeSnapshot")
        assert bench.get("VirtualMachine", "web").status.phase == "Running"


@simulated
async def test_the_same_clone_joins_and_another_of_that_name_does_not() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything())
        await bench.until("VMMRunning")
        await held(bench)
        first = await bench.engine.clone(CloneVm(name="web", new_name="two", requester="ann"))
        again = await bench.engine.clone(CloneVm(name="web", new_name="two", requester="bob"))
        assert again.joined and again.operation.id == first.operation.id
        with pytest.raises(Conflict):
            await bench.engine.clone(
                CloneVm(name="web", new_name="two", mode=CloneModeName.FULL, requester="bob")
            )


# --- joins


@simulated
async def test_an_apply_of_the_same_joins_the_operation_under_way() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), network(), volume())
        await held(bench)
        (first,) = (await bench.apply(vm())).results
        (again,) = (await bench.apply(vm())).results
        assert (again.action, again.operation_id) == ("unchanged", first.operation_id)
        bench.machine.gate.open = True
        await bench.until("VMMRunning")
        await bench.final(first.operation_id)
        (later,) = (await bench.apply(vm())).results
        assert (later.action, later.operation_id) == ("unchanged", "")


# --- keys


@simulated
async def test_a_deletion_under_its_key_is_replayed_once_the_object_is_gone() -> None:
    machine = still()
    request = api.DeleteObject(
        kind="VirtualMachine", name="web", requester="ann", idempotency_key="gone"
    )
    async with open_bench(machine) as bench:
        await bench.apply(image(), bare())
        first = (await bench.engine.delete(request)).operation
        await bench.until("deleted")
    machine.chaos.life += 1
    async with open_bench(machine) as bench:
        again = await bench.engine.delete(request)
        assert again.joined and again.operation.id == first.id
        assert again.operation.state is OperationState.SUCCEEDED
        other = api.DeleteObject(kind="Image", name="tiny", requester="ann", idempotency_key="gone")
        with pytest.raises(Conflict, match="another request"):
            await bench.engine.delete(other)


@simulated
async def test_a_request_that_joined_is_replayed_after_the_end_and_not_done_again() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare())
        await bench.until("VMMRunning")
        first = await bench.act("restart")
        joined = await bench.act("restart", idempotency_key="mine")
        assert joined.id == first.id
        await bench.final(first.id)
        assert (await bench.act("restart", idempotency_key="mine")).id == first.id


@simulated
async def test_a_rollback_and_a_node_verb_under_a_key_are_done_once() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare(memory="128Mi"))
        await bench.apply(bare(memory="256Mi"))
        request = Rollback(
            kind="VirtualMachine", name="web", to=1, requester="ann", idempotency_key="back"
        )
        first = await bench.engine.history.rollback(request)
        await bench.apply(bare(memory="192Mi"))
        assert await bench.engine.history.rollback(request) == first
        assert bench.get("VirtualMachine", "web").spec.memory == "192Mi"

        pause = ActOnNode(
            verb=NodeVerb.PAUSE_SCHEDULING, reason="r", requester="ann", idempotency_key="p"
        )
        operation_id, _ = await bench.engine.node.act(pause)
        await bench.engine.node.act(ActOnNode(verb=NodeVerb.RESUME_SCHEDULING, requester="ann"))
        assert await bench.engine.node.act(pause) == (operation_id, True)
        assert bench.engine.node.record.paused is None


# --- queues


@simulated
async def test_a_start_that_waits_for_a_slot_shows_its_position() -> None:
    async with open_bench(parallel_starts=1) as bench:
        await bench.apply(
            image(), *(bare(f"vm{number}", runStrategy="Halted") for number in range(3))
        )
        for number in range(3):
            await bench.until("phase=Stopped", f"vm{number}")
        seen: set[tuple[int, str]] = set()
        operations = [await bench.act("start", f"vm{number}") for number in range(3)]
        with anyio.move_on_after(30):
            while True:
                for operation in operations:
                    request = api.OperationRef(operation_id=operation.id)
                    now = (await bench.engine.get_operation(request)).operation
                    if now.queue is not None:
                        seen.add((now.queue.position, now.queue.waits_for))
                await anyio.lowlevel.checkpoint()
                if all(bench.process(f"vm{number}") is not None for number in range(3)):
                    break
        assert {(1, "a start slot"), (2, "a start slot")} <= seen
        for operation in operations:
            ended = await bench.final(operation.id)
            assert ended.queue is None and ended.state is OperationState.SUCCEEDED


def test_what_to_do_instead_is_text_that_can_be_filled() -> None:
    for words in INSTEAD.values():
        assert "{" not in words.format(name="web", what="vm web")
