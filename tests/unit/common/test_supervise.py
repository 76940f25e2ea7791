"""One-for-one supervision, on virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import pytest
from anyio.abc import TaskStatus
from hypothesis import given, settings
from hypothesis import strategies as st

from chv.common import virtual_time
from chv.common.supervise import (
    ChildSpec,
    ChildState,
    ChildStatus,
    GivenUp,
    PlannedRestart,
    RestartIntensityExceeded,
    backoff_s,
    supervise,
)

DAY_S = 86_400.0


class Flaky:
    """A child that runs for the given times, one after the other, then for ever."""

    def __init__(self, lives_s: list[float], *, error: type[Exception] | None = OSError) -> None:
        self.lives_s = lives_s
        self.error = error
        self.starts: list[float] = []

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        self.starts.append(anyio.current_time())
        task_status.started()
        if len(self.starts) > len(self.lives_s):
            await anyio.sleep_forever()
        await anyio.sleep(self.lives_s[len(self.starts) - 1])
        if self.error:
            raise self.error("broke")


def observe(spec: ChildSpec, *, for_s: float = DAY_S) -> tuple[list[ChildStatus], bool]:
    """Supervise in virtual time; return all that was told, and whether it gave up."""
    seen: list[ChildStatus] = []

    async def main() -> bool:
        try:
            with anyio.move_on_after(for_s):
                await supervise(spec, seen.append)
        except RestartIntensityExceeded:
            return True
        return False

    return seen, virtual_time.run(main)


def states(seen: list[ChildStatus]) -> list[str]:
    return [status.state.value for status in seen]


def test_a_healthy_child_is_started_once() -> None:
    child = Flaky([])
    seen, gave_up = observe(ChildSpec("c", child.run))
    assert states(seen) == ["starting", "ready"]
    assert not gave_up
    assert len(child.starts) == 1


def test_a_child_that_breaks_is_restarted_after_a_pause_and_the_reason_is_told() -> None:
    child = Flaky([5.0])
    seen, _ = observe(ChildSpec("c", child.run))
    assert states(seen) == ["starting", "ready", "backoff", "starting", "ready"]
    assert seen[2].reason == "OSError: broke"
    assert isinstance(seen[2].error, OSError)
    assert child.starts == pytest.approx([0.0, 5.1])
    assert seen[-1].restarts == 1


def test_a_child_that_returns_is_restarted_too() -> None:
    seen, _ = observe(ChildSpec("c", Flaky([1.0], error=None).run))
    assert seen[2] == ChildStatus("c", ChildState.BACKOFF, "returned")


def test_a_child_that_breaks_too_often_is_given_up() -> None:
    child = Flaky([0.0] * 100)
    seen, gave_up = observe(ChildSpec("c", child.run, restarts_max=3))
    assert gave_up
    assert len(child.starts) == 4
    assert seen[-1].state is ChildState.FAILED


def test_a_child_that_breaks_now_and_then_is_restarted_for_ever() -> None:
    child = Flaky([30.0] * 50)
    _, gave_up = observe(ChildSpec("c", child.run, restarts_max=3, window_s=60.0))
    assert not gave_up
    assert len(child.starts) == 51


def test_a_child_that_is_never_ready_is_stopped_and_counted() -> None:
    stopped: list[float] = []

    async def run(*, task_status: TaskStatus[None]) -> None:  # noqa: ASYNC128  the point of it
        try:
            await anyio.sleep_forever()
        finally:
            stopped.append(anyio.current_time())

    spec = ChildSpec("c", run, ready_timeout_s=2.0, restarts_max=1)
    seen, gave_up = observe(spec)
    assert gave_up
    assert stopped == pytest.approx([2.0, 4.1])
    assert seen[-1].reason == "not ready within 2 s"


def test_a_child_that_ends_before_it_is_ready_is_counted() -> None:
    async def run(*, task_status: TaskStatus[None]) -> None:  # noqa: ASYNC128  the point of it
        await anyio.sleep(0.5)
        raise OSError("early")

    seen, gave_up = observe(ChildSpec("c", run, restarts_max=0))
    assert gave_up
    assert states(seen) == ["starting", "failed"]
    assert seen[-1].reason == "OSError: early"


def test_a_childs_own_time_out_is_not_taken_for_unreadiness() -> None:
    seen, _ = observe(ChildSpec("c", Flaky([1.0], error=TimeoutError).run))
    assert seen[2].reason == "TimeoutError: broke"


def test_cancellation_passes_through_and_stops_the_child() -> None:
    stopped: list[bool] = []

    async def run(*, task_status: TaskStatus[None]) -> None:
        task_status.started()
        try:
            await anyio.sleep_forever()
        finally:
            stopped.append(True)

    seen, gave_up = observe(ChildSpec("c", run), for_s=1.0)
    assert states(seen) == ["starting", "ready"]
    assert stopped == [True]
    assert not gave_up


def test_one_child_that_gives_up_ends_the_group_it_is_supervised_in() -> None:
    async def main() -> float:
        with pytest.raises(BaseExceptionGroup) as raised:
            async with anyio.create_task_group() as daemon:
                daemon.start_soon(supervise, ChildSpec("a", Flaky([]).run), _ignore)
                bad = ChildSpec("b", Flaky([0.0] * 9).run, restarts_max=2)
                daemon.start_soon(supervise, bad, _ignore)
        assert raised.group_contains(RestartIntensityExceeded)
        return anyio.current_time()

    run: Callable[[Callable[[], Awaitable[float]]], float] = virtual_time.run
    assert run(main) == pytest.approx(0.3)


def _ignore(_: ChildStatus) -> None:
    """Nobody listens."""


def test_the_pause_doubles_up_to_its_limit() -> None:
    assert [backoff_s(ends, 1.0) for ends in (1, 2, 3, 4, 5, 9)] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


@settings(max_examples=60, deadline=None)
@given(
    lives_s=st.lists(st.floats(0.0, 50.0), max_size=60),
    restarts_max=st.integers(0, 6),
    window_s=st.floats(1.0, 120.0),
)
def test_restarts_never_exceed_the_intensity(
    lives_s: list[float], restarts_max: int, window_s: float
) -> None:
    child = Flaky(lives_s)
    spec = ChildSpec("c", child.run, restarts_max=restarts_max, window_s=window_s)
    _, gave_up = observe(spec)
    restarts = child.starts[1:]
    for index, begin in enumerate(restarts):
        within = [at for at in restarts[index:] if at - begin < window_s]
        # Ends, not starts, are counted; one pause lies between them, so one more start fits in.
        assert len(within) <= restarts_max + 1
    assert gave_up or len(child.starts) == len(lives_s) + 1
    assert not gave_up or len(child.starts) <= len(lives_s)


def test_a_restart_on_purpose_has_no_pause_and_counts_as_no_end() -> None:
    child = Flaky([1.0] * 50, error=PlannedRestart)
    seen, gave_up = observe(ChildSpec("c", child.run, restarts_max=2))
    assert not gave_up
    assert child.starts == pytest.approx([float(n) for n in range(51)])
    assert {status.restarts for status in seen} == {0}
    assert "backoff" not in states(seen)


def test_an_error_that_no_restart_cures_ends_it_at_once() -> None:
    child = Flaky([1.0, 1.0], error=LookupError)
    told: list[ChildStatus] = []

    async def main() -> None:
        with pytest.raises(GivenUp, match="broke"):
            await supervise(ChildSpec("c", child.run, hopeless=(LookupError,)), told.append)

    virtual_time.run(main)
    assert states(told) == ["starting", "ready", "failed"]
    assert len(child.starts) == 1
