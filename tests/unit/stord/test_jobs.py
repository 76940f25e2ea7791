"""Jobs: begun once, one per volume, watched, cancelled, gone on with, forgotten in time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from anyio.abc import TaskGroup

from chv.common.clock import SystemClock
from chv.common.errors import Conflict, FailedPrecondition, InUse, NotFound
from chv.common.ids import Ids
from chv.common.store import Store
from chv.common.wire.stord import JobInfo, JobKind, JobState
from chv.stord.events import Events
from chv.stord.jobs import FINAL_JOBS_MAX, JobControl, Jobs
from chv.stord.records import MIGRATIONS, Records

VOLUME, OTHER = Ids().uid(), Ids().uid()


class Parameters(msgspec.Struct, frozen=True):
    word: str = "w"


class World:
    def __init__(self, store: Store, records: Records, tasks: TaskGroup) -> None:
        self.store = store
        self.records = records
        self.events = Events()
        self.jobs = Jobs(records, SystemClock(), self.events, tasks)

    async def until_final(self, job_id: str) -> JobInfo:
        with anyio.fail_after(5):
            while self.jobs.get(job_id).state is JobState.RUNNING:
                await anyio.sleep(0.001)
        return self.jobs.get(job_id)


@asynccontextmanager
async def world(path: Path) -> AsyncIterator[World]:
    """A daemon's life: its end cancels what runs, like a stop does."""
    async with Store.open(path / "db", MIGRATIONS) as store, anyio.create_task_group() as tasks:
        yield World(store, await Records.load(store), tasks)
        tasks.cancel_scope.cancel()


async def at_once(control: JobControl) -> dict[str, str]:
    await control.progress(3, 4, control.parameters(Parameters).word)
    return {"errors": "0"}


async def until_cancelled(control: JobControl) -> dict[str, str]:
    await control.progress(1, 2, "half")
    await control.cancelling.wait()
    control.refuse_cancelled()
    return {}


async def test_a_job_runs_once_and_keeps_its_result(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        with here.events.subscribe() as events:
            started = await here.jobs.start(
                VOLUME, JobKind.CHECK, "op-1", Parameters("hello"), at_once
            )
            assert started.state is JobState.RUNNING
            done = await here.until_final("op-1")
            assert (done.state, done.result, done.message) == (
                JobState.DONE,
                {"errors": "0"},
                "hello",
            )
            assert (done.done_bytes, done.total_bytes) == (3, 4)
            assert done.ended_at >= done.started_at
            event = await events.receive()
            assert (event.kind, event.volume_id) == ("job", VOLUME)
    async with world(tmp_path) as here:
        assert here.jobs.get("op-1") == done


async def test_the_same_id_is_the_same_job_and_is_not_run_again(tmp_path: Path) -> None:
    runs = []

    async def counted(control: JobControl) -> dict[str, str]:
        runs.append(control.job_id)
        return {}

    async with world(tmp_path) as here:
        for _ in range(3):
            await here.jobs.start(VOLUME, JobKind.CHECK, "op-1", Parameters(), counted)
            await here.until_final("op-1")
        with pytest.raises(Conflict):
            await here.jobs.start(OTHER, JobKind.CHECK, "op-1", Parameters(), counted)
        with pytest.raises(Conflict):
            await here.jobs.start(VOLUME, JobKind.MOVE, "op-1", Parameters(), counted)
    assert runs == ["op-1"]


async def test_a_second_job_on_a_volume_is_refused_and_on_another_is_not(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.jobs.start(VOLUME, JobKind.CHECK, "op-1", Parameters(), until_cancelled)
        with pytest.raises(Conflict, match="op-1"):
            await here.jobs.start(VOLUME, JobKind.BACKUP, "op-2", Parameters(), at_once)
        await here.jobs.start(OTHER, JobKind.BACKUP, "op-3", Parameters(), at_once)
        assert (await here.until_final("op-3")).state is JobState.DONE
        with pytest.raises(NotFound):
            here.jobs.get("op-2")


async def test_cancel_ends_a_job_that_obeys_and_is_recorded(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.jobs.start(VOLUME, JobKind.CHECK, "op-1", Parameters(), until_cancelled)
        await here.jobs.cancel("op-1")
        ended = await here.until_final("op-1")
        assert ended.state is JobState.CANCELLED
        assert ended.error is not None
        assert ended.error.code == "CANCELLED"
        assert (await here.jobs.cancel("op-1")).state is JobState.CANCELLED


async def test_cancel_of_a_finished_job_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.jobs.start(VOLUME, JobKind.CHECK, "op-1", Parameters(), at_once)
        await here.until_final("op-1")
        with pytest.raises(FailedPrecondition):
            await here.jobs.cancel("op-1")
        with pytest.raises(NotFound):
            await here.jobs.cancel("op-9")


async def test_a_job_that_raises_is_failed_with_its_error(tmp_path: Path) -> None:
    async def refused(_control: JobControl) -> dict[str, str]:
        raise InUse("held", resource=VOLUME)

    async def broken(_control: JobControl) -> dict[str, str]:
        raise ZeroDivisionError

    async with world(tmp_path) as here:
        await here.jobs.start(VOLUME, JobKind.CHECK, "op-1", Parameters(), refused)
        first = await here.until_final("op-1")
        await here.jobs.start(VOLUME, JobKind.CHECK, "op-2", Parameters(), broken)
        second = await here.until_final("op-2")
    assert first.state is second.state is JobState.FAILED
    assert first.error is not None
    assert (first.error.code, first.error.message) == ("IN_USE", "held")
    assert second.error is not None
    assert second.error.code == "INTERNAL"


async def test_a_stop_leaves_the_job_running_and_the_next_start_goes_on_with_it(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here:
        await here.jobs.start(VOLUME, JobKind.CHECK, "op-1", Parameters("x"), until_cancelled)
    async with world(tmp_path) as here:
        assert here.jobs.get("op-1").state is JobState.RUNNING
        await here.jobs.resume({JobKind.CHECK: at_once})
        done = await here.until_final("op-1")
        assert (done.state, done.message) == (JobState.DONE, "x")


async def test_a_cancel_outlives_a_restart(tmp_path: Path) -> None:
    async def deaf(_control: JobControl) -> dict[str, str]:
        await anyio.sleep_forever()
        return {}

    async with world(tmp_path) as here:
        await here.jobs.start(VOLUME, JobKind.CHECK, "op-1", Parameters(), deaf)
        await here.jobs.cancel("op-1")
    async with world(tmp_path) as here:
        await here.jobs.resume({JobKind.CHECK: until_cancelled})
        assert (await here.until_final("op-1")).state is JobState.CANCELLED


async def test_progress_shows_while_it_runs(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.jobs.start(VOLUME, JobKind.CHECK, "op-1", Parameters(), until_cancelled)
        with anyio.fail_after(5):
            while here.jobs.get("op-1").message != "half":
                await anyio.sleep(0.001)
        shown = here.jobs.get("op-1")
        assert (shown.done_bytes, shown.total_bytes, shown.state) == (1, 2, JobState.RUNNING)


async def test_only_the_last_final_jobs_of_a_volume_are_kept(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.jobs.start(OTHER, JobKind.CHECK, "other", Parameters(), at_once)
        await here.until_final("other")
        for number in range(FINAL_JOBS_MAX + 5):
            job_id = f"op-{number:03}"
            await here.jobs.start(VOLUME, JobKind.CHECK, job_id, Parameters(), at_once)
            await here.until_final(job_id)
        with anyio.fail_after(5):
            while len(here.records.jobs) > FINAL_JOBS_MAX + 1:
                await anyio.sleep(0.001)
        kept = {info.job_id for info in here.jobs.list()}
        assert "other" in kept
        assert "op-004" not in kept
        assert {"op-005", "op-024"} <= kept


async def test_jobs_are_listed_newest_first(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        for job_id in ("op-1", "op-2", "op-3"):
            await here.jobs.start(VOLUME, JobKind.CHECK, job_id, Parameters(), at_once)
            await here.until_final(job_id)
        assert [info.job_id for info in here.jobs.list()] == ["op-3", "op-2", "op-1"]


async def test_the_end_of_a_job_whose_volume_is_gone_leaves_no_record(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.jobs.start(VOLUME, JobKind.CHECK, "op-1", Parameters(), until_cancelled)
        live = here.jobs._live["op-1"]
        await here.records.drop_volume(VOLUME)
        with anyio.fail_after(5), here.events.subscribe() as events:
            live.cancelling.set()
            await events.receive()
        assert here.records.jobs == {}
