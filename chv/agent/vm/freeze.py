"""Freezes a guest's file systems for a moment, by its agent, and never leaves them frozen.

The guest agent has no deadline of its own: a guest that nobody thaws stands still for ever. So
the intent is in the store before the guest is asked, and whoever finds it there (`ThawStep`)
thaws. Fails with FailedPrecondition or Unavailable where the guest cannot be frozen, and with
DeadlineExceeded where what is done meanwhile takes too long.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec

from chv.agent.context import Context
from chv.agent.ports import VmHandle
from chv.agent.records import PutWorker, WorkerRow
from chv.agent.vm.desired import handle_of
from chv.common import logs
from chv.common.errors import (
    ChvError,
    Conflict,
    DeadlineExceeded,
    FailedPrecondition,
    Unavailable,
)
from chv.common.failpoint import failpoint
from chv.vmm.driver import VmmState

THAW_S_MAX = 30.0  # afterwards the VM's worker goes on with it
THAW_AGAIN_S = 0.2
FIELD = "spec.freeze"

log = logs.get(__name__)


@asynccontextmanager
async def frozen(context: Context, vm_uid: str, timeout_s: float) -> AsyncIterator[None]:
    """Freeze the guest, let the caller act for at most `timeout_s` in all, thaw it."""
    vm = await _ready(context, vm_uid)
    context.freezing.add(vm_uid)
    try:
        await _mark(context, vm_uid, frozen=True)
        await failpoint("agent.vm.freeze.before")
        try:
            with anyio.fail_after(timeout_s):
                await _freeze(context, vm)
                yield
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"not done within the {timeout_s:g} s for which the guest may be frozen"
            ) from error
        finally:
            with anyio.CancelScope(shield=True):
                await _thaw(context, vm)
    finally:
        context.freezing.discard(vm_uid)
        context.wake(vm_uid)


async def _freeze(context: Context, vm: VmHandle) -> None:
    unasked: Unavailable | None = None
    try:
        await context.world.vmm.freeze_guest(vm)
    except Unavailable as error:
        unasked = error
    if unasked is not None:
        await _mark(context, vm.uid, frozen=False)
        raise unasked
    await failpoint("agent.vm.freeze.after")


async def _ready(context: Context, vm_uid: str) -> VmHandle:
    stored, row = context.stored(vm_uid), context.ledger.tables.workers.get(vm_uid)
    if stored is None or row is None or not row.booted or row.ending is not None:
        raise FailedPrecondition(
            "the VM does not run, so its guest cannot be frozen",
            field=FIELD,
            hint="start the VM, or leave --freeze out",
        )
    if row.recovering:
        raise FailedPrecondition("the VM is about to be reset", resource=stored.title)
    if vm_uid in context.freezing or row.frozen:
        raise Conflict("the guest is being frozen or thawed already", resource=stored.title)
    vm = handle_of(stored)
    observed = await context.world.vmm.observe(vm)
    if observed.state is not VmmState.RUNNING:
        raise FailedPrecondition(f"the VM is {observed.state}", resource=stored.title)
    await _find_agent(context, vm)  # before anything is written down
    return vm


async def _find_agent(context: Context, vm: VmHandle) -> None:
    """Refuse a guest whose agent does not answer in its time: it would not answer later either."""
    try:
        await context.world.vmm.ping_guest(vm)
    except (Unavailable, DeadlineExceeded) as error:
        raise FailedPrecondition(
            f"no guest agent answers in the VM: {error.message}",
            field=FIELD,
            hint="install and start qemu-guest-agent in the guest, or leave --freeze out",
        ) from error


async def _mark(context: Context, vm_uid: str, *, frozen: bool) -> None:
    async with context.ledger.writing() as tables:
        row: WorkerRow | None = tables.workers.get(vm_uid)
        if row is None:
            if frozen:
                raise FailedPrecondition("the VM has ended", resource=vm_uid)
            return
        if row.frozen != frozen:
            await context.ledger.commit_held(
                PutWorker(row=msgspec.structs.replace(row, frozen=frozen))
            )


def _is_marked(context: Context, vm_uid: str) -> bool:
    row = context.ledger.tables.workers.get(vm_uid)
    return row is not None and row.frozen


async def _thaw(context: Context, vm: VmHandle) -> None:
    """Thaw until it is known; in the end the mark stays, and the VM's worker takes over."""
    problem = "not tried"
    with anyio.move_on_after(THAW_S_MAX):
        while _is_marked(context, vm.uid):
            try:
                await context.world.vmm.thaw_guest(vm)
                await failpoint("agent.vm.freeze.thawed")
                await _mark(context, vm.uid, frozen=False)
            except ChvError as error:
                problem = str(error)
                await anyio.sleep(THAW_AGAIN_S)
        return
    log.error("agent.vm.thaw_failed", vm_id=vm.uid, error=problem)
