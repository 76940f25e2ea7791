"""Sizes, counters, snapshots and moves of the real Cloud Hypervisor.

What a KVM without nested state refuses is tested on the stock build; what comes after it on a
developer's build that reads "no nested state" as none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest

from chv.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    Unsupported,
)
from chv.vmm.cloud_hypervisor import sizes
from chv.vmm.driver import DiskConfig, NicConfig, Sizes, VmmState
from tests.cloud_hypervisor_rig import TOLERANT, Vm, World, binary_of, open_world
from tests.helpers import wait_until
from tests.vmm_rigs import open_tap

pytestmark = pytest.mark.root
MIB = 1 << 20
NIC = NicConfig(id="net0", mac="52:54:00:12:34:56")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world() as made:
        yield made


async def test_cpus_come_and_are_never_more_than_the_maximum(world: World) -> None:
    vm = await world.vm(cpus_max=3)
    await vm.start()
    for _ in range(2):
        await vm.driver.set_cpus(vm.dir, 2)
        assert (await vm.driver.sizes(vm.dir)).cpus == 2
    assert vcpus(vm) == 2
    for count in (0, 4):
        with pytest.raises(InvalidArgument, match="1 to 3"):
            await vm.driver.set_cpus(vm.dir, count)


async def test_cpus_go_once_the_guest_lets_them(world: World) -> None:
    vm = await world.vm(cpus=2, cpus_max=2)
    await vm.start()
    await vm.driver.set_cpus(vm.dir, 1)
    assert vcpus(vm) == 1
    assert (await vm.driver.sizes(vm.dir)).cpus == 1


async def test_cpus_that_the_guest_keeps_are_a_late_answer_and_block_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "RESIZE_S_MAX", 0.4)
    vm = await world.vm(cpus=2, cpus_max=3, cmdline="end=halt")
    await vm.start()
    await vm.says(b"end how=halt")
    for count in (1, 3):  # the VMM answers 429 as long as one is to go
        with pytest.raises(DeadlineExceeded, match="not let go"):
            await vm.driver.set_cpus(vm.dir, count)
    assert vcpus(vm) == 2


def vcpus(vm: Vm) -> int:
    names = [(task / "comm").read_text() for task in Path(f"/proc/{vm.pid}/task").iterdir()]
    return sum(name.startswith("vcpu") for name in names)


async def test_memory_grows_in_steps_up_to_its_maximum(world: World) -> None:
    vm = await world.vm(memory_bytes=128 * MIB, memory_max_bytes=384 * MIB)
    await vm.start()
    expected = Sizes(cpus=1, cpus_max=1, memory_bytes=128 * MIB, memory_max_bytes=384 * MIB)
    assert await vm.driver.sizes(vm.dir) == expected
    for _ in range(2):
        await vm.driver.set_memory(vm.dir, 256 * MIB)
        grown = msgspec.structs.replace(expected, memory_bytes=256 * MIB)
        assert await vm.driver.sizes(vm.dir) == grown
    with pytest.raises(InvalidArgument) as caught:
        await vm.driver.set_memory(vm.dir, 300 * MIB)
    assert str(256 * MIB) in caught.value.hint
    with pytest.raises(InvalidArgument, match="more than"):
        await vm.driver.set_memory(vm.dir, 512 * MIB)
    with pytest.raises(Unsupported, match="takes no memory away"):
        await vm.driver.set_memory(vm.dir, 128 * MIB)
    await vm.driver.reset(vm.dir)
    assert await vm.driver.sizes(vm.dir) == grown


async def test_counters_show_what_was_counted_alone(world: World) -> None:
    image = world.base / "seed.img"
    image.write_bytes(bytes(MIB))
    image.chmod(0o644)
    seed = DiskConfig(id="seed", kind="file", path=str(image), read_only=True)
    with open_tap() as tap:
        vm = await world.vm(disks=(seed,), nics=(NIC,), cmdline="disk=none net=off")
        await vm.start({"net0": (tap,)})
        counted = await vm.driver.counters(vm.dir)
    assert set(counted) == {"seed", "net0"}
    assert counted["seed"]["read_ops"] == 0
    assert not [name for name in counted["seed"] if "latency" in name]
    assert all(value < 2**60 for values in counted.values() for value in values.values())


async def test_a_kvm_without_nested_state_is_named_in_the_refusal(world: World) -> None:
    vm = await world.vm()
    await vm.start()
    await vm.driver.pause(vm.dir)
    target = vm.base / "save"
    try:
        await vm.driver.snapshot(vm.dir, target)
    except Unsupported as error:
        assert "nested state" in error.message
        assert error.hint
    else:
        pytest.skip("this KVM has nested state: the snapshot was taken")
    await vm.driver.resume(vm.dir)
    assert await vm.state() is VmmState.RUNNING


async def saved(world: World, *, disk: DiskConfig, tap: int) -> Vm:
    vm = await world.vm(
        binary=binary_of(TOLERANT), disks=(disk,), nics=(NIC,), cmdline="disk=none beat=50"
    )
    await vm.start({"net0": (tap,)})
    with pytest.raises(FailedPrecondition, match="running"):
        await vm.driver.snapshot(vm.dir, vm.base / "save")
    await vm.driver.pause(vm.dir)
    await vm.driver.snapshot(vm.dir, vm.base / "save")
    assert await vm.state() is VmmState.PAUSED
    with pytest.raises(FailedPrecondition, match="not empty"):
        await vm.driver.snapshot(vm.dir, vm.base / "save")
    await vm.driver.quit(vm.dir)
    await vm.gone()
    return vm


async def test_a_vm_comes_back_from_a_snapshot_with_other_paths(world: World) -> None:
    disk, child = await world.serve("root")
    with open_tap() as tap:
        vm = await saved(world, disk=disk, tap=tap)
        await child.terminate(grace_s=0)
        (world.base / "other.raw").write_bytes((world.base / "root.raw").read_bytes())
        other, _ = await world.serve("other")
        clone = await world.vm(
            "b",
            binary=binary_of(TOLERANT),
            disks=(msgspec.structs.replace(other, id="root"),),
            nics=(NIC,),
            restore_dir=str(vm.base / "save"),
        )
        await clone.create({"net0": (tap,)})
        assert await clone.state() is VmmState.PAUSED
        await clone.driver.resume(clone.dir)
        assert await clone.state() is VmmState.RUNNING
        await clone.says(b"beat ")
        assert [disk.id for disk in await clone.driver.disks(clone.dir)] == ["root"]
        assert await clone.driver.nics(clone.dir) == ("net0",)
        await clone.driver.reset(clone.dir)  # and it boots with its own paths
        await clone.hear()
        await clone.says(b"ready ")


async def test_a_snapshot_of_other_devices_is_refused_and_the_vmm_stays_empty(
    world: World,
) -> None:
    disk, _ = await world.serve("root")
    with open_tap() as tap:
        vm = await saved(world, disk=disk, tap=tap)
        clone = await world.vm("b", binary=binary_of(TOLERANT), restore_dir=str(vm.base / "save"))
        with pytest.raises(InvalidArgument, match="disk-root"):
            await clone.create()
        assert await clone.state() is VmmState.EMPTY


async def test_a_snapshot_that_is_not_there_is_named(world: World) -> None:
    vm = await world.vm(restore_dir=str(world.base / "none"))
    with pytest.raises(InvalidArgument, match="no snapshot"):
        await vm.create()
    assert await vm.state() is VmmState.EMPTY


async def test_a_vm_moves_to_another_process_and_goes_on_there(world: World) -> None:
    """On a build by glibc, a thread of the move is killed by its own seccomp filter."""
    lax = binary_of(TOLERANT)
    source = await world.vm(binary=lax, seccomp="log", cmdline="beat=20")
    await source.start()
    target = await world.vm("b", binary=lax, seccomp="log")
    socket = target.dir / "move.sock"  # made by the VMM, where its uid may
    async with anyio.create_task_group() as group:
        group.start_soon(target.driver.receive, target.dir, target.config, {}, socket)
        await wait_until(socket.exists, what="receiver")
        await source.driver.send(source.dir, socket)
    await source.gone()
    assert await target.state() is VmmState.RUNNING
    await target.hear()  # the port has moved along, and stays after the sender has gone
    await target.says(b"beat ")
    await target.driver.create(target.dir, target.config, {})  # it is whole already
    await target.driver.reset(target.dir)
    await target.hear()
    await target.says(b"ready ")
    assert await target.state() is VmmState.RUNNING


async def test_a_vm_that_nobody_takes_goes_on(world: World) -> None:
    vm = await world.vm(binary=binary_of(TOLERANT), seccomp="log", cmdline="beat=20")
    await vm.start()
    with pytest.raises(FailedPrecondition):
        await vm.driver.send(vm.dir, world.base / "nobody.sock")
    assert await vm.state() is VmmState.RUNNING
    await vm.hear()
    await vm.says(b"beat ")


async def test_a_vm_with_a_tap_by_descriptor_does_not_move(world: World) -> None:
    with open_tap() as tap:
        vm = await world.vm(nics=(NIC,))
        with pytest.raises(Unsupported, match="taps"):
            await vm.driver.receive(vm.dir, vm.config, {}, world.base / "s")
        await vm.start({"net0": (tap,)})
        with pytest.raises(Unsupported, match="taps"):
            await vm.driver.send(vm.dir, world.base / "s")
        assert await vm.state() is VmmState.RUNNING
