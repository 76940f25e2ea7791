"""Volumes and snapshots as objects: status, moves, verbs, what is refused.

The agent is the real one, on a simulated machine; a job lasts as long as the test wants.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import patch

import anyio
import pytest

from chv.common.errors import (
    ChvError,
    Conflict,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from chv.common.wire import agent as api
from chv.common.wire import stord
from chv.common.wire.stord import JobState
from tests.sim.bench import Bench, everything, manifest, open_bench, vm, volume
from tests.sim.stord import SimJob, SimStord, SimVolume
from tests.sim.virtual import simulated


def snapshot(name: str = "snap", **spec: Any) -> dict[str, Any]:
    return manifest("VolumeSnapshot", name, spec or {"volume": "data"})


def sim(bench: Bench) -> SimStord:
    return bench.machine.host.stord


def on_disk(bench: Bench, name: str = "data") -> SimVolume:
    return sim(bench).volumes[bench.get("Volume", name).metadata.uid]


@asynccontextmanager
async def open_slow() -> AsyncIterator[Bench]:
    """A bench on which no job ends by itself."""
    async with open_bench() as bench:
        sim(bench).job_s = (10_000.0,)
        yield bench


async def done(bench: Bench, *objects: dict[str, Any]) -> list[api.Operation]:
    reply = await bench.apply(*objects)
    return [await bench.final(each.operation_id) for each in reply.results if each.operation_id]


async def act(bench: Bench, verb: str, name: str = "data", **more: Any) -> api.OperationReply:
    request = api.ActOnVolume(verb=api.VolumeVerb(verb), name=name, requester="test", **more)
    return await bench.engine.act_on_volume(request)


async def cancel(bench: Bench, operation_id: str) -> api.Operation:
    request = api.CancelOperation(operation_id=operation_id, requester="test")
    return (await bench.engine.cancel(request)).operation


def the_job(bench: Bench, kind: str) -> SimJob:
    (found,) = [job for job in sim(bench).jobs.values() if job.info.kind.value == kind]
    return found


async def running_job(bench: Bench, kind: str, *, ends_in_s: float = 500.0) -> SimJob:
    """Wait until a job of the kind has begun, and let it last."""
    while not any(job.info.kind.value == kind for job in sim(bench).jobs.values()):
        await anyio.sleep(0.05)
    job = the_job(bench, kind)
    job.ends_at = bench.machine.clock.monotonic() + ends_in_s
    return job


def _fields(info: stord.JobInfo) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__struct_fields__}


async def refused(error: type[ChvError], bench: Bench, *objects: dict[str, Any]) -> ChvError:
    with pytest.raises(error) as caught:
        await bench.apply(*objects)
    return caught.value


# --- what stord is asked for, and what is shown


@simulated
async def test_the_whole_spec_reaches_stord_and_what_it_says_is_shown() -> None:
    async with open_bench() as bench:
        limits = {"iopsTotal": {"limit": 500, "burst": 900, "burstSeconds": 5},
                  "bandwidthRead": {"limit": "10Mi"}, "iopsSize": "64Ki"}  # fmt: skip
        await done(bench, volume(format="raw", pool="fast", limits=limits, spacePolicy="Report"))
        backend = on_disk(bench).backend
        assert backend.pool == "fast"
        assert backend.space_policy is stord.SpacePolicy.REPORT
        assert backend.limits.iops_total == stord.Rate(limit=500, burst=900, burst_s=5)
        assert backend.limits.bps_read.limit == 10 << 20
        assert backend.limits.iops_size_bytes == 64 << 10
        raw = bench.engine.get(api.ObjectRef(kind="Volume", name="data")).object
        assert json.loads(bytes(raw))["status"]["limits"] == limits
        shown = bench.get("Volume", "data").status
        assert shown.phase == "Ready"
        assert shown.limits.bandwidth_read.limit == "10Mi"
        assert {each.type: each.status.value for each in shown.conditions} == {
            "Ready": "True", "SizeApplied": "True", "SpaceAvailable": "True"
        }  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "place"),
    [
        ({"class": "lvm", "lvm": {"volumeGroup": "vg0", "thinPool": "tp"}}, "lvm"),
        ({"class": "nbd", "nbd": {"host": "192.0.2.1", "export": "x"}}, "nbd"),
        ({"class": "block", "block": {"device": "/dev/sdx"}}, "block"),
        ({"class": "rbd", "rbd": {"pool": "vms"}}, "rbd"),
    ],
)
def test_each_class_carries_its_place(spec: dict[str, Any], place: str) -> None:
    @simulated
    async def run() -> None:
        async with open_bench() as bench:
            await done(bench, volume(**spec))
            backend = on_disk(bench).backend
            assert backend.class_name.value == spec["class"]
            assert getattr(backend, place) is not None

    run()


@simulated
async def test_a_growth_that_the_guest_does_not_see_yet_is_told() -> None:
    async with open_bench() as bench:
        await done(bench, *everything())
        await bench.until("phase=Running")
        (grown,) = (await bench.apply(volume(size="128Mi"))).results
        said = (await bench.final(grown.operation_id)).message
        status = bench.get("Volume", "data").status
        sizes = (status.size_bytes >> 20, status.pending_size_bytes >> 20, status.size_applied)
        (applied,) = [each for each in status.conditions if each.type == "SizeApplied"]
        if sizes[1]:
            assert sizes == (64, 128, "OnNextStart")
            assert (applied.status.value, applied.reason) == ("False", "OnNextStart")
            assert "sees 64Mi until its next start, then 128Mi: " in applied.message
            assert said == f"open, {applied.message}"
        else:
            assert said == "open, 128Mi: its guest sees that at once"
            assert sizes == (128, 0, "Online")
            assert applied.status.value == "True"


# --- moves


@simulated
async def test_another_pool_moves_the_volume_and_the_operation_lasts_as_long() -> None:
    async with open_slow() as bench:
        await done(bench, volume())
        reply = await bench.apply(volume(pool="fast", limits={"iopsTotal": {"limit": 7}}))
        job = await running_job(bench, "move", ends_in_s=30.0)
        assert job.info.job_id == reply.results[0].operation_id
        await anyio.sleep(5)
        assert on_disk(bench).backend.pool == ""
        assert on_disk(bench).backend.limits.iops_total.limit == 7
        assert bench.get("Volume", "data").status.progress == "move 0%"
        operation = await bench.final(reply.results[0].operation_id)
        assert operation.state.value == "Succeeded"
        assert on_disk(bench).backend.pool == "fast"


@simulated
async def test_a_move_that_stord_has_lost_begins_again() -> None:
    async with open_slow() as bench:
        await done(bench, volume())
        await bench.apply(volume(pool="fast"))
        job = await running_job(bench, "move")
        del sim(bench).jobs[job.info.job_id]
        while not sim(bench).jobs:
            await anyio.sleep(1)
        assert the_job(bench, "move").info.volume_id == job.info.volume_id


@simulated
async def test_a_cancelled_move_leaves_volume_and_spec_where_they_were() -> None:
    async with open_slow() as bench:
        await done(bench, volume())
        reply = await bench.apply(volume(pool="fast"))
        job = await running_job(bench, "move")
        await cancel(bench, reply.results[0].operation_id)
        operation = await bench.final(reply.results[0].operation_id)
        assert operation.state.value == "Cancelled"
        assert job.info.state is JobState.CANCELLED
        await anyio.sleep(60)
        stored = bench.get("Volume", "data")
        assert stored.spec.pool == ""
        assert stored.status.observed_generation == stored.metadata.generation
        assert on_disk(bench).backend.pool == ""
        assert len(sim(bench).jobs) == 1


@simulated
async def test_a_failed_move_is_told_and_not_tried_again_before_the_spec_changes() -> None:
    async with open_slow() as bench:
        await done(bench, volume())
        reply = await bench.apply(volume(pool="fast"))
        job = await running_job(bench, "move")
        sim(bench)._end(job, JobState.FAILED)
        operation = await bench.final(reply.results[0].operation_id)
        assert (operation.state.value, operation.message) == ("Failed", "sim: the job failed")
        await anyio.sleep(300)
        assert len(sim(bench).jobs) == 1
        ready = bench.get("Volume", "data").status.conditions[0]
        assert "not moved: sim: the job failed" in ready.message
        await bench.apply(volume(pool="fast", spacePolicy="Report"))
        await anyio.sleep(1)
        assert len(sim(bench).jobs) == 2


@simulated
async def test_a_volume_with_snapshots_does_not_move() -> None:
    async with open_bench() as bench:
        await done(bench, volume(), snapshot())
        error = await refused(FailedPrecondition, bench, volume(pool="fast"))
        assert error.field == "spec.pool"
        assert "VolumeSnapshot default/snap" in error.hint


@simulated
async def test_a_growth_that_is_refused_leaves_a_volume_in_use_as_it_is_and_says_so() -> None:
    async with open_bench() as bench:
        await done(bench, *everything())
        sim(bench).device_bytes = 64 << 20

        (operation,) = await done(bench, volume(size="1Gi"))

        shown = bench.get("Volume", "data").status
        assert operation.state.value == "Failed"
        assert shown.phase == "Attached"
        found = {each.type: each for each in shown.conditions}
        assert (found["SizeApplied"].status.value, found["SizeApplied"].reason) == (
            "False",
            "Refused",
        )
        assert "goes on with it as it was" in found["Ready"].message


# --- snapshots


@simulated
async def test_a_snapshot_of_a_vm_has_all_disks_that_it_writes() -> None:
    async with open_bench() as bench:
        disks: list[dict[str, Any]] = [{"name": n, "volume": n} for n in ("data", "more")]
        disks.append({"name": "seen", "volume": "seen", "readOnly": True})
        await done(bench, *everything(disks=disks), volume("more"), volume("seen"))
        await bench.until("phase=Running")
        (operation,) = await done(bench, snapshot(virtualMachine="web"))
        assert operation.state.value == "Succeeded"
        status = bench.get("VolumeSnapshot", "snap").status
        assert (status.phase, status.consistency) == ("Ready", "Crash")
        assert sorted(part.volume for part in status.volumes) == ["data", "more"]
        await anyio.sleep(60)
        assert [part.snapshot for part in bench.get("Volume", "data").status.snapshots] == ["snap"]


@simulated
async def test_a_frozen_snapshot_thaws_the_guest_and_says_so() -> None:
    async with open_bench() as bench:
        await done(bench, *everything())
        await bench.until("phase=Running")
        await done(bench, snapshot(virtualMachine="web", freeze="5s"))
        assert bench.get("VolumeSnapshot", "snap").status.consistency == "FileSystem"
        process = bench.process()
        assert process is not None
        assert not process.frozen


@simulated
async def test_a_freeze_of_no_guest_fails_for_good() -> None:
    async with open_bench() as bench:
        await done(bench, volume())
        (operation,) = await done(bench, snapshot(volume="data", freeze="5s"))
        assert operation.state.value == "Failed"
        assert operation.error is not None
        assert operation.error.field == "spec.freeze"
        await anyio.sleep(300)
        assert bench.get("VolumeSnapshot", "snap").status.phase == "Failed"
        assert on_disk(bench).snapshots == {}


@simulated
async def test_a_freeze_of_a_guest_without_agent_fails_at_once_and_says_what_is_missing() -> None:
    async with open_bench() as bench:
        await done(bench, *everything())
        await bench.until("phase=Running")
        silent = Unavailable("nobody answers")
        with patch.object(bench.machine.host, "agent", side_effect=silent):
            began = bench.machine.clock.monotonic()
            (operation,) = await done(bench, snapshot(virtualMachine="web", freeze="5s"))
            assert bench.machine.clock.monotonic() - began < 30
        assert operation.state.value == "Failed"
        assert operation.error is not None
        assert (operation.error.code, operation.error.field) == (
            "FAILED_PRECONDITION",
            "spec.freeze",
        )
        await anyio.sleep(60)
        status = bench.get("VolumeSnapshot", "snap").status
        assert status.phase == "Failed"
        assert "qemu-guest-agent" in status.conditions[0].message
        assert on_disk(bench).snapshots == {}


@simulated
async def test_a_merge_that_fails_is_told_and_tried_again_at_leisure() -> None:
    async with open_slow() as bench:
        await done(bench, volume(), snapshot())
        await bench.delete("VolumeSnapshot", "snap")
        sim(bench)._end(await running_job(bench, "delete_snapshot"), JobState.FAILED)
        await anyio.sleep(3)
        message = bench.get("VolumeSnapshot", "snap").status.conditions[0].message
        assert message == "tries again: volume data: sim: the job failed"
        assert len(sim(bench).jobs) == 1
        await anyio.sleep(10)
        assert len(sim(bench).jobs) == 2


@simulated
async def test_a_snapshot_that_has_vanished_is_lost_and_never_taken_again() -> None:
    async with open_bench() as bench:
        await done(bench, volume(), snapshot())
        on_disk(bench).snapshots.clear()
        await anyio.sleep(120)
        stored = bench.get("VolumeSnapshot", "snap")
        assert stored.status.phase == "Failed"
        assert stored.status.conditions[0].reason == "DataLoss"
        assert on_disk(bench).snapshots == {}
        assert bench.machine.violations == []


@simulated
async def test_everything_about_a_snapshot_is_fixed_at_creation() -> None:
    async with open_bench() as bench:
        await done(bench, volume(), volume("more"), snapshot())
        error = await refused(InvalidArgument, bench, snapshot(volume="more"))
        assert error.field == "spec"


@simulated
async def test_what_still_needs_a_volume_or_snapshot_is_named_when_it_is_to_be_deleted() -> None:
    async with open_bench() as bench:
        await done(bench, volume(), snapshot())
        clone = volume("clone", format="qcow2", source={"snapshot": "snap"})
        await done(bench, clone)
        with pytest.raises(InUse, match="VolumeSnapshot default/snap"):
            await bench.delete("Volume", "data")
        with pytest.raises(InUse, match="Volume default/clone"):
            await bench.delete("VolumeSnapshot", "snap")
        await anyio.sleep(60)
        assert bench.get("VolumeSnapshot", "snap").status.volumes[0].used_by == ["clone"]
        for kind, name in (("Volume", "clone"), ("VolumeSnapshot", "snap"), ("Volume", "data")):
            operation = await bench.final((await bench.delete(kind, name)).id)
            assert operation.state.value == "Succeeded"
        assert sim(bench).volumes == {}


@simulated
async def test_a_full_clone_needs_its_snapshot_no_longer_than_its_making() -> None:
    async with open_slow() as bench:
        await done(bench, volume(), snapshot())
        clone = volume("clone", source={"snapshot": "snap", "mode": "Full"})
        await bench.apply(clone)
        job = await running_job(bench, "create")
        await anyio.sleep(3)
        assert bench.get("Volume", "clone").status.phase == "Creating"
        with pytest.raises(InUse):
            await bench.delete("VolumeSnapshot", "snap")
        sim(bench)._end(job, JobState.DONE)
        await bench.until("Ready", "clone", "Volume")
        sim(bench).job_s = (1.0,)
        await bench.final((await bench.delete("VolumeSnapshot", "snap")).id)
        await done(bench, {**clone, "spec": {**clone["spec"], "size": "128Mi"}})
        assert on_disk(bench, "clone").size_bytes == 128 << 20


@simulated
async def test_a_clone_of_one_of_several_volumes_that_is_not_named_fails_and_names_them() -> None:
    disks = [{"name": "data", "volume": "data"}, {"name": "more", "volume": "more"}]
    copy = volume("copy", size="1Gi", format="qcow2", source={"snapshot": "snap"})
    async with open_bench() as bench:
        await done(bench, *everything(disks=disks), volume("more"))
        await bench.apply(snapshot(virtualMachine="web"), copy)
        await bench.until("Ready", "snap", "VolumeSnapshot")
        await anyio.sleep(120)  # the clone came before it was known what it is of
        assert bench.get("Volume", "copy").status.phase == "Failed"
        ready = bench.get("Volume", "copy").status.conditions[0]
        assert "data, more" in ready.message


@simulated
async def test_a_clone_smaller_than_its_snapshot_is_refused() -> None:
    async with open_bench() as bench:
        await done(bench, volume(size="128Mi"), snapshot())
        small = volume("clone", source={"snapshot": "snap", "mode": "Full"})
        error = await refused(InvalidArgument, bench, small)
        assert (error.field, error.hint) == ("spec.size", "at least 128Mi")


@simulated
async def test_a_cancelled_deletion_leaves_the_snapshot_as_it_was() -> None:
    async with open_slow() as bench:
        await done(bench, volume(), snapshot())
        deletion = await bench.delete("VolumeSnapshot", "snap")
        await running_job(bench, "delete_snapshot")
        await anyio.sleep(5)
        assert bench.get("VolumeSnapshot", "snap").status.progress == "delete snapshot 0%"
        await cancel(bench, deletion.id)
        assert (await bench.final(deletion.id)).state.value == "Cancelled"
        ready = await bench.until("Ready", "snap", "VolumeSnapshot")
        assert ready.metadata.deletion_timestamp == ""
        assert list(on_disk(bench).snapshots.values()) == [False]


# --- verbs


@simulated
async def test_a_backup_is_an_operation_with_its_job_and_asking_twice_joins_it() -> None:
    async with open_slow() as bench:
        await done(bench, *everything())
        first = await act(bench, "backup", target="/backups/data")
        job = await running_job(bench, "backup")
        second = await act(bench, "backup", target="/backups/data")
        assert second.joined
        assert second.operation.id == first.operation.id == job.info.job_id
        with pytest.raises(Conflict, match="backup op-"):
            await act(bench, "backup", target="/backups/other")
        await anyio.sleep(5)
        request = api.OperationRef(operation_id=first.operation.id)
        seen = (await bench.engine.get_operation(request)).operation
        assert (seen.state.value, seen.message) == ("Running", "backup 0%")
        assert seen.progress is not None
        assert (seen.progress.done, seen.progress.total, seen.progress.unit) == (0, 100, "bytes")
        job.info = type(job.info)(
            **{**_fields(job.info), "result": {"path": "/b/1", "sequence": "1", "bytes": "1048576"}}
        )
        sim(bench)._end(job, JobState.DONE)
        final = await bench.final(first.operation.id)
        assert (final.state.value, final.message) == ("Succeeded", "number 1, 1Mi in /b/1")


@simulated
async def test_a_change_of_the_spec_leaves_a_backup_alone() -> None:
    async with open_slow() as bench:
        await done(bench, volume())
        backup = (await act(bench, "backup", target="/b")).operation
        job = await running_job(bench, "backup")
        await bench.apply(volume(spacePolicy="Report"))
        await anyio.sleep(5)
        request = api.ListOperations(active_only=True)
        active = (await bench.engine.list_operations(request)).operations
        assert {each.verb for each in active} == {"backup", "update"}
        sim(bench)._end(job, JobState.DONE)
        assert (await bench.final(backup.id)).state.value == "Succeeded"
        await bench.until("Ready", "data", "Volume")
        assert on_disk(bench).backend.space_policy is stord.SpacePolicy.REPORT


@simulated
async def test_a_cancelled_backup_ends_cancelled() -> None:
    async with open_slow() as bench:
        await done(bench, volume())
        backup = (await act(bench, "backup", target="/b")).operation
        job = await running_job(bench, "backup")
        await cancel(bench, backup.id)
        assert (await bench.final(backup.id)).state.value == "Cancelled"
        assert job.info.state is JobState.CANCELLED
        again = await cancel(bench, backup.id)
        assert again.state.value == "Cancelled"


@simulated
async def test_a_volume_that_goes_is_not_kept_waiting_by_a_snapshot_that_stays_after_all() -> None:
    async with open_slow() as bench:
        await done(bench, volume(), snapshot())
        deletion = await bench.delete("VolumeSnapshot", "snap")
        job = await running_job(bench, "delete_snapshot")
        gone = await bench.delete("Volume", "data")
        with pytest.raises(FailedPrecondition, match="data is being deleted and waits for it"):
            await cancel(bench, deletion.id)
        sim(bench)._end(job, JobState.DONE)
        assert (await bench.final(deletion.id)).state.value == "Succeeded"
        assert (await bench.final(gone.id)).state.value == "Succeeded"


@simulated
async def test_a_snapshot_whose_deletion_is_being_cancelled_keeps_its_volume() -> None:
    async with open_slow() as bench:
        await done(bench, volume(), snapshot())
        deletion = await bench.delete("VolumeSnapshot", "snap")
        await running_job(bench, "delete_snapshot")
        await cancel(bench, deletion.id)
        with pytest.raises(InUse, match="VolumeSnapshot default/snap"):
            await bench.delete("Volume", "data")
        assert (await bench.final(deletion.id)).state.value == "Cancelled"


@simulated
async def test_what_cannot_be_cancelled_safely_says_why() -> None:
    async with open_slow() as bench:
        await done(bench, volume())
        repair = (await act(bench, "repair")).operation
        job = await running_job(bench, "repair")
        with pytest.raises(FailedPrecondition) as caught:
            await cancel(bench, repair.id)
        assert "leaves more to repair" in caught.value.hint
        sim(bench)._end(job, JobState.DONE)
        await bench.final(repair.id)
        with pytest.raises(FailedPrecondition, match="it has ended"):
            await cancel(bench, repair.id)
        with pytest.raises(NotFound):
            await cancel(bench, "op-nowhere")


@simulated
async def test_check_and_restore_need_the_vm_stopped() -> None:
    async with open_bench() as bench:
        await done(bench, *everything(), snapshot())
        await bench.until("phase=Running")
        for verb, more in (("check", {}), ("repair", {}), ("restore", {"snapshot": "snap"})):
            with pytest.raises(FailedPrecondition) as caught:
                await act(bench, verb, **more)
            assert "chv stop web" in caught.value.hint


@simulated
async def test_no_vm_starts_on_a_volume_that_is_being_checked() -> None:
    async with open_slow() as bench:
        await done(bench, *everything(runStrategy="Halted"))
        check = (await act(bench, "check")).operation
        job = await running_job(bench, "check")
        start = await bench.act("start")
        await anyio.sleep(20)
        assert bench.process() is None
        reason = bench.condition("VolumesReady")
        assert reason[0] == "False"
        sim(bench)._end(job, JobState.DONE)
        assert (await bench.final(check.id)).state.value == "Succeeded"
        assert (await bench.final(start.id)).state.value == "Succeeded"
        assert bench.process() is not None


@simulated
async def test_a_restore_is_done_once_and_names_its_snapshot() -> None:
    async with open_bench() as bench:
        await done(bench, volume(), snapshot())
        restore = (await act(bench, "restore", snapshot="snap")).operation
        final = await bench.final(restore.id)
        assert final.message == "as in VolumeSnapshot default/snap"
        assert list(on_disk(bench).restored) == [restore.id]


@simulated
async def test_a_restore_past_later_snapshots_names_them_and_the_commands() -> None:
    async with open_bench() as bench:
        await done(bench, volume(), snapshot("first"))
        await done(bench, snapshot("second"))
        await done(bench, snapshot("third"))

        restore = (await act(bench, "restore", snapshot="first")).operation
        refused = await bench.final(restore.id)

        assert refused.state.value == "Failed"
        assert refused.error is not None
        assert "later snapshots, which would be lost: third, second" in refused.error.message
        assert refused.error.hint == (
            "chv snapshot rm third; chv snapshot rm second;"
            " chv volume restore data --snapshot first"
        )
        assert on_disk(bench).restored == {}
        newest = (await act(bench, "restore", snapshot="third")).operation
        assert (await bench.final(newest.id)).state.value == "Succeeded"


@pytest.mark.parametrize(
    ("verb", "more", "error", "field"),
    [
        ("backup", {}, InvalidArgument, "target"),
        ("backup", {"target": "tmp"}, InvalidArgument, "target"),
        ("check", {"target": "/b"}, InvalidArgument, "target"),
        ("restore", {}, InvalidArgument, "snapshot"),
        ("restore", {"snapshot": "none"}, NotFound, ""),
        ("restore", {"snapshot": "other"}, InvalidArgument, "snapshot"),
        ("grow_now", {}, FailedPrecondition, "status.pendingSizeBytes"),
    ],
)
def test_a_verb_that_makes_no_sense_is_refused(
    verb: str, more: dict[str, Any], error: type[ChvError], field: str
) -> None:
    @simulated
    async def run() -> None:
        async with open_bench() as bench:
            await done(bench, volume(), volume("more"), snapshot("other", volume="more"))
            with pytest.raises(error) as caught:
                await act(bench, verb, **more)
            assert caught.value.field == field
            assert sim(bench).jobs == {}

    run()


@simulated
async def test_a_deleted_volume_ends_its_verb_first() -> None:
    async with open_slow() as bench:
        await done(bench, volume())
        backup = (await act(bench, "backup", target="/b")).operation
        job = await running_job(bench, "backup")
        deletion = await bench.delete("Volume", "data")
        assert (await bench.final(backup.id)).state.value == "Failed"
        assert (await bench.final(deletion.id)).state.value == "Succeeded"
        assert job.info.state is JobState.CANCELLED
        assert sim(bench).volumes == {}


@simulated
async def test_a_verb_goes_on_after_the_agent_was_killed() -> None:
    async with open_slow() as bench:
        await done(bench, volume())
        backup = (await act(bench, "backup", target="/b")).operation
        job = await running_job(bench, "backup", ends_in_s=5.0)
        machine = bench.machine
    async with open_bench(machine) as bench:
        final = await bench.final(backup.id)
        assert final.state.value == "Succeeded"
        assert job.info.state is JobState.DONE
        assert len(sim(bench).jobs) == 1


# --- many readers


@simulated
async def test_several_vms_read_one_volume_and_none_may_write_it() -> None:
    async with open_bench() as bench:
        shared = volume("lib", accessMode="ReadOnlyMany", **{"class": "nbd"},
                        nbd={"host": "192.0.2.1", "export": "lib"})  # fmt: skip
        image, net = everything()[3], everything()[2]
        reading = [{"name": "lib", "volume": "lib", "readOnly": True}]
        writing = vm("c", disks=[{"name": "lib", "volume": "lib"}])
        await done(bench, image, net, shared, vm("a", disks=reading), vm("b", disks=reading))
        for name in ("a", "b"):
            await bench.until("phase=Running", name)
        error = await refused(InvalidArgument, bench, writing)
        assert error.field == "spec.disks[0].readOnly"
        await anyio.sleep(60)
        assert bench.get("Volume", "lib").status.readers == ["default/a", "default/b"]
        error = await refused(InvalidArgument, bench, snapshot(volume="lib"))
        assert error.field == "spec.volume"


@simulated
async def test_a_volume_of_one_writer_is_not_shared() -> None:
    async with open_bench() as bench:
        await done(bench, *everything())
        other = vm("other", disks=[{"name": "d", "volume": "data", "readOnly": True}])
        error = await refused(InUse, bench, other)
        assert "VirtualMachine default/web" in error.message


def test_status_is_json_without_what_is_empty() -> None:
    @simulated
    async def run() -> None:
        async with open_bench() as bench:
            await done(bench, volume())
            request = api.ObjectRef(kind="Volume", name="data")
            status = json.loads(bytes(bench.engine.get(request).object))["status"]
            assert "limits" not in status
            assert "readers" not in status
            assert "pendingSizeBytes" not in status

    run()
