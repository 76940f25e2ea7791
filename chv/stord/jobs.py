"""Work that outlives its call: begun once, watched, cancelled, gone on with after a restart.

At most one job is under way per volume, and one may be of several volumes; its record is durable
before its first effect. A runner must be restartable: after a kill it is called again with the
parameters it was begun with and finds out from records and reality how far it came. What it
raises is the job's end: `Cancelled` makes it cancelled, any other error failed; nothing of it
reaches the daemon. Progress is kept in memory only. This module knows nothing of what jobs do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import anyio
import anyio.lowlevel
import msgspec
from anyio.abc import TaskGroup

from chv.common import logs
from chv.common.clock import Clock, timestamp
from chv.common.errors import (
    Cancelled,
    ChvError,
    Conflict,
    DeadlineExceeded,
    ErrorData,
    FailedPrecondition,
    Internal,
    NotFound,
)
from chv.common.failpoint import failpoint
from chv.common.wire.stord import JobInfo, JobKind, JobState, StorageEvent
from chv.stord.events import Events
from chv.stord.records import Job, Records

log = logs.get(__name__)
FINAL_JOBS_MAX = 20  # kept per volume
MESSAGE_CHARACTERS_MAX = 256
END_TIMEOUT_S = 10.0
PERCENT = 100
T = TypeVar("T")


class JobControl:
    """What a runner has of its job.

    `cancelling` is set when somebody wants it to end: a runner that has not passed its point of
    no return then takes back what it did and raises `Cancelled`; one that has goes on.
    """

    def __init__(self, job: Job, clock: Clock) -> None:
        self._clock = clock
        self.job_id = job.info.job_id
        self.volume_id = job.info.volume_id
        self.cancelling = anyio.Event()
        self.waits = False  # for a word of the caller
        self._still_until = 0.0  # what the caller holds still, by CLOCK_MONOTONIC
        self._word = anyio.Event()
        self._heeded = anyio.Event()
        self.done_bytes = job.info.done_bytes
        self.total_bytes = job.info.total_bytes
        self.message = job.info.message
        self._parameters = job.parameters
        if job.cancelling:
            self.cancelling.set()

    def parameters(self, kind: type[T]) -> T:
        """Return the parameters that the job was begun with."""
        return msgspec.json.decode(self._parameters, type=kind)

    async def progress(self, done: int, total: int, message: str = "") -> None:
        """Say how far it is, in bytes; an empty message leaves the one before."""
        self.done_bytes, self.total_bytes = max(done, 0), max(total, 0)
        if message:
            self.message = message[:MESSAGE_CHARACTERS_MAX]
        await anyio.lowlevel.checkpoint()

    def percent(self, percent: float) -> None:
        """Say how far it is in percent of `total_bytes`, as qemu-img tells it."""
        self.done_bytes = int(self.total_bytes * percent / PERCENT)

    async def await_word(self) -> None:
        """Stand still until the caller says so; Cancelled where that never comes."""
        self.waits = True
        async with anyio.create_task_group() as either:

            async def cancelled() -> None:
                await self.cancelling.wait()
                either.cancel_scope.cancel()

            either.start_soon(cancelled)
            await self._word.wait()
            either.cancel_scope.cancel()
        self.refuse_cancelled()

    def require_stillness(self) -> None:
        """Raise DeadlineExceeded where what the caller held still may have moved by now."""
        if self.waits and self._clock.monotonic() > self._still_until:
            raise DeadlineExceeded("the guest went on before its writes were noticed")

    def heed_word(self) -> None:
        """Say that what the caller held still for is done, or will not be."""
        self.waits = False
        self._heeded.set()

    async def say_word(self, until_s: float) -> None:
        """Let a job that waits go on; returns when it has heeded it, or will not."""
        self._still_until = until_s
        self._word.set()
        await self._heeded.wait()

    def refuse_cancelled(self) -> None:
        """Raise `Cancelled` where somebody wants the job to end."""
        if self.cancelling.is_set():
            raise Cancelled("cancelled on request", resource=self.job_id)


Runner = Callable[[JobControl], Awaitable[dict[str, str]]]


class Jobs:
    """All jobs of this node. Their tasks run in `tasks`, and end with the daemon unfinished."""

    def __init__(self, records: Records, clock: Clock, events: Events, tasks: TaskGroup) -> None:
        self._records = records
        self._clock = clock
        self._events = events
        self._tasks = tasks
        self._live: dict[str, JobControl] = {}

    async def start(
        self,
        volume_id: str,
        kind: JobKind,
        job_id: str,
        parameters: msgspec.Struct,
        run: Runner,
    ) -> JobInfo:
        """Begin a job, or return the one of this id. The caller holds the volume's lock."""
        return await self.start_on([volume_id], kind, job_id, parameters, run)

    async def start_on(
        self,
        volume_ids: Sequence[str],
        kind: JobKind,
        job_id: str,
        parameters: msgspec.Struct,
        run: Runner,
    ) -> JobInfo:
        """Begin a job on several volumes, whose locks the caller holds; it is the first one's."""
        volume_id = volume_ids[0]
        known = self._records.jobs.get(job_id)
        if known is not None:
            if (known.info.volume_id, known.info.kind) != (volume_id, kind):
                raise Conflict(
                    f"{job_id} is a job of kind {known.info.kind.value} on volume"
                    f" {known.info.volume_id}",
                    field="meta.operation_id",
                    hint="an operation id names one operation",
                )
            return self.get(job_id)
        for each in volume_ids:
            self.refuse_busy(each)
        info = JobInfo(
            job_id=job_id,
            volume_id=volume_id,
            kind=kind,
            state=JobState.RUNNING,
            volume_ids=list(volume_ids) if len(volume_ids) > 1 else [],
            started_at=timestamp(self._clock.now()),
        )
        job = Job(info=info, parameters=msgspec.Raw(msgspec.json.encode(parameters)))
        await self._records.put_job(job)
        await failpoint("stord.job.after_record")
        log.info("job_started", job_id=job_id, kind=kind.value, volume_id=volume_id)
        self._spawn(job, run)
        return self.get(job_id)

    def refuse_busy(self, volume_id: str) -> None:
        """Raise Conflict where a job is under way on the volume."""
        busy = self._records.job_of(volume_id)
        if busy is not None:
            raise Conflict(
                f"job {busy.info.job_id} ({busy.info.kind.value}) is under way on the volume",
                resource=volume_id,
                hint="wait until it ends, or cancel it",
            )

    async def resume(self, runners: Mapping[JobKind, Runner]) -> None:
        """Go on with every job that a restart cut short. Called once, at start."""
        for job in list(self._records.jobs.values()):
            if job.info.state is JobState.RUNNING and job.info.job_id not in self._live:
                log.info("job_resumed", job_id=job.info.job_id, kind=job.info.kind.value)
                self._spawn(job, runners[job.info.kind])

    def get(self, job_id: str) -> JobInfo:
        """Return one job as it is now."""
        job = self._records.jobs.get(job_id)
        if job is None:
            raise NotFound(f"there is no job {job_id}", resource=job_id)
        return self._shown(job)

    def list(self) -> list[JobInfo]:
        """Return all jobs, newest first."""
        shown = [self._shown(job) for job in self._records.jobs.values()]
        return sorted(shown, key=lambda info: (info.started_at, info.job_id), reverse=True)

    async def cancel(self, job_id: str) -> JobInfo:
        """Ask a job to end; what it does about it is its own. Again: the same answer."""
        job = self._records.jobs.get(job_id)
        if job is None:
            raise NotFound(f"there is no job {job_id}", resource=job_id)
        if job.info.state in (JobState.DONE, JobState.FAILED):
            raise FailedPrecondition(f"the job is {job.info.state.value} already", resource=job_id)
        if job.info.state is JobState.RUNNING and not job.cancelling:
            await self._records.put_job(msgspec.structs.replace(job, cancelling=True))
            await failpoint("stord.job.after_cancel_record")
        live = self._live.get(job_id)
        if live is not None:
            live.cancelling.set()
        return self.get(job_id)

    async def go_on(self, job_id: str, until_s: float) -> JobInfo:
        """Let a job that waits go on, and return when it has; not waiting: no effect.

        What the caller holds still moves again at `until_s` of CLOCK_MONOTONIC: the job fails if it
        needs longer.
        """
        live = self._live.get(job_id)
        if live is not None and live.waits:
            await live.say_word(until_s)
        return self.get(job_id)

    def _shown(self, job: Job) -> JobInfo:
        live = self._live.get(job.info.job_id)
        if live is None:
            return job.info
        return msgspec.structs.replace(
            job.info,
            done_bytes=live.done_bytes,
            total_bytes=live.total_bytes,
            message=live.message,
            waits=live.waits,
        )

    # --- the life of one job
    def _spawn(self, job: Job, run: Runner) -> None:
        control = JobControl(job, self._clock)
        self._live[control.job_id] = control
        self._tasks.start_soon(self._run, control, run)

    async def _run(self, control: JobControl, run: Runner) -> None:
        """Run to the end; the firewall of one job. A stopping daemon leaves it as it is."""
        result: dict[str, str] = {}
        state, problem = JobState.DONE, None
        try:
            result = await run(control)
        except Cancelled as error:
            state, problem = JobState.CANCELLED, error.data()
        except ChvError as error:
            state, problem = JobState.FAILED, error.data()
        except Exception as error:  # the firewall of one job
            log.exception("job_crashed", error, job_id=control.job_id)  # noqa: TRY401  our logger
            state, problem = JobState.FAILED, Internal("the job failed inside stord").data()
        await self._end(control, state, result, problem)

    async def _end(
        self,
        control: JobControl,
        state: JobState,
        result: dict[str, str],
        problem: ErrorData | None,
    ) -> None:
        """Record the end and tell it; a job whose volume is gone by now has no record."""
        control.heed_word()
        job = self._records.jobs.get(control.job_id)
        await failpoint("stord.job.before_end")
        if job is not None:
            info = msgspec.structs.replace(
                self._shown(job),
                state=state,
                result=result,
                error=problem,
                ended_at=timestamp(self._clock.now()),
            )
            with anyio.fail_after(END_TIMEOUT_S, shield=True):
                await self._records.put_job(msgspec.structs.replace(job, info=info))
        self._live.pop(control.job_id, None)
        await failpoint("stord.job.after_end")
        text = state.value if problem is None else f"{state.value}: {problem.message}"
        log.info("job_ended", job_id=control.job_id, volume_id=control.volume_id, outcome=text)
        self._tell(control, text)
        await self._forget_old(control.volume_id)

    def _tell(self, control: JobControl, text: str) -> None:
        self._events.publish(
            StorageEvent(
                kind="job",
                volume_id=control.volume_id,
                message=f"{control.job_id} {text}"[:MESSAGE_CHARACTERS_MAX],
                at=timestamp(self._clock.now()),
            )
        )

    async def _forget_old(self, volume_id: str) -> None:
        final = [
            job.info
            for job in self._records.jobs.values()
            if job.info.volume_id == volume_id and job.info.state is not JobState.RUNNING
        ]
        final.sort(key=lambda info: (info.ended_at, info.job_id))
        await self._records.drop_jobs([info.job_id for info in final[:-FINAL_JOBS_MAX]])
