"""Time: the wall clock for stamps, the monotonic clock for everything that waits.

No timer, back-off or deadline may use `now()`: the wall clock jumps. Code that waits or stamps
takes a `Clock`, so that a simulation can replace it (`chv.common.virtual_time`).
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Protocol

import anyio

from chv.common.boot import boot_id

__all__ = ["Clock", "SystemClock", "boot_id", "timestamp"]


class Clock(Protocol):
    """What code may ask of time."""

    def now(self) -> datetime:
        """Return the wall clock in UTC, for stamps only."""
        ...

    def monotonic(self) -> float:
        """Return seconds that never go backwards, comparable within one boot of the host."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait that long; cancellable."""
        ...


class SystemClock:
    """The machine's clocks."""

    def now(self) -> datetime:
        """Return the wall clock in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return the event loop's time inside a loop, the kernel's monotonic time outside."""
        try:
            return anyio.current_time()
        except anyio.NoEventLoopError:
            return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait that long; cancellable."""
        await anyio.sleep(seconds)


def timestamp(moment: datetime) -> str:
    """Return an aware `moment` as RFC 3339 in UTC with milliseconds: 2026-01-31T23:59:59.000Z."""
    if moment.tzinfo is None:
        raise ValueError(f"{moment!r} has no time zone")
    text = moment.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.removesuffix("+00:00") + "Z"
