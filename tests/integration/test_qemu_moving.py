"""Snapshots and moves of real QEMUs: a guest that writes records for ever loses none of them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest

from chv.common.errors import FailedPrecondition, InvalidArgument
from chv.probe.device_events import Acked, Records
from chv.probe.events import CpuAdded, MemoryAdded, Ready
from chv.probe.image import DiskPlan
from chv.vmm.driver import DiskConfig, NicConfig, Sizes, VmmState
from chv.vmm.qemu import handover, stream
from chv.vmm.qemu.driver import QemuDriver
from tests.helpers import wait_until
from tests.probe_rig import Serial
from tests.qemu_rig import MIB, Taps, Vm, World, open_world
from tests.vmm_rigs import open_tap

pytestmark = pytest.mark.root
WRITER = DiskPlan(kind="writer", disk="0", seed=7, window=4096, every=1).word()
NIC = NicConfig(id="net0", mac="52:54:00:12:34:56", on_port=True)
LATE = NicConfig(id="late", mac="52:54:00:12:34:57", on_port=True)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world() as made:
        yield made


async def writing(
    world: World, name: str, *disks: DiskConfig, taps: Taps | None = None, **more: object
) -> Vm:
    """Start a VM whose guest writes records."""
    vm = await world.vm(
        name,
        taps,
        disks=disks,
        cpus_max=3,
        memory_max_bytes=512 * MIB,
        cmdline=f"{WRITER} disk=none net=off beat=50",
        **more,
    )
    serial = await vm.start()
    await serial.wait(Acked, 20)
    return vm


async def read_back(serial: Serial, acked: int) -> Records:
    """Let the guest stop writing and read its records back."""
    serial.type("disk.0=none")
    plan = DiskPlan(kind="records", disk="0", seed=7, window=4096, acked=acked)
    serial.type(plan.word())
    return await serial.wait(Records)


async def test_a_vm_with_all_that_was_plugged_comes_back_from_a_snapshot_and_loses_nothing(
    world: World,
) -> None:
    (disk,), _ = await world.serve("root")
    (later,), _ = await world.serve("later")
    with open_tap() as tap, open_tap() as other:
        vm = await writing(world, "a", disk, nics=(NIC,), taps={"net0": (tap,)})
        await grow(vm, later, other)
        await vm.driver.pause(vm.dir)
        await vm.driver.snapshot(vm.dir, vm.save)
        assert await vm.state() is VmmState.PAUSED
        assert {path.name for path in vm.save.iterdir()} == {"state", "layout.json"}
        acked = vm.serial.all(Acked)[-1].seq
        await vm.driver.quit(vm.dir)
        await vm.gone()
        clone = await world.again(
            "b",
            vm,
            disks=(later, disk),  # whatever order they come in
            nics=(LATE, NIC),
            memory_bytes=192 * MIB,
            restore_dir=str(vm.save),
        )
        assert await clone.state() is VmmState.EMPTY
        for _ in range(2):
            fds = {"net0": (tap,), "late": (other,)}
            await clone.driver.create(clone.dir, clone.config, fds)
            assert await clone.state() is VmmState.PAUSED
        serial = await clone.hear()
        await clone.driver.resume(clone.dir)
        assert (await serial.wait(Acked, 20)).seq > acked
        await has_all_that_was_plugged(clone)
        found = await read_back(serial, serial.all(Acked)[-1].seq)
        assert (found.ok, found.lost, found.bad) == (True, 0, 0)
        await clone.driver.remove_disk(clone.dir, "later")
        await clone.driver.reset(clone.dir)
        await serial.wait(Ready)


async def grow(vm: Vm, disk: DiskConfig, tap: int) -> None:
    """Plug one of everything."""
    await vm.driver.add_disk(vm.dir, disk)
    await vm.driver.add_nic(vm.dir, LATE, (tap,))
    await vm.driver.set_cpus(vm.dir, 2)
    await vm.serial.wait(CpuAdded)
    await vm.driver.set_memory(vm.dir, 192 * MIB)
    assert (await vm.serial.wait(MemoryAdded)).size == 128 * MIB


async def has_all_that_was_plugged(vm: Vm) -> None:
    assert await vm.driver.sizes(vm.dir) == Sizes(
        cpus=2, cpus_max=3, memory_bytes=192 * MIB, memory_max_bytes=512 * MIB
    )
    assert {disk.id for disk in await vm.driver.disks(vm.dir)} == {"root", "later"}
    assert await vm.driver.nics(vm.dir) == ("late", "net0")


async def test_a_vm_goes_on_after_its_snapshot_and_is_saved_again_once_it_has_run(
    world: World,
) -> None:
    (disk,), _ = await world.serve("root")
    vm = await writing(world, "a", disk)
    for number in (1, 2):
        target = vm.save / str(number)
        target.mkdir()
        await vm.driver.pause(vm.dir)
        await vm.driver.snapshot(vm.dir, target)
        again = vm.save / f"{number}-again"
        again.mkdir()
        with pytest.raises(FailedPrecondition, match="once in a pause"):
            await vm.driver.snapshot(vm.dir, again)
        assert not list(again.iterdir())
        seen = len(vm.serial.all(Acked))
        await vm.driver.resume(vm.dir)
        await vm.serial.wait(Acked, seen + 20)
    found = await read_back(vm.serial, vm.serial.all(Acked)[-1].seq)
    assert (found.ok, found.lost) == (True, 0)


async def test_a_snapshot_that_has_no_room_leaves_nothing_and_the_vm_goes_on(
    world: World,
) -> None:
    vm = await world.vm(cmdline="beat=50")
    serial = await vm.start()
    await serial.wait(Ready)
    with small_disk(vm.save):
        await vm.driver.pause(vm.dir)
        with pytest.raises(FailedPrecondition, match="No space"):
            await vm.driver.snapshot(vm.dir, vm.save)
        assert not list(vm.save.iterdir())
    assert await vm.state() is VmmState.PAUSED
    await vm.driver.resume(vm.dir)
    assert await vm.state() is VmmState.RUNNING
    await vm.driver.pause(vm.dir)
    await vm.driver.snapshot(vm.dir, vm.save)


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


async def test_a_snapshot_is_written_through_no_link_of_the_vms_uid(world: World) -> None:
    vm = await world.vm()
    await vm.start()
    await vm.driver.pause(vm.dir)
    (vm.save / "state").symlink_to(world.base / "elsewhere")
    with pytest.raises(FailedPrecondition, match="not empty"):
        await vm.driver.snapshot(vm.dir, vm.save)
    path = vm.save / "core"
    path.symlink_to(world.base / "elsewhere")
    with pytest.raises(FailedPrecondition, match="exists"):
        await vm.driver.core_dump(vm.dir, path)
    assert not (world.base / "elsewhere").exists()


async def test_a_snapshot_is_read_from_plain_files_alone(world: World) -> None:
    vm = await world.vm()
    await vm.start()
    await vm.driver.pause(vm.dir)
    await vm.driver.snapshot(vm.dir, vm.save)
    clone = await world.again("b", vm, restore_dir=str(vm.save))
    (vm.save / "state").unlink()
    os.mkfifo(vm.save / "state")
    with anyio.fail_after(5), pytest.raises(InvalidArgument, match="not a plain file"):
        await clone.driver.create(clone.dir, clone.config, {})
    (vm.save / "layout.json").unlink()
    (vm.save / "layout.json").symlink_to("/etc/hostname")
    with pytest.raises(InvalidArgument, match=r"layout\.json"):
        clone.driver.launch(clone.config)
    assert await clone.state() is VmmState.EMPTY


async def test_what_does_not_fit_a_snapshot_is_refused_before_anything_starts(
    world: World,
) -> None:
    (disk,), _ = await world.serve("root")
    vm = await writing(world, "a", disk)
    await vm.driver.pause(vm.dir)
    await vm.driver.snapshot(vm.dir, vm.save)
    for changes, words in (
        ({"disks": ()}, "root"),
        ({"memory_bytes": 32 * MIB}, "67108864"),
        ({"restore_dir": str(world.base)}, "no snapshot"),
        ({"accelerator": "kvm"}, "tcg"),
    ):
        changed = {"restore_dir": str(vm.save)} | changes
        with pytest.raises(InvalidArgument, match=words):
            await world.again(f"b-{words[:3]}", vm, **changed)


async def test_a_snapshot_that_is_damaged_ends_the_vmm_with_an_explanation(world: World) -> None:
    vm = await world.vm()
    await vm.start()
    await vm.driver.pause(vm.dir)
    await vm.driver.snapshot(vm.dir, vm.save)
    data = (vm.save / "state").read_bytes()
    (vm.save / "state").write_bytes(data[: len(data) // 2])
    clone = await world.again("b", vm, restore_dir=str(vm.save))
    with pytest.raises(FailedPrecondition, match="instead of taking the VM up"):
        await clone.driver.create(clone.dir, clone.config, {})
    await clone.gone()
    assert "load of migration failed" in clone.log()


async def test_a_vm_moves_while_it_writes_and_loses_nothing(world: World) -> None:
    (disk, other), _ = await world.serve("root", exports=2)
    vm = await writing(world, "a", disk)
    await vm.driver.set_memory(vm.dir, 192 * MIB)
    await vm.driver.set_cpus(vm.dir, 3)
    twin = await world.again("b", vm, disks=(other,), incoming=True)
    assert await twin.state() is VmmState.EMPTY
    serial = await twin.hear()
    await world.move(vm, twin)
    await vm.gone()
    assert await twin.state() is VmmState.RUNNING
    acked = vm.serial.all(Acked)[-1].seq
    assert (await serial.wait(Acked, 20)).seq > acked
    sizes = await twin.driver.sizes(twin.dir)
    assert (sizes.cpus, sizes.memory_bytes) == (3, 192 * MIB)
    found = await read_back(serial, serial.all(Acked)[-1].seq)
    assert (found.ok, found.lost, found.bad) == (True, 0, 0)
    await twin.driver.reset(twin.dir)
    await serial.wait(Ready)


async def test_a_paused_vm_stays_paused_where_it_arrives(world: World) -> None:
    vm = await world.vm(cmdline="beat=20")
    await (await vm.start()).wait(Ready)
    await vm.driver.pause(vm.dir)
    twin = await world.again("b", vm, incoming=True)
    await world.move(vm, twin)
    assert await twin.state() is VmmState.PAUSED


async def test_a_receiver_with_other_devices_refuses_and_the_vm_goes_on(world: World) -> None:
    (disk,), _ = await world.serve("root")
    vm = await writing(world, "a", disk)
    twin = await world.again("b", vm, disks=(), incoming=True)
    socket = twin.home / "move.sock"
    refused: list[InvalidArgument] = []

    async def receive() -> None:
        try:
            await twin.driver.receive(twin.dir, twin.config, {}, socket)
        except InvalidArgument as error:
            refused.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(receive)
        await wait_until(socket.exists, what="receiver")
        with pytest.raises(FailedPrecondition, match=r"root.*goes on here"):
            await vm.driver.send(vm.dir, socket)
    assert "root" in refused[0].message
    assert await vm.state() is VmmState.RUNNING
    await vm.serial.wait(Acked, len(vm.serial.all(Acked)) + 20)
    assert await twin.state() is VmmState.EMPTY


async def test_a_receiver_that_dies_in_the_middle_leaves_the_vm_where_it_was(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BANDWIDTH_MAX", 1 << 16)  # so that there is a middle
    (disk, other), _ = await world.serve("root", exports=2)
    vm = await writing(world, "a", disk)
    twin = await world.again("b", vm, disks=(other,), incoming=True)
    socket = twin.home / "move.sock"

    async def receive() -> None:
        with pytest.raises(FailedPrecondition, match="instead of taking the VM up"):
            await twin.driver.receive(twin.dir, twin.config, {}, socket)

    async def kill() -> None:
        async def half_way() -> bool:
            return await twin.state() is VmmState.EMPTY and await handover.stream_began(
                vm.driver._monitor(vm.dir)
            )

        await wait_until(half_way, what="stream")
        twin.kill()

    async with anyio.create_task_group() as group:
        group.start_soon(receive)
        await wait_until(socket.exists, what="receiver")
        group.start_soon(kill)
        with pytest.raises(FailedPrecondition, match="goes on here"):
            await vm.driver.send(vm.dir, socket)
    assert await vm.state() is VmmState.RUNNING
    await vm.serial.wait(Acked, len(vm.serial.all(Acked)) + 20)
    monkeypatch.undo()
    third = await world.again("c", vm, disks=(other,), incoming=True)
    await world.move(vm, third)  # and it can still be moved


async def test_an_agent_that_dies_after_the_move_finds_a_vm_that_runs_here_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = await world.vm(cmdline="beat=20")
    await (await vm.start()).wait(Ready)
    twin = await world.again("b", vm, incoming=True)

    async def dies(_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(handover, "_end", dies)
    with pytest.RaisesGroup(RuntimeError):
        await world.move(vm, twin)
    monkeypatch.undo()
    await vm.driver.close(vm.dir)
    later = QemuDriver()
    seen = await later.observe(vm.dir)
    assert (seen.state, seen.reason) == (VmmState.UNKNOWN, "handed-over")
    for act in (later.resume, later.boot, later.pause):
        with pytest.raises(FailedPrecondition):
            await act(vm.dir)
    await twin.driver.receive(twin.dir, twin.config, {}, twin.home / "unused")
    assert await twin.state() is VmmState.RUNNING
    await later.send(vm.dir, twin.home / "unused")
    await vm.gone()


async def test_a_sender_that_is_stopped_half_way_lets_its_vm_go_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BANDWIDTH_MAX", 1 << 16)
    vm = await world.vm(cmdline="beat=20")
    await (await vm.start()).wait(Ready)
    twin = await world.again("b", vm, incoming=True)
    socket = twin.home / "move.sock"

    async def receive() -> None:
        with pytest.raises(FailedPrecondition):
            await twin.driver.receive(twin.dir, twin.config, {}, socket)

    async with anyio.create_task_group() as group:
        group.start_soon(receive)
        await wait_until(socket.exists, what="receiver")
        with anyio.move_on_after(1) as patience:
            await vm.driver.send(vm.dir, socket)
        assert patience.cancelled_caught
    assert await vm.state() is VmmState.RUNNING
    await vm.driver.pause(vm.dir)
    await vm.driver.snapshot(vm.dir, vm.save)  # nothing stands in the way
