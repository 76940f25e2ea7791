"""The driver on the real Cloud Hypervisor: what a VM's life takes, step by step."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from chv.common.errors import FailedPrecondition
from chv.vmm.driver import VmmState
from tests.cloud_hypervisor_rig import World, open_world

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
