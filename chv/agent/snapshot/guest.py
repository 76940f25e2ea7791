"""The bounded freeze of a guest around a snapshot. Fails where the guest cannot be frozen."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from chv.agent.context import Context
from chv.agent.vm.freeze import FIELD, frozen
from chv.common.errors import FailedPrecondition


@asynccontextmanager
async def quiet(context: Context, vm_uid: str, freeze_s: float) -> AsyncIterator[None]:
    """Hold the guest's file systems still for at most so long."""
    if not vm_uid:
        raise FailedPrecondition(
            "no VM runs with it, so there is no guest that could be frozen",
            field=FIELD,
            hint="start its VM, or leave --freeze out",
        )
    async with frozen(context, vm_uid, freeze_s):
        yield
