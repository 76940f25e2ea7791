"""Work of a job that knows nothing of jobs, ended when somebody cancels the job."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio

from chv.common.errors import ChvError
from chv.stord.jobs import JobControl

T = TypeVar("T")


async def cancellable(control: JobControl, work: Callable[[], Awaitable[T]]) -> T:
    """Return what `work` returns; Cancelled where the job is cancelled before."""
    control.refuse_cancelled()
    results: list[T] = []
    failures: list[ChvError] = []
    async with anyio.create_task_group() as race:

        async def until_cancelled() -> None:
            await control.cancelling.wait()
            race.cancel_scope.cancel()

        race.start_soon(until_cancelled)
        try:
            results.append(await work())
        except ChvError as error:  # raised below, outside the group
            failures.append(error)
        race.cancel_scope.cancel()
    if failures:
        raise failures[0]
    if not results:
        control.refuse_cancelled()
    return results[0]
