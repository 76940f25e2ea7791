"""The driver on the real Cloud Hypervisor: what a VM's life takes, step by step."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.abc
import msgspec
import pytest

from chv.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    OutcomeUnknown,
    Unavailable,
    Unsupported,
)
from chv.common.ids import Ids
from chv.common.process import landlock_abi, scan
from chv.probe.command import INSTRUCTIONS
from chv.vmm import threads
from chv.vmm.cloud_hypervisor import api, journal
from chv.vmm.cloud_hypervisor.driver import CloudHypervisorDriver
from chv.vmm.driver import ProbeGuest, VmmState
from tests.cloud_hypervisor_rig import World, binary_of, open_world
from tests.helpers import wait_until

pytestmark = pytest.mark.root


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world() as made:
        yield made


async def test_a_vm_is_made_booted_paused_reset_and_ended(world: World) -> None:
    vm = await world.vm()
    assert await vm.state() is VmmState.EMPTY
    await vm.create()
    assert await vm.state() is VmmState.CREATED
    await vm.driver.boot(vm.dir)
    await vm.says(b"ready ")
    seen = await vm.driver.observe(vm.dir)
    assert (seen.state, seen.reboots) == (VmmState.RUNNING, 0)
    assert seen.version.startswith("5")
    await vm.driver.pause(vm.dir)
    assert await vm.state() is VmmState.PAUSED
    await vm.driver.resume(vm.dir)
    assert await vm.state() is VmmState.RUNNING
    await vm.driver.reset(vm.dir)
    assert await vm.state() is VmmState.RUNNING
    await vm.hear()
    await vm.says(b"ready ")
    await vm.driver.quit(vm.dir)
    await vm.gone()


async def test_a_reset_of_a_paused_vm_leaves_it_created_until_resume(world: World) -> None:
    vm = await world.vm()
    await vm.start()
    await vm.driver.pause(vm.dir)
    await vm.driver.reset(vm.dir)
    assert await vm.state() is VmmState.CREATED
    await vm.driver.resume(vm.dir)
    assert await vm.state() is VmmState.RUNNING


async def test_the_guests_own_power_off_is_shutdown_and_the_vmm_stays(world: World) -> None:
    vm = await world.vm()
    await vm.start()
    await vm.driver.power_button(vm.dir)
    await vm.becomes(VmmState.SHUTDOWN)
    assert (await vm.driver.observe(vm.dir)).reason == "guest-shutdown"
    await vm.driver.power_button(vm.dir)
    with pytest.raises(FailedPrecondition, match="shutdown"):
        await vm.driver.boot(vm.dir)
    await vm.driver.reset(vm.dir)
    assert await vm.state() is VmmState.CREATED
    await vm.driver.boot(vm.dir)
    assert await vm.state() is VmmState.RUNNING


async def test_the_guests_own_reboots_are_counted_and_ours_are_not(world: World) -> None:
    vm = await world.vm(cmdline="end=reboot end.after=300")
    await vm.start()

    async def rebooted() -> bool:
        return ((await vm.driver.observe(vm.dir)).reboots or 0) >= 2

    await wait_until(rebooted, timeout_s=10)
    calm = await world.vm("b")
    await calm.start()
    await calm.driver.reset(calm.dir)
    await calm.hear()
    await calm.says(b"ready ")
    assert (await calm.driver.observe(calm.dir)).reboots == 0


async def test_a_triple_fault_is_a_reboot_of_the_guests(world: World) -> None:
    vm = await world.vm(cmdline="end=triple end.after=200")
    await vm.start()

    async def rebooted() -> bool:
        return ((await vm.driver.observe(vm.dir)).reboots or 0) >= 1

    await wait_until(rebooted, timeout_s=10)


async def test_a_driver_without_memory_finds_the_same(world: World) -> None:
    vm = await world.vm(cmdline="end=off end.after=300")
    await vm.start()
    await vm.becomes(VmmState.SHUTDOWN)
    await vm.driver.close(vm.dir)
    another = CloudHypervisorDriver((vm.config.binary or binary_of(),))
    seen = await another.observe(vm.dir)
    assert (seen.state, seen.reason) == (VmmState.SHUTDOWN, "guest-shutdown")
    await another.reset(vm.dir)
    assert (await another.observe(vm.dir)).state is VmmState.CREATED
    await another.close(vm.dir)


async def test_its_process_is_found_by_its_worker_id_and_nothing_of_ours_is_in_its_environment(
    world: World,
) -> None:
    vm = await world.vm()
    found = await anyio.to_thread.run_sync(scan, world.layout.worker_prefix)
    assert [worker.worker_id for worker in found] == [vm.config.worker_id]
    assert found[0].record().pid == vm.pid
    environment = Path(f"/proc/{vm.pid}/environ").read_bytes()
    assert b"RUST_" not in environment
    assert not [name for name in os.listdir("/") if name.startswith("chv:")]  # noqa: PTH208


async def test_threads_are_filtered_and_the_vmm_has_confined_itself(world: World) -> None:
    vm = await world.vm()
    await vm.start()
    assert threads.unfiltered_by_name(vm.pid) == ()
    info = await vm.driver._machine(vm.dir).api.info()
    assert info.config["landlock_enable"] is (landlock_abi() >= 3)


async def test_a_frozen_vmm_is_late_for_a_look_and_unknown_for_a_change(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = await world.vm()
    await vm.start()
    monkeypatch.setattr(api, "READ_S_MAX", 0.3)
    monkeypatch.setattr(api, "CHANGE_S_MAX", 0.3)
    machine = vm.driver._machine(vm.dir)
    vm.send(signal.SIGSTOP)
    with pytest.raises(OutcomeUnknown, match=r"vm\.pause"):
        await machine.api.change("vm.pause")
    with pytest.raises(DeadlineExceeded, match=r"busy with vm\.pause"):
        await vm.driver.observe(vm.dir)
    with pytest.raises(DeadlineExceeded, match=r"vm.resume was not sent"):
        await machine.api.change("vm.resume")
    vm.send(signal.SIGCONT)
    await vm.becomes(VmmState.PAUSED)  # what was sent was done, once


async def test_a_caller_that_leaves_does_not_take_its_request_along(world: World) -> None:
    vm = await world.vm()
    await vm.start()
    vm.send(signal.SIGSTOP)
    with anyio.move_on_after(0.2) as left:
        await vm.driver._machine(vm.dir).api.change("vm.pause")
    assert left.cancelled_caught
    vm.send(signal.SIGCONT)
    assert await vm.state() is VmmState.PAUSED
    await vm.driver.resume(vm.dir)
    assert await vm.state() is VmmState.RUNNING


async def test_one_connection_serves_all_callers_in_turn(world: World) -> None:
    vm = await world.vm()
    await vm.start()
    async with anyio.create_task_group() as group:
        for _ in range(40):  # the VMM would turn away the eleventh connection
            group.start_soon(vm.driver.observe, vm.dir)
    ours = [s for s in Path(f"/proc/{vm.pid}/fd").iterdir() if "socket" in str(s.readlink())]
    assert len(ours) < 8


async def test_a_killed_vmm_is_unavailable(world: World) -> None:
    vm = await world.vm()
    await vm.start()
    vm.send(signal.SIGKILL)
    await vm.gone()
    with pytest.raises(Unavailable):
        await vm.driver.observe(vm.dir)
    with pytest.raises(Unavailable):
        await vm.driver.pause(vm.dir)


async def test_what_the_state_does_not_allow_is_refused_and_changes_nothing(world: World) -> None:
    vm = await world.vm()
    for call in (vm.driver.boot, vm.driver.pause, vm.driver.resume, vm.driver.reset):
        with pytest.raises(FailedPrecondition, match="empty"):
            await call(vm.dir)
    with pytest.raises(FailedPrecondition, match="no VM yet"):
        await vm.driver.sizes(vm.dir)
    await vm.create()
    for call in (vm.driver.pause, vm.driver.power_button, vm.driver.nmi):
        with pytest.raises(FailedPrecondition, match="created"):
            await call(vm.dir)
    await vm.driver.boot(vm.dir)
    await vm.driver.pause(vm.dir)
    with pytest.raises(FailedPrecondition, match="paused"):
        await vm.driver.boot(vm.dir)
    assert await vm.state() is VmmState.PAUSED


async def test_what_this_vmm_cannot_do_is_unsupported(world: World) -> None:
    vm = await world.vm()
    await vm.start()
    for call in (vm.driver.ping_guest, vm.driver.freeze_guest, vm.driver.thaw_guest):
        with pytest.raises(Unsupported):
            await call(vm.dir)
    with pytest.raises(Unsupported, match=r"no vm\.coredump"):
        await vm.driver.core_dump(vm.dir, vm.base / "save" / "core")
    await vm.driver.nmi(vm.dir)
    assert await vm.state() is VmmState.RUNNING


@pytest.mark.slow
async def test_a_guest_that_reboots_for_ever_fills_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "KEPT_BYTES_MAX", 1024)
    vm = await world.vm(cmdline="end=reboot")
    await vm.create()
    await vm.driver.boot(vm.dir)

    async def many() -> bool:
        return ((await vm.driver.observe(vm.dir)).reboots or 0) >= 45

    await wait_until(many, timeout_s=60)
    events = vm.driver.kept_files(vm.dir)[1].stat()
    assert events.st_size > 3 * 4096
    assert events.st_blocks * 512 <= 2 * 4096
    await vm.driver.close(vm.dir)
    another = CloudHypervisorDriver((binary_of(),))
    assert ((await another.observe(vm.dir)).reboots or 0) >= 45  # by the summary
    await another.close(vm.dir)


async def test_a_viewer_that_reads_to_the_end_may_come_back(world: World) -> None:
    vm = await world.vm(cmdline="beat=20")
    await vm.start()
    for _ in range(5):
        await vm.hear()
        await vm.says(b"beat ")
        await vm.says(b"beat ")
    assert threads.serves_serial(vm.pid)


async def test_a_viewer_that_leaves_bytes_unread_ends_the_port_until_a_reset(world: World) -> None:
    vm = await world.vm(cmdline="beat=20")
    await vm.start()
    assert vm.serial is not None
    peeked = vm.serial.extra(anyio.abc.SocketAttribute.raw_socket)
    await wait_until(lambda: readable(peeked))
    await vm.serial.aclose()
    vm.serial = None
    await wait_until(lambda: not threads.serves_serial(vm.pid))
    await vm.driver.reset(vm.dir)
    await vm.hear()
    await vm.says(b"ready ")
    assert threads.serves_serial(vm.pid)


def readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


async def test_a_stop_that_was_announced_and_never_asked_for_is_nobodys(world: World) -> None:
    vm = await world.vm()
    await vm.start()
    vm.driver._machine(vm.dir).journal.mark("stop")  # and then the agent died
    assert await vm.state() is VmmState.RUNNING
    await vm.driver.power_button(vm.dir)
    await vm.becomes(VmmState.SHUTDOWN)


async def test_a_try_boot_tells_which_instructions_a_kvm_lacks_from_one_that_runs_nothing(
    world: World,
) -> None:
    guest = ProbeGuest(kernel=str(world.guest()), instructions=INSTRUCTIONS)
    driver = CloudHypervisorDriver((binary_of(),))
    seen = await driver.probe(guest)
    assert (seen.usable, seen.accelerator) == (True, "kvm")
    assert seen.auto is not bool(seen.missing)  # a stock kernel needs them all
    assert set(seen.missing) <= set(INSTRUCTIONS)
    assert seen.binary == binary_of()
    assert len(seen.sha256) == 64
    bad = world.base / "bad"
    bad.write_bytes(b"no kernel")
    bad.chmod(0o644)
    seen = await driver.probe(msgspec.structs.replace(guest, kernel=str(bad)))
    assert (seen.usable, seen.auto, seen.missing) == (False, False, ())


async def test_what_a_killed_vmm_left_is_not_in_the_way_of_the_next(world: World) -> None:
    vm = await world.vm()
    await vm.start()
    vm.send(signal.SIGKILL)
    await vm.gone()
    assert vm.driver.serial_socket(vm.dir).exists()  # and nobody listens there
    await vm.driver.close(vm.dir)
    worker_id = world.layout.worker_id("vmm", vm.config.vm_id, Ids().nonce())
    vm.config = msgspec.structs.replace(vm.config, worker_id=worker_id)
    vm.serial = None
    vm.heard.clear()
    await world.spawn(vm)
    assert await vm.state() is VmmState.EMPTY
    await vm.start()
    seen = await vm.driver.observe(vm.dir)
    assert (seen.state, seen.reboots) == (VmmState.RUNNING, 0)


@pytest.mark.slow
async def test_twenty_vms_come_and_go_and_leave_nothing(world: World) -> None:
    started = anyio.current_time()
    for number in range(20):
        vm = await world.vm(f"vm{number}")
        await vm.start()
        await vm.driver.quit(vm.dir)
        await vm.gone()
        assert not vm.driver.serial_socket(vm.dir).exists()
    assert anyio.current_time() - started < 60
    found = await anyio.to_thread.run_sync(scan, world.layout.worker_prefix)
    assert found == []
