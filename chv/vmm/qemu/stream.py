"""QEMU's own stream of memory and devices, out of a VM and into one, over a descriptor.

The descriptor is opened by us and handed over by the monitor: so neither the VMM's uid nor its
sandbox needs a path. What goes wrong is told with QEMU's words; a wait that is cut short by
whoever waits cancels the stream.
"""

from __future__ import annotations

import contextlib
from typing import Any

import anyio

from chv.common.errors import ChvError, DeadlineExceeded, FailedPrecondition, Unavailable
from chv.vmm.qemu import machine
from chv.vmm.qemu.qmp import Monitor

STREAM_S_MAX = 600.0
ANSWER_S_MAX = 120.0  # while a stream is read, QEMU's only thread answers nothing
CANCEL_S_MAX = 10.0
POLL_S = 0.01
BANDWIDTH_MAX = 1 << 50  # bytes a second
NAME = "chv-stream"
COMPLETED = "completed"
_ENDED = (COMPLETED, "failed", "cancelled", "none")


async def write(monitor: Monitor, fd: int, *, two_way: bool) -> None:
    """Write a VM to `fd`. `two_way`: the other side says whether it took it.

    FailedPrecondition with QEMU's reason where it failed.
    """
    capabilities = [
        {"capability": "return-path", "state": two_way},
        {"capability": "auto-converge", "state": two_way},
    ]
    await monitor.tell("migrate-set-capabilities", {"capabilities": capabilities})
    await monitor.tell("migrate-set-parameters", {"max-bandwidth": BANDWIDTH_MAX})
    await _hand_over(monitor, fd, "migrate")
    await finish(monitor)


async def finish(monitor: Monitor) -> None:
    """Wait for the end of what is being written; cancel it where the wait is cut short."""
    ended = False
    try:
        with anyio.move_on_after(STREAM_S_MAX):
            while (answer := await progress(monitor))[0] not in _ENDED:  # noqa: ASYNC110
                await anyio.sleep(POLL_S)
            ended = True
    finally:
        if not ended:
            with anyio.move_on_after(CANCEL_S_MAX, shield=True):
                await _cancel(monitor)
    if not ended:
        raise DeadlineExceeded(f"not all was written in {STREAM_S_MAX:g} s")
    outcome, reason = answer
    if outcome != COMPLETED:
        raise FailedPrecondition(f"QEMU's stream {outcome}: {reason or 'no reason given'}")


async def _cancel(monitor: Monitor) -> None:
    with contextlib.suppress(ChvError):
        await monitor.tell("migrate_cancel")
        while (await progress(monitor))[0] not in _ENDED:  # noqa: ASYNC110
            await anyio.sleep(POLL_S)


async def read(monitor: Monitor, fd: int) -> None:
    """Let a QEMU that waits take a VM up from `fd`; one that cannot ends."""
    await _hand_over(monitor, fd, "migrate-incoming")
    await taken_up(monitor)


async def taken_up(monitor: Monitor) -> None:
    """Wait until the VM is there. FailedPrecondition where QEMU ended instead."""
    try:
        with anyio.fail_after(STREAM_S_MAX):
            while await machine.status(monitor) == "inmigrate":  # noqa: ASYNC110
                await progress(monitor)
                await anyio.sleep(POLL_S)
    except TimeoutError as error:
        raise DeadlineExceeded(f"the VM has not come in {STREAM_S_MAX:g} s") from error
    except Unavailable as error:
        raise FailedPrecondition(
            "QEMU ended instead of taking the VM up", hint="its log says why"
        ) from error


async def progress(monitor: Monitor) -> tuple[str, str]:
    """Return how far a stream is, and QEMU's reason where it failed."""
    answer: dict[str, Any] = await monitor.ask("query-migrate", limit_s=ANSWER_S_MAX)
    return str(answer.get("status", "none")), str(answer.get("error-desc", ""))


async def _hand_over(monitor: Monitor, fd: int, command: str) -> None:
    await monitor.give(NAME, fd)
    refusal: FailedPrecondition | None = None
    try:
        await monitor.tell(command, {"uri": f"fd:{NAME}"})
    except FailedPrecondition as error:
        refusal = error
    if refusal is not None:
        with contextlib.suppress(FailedPrecondition):
            await monitor.tell("closefd", {"fdname": NAME})
        raise refusal
