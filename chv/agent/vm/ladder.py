"""The stop ladder: resume if paused, ask by the ACPI button, TERM, KILL, under one deadline.

The button is pressed again every few seconds, since a guest that still boots ignores it. The
last seconds of the deadline belong to TERM and KILL. Whoever walks on after an earlier walk was
cut short gives the time that it has spent: rungs whose time is over are left out. Returns the
rung that worked. The wait can be cut short by `forced`. Fails with DeadlineExceeded where even
KILL leaves a process.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from enum import StrEnum

import anyio

from chv.agent.ports import VmHandle, VmmPort
from chv.common import logs
from chv.common.clock import Clock
from chv.common.errors import ChvError, DeadlineExceeded
from chv.common.process.records import WorkerRecord
from chv.vmm.driver import VmmState

log = logs.get(__name__)

PRESS_EVERY_S = 5.0
LOOK_EVERY_S = 0.5
TERM_S_MAX = 3.0  # reserved for TERM before KILL
KILL_S = 10.0  # a process in the kernel's hands may take that long to vanish


class Rung(StrEnum):
    """What ends a VMM, in the order in which it is tried."""

    ACPI = "acpi"  # the guest obeyed the button, also where the VMM was then told to quit
    QUIT = "quit"  # the guest was off, and the VMM ended when told
    TERM = "term"
    KILL = "kill"


class Ladder:
    """One walk down the ladder for one VMM; `resume` lets its vCPUs run, `begin` notes a rung."""

    def __init__(
        self,
        port: VmmPort,
        clock: Clock,
        vm: VmHandle,
        record: WorkerRecord,
        resume: Callable[[], Awaitable[None]],
        begin: Callable[[Rung], Awaitable[None]],
    ) -> None:
        self._port = port
        self._clock = clock
        self._vm = vm
        self._record = record
        self._resume = resume
        self._begin = begin

    async def walk(self, timeout_s: float, spent_s: float, forced: Callable[[], bool]) -> Rung:
        """End the VMM; return the rung that did it. `forced` skips the question."""
        term_s = min(TERM_S_MAX, timeout_s / 3)
        deadline = self._clock.monotonic() + timeout_s - spent_s
        ask_s = deadline - term_s - self._clock.monotonic()
        # A monitor that hangs must not take what belongs to TERM.
        with anyio.move_on_after(ask_s):
            if ask_s > 0 and not forced() and await self._ask(forced):
                return Rung.ACPI
        if await self._is_off_soon(term_s / 3):
            await self._begin(Rung.QUIT)
            if await self._quit(term_s):
                return Rung.QUIT
        patience_s = min(term_s, deadline - self._clock.monotonic())
        if patience_s > 0 and await self._signal(Rung.TERM, signal.SIGTERM, patience_s):
            return Rung.TERM
        if await self._signal(Rung.KILL, signal.SIGKILL, KILL_S):
            return Rung.KILL
        raise DeadlineExceeded(f"process {self._record.pid} is still there after SIGKILL")

    async def _ask(self, forced: Callable[[], bool]) -> bool:
        """Press the button until the guest is off, or nobody wants to wait; cut short in time."""
        await self._begin(Rung.ACPI)
        await self._try("resume", self._resume_if_paused)
        pressed_at = float("-inf")
        while not forced():
            if self._clock.monotonic() - pressed_at >= PRESS_EVERY_S:
                pressed_at = self._clock.monotonic()
                await self._try("power_button", self._press)
            if await self._gone_within(LOOK_EVERY_S):
                return True
            if await self._guest_is_off():
                with anyio.CancelScope(shield=True):  # the guest has done what it was asked
                    return await self._quit(TERM_S_MAX)
        return False

    async def _press(self) -> None:
        await self._port.power_button(self._vm)

    async def _resume_if_paused(self) -> None:
        seen = await self._port.observe(self._vm)
        if seen.state is VmmState.PAUSED:
            await self._resume()

    async def _guest_is_off(self) -> bool:
        try:
            return (await self._port.observe(self._vm)).state is VmmState.SHUTDOWN
        except ChvError:
            return False

    async def _is_off_soon(self, patience_s: float) -> bool:
        with anyio.move_on_after(patience_s):
            return await self._guest_is_off()
        return False

    async def _quit(self, patience_s: float) -> bool:
        """Ask the VMM to end whose guest is off."""
        with anyio.move_on_after(patience_s):
            await self._try("quit", lambda: self._port.quit(self._vm))
        return await self._gone_within(patience_s)

    async def _signal(self, rung: Rung, number: signal.Signals, patience_s: float) -> bool:
        await self._begin(rung)
        await self._port.signal(self._record, number)
        return await self._gone_within(patience_s)

    async def _gone_within(self, patience_s: float) -> bool:
        with anyio.move_on_after(patience_s):
            await self._port.wait_gone(self._record)
            return True
        return False

    async def _try(self, name: str, act: Callable[[], object]) -> None:
        """A monitor that does not answer must not stop the stop."""
        try:
            await act()  # type: ignore[misc]
        except ChvError as error:
            log.info("agent.stop.rung_failed", vm_id=self._vm.uid, rung=name, error=str(error))
