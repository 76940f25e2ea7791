"""Reboots by the guest: counted, dated, no resets of ours, each a boot of its own. And panics."""

from __future__ import annotations

from unittest.mock import patch

import anyio
import pytest

from chv.agent.vm.reboots import Reboots
from chv.common.wire.resources import VmmStatus
from chv.vmm.driver import VmmObservation, VmmState
from chv.vmm.qemu.resets import FIRMWARE_S, Resets
from tests.sim.bench import Bench, everything, open_bench
from tests.sim.virtual import simulated
from tests.sim.vmms import SimGuests, SimProcess
from tests.unit.agent.test_vm_life import live, started


def answer(reboots: int, *, remembers: bool = True, at_s: float = 0.0) -> VmmObservation:
    return VmmObservation(
        state=VmmState.RUNNING,
        reboots=reboots,
        resets=reboots,
        reset_at_s=at_s,
        remembers=remembers,
    )


def test_a_monitor_that_remembers_tells_of_reboots_while_no_agent_was_there() -> None:
    shown = VmmStatus(guest_reboots=2, guest_rebooted_at="t2")
    known = Reboots()
    assert known.see("w", answer(3), shown, "t3")
    assert (known.count, known.at) == (3, "t3")
    assert not known.see("w", answer(3), shown, "t4")
    assert (known.count, known.at) == (3, "t3")


def test_one_that_forgets_is_counted_on_from_what_was_shown() -> None:
    shown = VmmStatus(guest_reboots=2, guest_rebooted_at="t2")
    known = Reboots()
    assert not known.see("w", answer(0, remembers=False), shown, "t3")
    assert (known.count, known.at) == (2, "t2")
    assert known.see("w", answer(1, remembers=False, at_s=7.0), shown, "t4")
    assert (known.count, known.at, known.reset_at_s) == (3, "t4", 7.0)
    assert not known.see("w", answer(0, remembers=False), shown, "t5")  # connected anew
    assert known.see("w", answer(1, remembers=False), shown, "t6")
    assert known.count == 4


def test_another_vmm_begins_at_nothing() -> None:
    known = Reboots()
    known.see("w", answer(3), None, "t1")
    assert not known.see("v", answer(0), None, "t2")
    assert (known.count, known.at) == (0, "")


@pytest.mark.parametrize(
    ("told", "reboots", "announced"),
    [
        ([(100.0, True)], 1, 1),
        ([(100.0, True), (100.5, True), (100.6, True)], 1, 3),  # firmware resets once more
        ([(100.0, False), (100.4, True)], 0, 1),  # after a reset of ours, too
        ([(100.0, True), (100.0 + FIRMWARE_S, True)], 2, 2),
        ([(100.0, True), (120.0, True), (131.0, True)], 2, 3),
        ([(100.0, True), (50.0, True)], 2, 2),  # the clock fell back
    ],
)
def test_what_firmware_does_after_a_reset_is_no_reboot(
    told: list[tuple[float, bool]], reboots: int, announced: int
) -> None:
    resets = Resets()
    for at_s, by_guest in told:
        resets.told(at_s, by_guest=by_guest)
    assert (resets.reboots, resets.announced, resets.at_s) == (reboots, announced, told[-1][0])


def reboot(bench: Bench, process: SimProcess) -> None:
    process.reboots += 1
    process.ran_at = bench.machine.host.now()


async def no_serial(*_: object) -> str:
    return ""


@simulated
async def test_a_reboot_of_the_guest_is_counted_and_the_guest_has_to_boot_again() -> None:
    with patch.object(SimGuests, "serial_evidence", no_serial):
        async with open_bench() as bench:
            process = await started(bench)
            await bench.until("SSHReady")
            before = bench.get("VirtualMachine", "web").status
            assert before.vmm.guest_reboots == 0
            with patch.object(SimGuests, "BOOT_S", 60.0):
                reboot(bench, process)
                await bench.until("GuestBooted", status="False", timeout_s=15)
                shown = bench.get("VirtualMachine", "web").status
                assert shown.vmm.guest_reboots == 1
                assert shown.vmm.guest_rebooted_at > before.vmm.started_at
                assert shown.phase == "Running"
                assert bench.condition("SSHReady") == ("False", "NoBanner")
                await bench.until("GuestBooted", timeout_s=90)
            assert live(bench).pid == process.pid
            assert bench.get("VirtualMachine", "web").status.restarts == 0


@simulated
async def test_a_reset_of_ours_is_no_reboot_and_the_count_outlives_the_agent() -> None:
    async with open_bench() as bench:
        machine, process = bench.machine, await started(bench)
        await bench.until("SSHReady")
        await bench.final((await bench.act("reset")).id)
        await anyio.sleep(10)
        assert bench.get("VirtualMachine", "web").status.vmm.guest_reboots == 0
        reboot(bench, process)
        await anyio.sleep(10)
        assert bench.get("VirtualMachine", "web").status.vmm.guest_reboots == 1
    process.reboots += 1
    async with open_bench(machine) as bench:
        await anyio.sleep(10)
        assert bench.get("VirtualMachine", "web").status.vmm.guest_reboots == 2
        await bench.final((await bench.act("restart")).id)
        await anyio.sleep(5)
        assert bench.get("VirtualMachine", "web").status.vmm.guest_reboots == 0


@simulated
async def test_a_panic_is_a_crash_that_is_told_and_restarted_ever_later() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        for crashes in (1, 2):
            process.state = VmmState.PANICKED
            await anyio.sleep(6)
            status = bench.get("VirtualMachine", "web").status
            assert "GuestPanicked" in status.last_stop
            assert (status.phase, status.restarts) == ("Running", crashes)
            assert live(bench).pid != process.pid
            process = live(bench)
        process.state = VmmState.PANICKED
        await bench.until("VMMRunning", status="False")
        assert bench.condition("VMMRunning")[1] in ("BackOff", "Starting", "Panicked")


@simulated
async def test_a_panic_of_a_vm_that_is_started_by_hand_is_not_restarted() -> None:
    async with open_bench() as bench:
        for result in (await bench.apply(*everything(runStrategy="Manual"))).results:
            await bench.final(result.operation_id)
        await bench.final((await bench.act("start")).id)
        process = live(bench)
        process.state = VmmState.PANICKED
        await anyio.sleep(60)
        assert bench.process() is None
        status = bench.get("VirtualMachine", "web").status
        assert "GuestPanicked" in status.last_stop
        assert (status.phase, status.restarts) == ("Stopped", 0)
