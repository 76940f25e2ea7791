"""VMs for one run: they vanish with what they own once they have ended, and not before."""

from __future__ import annotations

from typing import Any

import pytest

from chv.agent.ports import Limits
from chv.common.errors import InvalidArgument
from chv.common.wire import agent as api
from tests.sim.bench import Bench, everything, image, manifest, open_bench, vm, volume
from tests.sim.virtual import simulated
from tests.sim.vmms import SimProcess

OWNER = {"apiVersion": "compute.chv.dev/v1alpha1", "kind": "VirtualMachine", "name": "web"}


def owned(name: str) -> dict[str, Any]:
    made = volume(name)
    made["metadata"]["ownerReferences"] = [OWNER]
    return made


async def running(bench: Bench, **spec: Any) -> SimProcess:
    """Run a VM with a volume of its own and one that stays."""
    disks = [{"name": "own", "volume": "own"}, {"name": "data", "volume": "data"}]
    await bench.apply(*everything(disks=disks, ephemeral=True, **spec), owned("own"))
    await bench.until("VMMRunning")
    process = bench.process()
    assert process is not None
    return process


async def vanished(bench: Bench) -> api.Operation:
    """Wait until it is gone with what it owns; return how it was deleted."""
    for kind, name in (("VirtualMachine", "web"), ("Volume", "own")):
        gone = api.WaitCondition(kind=kind, name=name, condition="deleted", timeout_s=120.0)
        await bench.engine.wait_condition(gone)
    assert bench.get("Volume", "data").status.phase == "Ready"
    request = api.ListOperations(kind="VirtualMachine", name="web", limit=1)
    (last,) = (await bench.engine.list_operations(request)).operations
    assert (last.verb, last.requester, last.state.value) == ("delete", "system", "Succeeded")
    assert len(bench.machine.host.processes) == 1  # it was not started a second time
    assert not bench.machine.violations
    return last


@simulated
async def test_it_goes_with_what_it_owns_when_its_guest_powers_off() -> None:
    async with open_bench() as bench:
        process = await running(bench)
        bench.machine.host.power_off(process)
        assert "GuestShutdown" in (await vanished(bench)).reason


@simulated
async def test_it_goes_after_a_crash_instead_of_a_restart() -> None:
    async with open_bench() as bench:
        process = await running(bench)
        bench.machine.host.die(process)
        assert "Crash" in (await vanished(bench)).reason


@simulated
async def test_a_stop_succeeds_and_is_its_end() -> None:
    async with open_bench() as bench:
        await running(bench)
        stopped = await bench.final((await bench.act("stop")).id)
        assert stopped.state.value == "Succeeded"
        assert "it is ephemeral, so it is deleted" in stopped.message
        assert "by test" in (await vanished(bench)).reason


@simulated
async def test_it_goes_when_the_next_agent_finds_it_dead() -> None:
    async with open_bench() as bench:
        process, machine = await running(bench), bench.machine
    machine.host.die(process)
    async with open_bench(machine) as bench:
        await vanished(bench)


@simulated
async def test_a_restart_and_a_reset_are_no_end() -> None:
    async with open_bench() as bench:
        first = await running(bench)
        for verb in ("reset", "restart"):
            done = await bench.final((await bench.act(verb)).id)
            assert done.state.value == "Succeeded", done.message
        second = bench.process()
        assert second is not None and second is not first
        assert bench.get("Volume", "own").status.phase == "Attached"


@simulated
async def test_what_it_owns_without_using_it_goes_without_a_resync() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything(), owned("own"))
        await bench.until("VMMRunning")
        await bench.delete("VirtualMachine", "web")
        soon_s = Limits().resync_s / 2
        for kind, name in (("VirtualMachine", "web"), ("Volume", "own")):
            gone = api.WaitCondition(kind=kind, name=name, condition="deleted", timeout_s=soon_s)
            await bench.engine.wait_condition(gone)


@simulated
async def test_one_that_never_ran_stays() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything(ephemeral=True, runStrategy="Halted"))
        await bench.final((await bench.act("stop")).id)
        assert bench.get("VirtualMachine", "web").status.phase == "Stopped"


@simulated
async def test_it_is_fixed_at_creation_and_excludes_always() -> None:
    async with open_bench() as bench:
        await bench.apply(*everything())
        with pytest.raises(InvalidArgument, match="fixed at creation"):
            await bench.apply(vm(ephemeral=True))
        with pytest.raises(InvalidArgument, match="never runs again"):
            await bench.apply(vm("two", ephemeral=True, runStrategy="Always"))


@simulated
async def test_an_owner_is_named_without_its_uid_be_it_new_or_there() -> None:
    async with open_bench() as bench:
        await bench.apply(image(), owned("own"), manifest_of_one())
        uid = bench.get("VirtualMachine", "web").metadata.uid
        assert bench.get("Volume", "own").metadata.owner_references[0].uid == uid
        again = await bench.apply(owned("own"), owned("more"))
        assert [each.action for each in again.results] == ["unchanged", "created"]
        with pytest.raises(InvalidArgument, match="there is no VirtualMachine 'web'"):
            await bench.apply(
                {**owned("x"), "metadata": {**owned("x")["metadata"], "namespace": "b"}}
            )


def manifest_of_one() -> dict[str, Any]:
    disks = [{"name": "own", "volume": "own"}]
    return manifest("VirtualMachine", "web", {"boot": {"image": "tiny"}, "disks": disks})
