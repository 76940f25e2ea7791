"""CPUs and memory that come to real QEMUs, dumps and counters, and what microvm does not do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from chv.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unsupported,
)
from chv.probe.device_events import Acked, Records
from chv.probe.events import Beat, CpuAdded, Cpus, Machine, MemoryAdded, Ready
from chv.probe.image import DiskPlan
from chv.vmm import spec_machine
from chv.vmm.driver import DiskConfig, NicConfig, Sizes, VmmState
from chv.vmm.qemu import qmp
from chv.vmm.spec import monitor_socket
from tests.qemu_rig import MIB, World, open_world
from tests.vmm_rigs import open_tap

pytestmark = pytest.mark.root
WRITER = DiskPlan(kind="writer", disk="0", seed=7, window=4096, every=1).word()
NIC = NicConfig(id="net0", mac="52:54:00:12:34:56")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world() as made:
        yield made


async def test_cpus_come_one_by_one_and_stay_over_a_reset(world: World) -> None:
    vm = await world.vm(cpus=2, cpus_max=4)
    serial = await vm.start()
    assert (await serial.wait(Machine)).cpus_max == 4
    await serial.wait(Ready)
    for _ in range(2):
        await vm.driver.set_cpus(vm.dir, 4)
    assert [(await serial.wait(CpuAdded, turn)).id for turn in (1, 2)] == [2, 3]
    assert (await serial.wait(Cpus)).present in (3, 4)
    for number in (0, 5):
        with pytest.raises(InvalidArgument, match="1 to 4"):
            await vm.driver.set_cpus(vm.dir, number)
    with pytest.raises(Unsupported, match="without KVM"):
        await vm.driver.set_cpus(vm.dir, 3)
    await vm.driver.reset(vm.dir)
    await serial.wait(Ready, 2)
    assert serial.all(Machine)[-1].cpus == 4
    assert (await vm.driver.sizes(vm.dir)).cpus == 4


async def test_memory_comes_while_a_back_end_works_and_it_maps_that_as_well(world: World) -> None:
    (disk,), storage = await world.serve("root")
    vm = await world.vm(disks=(disk,), memory_max_bytes=1024 * MIB, cmdline=f"{WRITER} beat=50")
    serial = await vm.start()
    await serial.wait(Acked, 20)
    mapped = shared_bytes(storage.pid)
    await vm.driver.set_memory(vm.dir, 320 * MIB)
    assert (await serial.wait(MemoryAdded)).size == 256 * MIB
    await serial.wait(Acked, len(serial.all(Acked)) + 20)
    assert shared_bytes(storage.pid) - mapped == 256 * MIB
    for _ in range(2):
        await vm.driver.set_memory(vm.dir, 448 * MIB)
    assert await vm.driver.sizes(vm.dir) == Sizes(
        cpus=1, cpus_max=1, memory_bytes=448 * MIB, memory_max_bytes=1024 * MIB
    )
    serial.type("disk.0=none")
    acked = serial.all(Acked)[-1].seq
    serial.type(DiskPlan(kind="records", disk="0", seed=7, window=4096, acked=acked).word())
    found = await serial.wait(Records)
    assert (found.ok, found.lost) == (True, 0)


def shared_bytes(pid: int) -> int:
    """How much of guests' memory a process has mapped."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memory-backend-memfd" in line:
            start, end = line.split()[0].split("-")
            total += int(end, 16) - int(start, 16)
    return total


async def test_memory_that_cannot_be_given_is_refused_and_nothing_is_left_behind(
    world: World,
) -> None:
    vm = await world.vm(memory_max_bytes=512 * MIB)
    await (await vm.start()).wait(Ready)
    for size, kind, words in (
        (100 * MIB, InvalidArgument, "multiple of 128"),
        (576 * MIB, InvalidArgument, "more than"),
        (32 * MIB, Unsupported, "away"),
    ):
        with pytest.raises(kind, match=words):
            await vm.driver.set_memory(vm.dir, size)
    await vm.driver.close(vm.dir)
    monitor = qmp.Monitor(monitor_socket(vm.dir))  # of an attempt that was cut short
    await monitor.tell("object-add", spec_machine.dimm_memory(0, 256 * MIB))
    await monitor.close()
    await vm.driver.set_memory(vm.dir, 192 * MIB)
    assert (await vm.driver.sizes(vm.dir)).memory_bytes == 192 * MIB


async def test_memory_grows_as_often_as_there_are_slots(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec_machine, "MEMORY_SLOTS", 2)
    vm = await world.vm(memory_max_bytes=1024 * MIB)
    await (await vm.start()).wait(Ready)
    await vm.driver.set_memory(vm.dir, 192 * MIB)
    await vm.driver.set_memory(vm.dir, 320 * MIB)
    with pytest.raises(ResourceExhausted, match="2 times"):
        await vm.driver.set_memory(vm.dir, 448 * MIB)


async def test_a_vm_without_room_tells_its_sizes_and_grows_not(world: World) -> None:
    vm = await world.vm()
    await (await vm.start()).wait(Ready)
    assert await vm.driver.sizes(vm.dir) == Sizes(
        cpus=1, cpus_max=1, memory_bytes=64 * MIB, memory_max_bytes=64 * MIB
    )
    with pytest.raises(InvalidArgument, match="more than"):
        await vm.driver.set_memory(vm.dir, 192 * MIB)
    with pytest.raises(InvalidArgument, match="1 to 1"):
        await vm.driver.set_cpus(vm.dir, 2)


async def test_a_dump_is_an_elf_with_the_guests_memory_and_the_guest_goes_on(
    world: World,
) -> None:
    image = world.base / "seed.img"
    image.write_bytes(bytes(MIB))
    image.chmod(0o644)
    seed = DiskConfig(id="seed", kind="file", path=str(image), read_only=True)
    vm = await world.vm(disks=(seed,), cmdline="disk=none beat=50")
    serial = await vm.start()
    await serial.wait(Ready)
    path = vm.save / "core"
    await vm.driver.core_dump(vm.dir, path)
    assert path.read_bytes()[:4] == b"\x7fELF"
    assert path.stat().st_size > 64 * MIB
    assert path.stat().st_mode & 0o077 == 0
    assert await vm.state() is VmmState.RUNNING
    await serial.wait(Beat, len(serial.all(Beat)) + 2)
    counted = await vm.driver.counters(vm.dir)
    assert set(counted) == {"seed"}
    assert counted["seed"]["write_ops"] == 0
    await vm.driver.nmi(vm.dir)
    with pytest.raises(InvalidArgument, match="core"):
        await vm.driver.core_dump(vm.dir, vm.save / "none" / "core")


async def test_microvm_lives_and_says_by_name_what_it_does_not_do(world: World) -> None:
    (disk,), _ = await world.serve("root")
    (other,), _ = await world.serve("other")
    with open_tap() as tap:
        vm = await world.vm(
            taps={"net0": (tap,)}, machine="microvm", disks=(disk,), nics=(NIC,),
            cmdline="beat=50",
        )  # fmt: skip
        assert await vm.state() is VmmState.CREATED
        serial = await vm.start()
        await serial.wait(Ready)
        driver, place = vm.driver, vm.dir
        expected = Sizes(cpus=1, cpus_max=1, memory_bytes=64 * MIB, memory_max_bytes=64 * MIB)
        assert await driver.sizes(place) == expected
        assert [disk.id for disk in await driver.disks(place)] == ["root"]
        assert await driver.nics(place) == ("net0",)
        await driver.await_disks(place, ("root",))
        late = NicConfig(id="late", mac="52:54:00:12:34:57", on_port=True)
        with anyio.fail_after(5):
            refusals: list[Callable[[], Awaitable[None]]] = [
                lambda: driver.add_disk(place, other),
                lambda: driver.remove_disk(place, "root"),
                lambda: driver.add_nic(place, late, (tap,)),
                lambda: driver.remove_nic(place, "net0"),
                lambda: driver.set_cpus(place, 1),
                lambda: driver.set_memory(place, 192 * MIB),
                lambda: driver.power_button(place),
            ]
            for refused in refusals:
                with pytest.raises(Unsupported, match="microvm"):
                    await refused()
        await driver.nmi(place)
        await driver.pause(place)
        await driver.reset(place)
        await driver.resume(place)
        await serial.wait(Ready, 2)
        assert await vm.state() is VmmState.RUNNING


async def test_microvm_comes_back_from_a_snapshot_and_moves(world: World) -> None:
    (disk, other), _ = await world.serve("root", exports=2)
    vm = await world.vm(machine="microvm", disks=(disk,), cmdline="beat=50")
    serial = await vm.start()
    await serial.wait(Beat, 5)
    await vm.driver.pause(vm.dir)
    await vm.driver.snapshot(vm.dir, vm.save)
    seen = serial.all(Beat)[-1].n
    vm.kill()
    await vm.gone()
    clone = await world.again("b", vm, restore_dir=str(vm.save))
    await clone.driver.create(clone.dir, clone.config, {})
    assert await clone.state() is VmmState.PAUSED
    serial = await clone.hear()
    await clone.driver.resume(clone.dir)
    assert (await serial.wait(Beat)).n in (seen, seen + 1)
    twin = await world.again("c", vm, incoming=True, disks=(other,))
    await world.move(clone, twin)
    assert await twin.state() is VmmState.RUNNING


async def test_a_disk_that_is_awaited_and_not_there_is_named(world: World) -> None:
    vm = await world.vm()
    await (await vm.start()).wait(Ready)
    with pytest.raises(NotFound, match="nowhere"):
        await vm.driver.await_disks(vm.dir, ("nowhere",))
    with pytest.raises(FailedPrecondition, match="running"):
        await vm.driver.receive(vm.dir, vm.config, {}, vm.home / "move.sock")
