"""Clocks: what they measure and how moments are written."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime, timedelta, timezone

import anyio
import pytest

from chv.common.clock import Clock, SystemClock, boot_id, timestamp
from chv.common.virtual_time import VirtualClock


def test_a_timestamp_is_utc_with_milliseconds() -> None:
    moment = datetime(2026, 1, 31, 23, 59, 59, 7_999, tzinfo=UTC)
    assert timestamp(moment) == "2026-01-31T23:59:59.007Z"


def test_a_timestamp_of_another_zone_is_converted() -> None:
    moment = datetime(2026, 2, 1, 1, 0, tzinfo=timezone(timedelta(hours=2)))
    assert timestamp(moment) == "2026-01-31T23:00:00.000Z"


def test_a_moment_without_zone_is_refused() -> None:
    with pytest.raises(ValueError, match="time zone"):
        timestamp(datetime(2026, 1, 1))


def test_the_wall_clock_is_aware_and_now() -> None:
    assert abs(SystemClock().now().timestamp() - time.time()) < 5


def test_outside_a_loop_monotonic_is_the_kernels() -> None:
    before = time.monotonic()
    assert before <= SystemClock().monotonic() <= time.monotonic()


async def test_inside_a_loop_monotonic_is_the_loops() -> None:
    before = anyio.current_time()
    assert before <= SystemClock().monotonic() <= anyio.current_time()


async def test_sleep_takes_that_long() -> None:
    clock: Clock = SystemClock()
    before = clock.monotonic()
    await clock.sleep(0.02)
    assert clock.monotonic() - before >= 0.019


def test_a_virtual_clock_is_a_clock() -> None:
    clock: Clock = VirtualClock()
    assert clock is not None


def test_the_boot_id_is_stable_and_a_uuid() -> None:
    assert boot_id() == boot_id()
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", boot_id())
