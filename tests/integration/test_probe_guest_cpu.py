"""The instructions that stock kernels need, tried by the probe guest: on QEMU, on the real VMM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from chv.probe.events import Boot, Cpu, CpuDone, CpuTry, Fault
from chv.probe.image import CpuPlan, ProbeCommand
from tests import probe_rig as rig
from tests.helpers import wait_until


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


async def test_qemus_processor_knows_all_that_it_promises(stack: ExitStack, tmp_path: Path) -> None:
    machine = await rig.qemu(stack, tmp_path, ProbeCommand(cpu=CpuPlan()))
    done = await machine.serial.wait(CpuDone)
    assert done.failed == 0, machine.serial.all(Cpu)
    tried = {event.insn for event in machine.serial.all(CpuTry)}
    assert {"cmpxchg16b", "popcnt", "xrstor", "clac", "int3", "iret", "sysret"} <= tried
    assert len(tried) == done.ok


async def test_an_instruction_that_the_processor_lacks_is_a_line(
    stack: ExitStack, tmp_path: Path
) -> None:
    command = ProbeCommand(cpu=CpuPlan(only=("popcnt", "rdtscp", "iret")))
    machine = await rig.qemu(stack, tmp_path, command, "-cpu", "qemu64,-popcnt")
    done = await machine.serial.wait(CpuDone)
    assert done.absent >= 1
    assert {event.insn: event.result for event in machine.serial.all(Cpu)}["popcnt"] == "absent"


async def test_a_fatal_instruction_is_the_last_word_and_can_be_gone_round(
    stack: ExitStack, tmp_path: Path
) -> None:
    fatal: list[str] = []
    for attempt in range(60):
        home = tmp_path / str(attempt)
        home.mkdir()
        with ExitStack() as each:
            command = ProbeCommand(cpu=CpuPlan(skip=tuple(fatal)))
            machine = await rig.cloud_hypervisor(each, home, command)
            if (culprit := await judged(machine)) is None:
                return
            fatal.append(culprit)
    raise AssertionError(f"no end of fatal instructions: {fatal}")


async def judged(machine: rig.Machine) -> str | None:
    """Return the instruction after which nothing came, or None when all were tried."""

    def ended() -> bool:
        dead = machine.process.poll() is not None
        return dead or bool(machine.serial.all(CpuDone) or machine.serial.all(Fault)) or closed()

    def closed() -> bool:
        return bool(machine.serial.all(Boot)[1:]) or machine.serial.closed

    await wait_until(ended, timeout_s=15, what="the instructions")
    if machine.serial.all(CpuDone):
        return None
    return machine.serial.all(CpuTry)[-1].insn
