"""The fake's own promises beyond the behaviour suite: faults, time, command line, start."""

from __future__ import annotations

import sys
from pathlib import Path

import anyio
import msgspec
import pytest

from chv.common.errors import (
    Conflict,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    OutcomeUnknown,
    Unavailable,
    Unsupported,
)
from chv.common.process import run
from chv.vmm import fake_driver, in_process
from chv.vmm.driver import DiskConfig, NicConfig, Sizes, VmmConfig, VmmState
from chv.vmm.fake_driver import FakeDriver
from chv.vmm.fake_spec import parse_argv, parse_behaviour
from chv.vmm.fake_state import READY_LINE, Behaviour, FakeVm, Fault
from chv.vmm.in_process import InProcessVmms

RUNTIME = Path("/run/x")
CONFIG = VmmConfig(
    vm_id="3f2504e0-4f89-41d3-9a0c-0305e82c3301",
    uuid="3f2504e0-4f89-41d3-9a0c-0305e82c3301",
    name="hello",
    worker_id="chv:abc123:vmm:3f2504e04f:0000beef",
    cpus=1,
    memory_bytes=1 << 20,
    kernel="/k",
    disks=(DiskConfig(id="root", kind="vhost-user-blk", path="/r.sock"),),
    nics=(NicConfig(id="net0", mac="52:54:00:00:00:01"),),
    runtime_dir=str(RUNTIME),
)


class Hand:
    """A clock that a test turns."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def state(vm: FakeVm) -> VmmState:
    return vm.state


def started(behaviour: Behaviour | None = None) -> InProcessVmms:
    vmms = InProcessVmms(behaviour)
    launch = vmms.launch(CONFIG)
    vmms.start(launch.argv, launch.environment)
    return vmms


def test_what_the_guest_does_later_happens_when_it_is_due_and_not_before() -> None:
    clock = Hand()
    vm = FakeVm(Behaviour(boot_s=2.0, button_s=3.0), [], clock)
    vm.boot()
    clock.now = 1.9
    vm.advance()
    assert READY_LINE not in vm.output
    clock.now = 2.0
    vm.advance()
    assert READY_LINE in vm.output
    vm.power_button()
    assert vm.next_due() == 5.0
    assert state(vm) is VmmState.RUNNING
    clock.now = 5.0
    assert state(vm) is VmmState.SHUTDOWN


def test_a_paused_guest_does_nothing_until_it_is_resumed() -> None:
    clock = Hand()
    vm = FakeVm(Behaviour(button_s=1.0), [], clock)
    vm.boot()
    vm.power_button()
    vm.pause()
    clock.now = 10.0
    assert state(vm) is VmmState.PAUSED
    vm.resume()
    assert state(vm) is VmmState.SHUTDOWN


def test_the_command_line_is_read_back_as_it_was_written() -> None:
    launch = FakeDriver().launch(CONFIG)
    parsed = parse_argv(launch.argv)
    assert parsed.worker_id == CONFIG.worker_id
    assert parsed.runtime_dir == CONFIG.runtime_dir
    assert parsed.parts.disks == CONFIG.disks
    assert parsed.parts.files == ("/k",)
    assert parsed.parts.nic_fds == launch.nic_fds == {"net0": (10,)}


def test_the_behaviour_travels_in_the_environment() -> None:
    driver = FakeDriver.from_environment({"CHV_FAKE": '{"boot_s": 1.5}'})
    assert driver.behaviour == Behaviour(boot_s=1.5)
    assert parse_behaviour(driver.launch(CONFIG).environment["CHV_FAKE"]) == driver.behaviour
    with pytest.raises(InvalidArgument, match="nonsense"):
        FakeDriver.from_environment({"CHV_FAKE": '{"nonsense": 1}'})


async def test_a_planted_error_is_raised_once_and_changes_nothing() -> None:
    vmms = started()
    await vmms.plant(RUNTIME, Fault(command="boot", kind="error", code="UNAVAILABLE"))
    with pytest.raises(Unavailable):
        await vmms.boot(RUNTIME)
    assert (await vmms.observe(RUNTIME)).state is VmmState.CREATED
    await vmms.boot(RUNTIME)
    assert (await vmms.observe(RUNTIME)).state is VmmState.RUNNING


@pytest.mark.parametrize(
    ("kind", "expected"), [("drop", VmmState.CREATED), ("apply_drop", VmmState.RUNNING)]
)
async def test_a_lost_answer_is_told_as_unknown_whether_it_was_applied_or_not(
    kind: str, expected: VmmState
) -> None:
    vmms = started()
    await vmms.plant(RUNTIME, Fault(command="boot", kind=kind))  # type: ignore[arg-type]
    with pytest.raises(OutcomeUnknown):
        await vmms.boot(RUNTIME)
    assert (await vmms.observe(RUNTIME)).state is expected


async def test_a_vmm_that_exits_on_a_command_is_gone() -> None:
    vmms = started(Behaviour(faults=(Fault(command="pause", kind="exit"),)))
    await vmms.boot(RUNTIME)
    with pytest.raises(OutcomeUnknown):
        await vmms.pause(RUNTIME)
    assert vmms.running() == {}
    with pytest.raises(Unavailable):
        await vmms.observe(RUNTIME)


async def test_a_hanging_call_ends_by_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process, "CALL_S_MAX", 0.05)
    vmms = started()
    await vmms.plant(RUNTIME, Fault(command="observe", kind="hang"))
    with pytest.raises(DeadlineExceeded):
        await vmms.observe(RUNTIME)


async def test_a_vmm_killed_while_it_is_asked_answers_no_more() -> None:
    vmms = started()
    vmms.at(RUNTIME).freeze()

    async def ask() -> None:
        with pytest.raises(OutcomeUnknown):
            await vmms.boot(RUNTIME)

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await anyio.wait_all_tasks_blocked()
        assert vmms.kill(CONFIG.worker_id)
    assert not vmms.kill(CONFIG.worker_id)
    await vmms.wait_gone(CONFIG.worker_id)


async def test_one_worker_id_runs_once() -> None:
    vmms = started()
    with pytest.raises(Conflict):
        vmms.start(vmms.launch(CONFIG).argv)


async def test_an_unknown_guest_action_is_refused() -> None:
    vmms = started()
    await vmms.boot(RUNTIME)
    with pytest.raises(InvalidArgument, match="dance"):
        await vmms.guest(RUNTIME, "dance")


async def test_an_error_code_that_nobody_knows_is_a_bug_of_the_fake() -> None:
    vmms = started(Behaviour(faults=(Fault(command="boot", kind="error", code="WHAT"),)))
    with pytest.raises(Internal):
        await vmms.boot(RUNTIME)


async def test_a_fake_process_whose_disk_nobody_serves_ends_with_the_reason() -> None:
    launch = FakeDriver().launch(
        VmmConfig(
            vm_id=CONFIG.vm_id,
            uuid=CONFIG.uuid,
            name="x",
            worker_id=CONFIG.worker_id,
            cpus=1,
            memory_bytes=1,
            disks=CONFIG.disks,
            runtime_dir="/nonexistent",
        )
    )
    ended = await run(list(launch.argv), timeout_s=20, check=False)
    assert ended.returncode == 1
    assert b"nothing listens on /r.sock" in ended.stderr


async def test_a_fake_process_without_its_options_says_how_to_call_it() -> None:
    ended = await run([sys.executable, "-m", "chv.vmm.fake"], timeout_s=20, check=False)
    assert ended.returncode == 1
    assert b"--id" in ended.stderr


ROOMY = msgspec.structs.replace(CONFIG, cpus_max=4, memory_max_bytes=4 << 20)


def running(config: VmmConfig = ROOMY, vmms: InProcessVmms | None = None) -> InProcessVmms:
    vmms = vmms or InProcessVmms()
    vmms.start(vmms.launch(config).argv)
    return vmms


async def test_a_guest_that_clings_keeps_its_cpus_until_it_lets_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fake_driver, "REMOVE_S_MAX", 0.1)
    vmms = running()
    await vmms.boot(RUNTIME)
    await vmms.set_cpus(RUNTIME, 4)
    await vmms.guest(RUNTIME, "cling")
    with pytest.raises(DeadlineExceeded, match="CPUs"):
        await vmms.set_cpus(RUNTIME, 1)
    assert (await vmms.sizes(RUNTIME)).cpus == 4
    await vmms.guest(RUNTIME, "let_go")
    assert (await vmms.sizes(RUNTIME)).cpus == 1


async def test_sizes_are_those_of_the_start_and_change_no_further_than_they_may() -> None:
    vmms = running()
    assert await vmms.sizes(RUNTIME) == Sizes(
        cpus=1, cpus_max=4, memory_bytes=1 << 20, memory_max_bytes=4 << 20
    )
    with pytest.raises(FailedPrecondition, match="created"):
        await vmms.set_cpus(RUNTIME, 2)
    await vmms.boot(RUNTIME)
    await vmms.set_memory(RUNTIME, 3 << 20)
    with pytest.raises(Unsupported, match="away"):
        await vmms.set_memory(RUNTIME, 2 << 20)
    with pytest.raises(InvalidArgument, match="more than"):
        await vmms.set_memory(RUNTIME, 5 << 20)
    assert (await vmms.sizes(RUNTIME)).memory_bytes == 3 << 20


async def test_a_fake_that_starts_from_a_snapshot_is_empty_until_it_is_made() -> None:
    vmms = running()
    await vmms.boot(RUNTIME)
    await vmms.set_cpus(RUNTIME, 3)
    await vmms.pause(RUNTIME)
    await vmms.snapshot(RUNTIME, Path("/saved"))
    vmms.kill(ROOMY.worker_id)
    config = msgspec.structs.replace(ROOMY, restore_dir="/saved")
    running(config, vmms)
    assert (await vmms.observe(RUNTIME)).state is VmmState.EMPTY
    for _ in range(2):
        await vmms.create(RUNTIME, config, {})
        assert (await vmms.observe(RUNTIME)).state is VmmState.PAUSED
    assert (await vmms.sizes(RUNTIME)).cpus == 3
    elsewhere = msgspec.structs.replace(config, restore_dir="/nowhere")
    vmms.kill(ROOMY.worker_id)
    running(elsewhere, vmms)
    with pytest.raises(InvalidArgument, match="no snapshot"):
        await vmms.create(RUNTIME, elsewhere, {})


async def test_reboots_are_counted_and_resets_from_outside_are_not() -> None:
    vmms = running()
    await vmms.boot(RUNTIME)
    await vmms.guest(RUNTIME, "reboot")
    await vmms.reset(RUNTIME)
    assert (await vmms.observe(RUNTIME)).reboots == 1
    assert await vmms.resets(RUNTIME) == 2
