"""stord's jobs as the agent sees them: found by id, cancelled, told in words.

An operation's id is the id of the job that it began, so that a lost reply is found again.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from chv.agent.context import Context
from chv.agent.naming import named_data
from chv.common.errors import FailedPrecondition, NotFound
from chv.common.quantity import format_bytes
from chv.common.wire import stord
from chv.common.wire.stord import JobInfo, JobKind, JobState

POLL_S = 2.0  # events tell of the end; this is for the progress that is shown


async def find_job(context: Context, job_id: str) -> JobInfo | None:
    """Return a job, None where stord knows none of that id."""
    try:
        job = await context.stord.call(stord.GET_JOB, stord.JobRef(job_id=job_id))
    except NotFound:
        return None
    if job.state is JobState.RUNNING and job.total_bytes:  # each merge of an operation has a suffix
        operation_id = job_id.partition(".")[0]
        context.progress.put(operation_id, job.done_bytes, job.total_bytes)
    return msgspec.structs.replace(job, error=named_data(context.ledger.tables, job.error))


async def cancel_job(context: Context, job_id: str) -> None:
    """Ask a job to end. It has ended, or there is none: no effect."""
    with suppress(NotFound, FailedPrecondition):
        await context.stord.call(stord.CANCEL_JOB, stord.JobRef(job_id=job_id))


def progress_of(job: JobInfo | None) -> str:
    """Return `backup 40%`, '' where nothing is under way."""
    if job is None or job.state is not JobState.RUNNING:
        return ""
    words = job.kind.value.replace("_", " ")
    if job.total_bytes:
        return f"{words} {100 * job.done_bytes // job.total_bytes}%"
    return f"{words} {job.message}".strip()


def result_of(job: JobInfo) -> str:
    """Return how a job that succeeded ended, for a person."""
    result = job.result
    if job.kind in (JobKind.CHECK, JobKind.REPAIR):
        words = [f"{result.get('errors', '?')} errors", f"{result.get('leaks', '?')} leaks"]
        if job.kind is JobKind.REPAIR:
            words.append(f"{result.get('fixed', '?')} fixed")
        return ", ".join(words)
    if job.kind is JobKind.BACKUP:
        count = result.get("bytes", "")
        size = format_bytes(int(count)) if count.isdigit() else count
        if "volumes" in result:
            return f"{result['volumes']} volumes, {size} in {result.get('path', '?')}"
        number = f"number {result['sequence']}, " if "sequence" in result else ""
        return f"{number}{size} in {result.get('path', '?')}"
    return ", ".join(f"{name} {value}" for name, value in result.items())
