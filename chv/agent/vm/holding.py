"""The vCPUs of a VM stand for a moment, so that nothing is under way at its disks.

Whoever lets vCPUs run does so by `boot` or `run_on`, which wait for such a moment to pass.

Nothing of it is recorded: who finds a VM paused that nobody wants so lets it run on, also the next
agent. Fails with the error of the port; the VM runs on in any case.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from chv.agent.context import Context
from chv.agent.ports import VmHandle
from chv.agent.vm.desired import handle_of
from chv.common.errors import DeadlineExceeded
from chv.vmm.driver import VmmState

HOLD_S_MAX = 30.0
# Storage daemons take what a guest has submitted within a millisecond of its kick.
SETTLE_S = 0.05


@asynccontextmanager
async def standing(context: Context, vm_uid: str) -> AsyncIterator[None]:
    """Let the vCPUs stand while the caller acts; one that does not run is left as it is."""
    context.holding.add(vm_uid)
    try:
        with anyio.fail_after(HOLD_S_MAX):
            async with context.vcpus(vm_uid):
                await _stand(context, vm_uid)
                yield
    except TimeoutError as error:
        raise DeadlineExceeded(f"not done within {HOLD_S_MAX:g} s, so the VM runs on") from error
    finally:
        context.holding.discard(vm_uid)
        context.wake(vm_uid)


async def run_on(context: Context, vm: VmHandle) -> None:
    """Let the vCPUs run, once nobody needs them to stand."""
    async with context.vcpus(vm.uid):
        await context.world.vmm.resume(vm)


async def boot(context: Context, vm: VmHandle) -> None:
    """Let the vCPUs run for the first time, once nobody needs them to stand."""
    async with context.vcpus(vm.uid):
        await context.world.vmm.boot(vm)


async def _stand(context: Context, vm_uid: str) -> None:
    stored = context.stored(vm_uid)
    if stored is None or vm_uid not in context.ledger.tables.workers:
        return
    vm, port = handle_of(stored), context.world.vmm
    if (await port.observe(vm)).state is VmmState.RUNNING:
        await port.pause(vm)
        await anyio.sleep(SETTLE_S)
