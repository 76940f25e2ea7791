"""Virtual time: it jumps, it is the same each run, and it says when nothing can run."""

from __future__ import annotations

import random
import time

import anyio
import anyio.lowlevel
import pytest

from chv.common import virtual_time
from chv.common.virtual_time import EPOCH, Deadlock, VirtualClock


def test_hours_pass_in_no_time() -> None:
    async def main() -> float:
        await anyio.sleep(7 * 86_400)  # noqa: ASYNC116
        return anyio.current_time()

    started = time.monotonic()
    assert virtual_time.run(main) == 7 * 86_400
    assert time.monotonic() - started < 2


def test_sleepers_wake_in_the_order_of_their_time() -> None:
    woken: list[tuple[float, float]] = []

    async def sleeper(seconds: float) -> None:
        await anyio.sleep(seconds)
        woken.append((seconds, anyio.current_time()))

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for seconds in (3, 1, 2, 0.5):
                group.start_soon(sleeper, seconds)

    virtual_time.run(main)
    assert woken == [(0.5, 0.5), (1, 1), (2, 2), (3, 3)]


def test_deadlines_are_virtual() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError), anyio.fail_after(30):
            await anyio.sleep(60)
        return anyio.current_time()

    assert virtual_time.run(main) == 30


def test_waiting_for_what_nobody_does_is_a_deadlock() -> None:
    async def main() -> None:
        await anyio.Event().wait()

    with pytest.raises(Deadlock, match="nothing can run"):
        virtual_time.run(main)


def test_sleeping_for_ever_is_a_deadlock_too() -> None:
    with pytest.raises(Deadlock):
        virtual_time.run(anyio.sleep, 1e12)


def test_tiny_steps_at_huge_times_still_pass() -> None:
    async def main() -> float:
        await anyio.sleep(1e9)  # noqa: ASYNC116
        for _ in range(100):
            await anyio.sleep(1e-9)
        return anyio.current_time()

    assert virtual_time.run(main) >= 1e9


def _cancel_storm(seed: int) -> list[str]:
    """Run tasks in scopes of their own, cancel all, and return the order of their ends."""
    trace: list[str] = []
    rubbish = [object() for _ in range(random.Random(seed).randrange(2000))]  # moves addresses

    async def worker(number: int) -> None:
        try:
            with anyio.CancelScope():
                async with anyio.create_task_group() as group:
                    group.start_soon(anyio.sleep, number)
                    await anyio.sleep(1000)
        finally:
            trace.append(f"{number}@{anyio.current_time()}")

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for number in range(40):
                group.start_soon(worker, number)
            await anyio.sleep(5)
            group.cancel_scope.cancel()

    virtual_time.run(main)
    assert len(trace) == 40
    del rubbish
    return trace


def test_a_cancel_storm_ends_in_the_same_order_each_run() -> None:
    traces = [_cancel_storm(seed) for seed in range(10)]
    assert all(trace == traces[0] for trace in traces)


def test_the_wall_clock_moves_with_virtual_time_and_skew() -> None:
    async def main() -> None:
        clock = VirtualClock()
        assert clock.now() == EPOCH
        await clock.sleep(90)
        assert (clock.now() - EPOCH).total_seconds() == 90
        assert clock.monotonic() == 90
        clock.skew_s = -3600.0
        assert (clock.now() - EPOCH).total_seconds() == 90 - 3600
        assert clock.monotonic() == 90

    virtual_time.run(main)


async def test_a_real_loop_beside_it_keeps_its_own_scopes() -> None:
    def simulate() -> float:
        return virtual_time.run(_sleep_and_tell)

    assert await anyio.to_thread.run_sync(simulate) == 10
    with anyio.move_on_after(5) as scope:
        await anyio.lowlevel.checkpoint()
    assert type(scope).__name__ == "CancelScope"


async def _sleep_and_tell() -> float:
    await anyio.sleep(10)
    return anyio.current_time()
