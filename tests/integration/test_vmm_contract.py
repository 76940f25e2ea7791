"""One behaviour suite for every VMM driver, run by the same assertions against each."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import msgspec
import pytest

from chv.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    OutcomeUnknown,
    Unavailable,
    Unsupported,
)
from chv.vmm import fake_driver, in_process, spec
from chv.vmm.cloud_hypervisor import api, devices
from chv.vmm.driver import DiskConfig, Feature, NicConfig, VmmState
from chv.vmm.fake_state import Behaviour
from chv.vmm.qemu import guest_agent, hotplug, qmp
from tests.helpers import taps_of, wait_until
from tests.vmm_rigs import KINDS, PROCESSES, TUNGETIFF, ProcessRig, Rig, open_rig, open_tap


@pytest.fixture(params=KINDS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with open_rig(request.param) as made:
        yield made


@pytest.fixture
async def running(rig: Rig) -> Rig:
    """A rig whose guest has booted."""
    await rig.launch()
    await rig.driver.boot(rig.runtime_dir)
    await rig.ready()
    return rig


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> float:
    """Let drivers give up sooner than in production."""
    for module, name in ((qmp, "COMMAND_S_MAX"), (fake_driver, "CALL_S_MAX")):
        monkeypatch.setattr(module, name, 0.5)
    for name in ("READ_S_MAX", "CHANGE_S_MAX"):
        monkeypatch.setattr(api, name, 0.5)
    monkeypatch.setattr(in_process, "CALL_S_MAX", 0.5)
    return 0.5


async def state(rig: Rig) -> VmmState:
    return (await rig.driver.observe(rig.runtime_dir)).state


async def becomes(rig: Rig, expected: VmmState) -> None:
    async def there() -> bool:
        return await state(rig) is expected

    await wait_until(there, timeout_s=10, what=f"state {expected}")


async def test_a_started_vmm_is_created_and_its_guest_runs_only_after_boot(rig: Rig) -> None:
    await rig.launch()
    assert await state(rig) is VmmState.CREATED
    await rig.driver.boot(rig.runtime_dir)
    assert await state(rig) is VmmState.RUNNING
    await rig.ready()


async def test_an_observation_says_where_it_comes_from(running: Rig) -> None:
    seen = await running.driver.observe(running.runtime_dir)
    assert "running" in seen.evidence
    assert seen.version


async def test_boot_of_a_running_vm_has_no_effect(running: Rig) -> None:
    await running.driver.boot(running.runtime_dir)
    assert await state(running) is VmmState.RUNNING


async def test_pause_and_resume_take_effect_and_may_be_repeated(running: Rig) -> None:
    for _ in range(2):
        await running.driver.pause(running.runtime_dir)
        assert await state(running) is VmmState.PAUSED
    for _ in range(2):
        await running.driver.resume(running.runtime_dir)
        assert await state(running) is VmmState.RUNNING


async def test_what_the_state_does_not_allow_is_refused_and_changes_nothing(rig: Rig) -> None:
    await rig.launch()
    with pytest.raises(FailedPrecondition, match="created"):
        await rig.driver.pause(rig.runtime_dir)
    with pytest.raises(FailedPrecondition, match="created"):
        await rig.driver.power_button(rig.runtime_dir)
    assert await state(rig) is VmmState.CREATED


async def test_boot_of_a_paused_vm_is_refused(running: Rig) -> None:
    await running.driver.pause(running.runtime_dir)
    with pytest.raises(FailedPrecondition, match="paused"):
        await running.driver.boot(running.runtime_dir)
    assert await state(running) is VmmState.PAUSED


async def test_reset_of_a_running_vm_boots_the_guest_again(running: Rig) -> None:
    await running.driver.reset(running.runtime_dir)
    assert await state(running) is VmmState.RUNNING
    await running.ready()


async def test_reset_of_a_paused_vm_leaves_it_created_until_resume(running: Rig) -> None:
    await running.driver.pause(running.runtime_dir)
    await running.driver.reset(running.runtime_dir)
    assert await state(running) is VmmState.CREATED
    await running.driver.resume(running.runtime_dir)
    assert await state(running) is VmmState.RUNNING
    await running.ready()


async def test_the_power_button_shuts_a_guest_down_and_the_vmm_stays(running: Rig) -> None:
    await running.driver.power_button(running.runtime_dir)
    await becomes(running, VmmState.SHUTDOWN)
    seen = await running.driver.observe(running.runtime_dir)
    assert seen.reason == "guest-shutdown"
    await running.driver.power_button(running.runtime_dir)
    assert await state(running) is VmmState.SHUTDOWN


async def test_a_guest_that_ignores_the_power_button_goes_on(running: Rig) -> None:
    await running.guest("ignore_button")
    await running.driver.power_button(running.runtime_dir)
    await running.guest("reboot")  # the next thing it does: by then it has seen the button
    await running.ready()
    assert await state(running) is VmmState.RUNNING


async def test_a_guest_that_powered_off_runs_again_after_reset_and_boot(running: Rig) -> None:
    await running.guest("power_off")
    await becomes(running, VmmState.SHUTDOWN)
    with pytest.raises(FailedPrecondition, match="shutdown"):
        await running.driver.boot(running.runtime_dir)
    with pytest.raises(FailedPrecondition, match="shutdown"):
        await running.driver.resume(running.runtime_dir)
    await running.driver.reset(running.runtime_dir)
    assert await state(running) is VmmState.CREATED
    await running.driver.boot(running.runtime_dir)
    await running.ready()


async def test_a_panic_is_told_and_ends_with_reset(running: Rig) -> None:
    await running.guest("panic")
    await becomes(running, VmmState.PANICKED)
    await running.driver.reset(running.runtime_dir)
    await running.driver.boot(running.runtime_dir)
    await running.ready()


async def test_a_guest_that_reboots_itself_stays_running(running: Rig) -> None:
    await running.guest("reboot")
    await running.ready()
    assert await state(running) is VmmState.RUNNING


async def test_quit_ends_the_vmm_and_then_nobody_answers(running: Rig) -> None:
    await running.driver.quit(running.runtime_dir)
    await running.gone()
    with pytest.raises(Unavailable):
        await running.driver.observe(running.runtime_dir)
    with pytest.raises(Unavailable):
        await running.driver.quit(running.runtime_dir)


async def test_a_killed_vmm_is_unavailable_for_reads_and_changes(running: Rig) -> None:
    running.send(signal.SIGKILL)
    await running.gone()
    with anyio.fail_after(2):
        with pytest.raises(Unavailable):
            await running.driver.observe(running.runtime_dir)
        with pytest.raises(Unavailable):
            await running.driver.pause(running.runtime_dir)


async def test_a_driver_whose_connection_was_closed_connects_again(running: Rig) -> None:
    await running.driver.close(running.runtime_dir)
    await running.driver.close(running.runtime_dir)
    assert await state(running) is VmmState.RUNNING


async def test_a_second_driver_takes_over_when_the_first_is_gone(
    running: Rig, short_deadline: float
) -> None:
    second = running.another_driver()
    try:
        seen = await second.observe(running.runtime_dir)
    except (Unavailable, DeadlineExceeded):
        pass  # QEMU serves one client; the wait was bounded
    else:
        assert seen.state is VmmState.RUNNING
    await running.driver.close(running.runtime_dir)
    await second.pause(running.runtime_dir)
    assert (await second.observe(running.runtime_dir)).state is VmmState.PAUSED
    await second.close(running.runtime_dir)


async def test_many_calls_at_once_on_one_vm_all_get_their_answer(running: Rig) -> None:
    states: list[VmmState] = []

    async def look() -> None:
        states.append(await state(running))

    async with anyio.create_task_group() as callers:
        for _ in range(50):
            callers.start_soon(look)
    assert states == [VmmState.RUNNING] * 50


async def test_a_cancelled_call_leaves_the_monitor_usable(running: Rig) -> None:
    running.send(signal.SIGSTOP)
    with anyio.move_on_after(0.05) as scope:
        await running.driver.observe(running.runtime_dir)
    running.send(signal.SIGCONT)
    assert scope.cancelled_caught
    assert await state(running) is VmmState.RUNNING


async def test_a_hung_vmm_costs_a_bounded_time_and_recovers(
    running: Rig, short_deadline: float
) -> None:
    running.send(signal.SIGSTOP)
    try:
        with anyio.fail_after(short_deadline * 4):
            with pytest.raises((DeadlineExceeded, Unavailable)):
                await running.driver.observe(running.runtime_dir)
            with pytest.raises((DeadlineExceeded, OutcomeUnknown)):
                await running.driver.pause(running.runtime_dir)
    finally:
        running.send(signal.SIGCONT)
    await running.driver.resume(running.runtime_dir)
    assert await state(running) is VmmState.RUNNING


async def test_a_fresh_driver_meets_a_hung_vmm_in_bounded_time(
    running: Rig, short_deadline: float
) -> None:
    await running.driver.close(running.runtime_dir)
    running.send(signal.SIGSTOP)
    try:
        for _ in range(4):
            with (
                anyio.fail_after(short_deadline * 2),
                pytest.raises((DeadlineExceeded, Unavailable)),
            ):
                await running.another_driver().observe(running.runtime_dir)
    finally:
        running.send(signal.SIGCONT)

    async def answers_again() -> bool:
        with suppress(Unavailable):  # until QEMU has taken leave of those who gave up
            return await state(running) is VmmState.RUNNING
        return False

    await wait_until(answers_again)


async def test_a_vm_that_was_never_started_is_unavailable(rig: Rig) -> None:
    with pytest.raises(Unavailable):
        await rig.driver.observe(rig.runtime_dir)


async def test_a_guest_boots_again_from_a_storage_daemon_that_came_back(rig: Rig) -> None:
    await rig.launch(disk=True)
    await rig.driver.await_disks(rig.runtime_dir, ("root",))
    await rig.driver.boot(rig.runtime_dir)
    await rig.ready()

    rig.stop_backend()
    await rig.driver.halt(rig.runtime_dir)

    async def is_noticed() -> bool:  # the kernel closes a dead one's sockets when it gets to it
        return not (await rig.driver.disks(rig.runtime_dir))[0].connected

    await wait_until(is_noticed)
    with anyio.move_on_after(0.3) as too_early:
        await rig.driver.await_disks(rig.runtime_dir, ("root",))
    assert too_early.cancelled_caught

    await rig.start_backend()
    with anyio.fail_after(10):
        await rig.driver.await_disks(rig.runtime_dir, ("root",))
    await rig.driver.reset(rig.runtime_dir)
    await rig.driver.resume(rig.runtime_dir)
    await rig.ready()


async def test_waiting_for_a_disk_that_the_vm_does_not_have_is_an_error(running: Rig) -> None:
    with pytest.raises(NotFound, match="ghost"):
        await running.driver.await_disks(running.runtime_dir, ("ghost",))


async def plugged(rig: Rig) -> dict[str, bool]:
    """What is plugged, and whether it is connected, as far as the VMM can tell."""
    found = await rig.driver.disks(rig.runtime_dir)
    return {disk.id: disk.connected is not False for disk in found}


async def test_a_disk_is_plugged_under_a_running_guest_and_unplugged_again(running: Rig) -> None:
    spare = await running.spare_disk()
    assert await plugged(running) == {}
    for _ in range(2):
        await running.driver.add_disk(running.runtime_dir, spare)
        assert await plugged(running) == {"spare": True}
    await running.driver.await_disks(running.runtime_dir, ("spare",))
    for _ in range(2):
        await running.driver.remove_disk(running.runtime_dir, "spare")
        assert await plugged(running) == {}
    await running.driver.add_disk(running.runtime_dir, spare)
    assert await plugged(running) == {"spare": True}


async def test_a_disk_that_was_there_from_the_start_is_unplugged_like_any_other(rig: Rig) -> None:
    await rig.launch(disk=True)
    assert set(await plugged(rig)) == {"root"}
    with pytest.raises(FailedPrecondition, match="created"):
        await rig.driver.remove_disk(rig.runtime_dir, "root")
    await rig.driver.boot(rig.runtime_dir)
    await rig.ready()
    await rig.driver.remove_disk(rig.runtime_dir, "root")
    assert await plugged(rig) == {}
    spare = await rig.spare_disk()
    await rig.driver.add_disk(rig.runtime_dir, spare)
    assert set(await plugged(rig)) == {"spare"}


async def test_a_guest_that_clings_to_a_disk_is_waited_for_in_bounded_time(
    running: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (hotplug, fake_driver, devices):
        monkeypatch.setattr(module, "REMOVE_S_MAX", 0.5)
    await running.driver.add_disk(running.runtime_dir, await running.spare_disk())
    await running.guest("cling")
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="spare"):
            await running.driver.remove_disk(running.runtime_dir, "spare")
        assert set(await plugged(running)) == {"spare"}
    await running.guest("let_go")

    async def gone() -> bool:
        return await plugged(running) == {}

    await wait_until(gone, timeout_s=10, what="the guest to let go")
    await running.driver.remove_disk(running.runtime_dir, "spare")


async def test_no_disk_is_unplugged_from_a_guest_whose_vcpus_stand(running: Rig) -> None:
    await running.driver.add_disk(running.runtime_dir, await running.spare_disk())
    await running.driver.pause(running.runtime_dir)
    with pytest.raises(FailedPrecondition, match="paused"):
        await running.driver.remove_disk(running.runtime_dir, "spare")
    assert await plugged(running) == {"spare": True}


@pytest.mark.root
@pytest.mark.parametrize("kind", PROCESSES)
async def test_a_disk_that_nobody_serves_is_not_plugged_and_harms_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hotplug, "CONNECT_S_MAX", 0.3)
    async with open_rig(kind) as made:
        await made.launch()
        await made.driver.boot(made.runtime_dir)
        await made.ready()
        ghost = DiskConfig(id="ghost", kind="vhost-user-blk", path="/run/no-such.sock")
        for _ in range(2):
            with pytest.raises(Unavailable, match="no-such"):
                await made.driver.add_disk(made.runtime_dir, ghost)
            assert await plugged(made) == {}
        await made.driver.add_disk(made.runtime_dir, await made.spare_disk())
        assert await plugged(made) == {"spare": True}


async def test_a_reset_finishes_what_the_guest_did_not_let_go_of(
    running: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (hotplug, fake_driver, devices):
        monkeypatch.setattr(module, "REMOVE_S_MAX", 0.3)
    await running.driver.add_disk(running.runtime_dir, await running.spare_disk())
    await running.guest("cling")
    with pytest.raises(DeadlineExceeded):
        await running.driver.remove_disk(running.runtime_dir, "spare")
    await running.driver.reset(running.runtime_dir)
    assert await plugged(running) == {}


# --- NICs of a running guest

NIC = NicConfig(id="spare", mac="52:54:00:12:34:57", mtu=1400, on_port=True)


@contextmanager
def spare_tap(rig: Rig) -> Iterator[tuple[int, ...]]:
    """The descriptor of a tap where the VMM is a process, none where it is not."""
    if not isinstance(rig, ProcessRig):
        yield ()
        return
    if not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("no /dev/net/tun")
    with open_tap() as tap:
        yield (tap,)


def holds(rig: Rig, fds: tuple[int, ...]) -> bool:
    """Tell whether the VMM has this tap open, where that can be seen."""
    if not isinstance(rig, ProcessRig):
        return True
    assert rig.record is not None
    name = fcntl.ioctl(fds[0], TUNGETIFF, bytes(40))[:16].rstrip(b"\0").decode()
    return name in taps_of(rig.record.pid)


async def test_a_nic_is_plugged_under_a_running_guest_and_unplugged_again(running: Rig) -> None:
    driver, directory = running.driver, running.runtime_dir
    with spare_tap(running) as fds:
        for _ in range(2):
            for _ in range(2):
                await driver.add_nic(directory, NIC, fds)
                assert await driver.nics(directory) == ("spare",)
                await driver.drop_nic(directory, "spare")  # not of one that is plugged
            assert holds(running, fds)
            for _ in range(2):
                await driver.remove_nic(directory, "spare")
                assert await driver.nics(directory) == ()
            assert not holds(running, fds) or not isinstance(running, ProcessRig)


async def test_disks_and_nics_share_the_ports(running: Rig) -> None:
    spare = await running.spare_disk()
    with spare_tap(running) as fds:
        await running.driver.add_nic(running.runtime_dir, NIC, fds)
        await running.driver.add_disk(running.runtime_dir, spare)
        assert await running.driver.nics(running.runtime_dir) == ("spare",)
        await running.driver.remove_nic(running.runtime_dir, "spare")
        assert await plugged(running) == {"spare": True}


async def test_no_nic_is_unplugged_from_a_guest_whose_vcpus_stand_or_that_clings(
    running: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (hotplug, fake_driver, devices):
        monkeypatch.setattr(module, "REMOVE_S_MAX", 0.5)
    driver, directory = running.driver, running.runtime_dir
    with spare_tap(running) as fds:
        await driver.add_nic(directory, NIC, fds)
        await running.guest("cling")
        with pytest.raises(DeadlineExceeded, match="spare"):
            await driver.remove_nic(directory, "spare")
        assert holds(running, fds)
        await driver.pause(directory)
        with pytest.raises(FailedPrecondition, match="paused"):
            await driver.remove_nic(directory, "spare")
        assert await driver.nics(directory) == ("spare",)
        await driver.reset(directory)  # nobody is left who could cling
        await driver.remove_nic(directory, "spare")
        assert await driver.nics(directory) == ()


@pytest.mark.root
@pytest.mark.parametrize("kind", PROCESSES)
async def test_a_nic_that_was_there_from_the_start_is_unplugged_like_any_other(kind: str) -> None:
    async with open_rig(kind) as made:
        assert isinstance(made, ProcessRig)
        with spare_tap(made) as fds:
            made.nics = {"net0": fds[0]}
            await made.launch()
            await made.driver.boot(made.runtime_dir)
            await made.ready()
            assert await made.driver.nics(made.runtime_dir) == ("net0",)
            assert holds(made, fds)
            await made.driver.remove_nic(made.runtime_dir, "net0")
            assert await made.driver.nics(made.runtime_dir) == ()
            assert not holds(made, fds)


@pytest.mark.root
@pytest.mark.parametrize("steps", [1, 2])
async def test_what_a_plug_of_a_nic_that_was_cut_short_left_is_dropped(steps: int) -> None:
    async with open_rig("qemu") as made:
        assert isinstance(made, ProcessRig)
        await made.launch()
        await made.driver.boot(made.runtime_dir)
        await made.ready()
        await made.driver.close(made.runtime_dir)
        with spare_tap(made) as fds:
            monitor = qmp.Monitor(spec.monitor_socket(made.runtime_dir))
            await monitor.give(spec.nic_fd_names("spare", 1)[0], fds[0])
            if steps > 1:
                await monitor.tell("netdev_add", spec.nic_connection(NIC))
            await monitor.close()
            assert holds(made, fds)
            await made.driver.drop_nic(made.runtime_dir, "spare")
            assert not holds(made, fds)
            await made.driver.add_nic(made.runtime_dir, NIC, fds)
            assert await made.driver.nics(made.runtime_dir) == ("spare",)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_guest_without_an_agent_is_neither_frozen_nor_waited_for_long(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest_agent, "SYNC_S_MAX", 0.3)
    async with open_rig(kind) as made:
        if isinstance(made.driver, fake_driver.FakeDriverBase):
            made.driver.behaviour = Behaviour(guest_agent=False)
        await made.launch()
        await made.driver.boot(made.runtime_dir)
        await made.ready()
        has_room = Feature.GUEST_AGENT in made.driver.features()
        refusal = Unavailable if has_room else Unsupported
        for act in (made.driver.ping_guest, made.driver.freeze_guest, made.driver.thaw_guest):
            with anyio.fail_after(2), pytest.raises(refusal, match="agent"):
                await act(made.runtime_dir)
        if has_room:
            with anyio.fail_after(2), pytest.raises(Unavailable, match="agent"):
                await made.driver.guest_frozen(made.runtime_dir)
        else:
            assert not await made.driver.guest_frozen(made.runtime_dir)


@pytest.mark.parametrize("kind", KINDS[:2])
async def test_a_guest_is_frozen_and_thawed_and_both_may_be_repeated(kind: str) -> None:
    async with open_rig(kind) as made:
        await made.launch()
        await made.driver.boot(made.runtime_dir)
        await made.ready()
        await made.driver.ping_guest(made.runtime_dir)
        for act, state_then in (
            (made.driver.freeze_guest, True),
            (made.driver.freeze_guest, True),
            (made.driver.thaw_guest, False),
            (made.driver.thaw_guest, False),
        ):
            await act(made.runtime_dir)
            assert await made.driver.guest_frozen(made.runtime_dir) is state_then


@pytest.mark.root
@pytest.mark.parametrize("kind", PROCESSES)
async def test_a_vmm_process_has_its_own_uid_and_no_capabilities(kind: str) -> None:
    async with open_rig(kind) as made:
        assert isinstance(made, ProcessRig)
        await made.launch()
        assert made.record is not None
        if kind != "qemu" and made.kept_root:
            pytest.skip("this checkout is below a directory that other uids cannot enter")
        lines = Path(f"/proc/{made.record.pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        uid = str(made.layout.vmm_uid(0))
        assert status["Uid"].split() == [uid] * 4
        assert status["Groups"].strip() in ("", uid)
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
        if kind == "qemu":
            assert status["Seccomp"] == "2"
        assert msgspec.to_builtins(made.provider.adopt(made.record).verdict) == "alive"


@pytest.mark.root
@pytest.mark.parametrize("kind", PROCESSES)
async def test_a_nic_is_an_inherited_descriptor_that_the_vmm_holds(kind: str) -> None:
    if not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("no /dev/net/tun")
    async with open_rig(kind) as made:
        assert isinstance(made, ProcessRig)
        with open_tap() as tap:
            made.nics = {"net0": tap}
            await made.launch()
            name = fcntl.ioctl(tap, TUNGETIFF, bytes(40))[:16].rstrip(b"\0").decode()
        assert made.record is not None
        assert name in taps_of(made.record.pid)
        made.send(signal.SIGKILL)
        await made.gone()
        await wait_until(lambda: name not in [link for _, link in socket.if_nameindex()])
