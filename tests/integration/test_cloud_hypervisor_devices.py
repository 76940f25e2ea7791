"""Disks and NICs of the real Cloud Hypervisor: plugged, let go of, refused."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
import pytest

from chv.common.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from chv.vmm.cloud_hypervisor import backends, devices, spec
from chv.vmm.cloud_hypervisor.api import Api
from chv.vmm.cloud_hypervisor.driver import CloudHypervisorDriver
from chv.vmm.cloud_hypervisor.refusals import Refused
from chv.vmm.driver import NicConfig, PluggedDisk, VmmState
from tests.cloud_hypervisor_rig import Vm, World, binary_of, open_world
from tests.helpers import taps_of, wait_until
from tests.vmm_rigs import IFF_UP, TUNGETIFF, open_tap, set_link

pytestmark = pytest.mark.root
NIC = NicConfig(id="net0", mac="52:54:00:12:34:56")
SPARE_NIC = NicConfig(id="net1", mac="52:54:00:12:34:57")


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world() as made:
        yield made


async def test_disks_and_nics_are_there_from_the_first_boot_on(world: World) -> None:
    disk, _ = await world.serve("root")
    with open_tap() as tap:
        vm = await world.vm(disks=(disk,), nics=(NIC,), cmdline="disk=check,sectors=8")
        await vm.start({"net0": (tap,)})
        await vm.says(b"disk-done disk=0 plan=check ok=1")
        assert await vm.driver.disks(vm.dir) == (PluggedDisk(id="root", connected=None),)
        assert await vm.driver.nics(vm.dir) == ("net0",)
        assert len(taps_of(vm.pid)) >= 1


async def test_a_nics_tap_survives_resets_in_the_vmm(world: World) -> None:
    with open_tap() as tap:
        vm = await world.vm(nics=(NIC,))
        await vm.start({"net0": (tap,)})
        held = set(taps_of(vm.pid))
    await vm.driver.reset(vm.dir)
    assert await vm.driver.nics(vm.dir) == ("net0",)
    await vm.driver.halt(vm.dir)
    await vm.driver.boot(vm.dir)
    assert set(taps_of(vm.pid)) == held


async def test_a_disk_is_plugged_and_let_go_of_and_plugged_again(world: World) -> None:
    spare, _ = await world.serve("spare")
    vm = await world.vm(cmdline="disk=none")
    await vm.start()
    for _ in range(2):  # the same id again, once it is free
        for _ in range(2):
            await vm.driver.add_disk(vm.dir, spare)
        await vm.says(b"hot=1")
        assert [disk.id for disk in await vm.driver.disks(vm.dir)] == ["spare"]
        for _ in range(2):
            await vm.driver.remove_disk(vm.dir, "spare")
        assert await vm.driver.disks(vm.dir) == ()


async def test_a_nic_is_plugged_and_let_go_of_and_its_tap_with_it(world: World) -> None:
    vm = await world.vm()
    await vm.start()
    with open_tap() as tap:
        for _ in range(2):
            await vm.driver.add_nic(vm.dir, SPARE_NIC, (tap,))
        await vm.says(b"hot=1")
        assert await vm.driver.nics(vm.dir) == ("net1",)
        for _ in range(2):
            await vm.driver.remove_nic(vm.dir, "net1")
        assert await vm.driver.nics(vm.dir) == ()
        await wait_until(lambda: not taps_of(vm.pid))


async def test_a_removal_that_the_guest_ignores_is_pending_and_never_asked_for_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "REMOVE_S_MAX", 0.3)
    spare, _ = await world.serve("spare")
    vm = await world.vm(cmdline="end=halt")
    await vm.start()
    await vm.says(b"end how=halt")
    await vm.driver.add_disk(vm.dir, spare)
    for _ in range(2):  # a second request would be an error of the VMM's
        with pytest.raises(DeadlineExceeded, match="not let go of disk spare"):
            await vm.driver.remove_disk(vm.dir, "spare")
        assert [disk.id for disk in await vm.driver.disks(vm.dir)] == ["spare"]
    with pytest.raises(FailedPrecondition, match="has not let go"):
        await vm.driver.add_disk(vm.dir, spare)
    await vm.driver.reset(vm.dir)
    assert await vm.driver.disks(vm.dir) == ()


async def test_nothing_is_removed_where_no_vcpu_could_let_go(world: World) -> None:
    spare, _ = await world.serve("spare")
    vm = await world.vm()
    await vm.start()
    await vm.driver.add_disk(vm.dir, spare)
    await vm.driver.pause(vm.dir)
    with pytest.raises(FailedPrecondition, match="paused"):
        await vm.driver.remove_disk(vm.dir, "spare")
    await vm.driver.resume(vm.dir)
    await vm.driver.remove_disk(vm.dir, "spare")


async def test_a_disk_whose_back_end_is_not_there_is_refused_at_once(world: World) -> None:
    """The VMM would stand still for 60 s."""
    disk, child = await world.serve("root")
    vm = await world.vm(disks=(disk,))
    await vm.create()
    await child.terminate(grace_s=0)
    with anyio.fail_after(2):
        with pytest.raises(Unavailable, match="nothing listens"):
            await vm.driver.boot(vm.dir)
        with pytest.raises(Unavailable, match="nothing answers"):
            spare = msgspec.structs.replace(disk, id="spare")
            await vm.driver.add_disk(vm.dir, spare)
    assert await vm.state() is VmmState.CREATED
    await world.serve("root")
    await vm.driver.boot(vm.dir)
    assert await vm.state() is VmmState.RUNNING


async def test_a_failed_boot_leaves_no_vm_that_would_boot_without_its_disks(world: World) -> None:
    kernel = world.base / "kernel"
    kernel.write_bytes(b"no kernel")
    vm = await world.vm(kernel=str(kernel))
    await vm.create()
    with pytest.raises(FailedPrecondition) as caught:
        await vm.driver.boot(vm.dir)
    assert "create it again" in caught.value.hint
    assert await vm.state() is VmmState.EMPTY
    kernel.write_bytes(world.guest().read_bytes())
    await vm.start()
    assert await vm.state() is VmmState.RUNNING


async def test_a_vm_is_cut_off_though_its_disk_is_dead_and_comes_back(world: World) -> None:
    disk, child = await world.serve("root")
    vm = await world.vm(disks=(disk,), cmdline="disk=writer")
    await vm.start()
    await vm.says(b"acked disk=0")
    await child.terminate(grace_s=0)
    with anyio.fail_after(2):
        await vm.driver.halt(vm.dir)
    assert await vm.state() is VmmState.CREATED
    await world.serve("root")
    await vm.driver.await_disks(vm.dir, ("root",))
    await vm.driver.reset(vm.dir)
    await vm.driver.resume(vm.dir)
    await vm.hear()
    await vm.says(b"acked disk=0")


async def test_an_interrupted_create_is_made_anew_and_a_whole_one_is_left(world: World) -> None:
    with open_tap() as tap:
        vm = await world.vm(nics=(NIC,))
        machine = vm.driver._machine(vm.dir)
        body = spec.vm_config(vm.config, version=(53, 0), landlock=False)
        await machine.api.change("vm.create", body)  # and then the agent died
        assert await vm.driver.nics(vm.dir) == ()
        await vm.create({"net0": (tap,)})
        assert await vm.driver.nics(vm.dir) == ("net0",)
        await vm.driver.create(vm.dir, vm.config, {"net0": (tap,)})
    await vm.driver.boot(vm.dir)
    await vm.driver.create(vm.dir, vm.config, {})
    assert await vm.state() is VmmState.RUNNING


async def test_a_disk_of_a_file_cannot_be_plugged_later(world: World) -> None:
    spare, _ = await world.serve("spare")
    vm = await world.vm()
    await vm.start()
    with pytest.raises(InvalidArgument, match="plugged later"):
        await vm.driver.add_disk(vm.dir, msgspec.structs.replace(spare, kind="file"))


async def test_a_nic_whose_tap_is_down_is_refused_before_the_vmm_has_it(world: World) -> None:
    vm = await world.vm(nics=(NIC,))
    with open_tap() as tap:
        set_link(tap, 0)
        name = tap_name(tap)
        with pytest.raises(FailedPrecondition, match=f"link of tap {name}"):
            await vm.create({"net0": (tap,)})
        assert await vm.state() is VmmState.EMPTY
        set_link(tap, IFF_UP)
        await vm.start({"net0": (tap,)})
        with open_tap() as other:
            set_link(other, 0)
            with pytest.raises(FailedPrecondition, match="is down"):
                await vm.driver.add_nic(vm.dir, SPARE_NIC, (other,))
            held = set(taps_of(vm.pid))
            assert len(held) == 1
            set_link(other, IFF_UP)
            await vm.driver.add_nic(vm.dir, SPARE_NIC, (other,))
        with pytest.raises(InvalidArgument, match="is no tap"):
            more = msgspec.structs.replace(SPARE_NIC, id="net2")
            await vm.driver.add_nic(vm.dir, more, (os.open("/dev/null", os.O_RDWR),))


async def test_a_nic_dies_with_its_taps_link_and_the_vm_can_still_be_cut_off(
    world: World,
) -> None:
    """Its worker ends at a frame that the tap does not take; a pause would wait for it for ever."""
    with open_tap() as tap:
        vm = await world.vm(nics=(NIC,))
        await vm.create({"net0": (tap,)})
        set_link(tap, 0)
        await vm.driver.boot(vm.dir)
        await wait_until(lambda: "NEEDS_RESET" in vm.log())
        with anyio.fail_after(3):
            await vm.driver.halt(vm.dir)
        await vm.driver.reset(vm.dir)
        assert await vm.state() is VmmState.CREATED


def tap_name(tap: int) -> str:
    return fcntl.ioctl(tap, TUNGETIFF, bytes(40))[:16].rstrip(b"\0").decode()


def exists(name: str) -> bool:
    return Path("/sys/class/net", name).exists()


def refuse_nics(patch: pytest.MonkeyPatch) -> None:
    """Ask for more queues than there are descriptors: what the VMM finds out by itself."""
    asked = spec.nic_config

    def too_many(nic: NicConfig, fds: Sequence[int]) -> spec.Body:
        return asked(nic, fds) | {"num_queues": 4}

    patch.setattr(spec, "nic_config", too_many)


async def test_a_nic_that_is_refused_keeps_its_tap_until_the_vmm_ends_and_it_is_said(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = await world.vm()
    await vm.start()
    with monkeypatch.context() as patch, open_tap() as tap:
        name = tap_name(tap)
        refuse_nics(patch)
        with pytest.raises(FailedPrecondition) as caught:
            await vm.driver.add_nic(vm.dir, SPARE_NIC, (tap,))
        assert "until it ends" in caught.value.hint
    await vm.driver.reset(vm.dir)
    assert await vm.driver.nics(vm.dir) == ()
    assert exists(name)  # ours is closed: it is the VMM that holds it
    vm.driver = CloudHypervisorDriver((binary_of(),))
    with pytest.raises(FailedPrecondition, match="refused before"):
        await vm.driver.drop_nic(vm.dir, "net1")
    await vm.driver.drop_nic(vm.dir, "net2")  # of another nothing is held
    await vm.driver.quit(vm.dir)
    await vm.gone()
    assert not exists(name)


async def test_a_create_whose_nic_is_refused_ends_the_vmm_and_frees_every_tap(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    vm = await world.vm(nics=(NIC,))
    with monkeypatch.context() as patch, open_tap() as tap:
        name = tap_name(tap)
        refuse_nics(patch)
        with pytest.raises(FailedPrecondition) as caught:
            await vm.create({"net0": (tap,)})
        assert "new VMM" in caught.value.hint
    await vm.gone()
    assert not exists(name)
    await again(world, vm)
    with open_tap() as tap:
        await vm.start({"net0": (tap,)})


async def test_a_create_that_was_cut_short_with_a_nic_is_told_as_such_and_takes_a_new_vmm(
    world: World,
) -> None:
    vm = await world.vm(nics=(NIC,))
    with open_tap() as tap:
        name = tap_name(tap)
        await vm.create({"net0": (tap,)})
        vm.driver._machine(vm.dir).journal.mark("making")  # and it never came to its end
    assert await vm.state() is VmmState.EMPTY  # not CREATED: it must not be booted
    with pytest.raises(FailedPrecondition, match="empty"):
        await vm.driver.boot(vm.dir)
    assert exists(name)
    with pytest.raises(Unavailable, match="cut short"):
        await vm.driver.drop_nic(vm.dir, "net0")
    await vm.gone()
    assert not exists(name)


async def test_a_failed_boot_of_a_vm_with_nics_ends_the_vmm_and_frees_their_taps(
    world: World,
) -> None:
    kernel = world.base / "kernel"
    kernel.write_bytes(b"no kernel")
    vm = await world.vm(kernel=str(kernel), nics=(NIC,))
    with open_tap() as tap:
        name = tap_name(tap)
        await vm.create({"net0": (tap,)})
        with pytest.raises(FailedPrecondition) as caught:
            await vm.driver.boot(vm.dir)
    assert "new VMM" in caught.value.hint
    await vm.gone()
    assert not exists(name)


async def test_asking_whether_a_back_end_listens_is_not_noticed_by_it(world: World) -> None:
    path = world.base / "back.sock"
    assert not backends.listens(str(path))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(1)
        listener.setblocking(False)
        for _ in range(3):
            assert backends.listens(str(path))
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert not backends.listens(str(path))  # the name is still there, nobody holds it


class Died(Exception):
    """The agent ended here."""


@pytest.mark.parametrize("calls", [0, 1, 2, 3])
async def test_a_create_that_was_cut_short_anywhere_is_made_whole(
    world: World, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    disk, _ = await world.serve("root")
    with open_tap() as tap, open_tap() as other:
        vm = await world.vm(disks=(disk,), nics=(NIC, SPARE_NIC))
        fds = {"net0": (tap,), "net1": (other,)}
        left, put = calls, Api.put

        async def dying(api: Api, *arguments: Any, **options: Any) -> None:
            nonlocal left
            if left == 0:
                raise Died
            left -= 1
            await put(api, *arguments, **options)

        with monkeypatch.context() as patch, suppress(Died):
            patch.setattr(Api, "put", dying)
            await vm.driver.create(vm.dir, vm.config, fds)
        assert left == 0
        await vm.driver.close(vm.dir)
        vm.driver = CloudHypervisorDriver((binary_of(),))
        if calls == 2:  # it holds a tap, and is not whole
            with pytest.raises(Unavailable, match="cut short"):
                await vm.create(fds)
            await vm.gone()
            await again(world, vm)
        await vm.start(fds)
        assert await vm.driver.nics(vm.dir) == ("net0", "net1")
        assert [found.id for found in await vm.driver.disks(vm.dir)] == ["root"]


async def again(world: World, vm: Vm) -> None:
    """Start another VMM for it, in the same place."""
    await vm.driver.close(vm.dir)
    vm.driver.serial_socket(vm.dir).unlink(missing_ok=True)
    await world.spawn(vm)


async def test_a_back_end_that_hangs_up_costs_the_boot_and_no_disk_is_forgotten(
    world: World,
) -> None:
    disk, child = await world.serve("root")
    vm = await world.vm(disks=(disk,))
    await vm.create()
    await child.terminate(grace_s=0)
    Path(disk.path).unlink()
    listener = await anyio.create_unix_listener(disk.path, mode=0o666)

    async def hang_up(stream: anyio.abc.SocketStream) -> None:
        await stream.aclose()

    async with anyio.create_task_group() as group:
        group.start_soon(listener.serve, hang_up)
        with pytest.raises(FailedPrecondition) as caught:
            await vm.driver.boot(vm.dir)
        group.cancel_scope.cancel()
    await listener.aclose()
    assert "create it again" in caught.value.hint
    assert await vm.state() is VmmState.EMPTY
    await world.serve("root")
    await vm.start()
    assert [found.id for found in await vm.driver.disks(vm.dir)] == ["root"]


async def test_a_boot_that_failed_behind_our_back_is_found_out(world: World) -> None:
    """Its answer was lost: the VM stands there as if it had never been booted."""
    kernel = world.base / "kernel"
    kernel.write_bytes(b"no kernel")
    vm = await world.vm(kernel=str(kernel))
    await vm.create()
    with suppress(Refused):
        await vm.driver._machine(vm.dir).api.put("vm.boot", limit_s=5)
    kernel.write_bytes(world.guest().read_bytes())
    with pytest.raises(FailedPrecondition, match="failed half-way"):
        await vm.driver.boot(vm.dir)
    assert await vm.state() is VmmState.EMPTY
    await vm.start()
