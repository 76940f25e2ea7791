"""A VMM that was started needs some milliseconds until it answers."""

from __future__ import annotations

import anyio

from chv.agent.context import Context
from chv.agent.ports import VmHandle
from chv.common.errors import DeadlineExceeded, NotFound, Unavailable

ANSWER_S_MAX = 2.0
LOOK_EVERY_S = 0.005


async def await_answer(context: Context, vm: VmHandle) -> None:
    """Return when the VMM answers, or has not for too long: the next call then says why."""
    with anyio.move_on_after(ANSWER_S_MAX):
        while True:
            if await _answers(context, vm):
                return
            await anyio.sleep(LOOK_EVERY_S)


async def _answers(context: Context, vm: VmHandle) -> bool:
    try:
        await context.world.vmm.observe(vm)
    except (Unavailable, NotFound, DeadlineExceeded):
        return False
    return True
