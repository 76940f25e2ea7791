"""One-for-one supervision with restart intensity: keep one child running, or give up loudly.

A child is an async callable that reports readiness through its task status and then runs until
it fails. Its return counts as a failure too: children here are daemons. Each end is followed by
a back-off that doubles; more than `restarts_max` restarts within `window_s` raise
RestartIntensityExceeded, for the parent to decide on, and an error that no restart cures raises
GivenUp at once. A child that is started anew on purpose (PlannedRestart) has not failed: no pause,
and nothing is counted. Cancellation passes through untouched.

Not tenacity: a retry policy counts attempts of one call, this one counts ends within a sliding
window over the whole life of a daemon.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import anyio

from chv.common.errors import Unavailable

BACKOFF_S_FIRST = 0.1


class ChildState(enum.Enum):
    """Where a supervised child is."""

    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    FAILED = "failed"  # restart intensity exceeded; only a new `supervise` starts it again


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to keep running, and how patiently."""

    name: str
    run: Callable[..., Coroutine[Any, Any, None]]
    ready_timeout_s: float = 10.0
    restarts_max: int = 5
    window_s: float = 60.0
    backoff_s_max: float = 10.0
    hopeless: tuple[type[BaseException], ...] = ()  # errors that starting it again does not cure


@dataclass(frozen=True, slots=True)
class ChildStatus:
    """What `on_change` gets. `error` is the failure behind BACKOFF and FAILED, if there was one."""

    name: str
    state: ChildState
    reason: str = ""
    restarts: int = 0
    error: BaseException | None = None


class PlannedRestart(Exception):
    """Ends a child's run on purpose, once it may be started again."""


class GivenUp(Unavailable):
    """A child is not started again; to do so is an operator's decision."""

    retriable = False


class RestartIntensityExceeded(GivenUp):
    """It failed too often in too short a time."""


async def supervise(spec: ChildSpec, on_change: Callable[[ChildStatus], None]) -> None:
    """Run the child, restart it when it ends; raise GivenUp, never return."""
    ends: deque[float] = deque()
    restarts = 0
    while True:
        on_change(ChildStatus(spec.name, ChildState.STARTING, restarts=restarts))
        reason, error = await _run_once(spec, on_change, restarts)
        if isinstance(error, PlannedRestart):
            continue
        if isinstance(error, spec.hopeless):
            on_change(ChildStatus(spec.name, ChildState.FAILED, reason, restarts, error))
            raise GivenUp(f"{spec.name}: {error}", resource=spec.name) from error
        _count_end(ends, spec.window_s)
        if len(ends) > spec.restarts_max:
            on_change(ChildStatus(spec.name, ChildState.FAILED, reason, restarts, error))
            raise RestartIntensityExceeded(
                f"{spec.name} ended {len(ends)} times within {spec.window_s:g} s, last: {reason}",
                resource=spec.name,
            ) from error
        on_change(ChildStatus(spec.name, ChildState.BACKOFF, reason, restarts, error))
        await anyio.sleep(backoff_s(len(ends), spec.backoff_s_max))
        restarts += 1


def backoff_s(ends: int, backoff_s_max: float) -> float:
    """Return the pause after the given number of ends within the window."""
    return float(min(BACKOFF_S_FIRST * 2 ** (ends - 1), backoff_s_max))


def _count_end(ends: deque[float], window_s: float) -> None:
    """Add an end at this moment and forget those outside the window."""
    now = anyio.current_time()
    ends.append(now)
    while now - ends[0] > window_s:
        ends.popleft()


async def _run_once(
    spec: ChildSpec, on_change: Callable[[ChildStatus], None], restarts: int
) -> tuple[str, BaseException | None]:
    """Run the child to its end; return why it ended. The firewall of a supervised child."""

    try:
        async with anyio.create_task_group() as scope:
            with anyio.move_on_after(spec.ready_timeout_s) as patience:
                await scope.start(spec.run)
                on_change(ChildStatus(spec.name, ChildState.READY, restarts=restarts))
    except Exception as error:  # noqa: BLE001  one supervised child; told by on_change
        cause = _first_cause(error)
        return f"{type(cause).__name__}: {cause}", cause
    if patience.cancelled_caught:
        return f"not ready within {spec.ready_timeout_s:g} s", None
    return "returned", None


def _first_cause(error: BaseException) -> BaseException:
    """Return the first error that is not a mere group of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
