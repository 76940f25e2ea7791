"""Clones of VMs on the simulated machine: all objects at once, of one instant, or none."""

from __future__ import annotations

from typing import Any

import pytest

from chv.common.errors import Conflict, FailedPrecondition, InUse, NotFound, Unsupported
from chv.common.wire import agent as api
from chv.common.wire.agent_clone import CloneVm, CloneVmReply
from tests.sim.bench import Bench, everything, manifest, open_bench, volume
from tests.sim.virtual import simulated

DISKS = [{"name": "data", "volume": "data"}, {"name": "more", "volume": "more"}]
NIC = {"name": "eth0", "network": "net", "mac": "52:54:00:00:00:07", "address": "10.9.0.77"}


async def running(bench: Bench, **spec: Any) -> None:
    await bench.apply(*everything(disks=DISKS, **spec), volume("more"))
    await bench.until("VMMRunning")


async def clone(bench: Bench, **more: Any) -> CloneVmReply:
    return await bench.engine.clone(
        CloneVm(**({"name": "web", "new_name": "two", "requester": "test"} | more))
    )


async def made(bench: Bench, **more: Any) -> CloneVmReply:
    reply = await clone(bench, **more)
    final = await bench.final(reply.operation.id)
    assert final.state.value == "Succeeded", final.message
    return reply


@simulated
async def test_the_clone_of_a_running_vm_runs_with_an_identity_of_its_own() -> None:
    async with open_bench() as bench:
        await running(bench, interfaces=[NIC])
        reply = await made(bench)
        assert (reply.operation.verb, reply.operation.name) == ("clone", "two")
        assert reply.left_out == [
            "mac 52:54:00:00:00:07 of interface eth0",
            "address 10.9.0.77 of interface eth0",
        ]
        one, two = bench.get("VirtualMachine", "web"), bench.get("VirtualMachine", "two")
        assert one.status.phase == two.status.phase == "Running"
        assert one.metadata.uid != two.metadata.uid
        assert one.status.interfaces[0].mac != two.status.interfaces[0].mac
        assert one.status.interfaces[0].address != two.status.interfaces[0].address
        assert [disk.volume for disk in two.spec.disks] == ["two-data", "two-more"]
        parts = bench.get("VolumeSnapshot", "two-source").status.volumes
        assert [part.volume for part in parts] == ["data", "more"]
        assert not bench.machine.violations


@simulated
async def test_a_full_clone_lets_go_of_its_snapshot() -> None:
    async with open_bench() as bench:
        await running(bench)
        await made(bench, mode="Full", start=False)
        assert bench.get("VirtualMachine", "two").status.phase == "Stopped"
        await bench.until("deleted", "two-source", "VolumeSnapshot", timeout_s=600.0)
        assert not bench.machine.violations


@simulated
async def test_a_linked_clone_keeps_the_volumes_of_its_source_until_it_is_gone() -> None:
    async with open_bench() as bench:
        await running(bench)
        await made(bench)
        await bench.final((await bench.delete("VirtualMachine", "web")).id)
        with pytest.raises(InUse, match="two-source"):
            await bench.delete("Volume", "data")
        await bench.final((await bench.delete("VirtualMachine", "two")).id)
        for name in ("two-data", "two-more"):
            await bench.final((await bench.delete("Volume", name)).id)
        await bench.until("deleted", "two-source", "VolumeSnapshot", timeout_s=600.0)
        await bench.final((await bench.delete("Volume", "data")).id)


@simulated
async def test_what_cannot_be_cloned_is_refused_before_anything_is_made() -> None:
    async with open_bench() as bench:
        await running(bench)
        with pytest.raises(Conflict, match="there already"):
            await clone(bench, new_name="web")
        with pytest.raises(NotFound):
            await clone(bench, name="nobody")
        read = [*DISKS[:1], {**DISKS[1], "readOnly": True}]
        await bench.final((await bench.act("stop")).id)
        await bench.apply(*everything(disks=read))
        with pytest.raises(Unsupported, match="read only here"):
            await clone(bench)
        with pytest.raises(NotFound):
            bench.engine.get(api.ObjectRef(kind="VolumeSnapshot", name="two-source"))


@simulated
async def test_the_same_request_under_its_key_makes_one_clone() -> None:
    async with open_bench() as bench:
        await running(bench)
        first = await clone(bench, idempotency_key="k")
        again = await clone(bench, idempotency_key="k")
        assert first.operation.id == again.operation.id
        with pytest.raises(Conflict):
            await clone(bench, idempotency_key="k", start=False)


@simulated
async def test_a_clone_whose_snapshot_cannot_be_taken_leaves_nothing() -> None:
    async with open_bench() as bench:
        await running(bench)
        await bench.final((await bench.act("stop")).id)  # there is no guest to freeze
        reply = await clone(bench, freeze="5s")
        final = await bench.final(reply.operation.id)
        assert final.state.value == "Failed"
        assert "the snapshot of its source was not taken" in final.message
        assert final.error is not None and final.error.code == "FAILED_PRECONDITION"
        for kind, names in (
            ("VirtualMachine", ["two"]),
            ("Volume", ["two-data", "two-more"]),
            ("VolumeSnapshot", ["two-source"]),
        ):
            for name in names:
                gone = api.WaitCondition(kind=kind, name=name, condition="deleted", timeout_s=60.0)
                await bench.engine.wait_condition(gone)
        assert bench.get("Volume", "data").status.snapshots == []
        assert not bench.machine.violations


@simulated
async def test_a_frozen_guest_gives_a_clone_with_whole_file_systems() -> None:
    async with open_bench() as bench:
        await running(bench)
        await made(bench, freeze="5s")
        assert bench.get("VolumeSnapshot", "two-source").status.consistency == "FileSystem"
        assert bench.condition("VMMRunning") == ("True", "Running")
        await bench.apply(*everything()[2:])
        await bench.apply(manifest("VirtualMachine", "bare", {"boot": {"image": "tiny"}}))
        with pytest.raises(FailedPrecondition, match="nothing to freeze"):
            await clone(bench, name="bare", new_name="three", freeze="5s")
