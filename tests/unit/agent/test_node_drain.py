"""Drain, maintenance and resume on an engine without chance: the simulation's machine."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from chv.agent.node import NodeState
from chv.agent.node_record import NODE_UID, NodeIntent
from chv.agent.records import EndKind, VmFacts
from chv.common.errors import FailedPrecondition, InvalidArgument
from chv.common.wire import agent as api
from chv.common.wire.agent import Operation, OperationState
from chv.common.wire.agent_node import ActOnNode, NodeVerb
from chv.vmm.driver import VmmState
from tests.sim.bench import Bench, bare, everything, image, manifest, open_bench
from tests.sim.virtual import simulated

VERB = NodeVerb


async def act(bench: Bench, verb: NodeVerb, reason: str = "firmware") -> str:
    request = ActOnNode(verb=verb, requester="ann", reason=reason)
    return (await bench.engine.node.act(request))[0]


async def drained(bench: Bench, verb: NodeVerb = VERB.DRAIN) -> Operation:
    return await bench.final(await act(bench, verb))


def state(bench: Bench) -> NodeState:
    return bench.machine.gate.node.state


def vm(name: str = "web", strategy: str = "Always") -> dict[str, object]:
    made = bare(name)
    made["spec"] = {**made["spec"], "runStrategy": strategy}
    return made


@simulated
async def test_drain_stops_every_vm_and_ends_in_maintenance() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), vm("web"), vm("db"))
        for name in ("web", "db"):
            await bench.until("VMMRunning", name)
        generation = bench.get("VirtualMachine", "web").metadata.generation
        operation = await drained(bench)
        assert operation.state is OperationState.SUCCEEDED
        assert (operation.requester, operation.reason) == ("ann", "firmware")
        assert state(bench) is NodeState.MAINTENANCE
        assert bench.process("web") is None and bench.process("db") is None
        web = bench.get("VirtualMachine", "web")
        assert (web.spec.run_strategy, web.metadata.generation) == ("Always", generation)
        assert "by ann: firmware" in web.status.last_stop
        await bench.until("VMMRunning", status="False")
        assert bench.condition("VMMRunning") == ("False", "HeldByNode")
        await anyio.sleep(1)
        why = await bench.engine.why.why(api.ObjectRef(kind="VirtualMachine", name="web"))
        assert "in Maintenance (by ann: firmware)" in why.verdict
        assert "chv node resume" in why.fixes


@simulated
async def test_resumed_node_starts_what_is_wanted_and_nothing_else() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), vm("web"), vm("off"), vm("manual", "Manual"))
        await bench.act("start", "manual")
        for name in ("web", "off", "manual"):
            await bench.until("VMMRunning", name)
        await drained(bench, VERB.MAINTENANCE)
        await bench.final((await bench.act("stop", "off")).id)
        await act(bench, VERB.RESUME)
        await bench.until("VMMRunning", "web")
        await bench.until("VMMRunning", "manual")
        assert state(bench) is NodeState.TENANT_READY
        assert bench.process("off") is None


@simulated
async def test_cancelled_drain_starts_again_what_it_stopped() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), vm())
        await bench.until("VMMRunning")
        before = bench.process()
        operation_id = await act(bench, VERB.DRAIN)
        await act(bench, VERB.CANCEL_DRAIN, "")
        assert (await bench.final(operation_id)).state is OperationState.CANCELLED
        assert state(bench) is NodeState.TENANT_READY
        await bench.until("VMMRunning")
        assert before is not None and bench.process() is not None


@simulated
async def test_nothing_is_created_or_started_meanwhile_and_the_refusal_says_why() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), vm())
        await bench.until("VMMRunning")
        await act(bench, VERB.DRAIN)
        refused = []
        for attempt in (bench.apply(image(), vm("new")), bench.act("start"), bench.act("restart")):
            with pytest.raises(FailedPrecondition) as caught:
                await attempt
            refused.append(caught.value)
        assert all("Draining (by ann: firmware)" in str(error) for error in refused)
        assert all("chv node drain --cancel" in error.hint for error in refused)
        await bench.act("stop")
        await bench.delete("VirtualMachine", "web")


@simulated
async def test_start_that_was_under_way_is_ended_and_says_who_holds_the_vm() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), vm(strategy="Halted"))
        bench.machine.gate.open = False
        started = await bench.act("start")
        assert await drained(bench)
        ended = await bench.final(started.id)
        assert ended.state is OperationState.FAILED
        assert "Maintenance (by ann: firmware)" in ended.message


@simulated
async def test_drain_in_parallel_keeps_its_limit_and_shows_who_blocks() -> None:
    async with open_bench(parallel_drains=1) as bench:
        names = ("a", "b", "c")
        await bench.apply(image(), *(vm(name) for name in names))
        for name in names:
            await bench.until("VMMRunning", name)
        for name in names:
            process = bench.process(name)
            assert process is not None
            process.clings = 3  # hears neither button nor TERM
        operation_id = await act(bench, VERB.DRAIN)
        await anyio.sleep(2.0)
        rows = bench.engine._context.ledger.tables.workers.values()
        ending = [row for row in rows if row.ending is not None]
        assert len(ending) == 1 and ending[0].ending is not None
        assert ending[0].ending.kind is EndKind.DRAIN
        progress = bench.engine.node.progress()
        assert progress is not None and (progress.total, progress.left) == (3, 3)
        whys = [each.why for each in progress.blocking]
        assert any("asked to power off" in why for why in whys)
        assert any("turn to be stopped" in why for why in whys)
        assert (await bench.final(operation_id, 600)).state is OperationState.SUCCEEDED


@simulated
async def test_drain_is_joined_and_keeps_who_asked_first() -> None:
    async with open_bench() as bench:
        first = await act(bench, VERB.DRAIN)
        again = await bench.engine.node.act(ActOnNode(verb=VERB.DRAIN, requester="bob"))
        assert again == (first, True)
        hold = bench.engine.node.record.hold
        assert hold is not None and hold.requester == "ann"


@simulated
async def test_drain_without_a_vm_is_maintenance_at_once() -> None:
    async with open_bench() as bench:
        await act(bench, VERB.MAINTENANCE)
        assert state(bench) is NodeState.MAINTENANCE
        assert bench.engine.node.record.intent is NodeIntent.MAINTAIN
        assert bench.engine.node.progress() is None


@simulated
async def test_verbs_are_refused_where_the_table_has_no_such_event() -> None:
    async with open_bench() as bench:
        for verb in (VERB.RESUME, VERB.CANCEL_DRAIN):
            with pytest.raises(FailedPrecondition, match="TenantReady"):
                await act(bench, verb)
        with pytest.raises(InvalidArgument, match="reason"):
            await act(bench, VERB.MAINTENANCE, "")
        await act(bench, VERB.DRAIN)
        with pytest.raises(FailedPrecondition) as caught:
            await act(bench, VERB.CANCEL_DRAIN)
        assert caught.value.hint == "chv node resume"


@simulated
async def test_paused_scheduling_keeps_new_vms_away_and_no_others() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), vm(strategy="Halted"))
        await act(bench, VERB.PAUSE_SCHEDULING, "disk is slow")
        with pytest.raises(FailedPrecondition, match="by ann: disk is slow") as caught:
            await bench.apply(image(), vm("new"))
        assert caught.value.hint == "chv node resume-scheduling"
        await bench.act("start")
        await bench.until("VMMRunning")
        await act(bench, VERB.RESUME_SCHEDULING)
        await bench.apply(image(), vm("new"))


@pytest.mark.parametrize("verb", [VERB.DRAIN, VERB.MAINTENANCE])
@simulated
async def test_next_agent_finds_the_node_as_it_was_recorded(verb: NodeVerb) -> None:
    async with open_bench() as bench:
        await bench.apply(image(), vm())
        await bench.until("VMMRunning")
        await act(bench, VERB.PAUSE_SCHEDULING)
        operation_id = await act(bench, verb)
        machine = bench.machine
    assert machine.store.tables.node.intent is NodeIntent.DRAIN
    async with open_bench(machine) as bench:
        assert "as recorded: by ann: firmware" in bench.machine.gate.node.transitions[0]
        assert (await bench.final(operation_id)).state is OperationState.SUCCEEDED
    async with open_bench(machine) as bench:
        assert state(bench) is NodeState.MAINTENANCE
        assert bench.engine.node.record.paused is not None
        await anyio.sleep(60)
        assert bench.process() is None
        await act(bench, VERB.RESUME)
        await bench.until("VMMRunning")


@simulated
async def test_paused_guest_and_crash_do_not_keep_a_drain() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), vm("web"), vm("db"))
        for name in ("web", "db"):
            await bench.until("VMMRunning", name)
        await bench.final((await bench.act("pause", "db")).id)
        process = bench.process("web")
        assert process is not None
        bench.machine.host.die(process)
        assert (await drained(bench)).state is OperationState.SUCCEEDED
        await act(bench, VERB.RESUME)
        await bench.until("VMMRunning", "web")
        await bench.until("VMMRunning", "db")
        running = bench.process("db")
        assert running is not None and running.state is VmmState.RUNNING


@simulated
async def test_vmm_that_no_record_explains_keeps_a_drain_until_it_is_gone() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), vm())
        await bench.until("VMMRunning")
        bench.engine._context.strangers["feedface"] = "chv:simsim:vmm:feedface:1"
        progress = None
        await act(bench, VERB.DRAIN)
        progress = bench.engine.node.progress()
        assert progress is not None
        assert "a VMM that no record explains" in [each.why for each in progress.blocking]
        await anyio.sleep(120)
        assert state(bench) is NodeState.MAINTENANCE


@simulated
async def test_other_objects_and_operations_stay_readable() -> None:
    async with open_bench() as bench:
        await act(bench, VERB.DRAIN)
        operations = await bench.engine.list_operations(_newest())
        assert [each.name for each in operations.operations] == [NODE_UID]
        with pytest.raises(FailedPrecondition, match="it has ended"):
            await bench.engine.cancel(_cancel(operations.operations[0].id))


@simulated
async def test_cancelling_the_operation_of_a_drain_takes_the_drain_back() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), vm())
        await bench.until("VMMRunning")
        operation_id = await act(bench, VERB.DRAIN)
        seen = (
            await bench.engine.get_operation(api.OperationRef(operation_id=operation_id))
        ).operation
        assert seen.progress is not None
        assert (seen.progress.total, seen.progress.unit) == (1, "VMs")
        ended = (await bench.engine.cancel(_cancel(operation_id))).operation
        assert ended.state is api.OperationState.CANCELLED
        assert state(bench) is NodeState.TENANT_READY
        await bench.until("VMMRunning")


# --- what is half done comes to its end first


@simulated
async def test_vm_that_is_being_saved_is_stopped_only_once_that_is_decided() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything())
        await bench.until("VMMRunning")
        reply = await bench.apply(whole())
        while not facts(bench).saving:  # noqa: ASYNC110  no time passes until then
            await anyio.lowlevel.checkpoint()
        operation = await drained(bench)
        assert operation.state is OperationState.SUCCEEDED
        assert (await bench.final(reply.results[0].operation_id)).state is OperationState.SUCCEEDED
        assert not bench.machine.violations


@pytest.mark.parametrize("turns", range(0, 180, 15))
@simulated
async def test_restore_that_is_under_way_loses_nothing_to_a_drain(turns: int) -> None:
    async with open_bench() as bench:
        await bench.apply(*everything())
        await bench.until("VMMRunning")
        reply = await bench.apply(whole())
        await bench.final(reply.results[0].operation_id)
        await bench.act("restore", snapshot="s", force=True)
        for _ in range(turns):
            await anyio.lowlevel.checkpoint()
        assert (await drained(bench)).state is OperationState.SUCCEEDED
        assert bench.process() is None
        pending = facts(bench).restore is not None
        await act(bench, VERB.RESUME)
        await bench.until("VMMRunning")
        process = bench.process()
        assert process is not None
        # Put off, it goes on from the memory; else it had, and boots like any other VM.
        assert (process.boots == 0) == pending
        assert not bench.machine.violations


@simulated
async def test_drain_shows_that_a_silent_storage_service_blocks_it() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything())
        await bench.until("VMMRunning")
        bench.machine.host.stord.down_until = 60.0
        operation_id = await act(bench, VERB.DRAIN)
        await anyio.sleep(30)
        progress = bench.engine.node.progress()
        assert progress is not None
        assert "storage daemon service does not answer" in progress.blocking[0].why
        shown = bench.engine._context.operations.current(NODE_UID)
        assert shown is not None and "VMs left: 1; default/web" in shown.message
        assert (await bench.final(operation_id)).state is OperationState.SUCCEEDED


def facts(bench: Bench) -> VmFacts:
    stored = bench.engine._context.stored(bench.engine.vm_uid("web", "default"))
    assert stored is not None and stored.facts is not None
    return stored.facts


def whole() -> dict[str, object]:
    return manifest("VirtualMachineSnapshot", "s", {"virtualMachine": "web"})


def _newest() -> api.ListOperations:
    return api.ListOperations(limit=1)


def _cancel(operation_id: str) -> api.CancelOperation:
    return api.CancelOperation(operation_id=operation_id, requester="ann")
