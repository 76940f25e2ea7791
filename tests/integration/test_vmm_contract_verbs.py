"""The VMM contract beyond a VM's plain life: sizes, snapshots, moves, counters, dumps.

Each verb is tried on every kind of VMM. One that claims its Feature does what the port says; one
that does not refuses by name, and its VM goes on as if nothing had been asked.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio
import pytest

from chv.common.errors import FailedPrecondition, InvalidArgument, Unsupported
from chv.vmm.driver import Feature, VmmState
from tests.helpers import wait_until
from tests.vmm_rig_probe import CloudHypervisorRig
from tests.vmm_rigs import KINDS, MOVING, Rig, open_rig

MIB = 1 << 20


@pytest.fixture(params=KINDS)
async def running(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with open_rig(request.param) as made:
        await start(made)
        yield made


@pytest.fixture(params=MOVING)
async def moving(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with open_rig(request.param) as made:
        await start(made)
        yield made


async def start(rig: Rig) -> None:
    await rig.launch()
    await rig.driver.boot(rig.runtime_dir)
    await rig.ready()


async def state(rig: Rig) -> VmmState:
    return (await rig.driver.observe(rig.runtime_dir)).state


def claims(rig: Rig, feature: Feature) -> bool:
    return feature in rig.driver.features()


@pytest.mark.parametrize("kind", KINDS)
async def test_create_of_a_vm_that_is_there_has_no_effect(kind: str) -> None:
    async with open_rig(kind) as rig:
        await rig.launch()
        config = getattr(rig, "vm_config", None)
        if config is None:
            pytest.skip("this VMM is given its VM by the command line")
        for expected in (VmmState.CREATED, VmmState.RUNNING):
            for _ in range(2):
                await rig.driver.create(rig.runtime_dir, config, {})
                assert await state(rig) is expected
            await rig.driver.boot(rig.runtime_dir)
        await rig.driver.pause(rig.runtime_dir)
        await rig.driver.create(rig.runtime_dir, config, {})
        assert await state(rig) is VmmState.PAUSED


async def test_halt_lets_no_vcpu_run_and_a_reset_and_a_boot_follow(running: Rig) -> None:
    driver, directory = running.driver, running.runtime_dir
    for _ in range(2):
        await driver.halt(directory)
        assert await state(running) in (VmmState.PAUSED, VmmState.CREATED)
    await driver.reset(directory)
    assert await state(running) is VmmState.CREATED
    await driver.boot(directory)
    await running.ready()


async def test_an_nmi_is_injected_or_refused_and_the_vm_goes_on(running: Rig) -> None:
    try:
        await running.driver.nmi(running.runtime_dir)
    except Unsupported as error:
        assert "NMI" in str(error)
    assert await state(running) is VmmState.RUNNING


async def test_cpus_grow_and_go_within_their_maximum(running: Rig) -> None:
    driver, directory = running.driver, running.runtime_dir
    if not claims(running, Feature.RESIZE_CPUS):
        with pytest.raises(Unsupported, match="CPU"):
            await driver.set_cpus(directory, 2)
        assert await state(running) is VmmState.RUNNING
        return
    before = await driver.sizes(directory)
    assert before.cpus == 1 < before.cpus_max
    for wanted in (2, before.cpus_max, before.cpus_max):
        await driver.set_cpus(directory, wanted)
        assert (await driver.sizes(directory)).cpus == wanted
    for wanted in (0, before.cpus_max + 1):
        with pytest.raises(InvalidArgument, match=str(wanted)):
            await driver.set_cpus(directory, wanted)
    if driver.name == "qemu":  # without KVM, it would crash at the next reset
        with pytest.raises(Unsupported, match="takes no CPU away"):
            await driver.set_cpus(directory, 1)
        assert (await driver.sizes(directory)).cpus == before.cpus_max
    else:
        for wanted in (1, 2):
            await driver.set_cpus(directory, wanted)
            assert (await driver.sizes(directory)).cpus == wanted
    assert await state(running) is VmmState.RUNNING


async def test_memory_grows_within_its_maximum(running: Rig) -> None:
    driver, directory = running.driver, running.runtime_dir
    if not claims(running, Feature.RESIZE_MEMORY):
        with pytest.raises(Unsupported, match="memory"):
            await driver.set_memory(directory, 512 * MIB)
        assert await state(running) is VmmState.RUNNING
        return
    before = await driver.sizes(directory)
    assert before.memory_bytes < before.memory_max_bytes
    for wanted in (before.memory_bytes + 128 * MIB, before.memory_max_bytes):
        for _ in range(2):
            await driver.set_memory(directory, wanted)
            assert (await driver.sizes(directory)).memory_bytes == wanted
    with pytest.raises(InvalidArgument):
        await driver.set_memory(directory, before.memory_max_bytes + 128 * MIB)
    after = await driver.sizes(directory)
    assert (after.memory_bytes, after.cpus) == (before.memory_max_bytes, before.cpus)


async def test_counters_are_whole_numbers_by_device(running: Rig) -> None:
    driver, directory = running.driver, running.runtime_dir
    if not claims(running, Feature.COUNTERS):
        with pytest.raises(Unsupported, match="count"):
            await driver.counters(directory)
        return
    for values in (await driver.counters(directory)).values():
        assert all(0 <= value < 1 << 60 for value in values.values())  # no stand-ins for "none"


async def test_a_core_dump_is_a_new_file_or_is_refused(running: Rig) -> None:
    driver, directory = running.driver, running.runtime_dir
    if not claims(running, Feature.CORE_DUMP):
        with pytest.raises(Unsupported):
            await driver.core_dump(directory, running.save_to() / "core")
        assert await state(running) is VmmState.RUNNING
        return
    path = running.save_to() / "core"
    await driver.core_dump(directory, path)
    assert path.read_bytes()[:4] == b"\x7fELF"
    with pytest.raises(FailedPrecondition, match="exists"):
        await driver.core_dump(directory, path)
    assert await state(running) is VmmState.RUNNING


async def test_a_snapshot_of_a_vm_that_runs_is_refused(running: Rig) -> None:
    expected = FailedPrecondition if claims(running, Feature.SNAPSHOT) else Unsupported
    with pytest.raises(expected):
        await running.driver.snapshot(running.runtime_dir, running.save_to())
    assert await state(running) is VmmState.RUNNING


async def test_a_paused_vm_is_saved_and_goes_on_from_there_in_a_new_process(moving: Rig) -> None:
    driver, directory = moving.driver, moving.runtime_dir
    target = moving.save_to()
    await driver.pause(directory)
    if not claims(moving, Feature.SNAPSHOT):
        with pytest.raises(Unsupported, match="save memory"):
            await driver.snapshot(directory, target)
        await driver.resume(directory)
        return
    try:
        await driver.snapshot(directory, target)
    except Unsupported as error:
        assert kind_of(moving) == "cloud_hypervisor"  # alone there a host may lack what it takes
        assert "nested state" in str(error)
        assert await state(moving) is VmmState.PAUSED
        await driver.resume(directory)
        assert await state(moving) is VmmState.RUNNING
        return
    assert await state(moving) is VmmState.PAUSED
    with pytest.raises(FailedPrecondition, match="empty"):
        await driver.snapshot(directory, target)
    await moving.start_again(target)
    assert await state(moving) is VmmState.PAUSED
    await moving.driver.resume(directory)
    assert await state(moving) is VmmState.RUNNING
    await moving.guest("reboot")
    await moving.ready()


def kind_of(rig: Rig) -> str:
    return rig.kind if isinstance(rig, CloudHypervisorRig) else ""


async def test_a_vm_is_handed_over_to_another_process(moving: Rig) -> None:
    driver, directory = moving.driver, moving.runtime_dir
    if not claims(moving, Feature.MIGRATION):
        with pytest.raises(Unsupported, match="send"):
            await driver.send(directory, directory / "move.sock")
        assert await state(moving) is VmmState.RUNNING
        return
    if kind_of(moving) == "cloud_hypervisor":
        pytest.skip("a move takes what a snapshot takes: see the kind cloud_hypervisor_tolerant")
    twin = await moving.empty_twin()
    path = twin.runtime_dir / "move.sock"
    config = getattr(twin, "vm_config", None)
    assert config is not None
    async with anyio.create_task_group() as receiving:
        receiving.start_soon(twin.driver.receive, twin.runtime_dir, config, {}, path)
        if path.parent.exists():
            await wait_until(path.exists, what="receiver")
        else:
            await anyio.wait_all_tasks_blocked()
        await driver.send(directory, path)
    await moving.gone()
    assert await state(twin) is VmmState.RUNNING
    await twin.guest("reboot")
    await twin.ready()
    await twin.driver.close(twin.runtime_dir)


async def test_a_vm_that_nobody_takes_goes_on(moving: Rig) -> None:
    if not claims(moving, Feature.MIGRATION):
        pytest.skip("this VMM moves nothing")
    with pytest.raises(FailedPrecondition, match="goes on"):
        await moving.driver.send(moving.runtime_dir, moving.runtime_dir / "nobody.sock")
    assert await state(moving) is VmmState.RUNNING
    await moving.guest("reboot")
    await moving.ready()
