"""An asyncio loop whose clock jumps to the next timer: hours of simulation in milliseconds.

For simulations and tests only. Two runs of the same program do the same things in the same
order: tasks and cancel scopes, which anyio keeps in sets, hash by their number of creation and
not by their address. Threads and waits on real file descriptors have no place here, since the
clock does not wait for them. `Deadlock` is raised when nothing can ever run again.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

import anyio
from anyio._backends import _asyncio as anyio_asyncio

T = TypeVar("T")

# A program that is still idle after so long (126 years) waits for nothing.
HORIZON_S = 4e9
# asyncio fires timers that are due within this. It must be more than a float can tell apart at
# the horizon, or a timer would never become due and the loop would spin.
RESOLUTION_S = 1e-6
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class Deadlock(Exception):
    """Nothing is ready and no timer is set: the program would wait for ever."""


class _OrderedTask(asyncio.Task[Any]):
    """A task that hashes by its number, so that sets of tasks iterate the same way each run."""

    def __init__(self, coro: Any, *, loop: VirtualLoop, **kwargs: Any) -> None:
        self._chv_number = loop.next_number()
        super().__init__(coro, loop=loop, **kwargs)

    def __hash__(self) -> int:
        return self._chv_number


class _OrderedScope(anyio_asyncio.CancelScope):
    """A cancel scope that hashes by its number, for the same reason."""

    def __init__(self, deadline: float = math.inf, shield: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self._chv_number = loop.next_number() if isinstance(loop, VirtualLoop) else id(self)
        super().__init__(deadline, shield)

    def __hash__(self) -> int:
        return self._chv_number


class _JumpingSelector(selectors.SelectSelector):
    """Polls without waiting; where the loop would wait, the virtual clock moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready now; else jump by `timeout`."""
        if timeout == 0:  # something can run: descriptors are looked at before a jump only
            return []
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None or self.now_s > HORIZON_S:
            raise Deadlock(f"nothing can run after {self.now_s:.3f} virtual seconds")
        # At large times a tiny step would be lost in rounding and the loop would spin.
        self.now_s = max(self.now_s + timeout, math.nextafter(self.now_s, math.inf))
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; use it through `run`, or as `loop_factory` of anyio's asyncio backend."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        self._numbers = itertools.count(1)
        super().__init__(self._jumping)
        self._clock_resolution = RESOLUTION_S
        self.set_task_factory(_make_task)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._jumping.now_s

    def next_number(self) -> int:
        """Return the next number of creation, for things that must have an order."""
        return next(self._numbers)

    def run_forever(self) -> None:
        """Run with cancel scopes that have an order."""
        with _ordered_scopes():
            super().run_forever()


def _make_task(
    loop: asyncio.AbstractEventLoop,
    coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    *,
    context: contextvars.Context | None = None,
    **kwargs: Any,
) -> _OrderedTask:
    assert isinstance(loop, VirtualLoop)
    return _OrderedTask(coro, loop=loop, context=context, **kwargs)


@contextmanager
def _ordered_scopes() -> Iterator[None]:
    """Let anyio make ordered scopes meanwhile; scopes made before keep their own kind."""
    original = anyio_asyncio.CancelScope
    anyio_asyncio.CancelScope = _OrderedScope  # type: ignore[misc]
    try:
        yield
    finally:
        anyio_asyncio.CancelScope = original  # type: ignore[misc]


def run(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run an async function to its end on a fresh `VirtualLoop`."""
    return anyio.run(
        function, *args, backend="asyncio", backend_options={"loop_factory": VirtualLoop}
    )


class VirtualClock:
    """A `Clock` on the running virtual loop. `skew_s` moves the wall clock alone."""

    def __init__(self, epoch: datetime = EPOCH) -> None:
        self._epoch = epoch
        self.skew_s = 0.0

    def now(self) -> datetime:
        """Return the epoch plus virtual time plus skew."""
        return self._epoch + timedelta(seconds=self.monotonic() + self.skew_s)

    def monotonic(self) -> float:
        """Return the loop's virtual seconds."""
        return anyio.current_time()

    async def sleep(self, seconds: float) -> None:
        """Wait that long in virtual time."""
        await anyio.sleep(seconds)
