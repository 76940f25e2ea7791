"""Jobs of a storage daemon that end while somebody looks at them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from chv.common.errors import Internal
from chv.stord.qsd import block_jobs
from chv.stord.qsd.monitor import Monitor

NAME = "backup-0123456789"


class Racing:
    """A monitor whose job is `after` as soon as somebody has asked for its end."""

    def __init__(self, after: str) -> None:
        self._after = after
        self.jobs = {NAME: "running"}

    async def call(self, command: str, arguments: dict[str, Any] | None = None, **_: Any) -> Any:
        if command == "query-jobs":
            return [
                {"id": name, "status": status, "current-progress": 1, "total-progress": 1}
                for name, status in self.jobs.items()
            ]
        if command == "job-cancel":
            self.jobs[NAME] = self._after
            raise Internal("job-cancel: Job in state 'concluded' cannot accept command verb")
        assert command == "job-dismiss"
        assert arguments is not None
        del self.jobs[arguments["id"]]
        return {}


async def test_a_job_that_ends_before_it_is_cancelled_is_dismissed_as_it_ended() -> None:
    monitor = Racing("concluded")
    ended = await block_jobs.cancel(cast(Monitor, monitor), NAME)
    assert ended is not None
    assert ended.status == "concluded"
    assert monitor.jobs == {}


async def test_a_job_that_goes_on_and_refuses_its_end_is_an_error() -> None:
    with pytest.raises(Internal, match="job-cancel"):
        await block_jobs.cancel(cast(Monitor, Racing("running")), NAME)
