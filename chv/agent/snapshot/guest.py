"""The bounded freeze of a guest around a snapshot. Fails where the guest cannot be frozen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chv.agent.context import Context
from chv.common.errors import FailedPrecondition, Unsupported


@asynccontextmanager
async def quiet(context: Context, vm_uid: str, freeze_s: float) -> AsyncIterator[None]:
    """Hold the guest's file systems still for at most so long."""
    if not vm_uid:
        raise FailedPrecondition(
            "no guest runs on it that could be frozen", field="spec.freeze", hint="leave it out"
        )
    if context is not None and freeze_s > 0:
        raise Unsupported("guests cannot be frozen here", field="spec.freeze", hint="leave it out")
    yield
