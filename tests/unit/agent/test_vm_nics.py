"""NICs of a running VM on the simulated machine: plugged, unplugged, refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chv.agent.network import admission
from chv.agent.records import PutWorker
from chv.common.errors import FailedPrecondition
from chv.common.wire.agent import OperationState
from tests.helpers import wait_until
from tests.sim.bench import Bench, bare, image, network, open_bench
from tests.sim.virtual import simulated
from tests.sim.vmms import SimProcess

FIRST = {"name": "eth0", "network": "lan"}
SECOND = {"name": "eth1", "network": "back"}


async def settled(bench: Bench, *objects: dict[str, Any]) -> OperationState:
    reply = await bench.apply(*objects)
    states = [(await bench.final(each.operation_id)).state for each in reply.results]
    return states[-1]


async def started(bench: Bench) -> SimProcess:
    objects = [image(), network("lan"), network("back", subnet="10.10.0.0/24")]
    assert await settled(bench, *objects, bare(interfaces=[FIRST])) is OperationState.SUCCEEDED
    process = bench.process()
    assert process is not None
    return process


def on(bench: Bench) -> set[str]:
    """Return the names of the networks that nwd has a NIC on."""
    nwd = bench.machine.host.nwd
    names = {bench.get("Network", name).metadata.uid: name for name in ("lan", "back")}
    return {names[nic.network_id] for nic in nwd.nics.values()}


def shown(bench: Bench) -> list[str]:
    return [each.name for each in bench.get("VirtualMachine", "web").status.interfaces]


@simulated
async def test_a_nic_comes_and_goes_under_a_running_vm() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        assert await settled(bench, bare(interfaces=[FIRST, SECOND])) is OperationState.SUCCEEDED
        assert process.nics == set(bench.machine.host.nwd.nics)
        assert (on(bench), shown(bench)) == ({"lan", "back"}, ["eth0", "eth1"])
        assert bench.condition("NetworkReady") == ("True", "Attached")
        assert bench.condition("RestartRequired") == ("False", "AsStarted")
        assert await settled(bench, bare(interfaces=[SECOND])) is OperationState.SUCCEEDED
        assert process.nics == set(bench.machine.host.nwd.nics)
        assert (on(bench), shown(bench)) == ({"back"}, ["eth1"])
        assert await settled(bench, bare(interfaces=[])) is OperationState.SUCCEEDED
        assert (process.nics, on(bench)) == (set(), set())
        assert bench.process() is process


@simulated
async def test_another_network_under_the_same_name_is_another_nic_with_the_same_mac() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        mac = {"mac": "52:54:00:00:00:77"}
        await settled(bench, bare(interfaces=[FIRST, {**SECOND, **mac}]))
        before = set(process.nics)
        await settled(bench, bare(interfaces=[FIRST, {**SECOND, **mac, "network": "lan"}]))
        assert on(bench) == {"lan"}
        assert len(process.nics - before) == len(before - process.nics) == 1
        assert bench.process() is process


@simulated
async def test_a_guest_that_clings_to_its_nic_keeps_its_tap_until_it_lets_go() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        process.clings = 3
        reply = await bench.apply(bare(interfaces=[]))
        await wait_until(lambda: process.clings < 3, timeout_s=60)
        assert bench.condition("NetworkReady") == ("False", "Unplugging")
        assert on(bench) == {"lan"}
        with pytest.raises(FailedPrecondition, match="letting go") as caught:
            await bench.apply(bare(interfaces=[{**FIRST, "mac": "52:54:00:00:00:01"}]))
        assert caught.value.field == "spec.interfaces"
        done = await bench.final(reply.results[0].operation_id)
        assert done.state is OperationState.SUCCEEDED
        assert on(bench) == set()
        assert await settled(bench, bare(interfaces=[FIRST])) is OperationState.SUCCEEDED
        assert on(bench) == {"lan"}


@simulated
async def test_what_an_older_version_started_keeps_its_nics_and_takes_up_others() -> None:
    async with open_bench() as bench:
        process = await started(bench)
        context = bench.engine._context
        row = context.ledger.tables.workers[process.vm_uid]
        old = tuple(msgspec.structs.replace(nic, on_port=False) for nic in row.config.nics)
        config = msgspec.structs.replace(row.config, nics=old)
        await context.ledger.commit(PutWorker(row=msgspec.structs.replace(row, config=config)))
        with pytest.raises(FailedPrecondition, match="older version") as caught:
            await bench.apply(bare(interfaces=[SECOND]))
        assert "chv stop web" in caught.value.hint
        assert await settled(bench, bare(interfaces=[FIRST, SECOND])) is OperationState.SUCCEEDED
        assert await settled(bench, bare(interfaces=[FIRST])) is OperationState.SUCCEEDED
        assert on(bench) == {"lan"}


@simulated
async def test_a_vmm_that_plugs_nothing_is_refused_other_interfaces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_bench() as bench:
        process = await started(bench)
        monkeypatch.setattr(admission, "HOT_PLUG", frozenset())
        for interfaces in ([], [FIRST, SECOND]):
            with pytest.raises(FailedPrecondition, match="only at a start") as caught:
                await bench.apply(bare(interfaces=interfaces))
            assert caught.value.field == "spec.interfaces"
        assert len(process.nics) == 1
