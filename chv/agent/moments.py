"""Moments that outlive the agent and the host: how long ago was it, whatever the clocks did since?

Within one boot the kernel's monotonic clock says it exactly, over every end of the agent and every
jump of the wall clock. Over a boot only the wall clock spans the gap, and it may have jumped: then
it is at least as long ago as the host is up. So a wall clock that fell back ten years delays
nothing by more than its own delay, and one that leapt ahead forgets at most once per boot. Pure.
"""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

from chv.common.clock import timestamp
from chv.common.wire.types import FrozenMeta


class Moment(msgspec.Struct, metaclass=FrozenMeta):
    """A moment by all clocks: seconds since the boot of that id, and seconds since 1970."""

    boot_id: str
    monotonic_s: float
    wall_s: float

    @property
    def stamp(self) -> str:
        """The wall clock as it was shown then, RFC 3339."""
        return timestamp(datetime.fromtimestamp(self.wall_s, UTC))


def age_s(then: Moment, now: Moment) -> float:
    """Return how many seconds `then` is before `now`; never negative."""
    if then.boot_id == now.boot_id and now.monotonic_s >= then.monotonic_s:
        return now.monotonic_s - then.monotonic_s
    return max(0.0, now.monotonic_s, now.wall_s - then.wall_s)
