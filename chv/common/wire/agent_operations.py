"""How far an operation is and what it waits for, as its readers see it. Part of the agent's API.

Kept in memory while the operation goes on: after a new start of the agent they are seen anew.
"""

from __future__ import annotations

from chv.common.wire.types import Reply


class OperationProgress(Reply, frozen=True, kw_only=True):
    """`done` of `total` in `unit` (bytes, VMs); `total` 0: not known yet."""

    done: int
    total: int = 0
    unit: str = "bytes"


class QueuePlace(Reply, frozen=True, kw_only=True):
    """`position`: 1 is the next one. `waits_for`: of what it gets one when its turn comes."""

    position: int
    waits_for: str
