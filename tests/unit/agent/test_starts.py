"""Who starts when: priorities, delays, slots, drains; what a boot of the host leaves and begins."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

import anyio
import pytest

from chv.agent.ports import Limits
from chv.agent.ranks import START_WAIT_S
from chv.agent.starts import Order, Rank, StartQueue
from chv.common.errors import InvalidArgument
from chv.common.wire import agent as api
from chv.common.wire.agent_node import ActOnNode, NodeVerb
from tests.sim.bench import Bench, bare, everything, image, open_bench, vm
from tests.sim.chaos import Chaos
from tests.sim.virtual import simulated
from tests.sim.vmms import SimVmms
from tests.sim.world import TEN_YEARS_S, Machine


def machine_of(**limits: Any) -> Machine:
    """A machine without chance that outlives a bench."""
    made = Machine(1, Chaos(random.Random(1), delays_s=(0.0,)), Limits(**limits))
    made.chaos.quiet, made.host.stord.mishaps = True, False
    return made


async def made(machine: Machine, *vms: dict[str, Any]) -> None:
    """Apply VMs, wait until they run, and end the agent."""
    async with open_bench(machine) as bench:
        reply = await bench.apply(image(), *vms)
        for result in reply.results:
            await bench.final(result.operation_id)


def spawned(machine: Machine) -> list[str]:
    """Return the names of the VMs that have a VMM, in the order of their starts."""
    names = {o.uid: o.key[2] for o in machine.store.tables.of_kind("VirtualMachine")}
    return [names[p.vm_uid] for _, p in sorted(machine.host.processes.items())]


def message(bench: Bench, name: str) -> str:
    conditions = bench.get("VirtualMachine", name).status.conditions
    return str(next(c.message for c in conditions if c.type == "VMMRunning"))


# --- the order itself


def order_of(*ranks: tuple[int, float]) -> tuple[Order, list[str]]:
    woken: list[str] = []
    known = {
        f"vm{n}": Rank(title=f"vm{n}", priority=level, level=level, wait_s=10.0, delay_s=delay_s)
        for n, (level, delay_s) in enumerate(ranks)
    }
    order = Order(known.get, woken.append)
    order.begin(known)
    return order, woken


def test_a_level_goes_when_the_one_above_has_got_there_and_its_delay_has_passed() -> None:
    order, woken = order_of((5, 3.0), (1, 0.0), (1, 0.0))
    assert order.turn("vm0", 0.0) is None
    turn = order.turn("vm1", 0.0)
    assert turn is not None and (turn.whom, turn.position) == ("VM vm0 (priority 5)", 2)
    order.arrived("vm0", 1.0)
    assert woken == ["vm1", "vm2"]
    turn = order.turn("vm1", 1.0)
    assert turn is not None and turn.delayed and turn.retry_s == pytest.approx(3.01)
    assert order.turn("vm1", 4.0) is None
    assert order.turn("vm2", 4.0) is None


def test_one_that_does_not_get_there_is_waited_for_no_longer_than_its_time() -> None:
    order, _ = order_of((5, 0.0), (3, 0.0), (1, 0.0))
    assert order.turn("vm2", 0.0) is not None
    assert order.turn("vm2", 9.9) is not None
    turn = order.turn("vm2", 10.0)  # the first level has had its time: the next one's begins
    assert turn is not None and turn.whom == "VM vm1 (priority 3)"
    assert order.turn("vm2", 20.0) is None


def test_who_drops_out_or_is_exempt_holds_up_nobody() -> None:
    order, woken = order_of((5, 60.0), (1, 0.0), (0, 0.0))
    order.exempt("vm2")
    assert order.turn("vm2", 0.0) is None
    assert order.turn("vm1", 0.0) is not None
    order.drop("vm0")
    assert woken == ["vm1"]
    assert order.turn("vm1", 0.0) is None


def test_who_was_let_go_is_not_held_up_again_and_strangers_never_are() -> None:
    order, _ = order_of((5, 0.0), (1, 0.0))
    order.arrived("vm0", 0.0)
    assert order.turn("vm1", 0.0) is None
    order.begin([])
    assert order.turn("vm1", 0.0) is None


def test_who_is_asked_for_waits_before_the_others_for_a_slot() -> None:
    queue = StartQueue(1, lambda uid: None)
    assert [queue.enter(uid) for uid in ("a", "b", "c")] == [0, 1, 2]
    assert queue.enter("d", first=True) == 1
    assert queue.enter("c", first=True) == 2
    assert [queue.enter(uid) for uid in ("a", "d", "c", "b")] == [0, 1, 2, 3]


# --- the start of a node


@simulated
async def test_after_a_boot_vms_start_by_priority_each_once() -> None:
    machine = machine_of(parallel_starts=4)
    await made(
        machine,
        bare("low", startPriority=-5),
        bare("plain"),
        bare("first", startPriority=10, startDelay="30s"),
        bare("halted", runStrategy="Halted"),
    )
    machine.reboot()
    async with open_bench(machine) as bench:
        await bench.until("VMMRunning", "first")
        await anyio.sleep(5)
        assert spawned(machine) == ["first"]
        assert message(bench, "plain") == (
            "waits for the startDelay of VM first (priority 10), position 1"
        )
        assert message(bench, "low") == (
            "waits for the startDelay of VM first (priority 10), position 2"
        )
        why = await bench.engine.why.why(api.ObjectRef(kind="VirtualMachine", name="low"))
        assert "waits for the startDelay of VM first" in why.verdict
        await anyio.sleep(40)
        assert spawned(machine) == ["first", "plain", "low"]
        assert "HostReboot" in bench.get("VirtualMachine", "plain").status.last_stop
        assert bench.get("VirtualMachine", "plain").status.crash_loop_since == ""
        assert bench.process("halted") is None
    assert not machine.violations


@simulated
async def test_a_vm_that_hangs_holds_up_the_others_no_longer_than_said() -> None:
    machine = machine_of()
    await made(machine, bare("hangs", startPriority=10), bare("later"))
    machine.reboot()
    real = SimVmms.prepare

    async def prepare(self: SimVmms, handle: Any) -> None:
        if handle.name == "hangs":
            await anyio.sleep(60)
        await real(self, handle)

    with patch.object(SimVmms, "prepare", prepare):
        started_at = anyio.current_time()
        async with open_bench(machine) as bench:
            with patch.object(SimVmms, "boot", _never):
                await bench.until("phase=Pending", "later", timeout_s=10)
                await anyio.sleep(START_WAIT_S - 20)
                assert "later" not in spawned(machine)
                assert bench.condition("VMMRunning", "later") == ("False", "StartOrder")
                await anyio.sleep(30)
                assert "later" in spawned(machine)
                assert anyio.current_time() - started_at < START_WAIT_S + 20


async def _never(self: SimVmms, handle: Any) -> None:
    from chv.common.errors import Unavailable

    raise Unavailable("it does not boot")


@simulated
async def test_a_persons_start_does_not_wait_for_priorities() -> None:
    machine = machine_of()
    await made(machine, bare("first", startPriority=10), bare("web"))
    machine.reboot()
    with patch.object(SimVmms, "boot", _only("web")):
        async with open_bench(machine) as bench:
            await anyio.sleep(5)
            assert bench.condition("VMMRunning", "web") == ("False", "StartOrder")
            operation = await bench.final((await bench.act("start", "web")).id)
            assert operation.state is api.OperationState.SUCCEEDED
            assert bench.condition("VMMRunning", "web") == ("True", "Running")


def _only(name: str) -> Any:
    real = SimVmms.boot

    async def boot(self: SimVmms, handle: Any) -> None:
        if handle.name != name:
            await _never(self, handle)
        await real(self, handle)

    return boot


@simulated
async def test_a_new_agent_starts_nothing_that_runs_and_waits_for_nobody_who_does() -> None:
    machine = machine_of()
    await made(machine, bare("first", startPriority=10), bare("web"))
    async with open_bench(machine) as bench:
        web = bench.process("web")
        assert web is not None
        machine.host.die(web)
        await anyio.sleep(5)
        assert bench.process("web") is not None
    assert sorted(spawned(machine)) == ["first", "web", "web"]


@simulated
async def test_a_drain_stops_the_lowest_first_and_a_resume_starts_the_highest_first() -> None:
    machine = machine_of()
    stopped: list[str] = []
    async with open_bench(machine) as bench:
        reply = await bench.apply(
            image(), *(bare(f"vm{n}", startPriority=n, shutdownTimeout="60s") for n in range(3))
        )
        for result in reply.results:
            await bench.final(result.operation_id)
        real, names = (
            machine.host.die,
            {bench.engine.vm_uid(f"vm{n}", "default"): f"vm{n}" for n in range(3)},
        )

        def die(process: Any) -> None:
            stopped.append(names[process.vm_uid])
            real(process)

        with patch.object(machine.host, "die", die):
            await bench.engine.node.act(ActOnNode(verb=NodeVerb.DRAIN, requester="test"))
            await anyio.sleep(1)
            assert message(bench, "vm2").startswith("waits until VM vm0 (priority 0) has stopped")
            await anyio.sleep(200)
        assert stopped == ["vm0", "vm1", "vm2"]
        await bench.engine.node.act(ActOnNode(verb=NodeVerb.RESUME, requester="test"))
        machine.gate.follow(machine.store.tables.node)
        await bench.until("VMMRunning", "vm0")
    assert spawned(machine)[3:] == ["vm2", "vm1", "vm0"]


@simulated
async def test_the_delay_is_refused_where_it_is_too_long() -> None:
    async with open_bench() as bench:
        with pytest.raises(InvalidArgument, match="out of range"):
            await bench.apply(bare("web", startDelay="2h"))


# --- a boot of the host


@pytest.mark.parametrize(
    ("strategy", "runs"),
    [("Always", True), ("RerunOnFailure", True), ("Manual", False)],
)
def test_what_ran_when_the_host_went_down(strategy: str, runs: bool) -> None:
    @simulated
    async def check() -> None:
        machine = machine_of()
        async with open_bench(machine) as bench:
            await bench.apply(*everything(runStrategy=strategy))
            if strategy == "Manual":
                await bench.act("start")
            seen = await bench.until("phase=Running")
        address = seen.status.interfaces[0].address
        machine.reboot()
        async with open_bench(machine) as bench:
            await anyio.sleep(60)
            assert (bench.process() is not None) is runs
            seen = bench.get("VirtualMachine", "web")
            assert "HostReboot" in seen.status.last_stop
            assert seen.status.phase == ("Running" if runs else "Stopped")
            assert seen.status.restarts == int(runs)
            if runs:
                assert seen.status.interfaces[0].address == address
        assert machine.host.spawned == 1 + runs
        assert not machine.violations

    check()


@simulated
async def test_a_guest_that_had_powered_off_stays_off_over_a_boot() -> None:
    machine = machine_of()
    async with open_bench(machine) as bench:
        await bench.apply(image(), bare("web"))
        await bench.until("phase=Running")
        process = bench.process()
        assert process is not None
        machine.host.power_off(process)
        await bench.until("phase=Stopped")
    machine.reboot()
    async with open_bench(machine) as bench:
        await anyio.sleep(60)
        assert bench.process() is None
        assert "GuestShutdown" in bench.get("VirtualMachine", "web").status.last_stop


@simulated
async def test_a_record_of_another_boot_is_no_live_process() -> None:
    """Pids begin anew: what has the pid of a recorded VMM is somebody else's."""
    machine = machine_of()
    await made(machine, bare("a"), bare("b"))
    before = {p.vm_uid: p.pid for p in machine.host.processes.values()}
    machine.reboot()
    async with open_bench(machine) as bench:
        await anyio.sleep(20)
        after = {p.vm_uid: p.pid for p in machine.host.processes.values()}
        assert sorted(before.values()) == sorted(after.values())
        await bench.final((await bench.act("stop", "a", force=True)).id)
        assert bench.process("a") is None
        assert bench.process("b") is not None
    assert not machine.violations


@pytest.mark.parametrize("jump_s", [0.0, TEN_YEARS_S, -TEN_YEARS_S])
def test_backoff_goes_on_under_another_agent_whatever_the_wall_clock_does(jump_s: float) -> None:
    @simulated
    async def check() -> None:
        machine = machine_of(restarts_max=4, restart_window_s=600.0)
        await made(machine, bare("web"))
        spawns = machine.host.spawned
        for crash in range(1, 6):
            async with open_bench(machine) as bench:
                await bench.until("VMMRunning")
                process = bench.process()
                assert process is not None
                machine.host.die(process)
                await anyio.sleep(0.5)
                seen = bench.get("VirtualMachine", "web").status
                if 3 <= crash <= 4:  # the back-off is longer than that
                    assert bench.condition("VMMRunning") == ("False", "BackOff")
                    assert seen.next_restart_at and seen.crash_loop_since
                    loop = f"crashes since {seen.crash_loop_since}: {crash}"
                    assert loop in message(bench, "web")
            machine.clock.wall_s += jump_s  # the agent is dead, and the clock is set
        async with open_bench(machine) as bench:
            await anyio.sleep(100)
            assert bench.condition("VMMRunning") == ("False", "GivenUp")
        assert machine.host.spawned - spawns == 4
        assert not machine.violations

    check()


@simulated
async def test_a_start_by_a_person_waits_for_no_backoff_and_forgives_what_was_given_up() -> None:
    machine = machine_of(restarts_max=2, restart_window_s=600.0)
    await made(machine, bare("web"))
    async with open_bench(machine) as bench:
        for _ in range(3):
            await bench.until("VMMRunning")
            process = bench.process()
            assert process is not None
            machine.host.die(process)
            await anyio.sleep(5)
        assert bench.condition("VMMRunning") == ("False", "GivenUp")
        await bench.final((await bench.act("start")).id)
        process = bench.process()
        assert process is not None
        machine.host.die(process)  # the first of a new count
        await bench.until("VMMRunning")


@pytest.mark.parametrize("until_boot", [True, False])
def test_a_drain_lasts_until_the_host_boots_where_that_was_asked_for(until_boot: bool) -> None:
    @simulated
    async def check() -> None:
        machine = machine_of()
        await made(machine, bare("web"))
        wish = ActOnNode(verb=NodeVerb.DRAIN, requester="test", until_boot=until_boot)
        async with open_bench(machine) as bench:
            operation_id, _ = await bench.engine.node.act(wish)
            await bench.final(operation_id)
        async with open_bench(machine) as bench:  # another agent is no boot
            await anyio.sleep(40)
            assert bench.process("web") is None
        machine.reboot()
        async with open_bench(machine) as bench:
            await anyio.sleep(40)
            assert (bench.process("web") is not None) is until_boot
            assert bench.engine.node.record.holds_vms is not until_boot

    check()


@simulated
async def test_a_drain_that_the_power_cut_short_has_ended_with_the_boot() -> None:
    machine = machine_of()
    await made(machine, bare("web", shutdownTimeout="1m"))
    for process in machine.host.processes.values():
        process.obedient = False
    wish = ActOnNode(verb=NodeVerb.DRAIN, requester="test", until_boot=True)
    async with open_bench(machine) as bench:
        operation_id, _ = await bench.engine.node.act(wish)
        await anyio.sleep(5)
        assert "until the host boots" in bench.engine.node.record.words
    machine.reboot()
    async with open_bench(machine) as bench:
        operation = await bench.final(operation_id)
        assert (operation.state, operation.message) == ("Succeeded", "the host has booted")
        await anyio.sleep(20)
        assert bench.condition("VMMRunning") == ("True", "Running")


# --- the stop ladder over the death of its agent


@pytest.mark.parametrize("killed_s", [1.0, 4.0, 9.0, 18.5, 20.2])
def test_the_deadline_of_a_stop_does_not_begin_anew(killed_s: float) -> None:
    @simulated
    async def check() -> None:
        machine = machine_of()
        async with open_bench(machine) as bench:
            await bench.apply(image(), bare("web", shutdownTimeout="20s"))
            await bench.until("phase=Running")
            process = bench.process()
            assert process is not None
            process.obedient = False
            await bench.act("stop")
            begun = anyio.current_time()
            await anyio.sleep(killed_s)
        async with open_bench(machine) as bench:
            while process.alive and anyio.current_time() - begun < 60:  # noqa: ASYNC110
                await anyio.sleep(0.1)
            took_s = anyio.current_time() - begun
            assert 19.5 <= took_s <= 21.0
            await bench.until("phase=Stopped")
            assert "by kill" in bench.get("VirtualMachine", "web").status.last_stop

    check()


@simulated
async def test_a_paused_vm_is_let_run_to_be_asked() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), vm("web", disks=[], interfaces=[]))
        await bench.until("phase=Running")
        process = bench.process()
        assert process is not None
        process.obedient = True
        await bench.final((await bench.act("pause")).id)
        operation = await bench.final((await bench.act("stop")).id)
        assert operation.message == "stopped by acpi"
