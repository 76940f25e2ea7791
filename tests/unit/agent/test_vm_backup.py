"""A backup of all disks of a VM: one operation, one job, a request on every volume meanwhile."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from chv.common.errors import Conflict, FailedPrecondition, InvalidArgument, NotFound
from chv.common.wire import agent as api
from chv.common.wire.stord import JobState
from tests.sim.bench import Bench, everything, open_bench, vm, volume
from tests.sim.stord import SimJob, SimStord
from tests.sim.virtual import simulated

DISKS = [{"name": "data", "volume": "data"}, {"name": "more", "volume": "more"}]


def sim(bench: Bench) -> SimStord:
    return bench.machine.host.stord


@asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    """A VM with two disks, on a bench on which no job ends by itself."""
    async with open_bench() as bench:
        sim(bench).job_s = (10_000.0,)
        await bench.apply(*everything()[1:], volume("more"))
        reply = await bench.apply(vm(disks=DISKS))
        assert (await bench.final(reply.results[-1].operation_id)).state.value == "Succeeded"
        yield bench


async def back_up(bench: Bench, **more: Any) -> api.OperationReply:
    values = {"name": "web", "requester": "test", "target": "/backups/web/"} | more
    return await bench.engine.back_up_vm(api.BackUpVm(**values))


async def act(bench: Bench, name: str) -> api.OperationReply:
    request = api.ActOnVolume(
        verb=api.VolumeVerb.BACKUP, name=name, requester="test", target="/backups/other"
    )
    return await bench.engine.act_on_volume(request)


async def the_job(bench: Bench) -> SimJob:
    with anyio.fail_after(120):
        while not sim(bench).jobs:  # noqa: ASYNC110
            await anyio.sleep(0.5)
    (job,) = sim(bench).jobs.values()
    return job


async def free(bench: Bench) -> None:
    """No volume has a request any more: each takes another verb."""
    with anyio.fail_after(60):
        for name in ("data", "more"):
            while True:
                try:
                    operation = (await act(bench, name)).operation
                    break
                except Conflict:
                    await anyio.sleep(0.5)
            request = api.CancelOperation(operation_id=operation.id, requester="test")
            await bench.engine.cancel(request)
            await bench.final(operation.id)


@simulated
async def test_it_is_one_operation_of_the_vm_with_one_job_and_asking_twice_joins_it() -> None:
    async with running() as bench:
        first = await back_up(bench)
        assert (first.operation.kind, first.operation.verb) == ("VirtualMachine", "backup")
        job = await the_job(bench)
        uids = [bench.get("Volume", name).metadata.uid for name in ("data", "more")]
        assert job.info.volume_ids == uids
        again = await back_up(bench)
        assert again.joined
        assert again.operation.id == first.operation.id == job.info.job_id
        with pytest.raises(Conflict, match="backup op-"):
            await back_up(bench, incremental=True)
        for name in ("data", "more"):
            with pytest.raises(Conflict, match="backup op-"):
                await act(bench, name)
        result = {"volumes": "2", "path": "/b/data/1, /b/more/1", "bytes": "2097152"}
        values = {name: getattr(job.info, name) for name in job.info.__struct_fields__}
        job.info = type(job.info)(**(values | {"result": result}))
        sim(bench)._end(job, JobState.DONE)
        final = await bench.final(first.operation.id)
        assert final.state.value == "Succeeded"
        assert final.message == "2 volumes, 2Mi in /b/data/1, /b/more/1"
        await free(bench)


@simulated
async def test_cancelled_it_ends_and_lets_go_of_every_volume() -> None:
    async with running() as bench:
        backup = (await back_up(bench)).operation
        job = await the_job(bench)
        request = api.CancelOperation(operation_id=backup.id, requester="test")
        await bench.engine.cancel(request)
        assert (await bench.final(backup.id)).state.value == "Cancelled"
        assert job.info.state is JobState.CANCELLED
        await free(bench)


@simulated
async def test_a_job_that_fails_fails_the_operation_and_the_vm_runs_on() -> None:
    async with running() as bench:
        backup = (await back_up(bench)).operation
        sim(bench)._end(await the_job(bench), JobState.FAILED)
        final = await bench.final(backup.id)
        assert final.state.value == "Failed"
        assert final.error is not None
        assert bench.get("VirtualMachine", "web").status.phase == "Running"
        await free(bench)


@simulated
async def test_it_runs_beside_the_verbs_on_the_vm() -> None:
    async with running() as bench:
        backup = (await back_up(bench)).operation
        job = await the_job(bench)
        assert (await bench.final((await bench.act("reset")).id)).state.value == "Succeeded"
        shown = await bench.engine.get_operation(api.OperationRef(operation_id=backup.id))
        assert shown.operation.state.value == "Running"
        sim(bench)._end(job, JobState.DONE)
        assert (await bench.final(backup.id)).state.value == "Succeeded"


@simulated
async def test_what_cannot_be_backed_up_is_refused_before_anything_is_recorded() -> None:
    async with running() as bench:
        with pytest.raises(NotFound):
            await back_up(bench, name="nobody")
        with pytest.raises(InvalidArgument, match="no place for a backup"):
            await back_up(bench, target="backups")
        await act(bench, "more")
        with pytest.raises(Conflict, match="is under way"):
            await back_up(bench)
        await bench.apply(vm(name="bare", disks=[]))
        with pytest.raises(FailedPrecondition, match="no disk that it writes"):
            await back_up(bench, name="bare")
