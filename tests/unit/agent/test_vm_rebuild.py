"""Rebuilds on the simulated machine: a new root disk, and never none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from chv.common.errors import Conflict, FailedPrecondition, InUse, NotFound, Unsupported
from chv.common.wire import agent as api
from chv.common.wire.agent_rebuild import RebuildVm, RebuildVmReply
from tests.sim.bench import Bench, everything, image, manifest, open_bench, volume
from tests.sim.virtual import simulated

SHA = "0" * 64
ROOT = {"format": "raw", "size": "64Mi", "source": {"image": "tiny"}}
DISKS = [{"name": "root", "volume": "root"}, {"name": "data", "volume": "data"}]


async def running(bench: Bench, **spec: Any) -> None:
    root = manifest("Volume", "root", ROOT)
    await bench.apply(*everything(disks=DISKS, **spec), root)
    await bench.until("VMMRunning")


async def rebuild(bench: Bench, **more: Any) -> RebuildVmReply:
    return await bench.engine.rebuild(RebuildVm(**({"name": "web", "requester": "test"} | more)))


async def done(bench: Bench, **more: Any) -> api.Operation:
    return await bench.final((await rebuild(bench, **more)).operation.id)


async def gone(bench: Bench, name: str) -> None:
    await bench.engine.wait_condition(
        api.WaitCondition(kind="Volume", name=name, condition="deleted", timeout_s=60.0)
    )


def volumes(bench: Bench) -> dict[str, str]:
    reply = bench.engine.list(api.ListObjects(kind="Volume"))
    found = [msgspec.json.decode(each)["metadata"] for each in reply.items]
    return {each["name"]: each["uid"] for each in found if "deletionTimestamp" not in each}


@simulated
async def test_a_running_vm_runs_again_from_a_new_root_disk_with_all_else_as_it_was() -> None:
    async with open_bench() as bench:
        await running(bench)
        before, had, pid = bench.get("VirtualMachine", "web"), volumes(bench), bench.process()
        final = await done(bench, reason="broken")
        assert final.state.value == "Succeeded", final.message
        assert final.message == "running; its former root disk is deleted"
        after, has = bench.get("VirtualMachine", "web"), volumes(bench)
        assert (after.metadata.uid, after.spec) == (before.metadata.uid, before.spec)
        assert after.status.interfaces == before.status.interfaces
        assert after.status.ssh_host_key == before.status.ssh_host_key
        assert "stopped for a new root disk" in after.status.last_stop
        assert has["data"] == had["data"] and has["root"] != had["root"]
        assert set(has) == {"root", "data"}
        assert bench.process() is not None and bench.process() is not pid
        await gone(bench, "root-before-rebuild")
        assert not bench.machine.violations


@simulated
async def test_the_former_disk_of_a_stopped_vm_stays_until_the_vm_has_run() -> None:
    async with open_bench() as bench:
        await running(bench)
        await bench.final((await bench.act("stop")).id)
        final = await done(bench)
        former = "its former root disk is volume root-before-rebuild until it has run"
        assert final.message == f"stopped; {former}"
        assert bench.get("VirtualMachine", "web").status.phase == "Stopped"
        assert set(volumes(bench)) == {"root", "data", "root-before-rebuild"}
        with pytest.raises(Conflict, match="there already"):
            await rebuild(bench)
        await bench.final((await bench.act("start")).id)
        assert set(volumes(bench)) == {"root", "data"}


@simulated
async def test_the_former_disk_is_kept_where_that_was_asked_for() -> None:
    async with open_bench() as bench:
        await running(bench)
        had = volumes(bench)
        final = await done(bench, keep_old=True)
        assert final.message == "running; its former root disk is volume root-before-rebuild"
        assert volumes(bench)["root-before-rebuild"] == had["root"]
        await bench.final((await bench.delete("VirtualMachine", "web")).id)
        assert "root-before-rebuild" in volumes(bench)


@simulated
async def test_another_image_is_taken_and_its_kernel_where_the_vm_booted_that_of_the_first() -> (
    None
):
    async with open_bench() as bench:
        await running(bench)
        await bench.apply(image("next"))
        await done(bench, image="next")
        assert bench.get("Volume", "root").spec.source.image == "next"
        assert bench.get("VirtualMachine", "web").spec.boot.image == "next"
        await bench.final((await bench.delete("Image", "tiny")).id)


@simulated
async def test_a_disk_that_cannot_be_made_leaves_the_vm_as_it_was() -> None:
    async with open_bench() as bench:
        await running(bench)
        had, process = volumes(bench), bench.process()
        bench.machine.host.stord.device_bytes = 1
        final = await done(bench)
        assert final.state.value == "Failed"
        assert "more than its device has" in final.message
        assert bench.process() is process
        await gone(bench, "root-rebuild")
        assert volumes(bench) == had


@simulated
async def test_a_storage_service_that_is_silent_for_a_while_takes_nothing_back() -> None:
    async with open_bench() as bench:
        await running(bench)
        had, stord = volumes(bench), bench.machine.host.stord
        reply = await rebuild(bench)
        await bench.until("Ready", "root-rebuild", "Volume")
        stord.down_until = bench.machine.clock.monotonic() + 20.0
        bench.engine.notify_daemon_ready("stord")
        final = await bench.final(reply.operation.id)
        assert final.state.value == "Succeeded", final.message
        assert volumes(bench)["root"] != had["root"]


@simulated
async def test_another_verb_before_the_swap_takes_the_rebuild_back() -> None:
    async with open_bench() as bench:
        await running(bench)
        had = volumes(bench)
        late = {"disk": {"sha256": SHA, "format": "raw"}, "kernel": {"sha256": SHA}}
        await bench.apply(manifest("Image", "late", late))
        reply = await rebuild(bench, image="late")  # which never gets there
        assert (await rebuild(bench, image="late")).operation.id == reply.operation.id
        with pytest.raises(Conflict, match="being rebuilt"):
            await rebuild(bench, keep_old=True)
        await bench.final((await bench.act("stop")).id)
        ended = await bench.final(reply.operation.id)
        assert ended.state.value == "Superseded"
        await gone(bench, "root-rebuild")
        assert volumes(bench) == had


@simulated
async def test_what_cannot_be_rebuilt_is_refused_and_says_why() -> None:
    async with open_bench() as bench:
        await running(bench)
        await bench.apply(manifest("VolumeSnapshot", "snap", {"volume": "root"}))
        with pytest.raises(InUse, match="VolumeSnapshot default/snap"):
            await rebuild(bench)
        await bench.apply(
            manifest("VirtualMachine", "bare", {"boot": {"image": "tiny"}}),
            volume("empty"),
            manifest(
                "VirtualMachine",
                "own",
                {"boot": {"image": "tiny"}, "disks": [{"name": "d", "volume": "empty"}]},
            ),
        )
        with pytest.raises(FailedPrecondition, match="no disk"):
            await rebuild(bench, name="bare")
        with pytest.raises(FailedPrecondition, match="not made from an image"):
            await rebuild(bench, name="own")
        with pytest.raises(NotFound):
            await rebuild(bench, name="nobody")
        block = {"class": "block", "format": "raw", "size": "64Mi", "block": {"device": "/dev/x"}}
        await bench.apply(
            manifest("Volume", "dev", block),
            manifest(
                "VirtualMachine",
                "metal",
                {"boot": {"image": "tiny"}, "disks": [{"name": "d", "volume": "dev"}]},
            ),
        )
        with pytest.raises(Unsupported, match="class block"):
            await rebuild(bench, name="metal", image="tiny")


@simulated
async def test_the_same_request_under_its_key_rebuilds_once() -> None:
    async with open_bench() as bench:
        await running(bench)
        first = await rebuild(bench, idempotency_key="k")
        await bench.final(first.operation.id)
        again = await rebuild(bench, idempotency_key="k")
        assert again.operation.id == first.operation.id and again.joined
        with pytest.raises(Conflict):
            await rebuild(bench, idempotency_key="k", keep_old=True)


@simulated
async def test_the_volumes_of_a_rebuild_go_with_their_vm() -> None:
    async with open_bench() as bench:
        await running(bench)
        await bench.final((await bench.act("stop")).id)
        await done(bench)
        await bench.final((await bench.delete("VirtualMachine", "web")).id)
        await gone(bench, "root-before-rebuild")
        assert set(volumes(bench)) == {"root", "data"}
