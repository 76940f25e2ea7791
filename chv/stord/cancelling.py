"""Work of a job that knows nothing of jobs, ended when somebody cancels the job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from chv.common.racing import unless
from chv.stord.jobs import JobControl

T = TypeVar("T")


async def cancellable(control: JobControl, work: Callable[[], Awaitable[T]]) -> T:
    """Return what `work` returns; Cancelled where the job is cancelled before."""
    control.refuse_cancelled()
    results = await unless(control.cancelling.wait, work)
    if not results:
        control.refuse_cancelled()
    return results[0]
