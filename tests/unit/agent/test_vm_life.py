"""A VM's life as users see it, with the real engine on a simulated machine in virtual time."""

from __future__ import annotations

from unittest.mock import AsyncMock, patch

import anyio
import msgspec
import pytest

from chv.agent.queries import check_condition
from chv.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)
from chv.common.wire import agent as api
from chv.vmm.driver import VmmState
from tests.sim.bench import Bench, bare, everything, image, open_bench, vm
from tests.sim.virtual import simulated
from tests.sim.vmms import SimGuests, SimProcess, SimVmms


def state(process: SimProcess) -> VmmState:
    return process.state


def live(bench: Bench, name: str = "web") -> SimProcess:
    process = bench.process(name)
    assert process is not None
    return process


async def started(bench: Bench, **spec: object) -> SimProcess:
    """Apply everything and wait until the VM runs."""
    reply = await bench.apply(*everything(**spec))
    for result in reply.results:
        operation = await bench.final(result.operation_id)
        assert operation.state is api.OperationState.SUCCEEDED, operation
    return live(bench)


@simulated
async def test_an_applied_vm_runs_with_disk_nic_seed_and_console() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        assert process.state is VmmState.RUNNING
        assert [disk.kind for disk in process.config.disks] == ["vhost-user-blk", "file"]
        assert len(process.config.nics) == 1
        assert process.vm_uid in bench.machine.host.consoles
        seen = await bench.until("SSHReady")
        assert seen.status.phase == "Running"
        assert seen.status.ssh_host_key
        assert seen.status.disks[0].export.startswith("vhost-user-blk:/")
        assert seen.status.interfaces[0].address
        assert seen.status.vmm.pid == process.pid
        assert bench.condition("GuestBooted") == ("True", "SshBanner")


@simulated
async def test_the_journal_shows_each_step_of_a_start() -> None:
    async with open_bench() as bench:
        reply = await bench.apply(*everything())
        operation = await bench.final(reply.results[-1].operation_id)
        names = [step.name.split()[0] for step in operation.steps]
        assert names == [
            "select_vmm",
            "prepare",
            "attach_volume",
            "attach_nic",
            "seed",
            "spawn",
            "create",
            "attach_console",
            "boot",
        ]
        assert {step.outcome for step in operation.steps} == {"done"}


@simulated
async def test_a_second_pass_changes_nothing() -> None:
    async with open_bench() as bench:
        await started(bench)
        await bench.until("SSHReady")
        before = bench.machine.chaos.effects
        bench.engine.notify_daemon_ready("stord")
        await anyio.sleep(120)
        assert bench.machine.chaos.effects == before


@simulated
async def test_stop_asks_the_guest_and_says_which_rung_worked() -> None:
    async with open_bench() as bench:
        (await started(bench)).obedient = True
        operation = await bench.final((await bench.act("stop", reason="for a test")).id)
        assert operation.state is api.OperationState.SUCCEEDED
        assert operation.message == "stopped by acpi"
        seen = bench.get("VirtualMachine", "web")
        assert seen.spec.run_strategy == "Halted"
        assert "acpi" in seen.status.last_stop
        assert "by test: for a test" in seen.status.last_stop
        assert bench.process() is None
        assert not bench.machine.host.stord.sessions  # the storage daemon went, too
        assert bench.machine.host.nwd.nics  # the address stays


@simulated
async def test_a_guest_that_does_not_listen_is_killed_within_the_deadline() -> None:
    async with open_bench() as bench:
        (await started(bench, shutdownTimeout="10s")).obedient = False
        begun = bench.machine.clock.monotonic()
        operation = await bench.final((await bench.act("stop")).id)
        assert operation.message == "stopped by kill"
        assert bench.machine.clock.monotonic() - begun < 11


@simulated
async def test_force_skips_the_question() -> None:
    async with open_bench() as bench:
        process = await started(bench, shutdownTimeout="1h")
        operation = await bench.final((await bench.act("stop", force=True)).id)
        assert operation.state is api.OperationState.SUCCEEDED
        assert process.button_at < 0


@simulated
async def test_force_cuts_a_stop_short_that_is_under_way() -> None:
    async with open_bench() as bench:
        (await started(bench, shutdownTimeout="1h")).obedient = False
        patient = await bench.act("stop")
        await anyio.sleep(5)
        forced = await bench.act("stop", force=True)
        assert forced.id != patient.id
        done = await bench.final(forced.id, timeout_s=30)
        assert done.state is api.OperationState.SUCCEEDED
        assert (await bench.final(patient.id)).state is api.OperationState.SUPERSEDED


@simulated
async def test_start_restores_the_strategy_that_stop_put_away() -> None:
    async with open_bench() as bench:
        await started(bench, runStrategy="Always")
        await bench.final((await bench.act("stop", force=True)).id)
        await bench.final((await bench.act("start")).id)
        assert bench.get("VirtualMachine", "web").spec.run_strategy == "Always"
        assert live(bench).state is VmmState.RUNNING


@simulated
async def test_restart_is_a_new_vmm_under_one_operation() -> None:
    async with open_bench() as bench:
        first = await started(bench)
        operation = await bench.final((await bench.act("restart")).id)
        assert operation.state is api.OperationState.SUCCEEDED
        names = [step.name.split()[0] for step in operation.steps]
        assert names.index("stop") < names.index("forget") < names.index("spawn")
        assert live(bench).pid != first.pid
        assert bench.get("VirtualMachine", "web").status.restarts == 0  # somebody asked for it


@simulated
async def test_reset_is_the_button_in_the_same_vmm() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        await bench.until("SSHReady")
        operation = await bench.final((await bench.act("reset")).id)
        assert operation.state is api.OperationState.SUCCEEDED
        assert live(bench).pid == process.pid
        assert process.resets == 1
        await anyio.sleep(60)
        assert process.resets == 1


@simulated
async def test_a_stopped_vm_cannot_be_reset() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare(runStrategy="Halted"))
        with pytest.raises(FailedPrecondition, match="does not run"):
            await bench.act("reset")


@simulated
async def test_an_identical_request_joins_the_one_under_way() -> None:
    async with open_bench() as bench:
        (await started(bench, shutdownTimeout="1m")).obedient = False
        first = await bench.act("stop")
        assert (await bench.act("stop")).id == first.id


@simulated
async def test_a_key_answers_with_the_operation_of_the_first_request() -> None:
    async with open_bench() as bench:
        await started(bench)
        first = await bench.act("restart", idempotency_key="once")
        await bench.final(first.id)
        again = await bench.act("restart", idempotency_key="once")
        assert again.id == first.id
        assert again.state is api.OperationState.SUCCEEDED
        assert bench.machine.host.spawned == 2


@simulated
async def test_manual_starts_only_on_request() -> None:
    async with open_bench() as bench:
        reply = await bench.apply(image(), bare(runStrategy="Manual"))
        await bench.final(reply.results[-1].operation_id)
        assert bench.process() is None
        await bench.final((await bench.act("start")).id)
        assert live(bench).state is VmmState.RUNNING


@simulated
async def test_the_guests_own_power_off_halts_a_vm_that_reruns_on_failure() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        bench.machine.host.power_off(process)
        seen = await bench.until("phase=Stopped")
        assert seen.spec.run_strategy == "Halted"
        assert "GuestShutdown" in seen.status.last_stop
        await bench.final((await bench.act("start")).id)
        assert bench.get("VirtualMachine", "web").spec.run_strategy == "RerunOnFailure"


@simulated
async def test_always_starts_again_after_the_guests_own_power_off() -> None:
    async with open_bench() as bench:
        process = await started(bench, runStrategy="Always")
        bench.machine.host.power_off(process)
        await anyio.sleep(30)
        assert live(bench).pid != process.pid
        assert bench.get("VirtualMachine", "web").spec.run_strategy == "Always"


@simulated
async def test_a_crash_is_followed_by_a_start() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        bench.machine.host.die(process)
        await anyio.sleep(5)
        assert live(bench).pid != process.pid
        seen = bench.get("VirtualMachine", "web")
        assert "Crash" in seen.status.last_stop
        assert seen.status.restarts == 1


@simulated
async def test_a_vm_that_crashes_again_and_again_is_given_up_and_can_be_started() -> None:
    async with open_bench(restarts_max=3, restart_window_s=600.0) as bench:
        await started(bench)
        for _ in range(4):
            await bench.until("VMMRunning", timeout_s=100)
            bench.machine.host.die(live(bench))
            await anyio.sleep(20)
        seen = bench.get("VirtualMachine", "web")
        assert seen.status.phase == "Failed"
        assert bench.condition("VMMRunning") == ("False", "GivenUp")
        with pytest.raises(FailedPrecondition, match="ended too often"):
            await bench.until("SSHReady")
        await bench.final((await bench.act("start")).id)
        assert live(bench).state is VmmState.RUNNING


@simulated
async def test_a_storage_loss_resets_the_vm_before_its_disks_come_back() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        host, served = bench.machine.host, list[bool]()
        reset = host.reset

        def noted(vm_uid: str) -> None:
            served.append(host.stord.sessions[vm_uid].serving)
            reset(vm_uid)

        with patch.object(host, "reset", noted):
            host.lose_storage(process.vm_uid)
            await anyio.sleep(60)
        # First while nothing serves: a disk that returns is then not started where it was left.
        assert served == [False, True]
        assert process.state is VmmState.RUNNING
        assert bench.condition("StorageLost") == ("False", "Recovered")
        assert not bench.machine.violations


@simulated
async def test_a_silent_monitor_is_unknown_and_nothing_is_started() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        with patch.object(bench.machine.host, "monitor", silent):
            await anyio.sleep(120)
        assert bench.get("VirtualMachine", "web").status.phase == "Unknown"
        assert bench.condition("VMMRunning") == ("Unknown", "MonitorSilent")
        assert bench.machine.host.spawned == 1
        await bench.until("phase=Running")
        assert live(bench).pid == process.pid


def silent(_: str) -> SimProcess:
    from chv.common.errors import Unavailable

    raise Unavailable("no answer")


@simulated
async def test_a_vm_with_a_silent_monitor_can_be_stopped() -> None:
    async with open_bench() as bench:
        await started(bench)
        with patch.object(bench.machine.host, "monitor", silent):
            operation = await bench.final((await bench.act("stop")).id)
        assert operation.state is api.OperationState.SUCCEEDED
        assert bench.process() is None


@simulated
async def test_a_vm_can_be_stopped_while_stord_is_down() -> None:
    async with open_bench() as bench:
        await started(bench)
        bench.machine.host.stord.down_until = 200.0
        operation = await bench.act("stop")
        await anyio.sleep(30)
        assert bench.process() is None
        assert (await bench.final(operation.id, timeout_s=300)).state == "Succeeded"


@simulated
async def test_a_daemon_that_answers_again_is_shown_before_the_next_resync() -> None:
    async with open_bench() as bench:
        await started(bench)
        bench.machine.host.nwd.down_until = anyio.current_time() + 2.0
        bench.engine.notify_vmm_exit(bench.engine.vm_uid("web", "default"))  # look now
        await anyio.sleep(1)
        assert bench.condition("NetworkReady") == ("Unknown", "NetworkUnavailable")
        await anyio.sleep(9)
        assert bench.condition("NetworkReady") == ("True", "Attached")


@simulated
async def test_starts_queue_and_show_their_position() -> None:
    async with open_bench(parallel_starts=1) as bench:
        bench.machine.gate.open = True
        names = [f"vm{n}" for n in range(4)]
        reply = await bench.apply(image(), *(bare(name) for name in names))
        for result in reply.results:
            assert (await bench.final(result.operation_id)).state == "Succeeded"
        assert bench.machine.host.spawned == 4


@simulated
async def test_a_node_that_is_not_ready_starts_nothing_but_stops_and_deletes() -> None:
    async with open_bench() as bench:
        await started(bench)
        bench.machine.gate.open = False
        reply = await bench.apply(bare("late"))
        await anyio.sleep(60)
        assert bench.process("late") is None
        assert bench.condition("VMMRunning", "late") == ("False", "NodeNotReady")
        await bench.final((await bench.act("stop", force=True)).id)
        await bench.final((await bench.delete("VirtualMachine", "web")).id)
        bench.machine.gate.open = True
        await bench.final(reply.results[0].operation_id)
        assert live(bench, "late").state is VmmState.RUNNING


@simulated
async def test_delete_in_reverse_order_leaves_nothing() -> None:
    async with open_bench() as bench:
        await started(bench)
        for kind, name in [
            ("VirtualMachine", "web"),
            ("Volume", "data"),
            ("Network", "net"),
            ("Image", "tiny"),
        ]:
            operation = await bench.delete(kind, name)
            assert (await bench.final(operation.id)).state is api.OperationState.SUCCEEDED
        host = bench.machine.host
        assert not (host.stord.volumes or host.stord.sessions or host.nwd.networks)
        assert not (host.nwd.nics or host.seeds or host.dirs or host.consoles or host.remains)
        assert not host.artifacts
        assert not bench.machine.store.tables.objects
        with pytest.raises(NotFound):
            bench.get("VirtualMachine", "web")


@simulated
async def test_all_of_it_can_be_deleted_at_once_and_goes_in_order() -> None:
    async with open_bench() as bench:
        await started(bench)
        kinds = [("VirtualMachine", "web"), ("Volume", "data"), ("Network", "net")]
        operations = [await bench.delete(kind, name) for kind, name in kinds]
        for operation in operations:
            assert (await bench.final(operation.id)).state is api.OperationState.SUCCEEDED
        assert not bench.machine.violations


@simulated
async def test_a_vm_is_deleted_while_it_starts() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything())
        operation = await bench.delete("VirtualMachine", "web")
        assert (await bench.final(operation.id)).state is api.OperationState.SUCCEEDED
        assert not bench.machine.host.dirs
        assert not bench.machine.host.nwd.nics


@simulated
async def test_a_new_agent_adopts_the_vm_and_does_nothing_to_it() -> None:
    async with open_bench() as bench:
        process = await started(bench)
    machine = bench.machine
    machine.host.exits = type(machine.host.exits)()
    before = machine.host.spawned
    async with open_bench(machine) as bench:
        await bench.until("SSHReady")
        assert live(bench).pid == process.pid
        assert machine.host.spawned == before
        await bench.final((await bench.act("stop", force=True)).id)


@simulated
async def test_a_new_agent_takes_nothing_back_that_the_guest_has_shown() -> None:
    async with open_bench() as bench:
        await started(bench)
        before = (await bench.until("SSHReady")).status
        await anyio.sleep(100)
    machine = bench.machine
    machine.host.exits = type(machine.host.exits)()
    async with open_bench(machine) as bench:
        seen = set()
        for _ in range(400):
            seen.add((bench.condition("GuestBooted")[0], bench.condition("SSHReady")[0]))
            await anyio.sleep(0.02)
        assert seen == {("True", "True")}
        after = bench.get("VirtualMachine", "web").status
        since = [[c.last_transition_time for c in s.conditions] for s in (before, after)]
        assert since[0] == since[1]
        assert after.vmm.started_at == before.vmm.started_at


@simulated
async def test_a_guest_that_cannot_be_asked_keeps_what_it_has_shown() -> None:
    async with open_bench() as bench:
        await started(bench)
        await bench.until("SSHReady")
    machine = bench.machine
    machine.host.exits = type(machine.host.exits)()
    away = AsyncMock(side_effect=OutcomeUnknown("the guest could not be asked"))
    with patch.object(SimGuests, "probe_ssh", away):
        async with open_bench(machine) as bench:
            await anyio.sleep(60)
            assert away.await_count > 1
            assert bench.condition("SSHReady") == ("True", "Banner")
    gone = AsyncMock(side_effect=Unavailable("Connection refused"))
    with patch.object(SimGuests, "probe_ssh", gone):
        async with open_bench(machine) as bench:
            await bench.until("SSHReady", status="False")
            assert bench.condition("GuestBooted")[0] == "True"


@simulated
async def test_a_reset_takes_back_what_the_guest_has_shown() -> None:
    async with open_bench() as bench:
        await started(bench)
        await bench.until("SSHReady")
        process = live(bench)
        await bench.act("reset")
        await bench.until("SSHReady", status="False", timeout_s=5)
        assert live(bench) is process
        await bench.until("SSHReady")


@simulated
async def test_a_guest_that_was_not_asked_yet_is_unknown() -> None:
    async with open_bench() as bench:
        await started(bench)
        assert bench.condition("SSHReady") == ("Unknown", "NotProbedYet")
        await bench.until("SSHReady", status="False", timeout_s=5)


@simulated
async def test_a_vmm_that_no_record_explains_keeps_its_vm_from_starting() -> None:
    async with open_bench() as bench:
        process = await started(bench)
    machine = bench.machine
    machine.host.exits = type(machine.host.exits)()
    del machine.store.tables.workers[process.vm_uid]
    async with open_bench(machine) as bench:
        await anyio.sleep(60)
        assert bench.get("VirtualMachine", "web").status.phase == "Unknown"
        assert bench.condition("SSHReady") == ("Unknown", "InDoubt")
        assert machine.host.spawned == 1
        machine.host.die(process)
        await bench.until("phase=Running", timeout_s=60)


@simulated
async def test_a_wait_ends_with_its_deadline() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare())
        with pytest.raises(FailedPrecondition, match="the VM has no interface"):
            await bench.until("SSHReady", timeout_s=30)
        with pytest.raises(DeadlineExceeded, match="phase is Running, not Paused, after 2 s"):
            await bench.until("phase=Paused", timeout_s=2)
        with pytest.raises(DeadlineExceeded, match="still there, in phase Running"):
            await bench.until("deleted", timeout_s=2)


@pytest.mark.parametrize(
    ("kind", "condition", "hint"),
    [
        ("VirtualMachine", "SshReady", "VMMRunning, GuestBooted, SSHReady"),
        ("VirtualMachine", "phase=Runing", "Running, Paused"),
        ("VirtualMachine", "size=1", "phase=NAME, deleted"),
        ("VirtualMachine", "phase=NAME", "Pending"),
        ("VirtualMachine", "Ready", "VolumesReady"),
        ("Image", "SSHReady", "one of Ready, phase=NAME, deleted"),
    ],
)
async def test_nobody_waits_for_what_does_not_exist(kind: str, condition: str, hint: str) -> None:
    request = api.WaitCondition(kind=kind, name="web", condition=condition)
    with pytest.raises(InvalidArgument) as caught:
        check_condition(request)
    assert hint in caught.value.hint


@simulated
async def test_what_is_not_there_is_deleted() -> None:
    async with open_bench() as bench:
        request = api.WaitCondition(kind="Volume", name="none", condition="deleted")
        reply = await bench.engine.wait_condition(request)
        assert msgspec.json.decode(reply.object) is None
        with pytest.raises(NotFound):
            await bench.until("Ready", "none", "Volume")


@simulated
async def test_waiting_for_what_a_stopped_vm_cannot_reach_fails_at_once() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), bare(runStrategy="Halted"))
        with pytest.raises(FailedPrecondition, match="stopped"):
            await bench.until("VMMRunning", timeout_s=60)


@simulated
async def test_access_tells_nic_address_and_pinned_key() -> None:
    async with open_bench() as bench:
        await started(bench)
        await bench.until("SSHReady")
        access = bench.engine.vm_access("web", "default")
        assert access.nic_id in bench.machine.host.nwd.nics
        assert access.host_key == bench.machine.host.seeds[access.vm_uid]
        assert access.guest_ports == (22,)


@simulated
async def test_counts_tell_kinds_and_phases() -> None:
    async with open_bench() as bench:
        await started(bench)
        counts = bench.engine.counts()
        assert counts["VirtualMachine"] == 1
        assert counts["vm.Running"] == 1


@simulated
async def test_an_always_changing_spec_still_ends_as_wanted() -> None:
    async with open_bench() as bench:
        await started(bench)
        for number in range(5):
            await bench.apply(vm(memory=f"{128 + number}Mi"))
        await bench.until("phase=Running")
        assert bench.get("VirtualMachine", "web").metadata.generation == 5


@simulated
async def test_a_paused_vm_stands_until_it_is_resumed_whatever_happens_to_the_agent() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        operation = await bench.final((await bench.act("pause")).id)
        assert operation.state is api.OperationState.SUCCEEDED
        assert state(process) is VmmState.PAUSED
        assert bench.condition("Paused") == ("True", "Asked")
        again = await bench.final((await bench.act("pause")).id)
        assert again.state is api.OperationState.SUCCEEDED
    bench.machine.host.exits = type(bench.machine.host.exits)()
    async with open_bench(bench.machine) as bench:
        await anyio.sleep(100)
        assert state(process) is VmmState.PAUSED
        assert bench.get("VirtualMachine", "web").status.phase == "Paused"
        await bench.final((await bench.act("resume")).id)
        assert state(process) is VmmState.RUNNING
        assert bench.condition("Paused") == ("False", "VcpusRun")


@simulated
async def test_a_paused_vm_that_is_reset_or_loses_its_storage_goes_on_standing() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        await bench.final((await bench.act("pause")).id)
        bench.machine.host.lose_storage(process.vm_uid)
        await bench.until("StorageLost", status="False")
        await anyio.sleep(100)
        assert process.resets > 0
        assert state(process) in (VmmState.PAUSED, VmmState.CREATED)
        assert bench.get("VirtualMachine", "web").status.phase == "Paused"
        await bench.final((await bench.act("resume")).id)
        assert state(process) is VmmState.RUNNING


@simulated
async def test_a_stop_ends_a_pause_and_the_next_start_runs() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        await bench.final((await bench.act("pause")).id)
        await bench.final((await bench.act("stop")).id)
        assert not process.alive
        with pytest.raises(FailedPrecondition, match="it does not run, so it cannot be paused"):
            await bench.act("pause")
        await bench.final((await bench.act("start")).id)
        assert state(live(bench)) is VmmState.RUNNING


@simulated
async def test_a_vmm_that_starts_empty_is_given_its_vm_and_halts_before_a_reset() -> None:
    async with open_bench() as bench:
        bench.machine.host.two_phases = 1.0
        process = await started(bench)
        bench.machine.host.lose_storage(process.vm_uid)
        await bench.until("StorageLost")
        await bench.until("StorageLost", status="False")
        await bench.until("VMMRunning")
        assert (process.alive, process.boots) == (True, 2)
        assert state(process) is VmmState.RUNNING


@simulated
async def test_a_vmm_whose_agent_died_before_it_was_given_its_vm_is_given_it_by_the_next() -> None:
    async with open_bench() as bench:
        bench.machine.host.two_phases = 1.0
        process = await started(bench)
    process.state = VmmState.EMPTY  # as if that agent had not come so far
    bench.machine.host.exits = type(bench.machine.host.exits)()
    async with open_bench(bench.machine) as bench:
        await anyio.sleep(60)
        assert bench.process("web") is process
        assert state(process) is VmmState.RUNNING


@simulated
async def test_threads_without_their_filter_are_told_of() -> None:
    with patch.object(SimVmms, "unfiltered", AsyncMock(return_value=("vcpu0", "vmm"))) as asked:
        async with open_bench() as bench:
            await started(bench)
            await anyio.sleep(60)
            status = bench.get("VirtualMachine", "web").status
            assert status.vmm.seccomp == "unfiltered: vcpu0, vmm"
    assert asked.await_count == 1
