"""The stop ladder: resume if paused, ask by the ACPI button, TERM, KILL, under one deadline.

The button is pressed again every few seconds, since a guest that still boots ignores it. The
last seconds of the deadline belong to TERM and KILL. Returns the rung that worked. The wait can
be cut short by `forced`. Fails with DeadlineExceeded where even KILL leaves a process.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable

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


class Ladder:
    """One walk down the ladder for one VMM; `resume` lets its vCPUs run."""

    def __init__(
        self,
        port: VmmPort,
        clock: Clock,
        vm: VmHandle,
        record: WorkerRecord,
        resume: Callable[[], Awaitable[None]],
    ) -> None:
        self._port = port
        self._clock = clock
        self._vm = vm
        self._record = record
        self._resume = resume

    async def walk(self, timeout_s: float, forced: Callable[[], bool]) -> str:
        """End the VMM; return the rung that did it. `forced` skips the question."""
        term_s = min(TERM_S_MAX, timeout_s / 3)
        deadline = self._clock.monotonic() + timeout_s - term_s
        if not forced() and await self._ask(deadline, forced):
            return "acpi"
        if await self._quit(term_s):
            return "quit"
        if await self._signal(signal.SIGTERM, term_s):
            return "term"
        if await self._signal(signal.SIGKILL, KILL_S):
            return "kill"
        raise DeadlineExceeded(f"process {self._record.pid} is still there after SIGKILL")

    async def _ask(self, deadline: float, forced: Callable[[], bool]) -> bool:
        """Press the button until the guest is off, the time is up, or nobody wants to wait."""
        await self._try("resume", self._resume_if_paused)
        pressed_at = float("-inf")
        while self._clock.monotonic() < deadline and not forced():
            if self._clock.monotonic() - pressed_at >= PRESS_EVERY_S:
                pressed_at = self._clock.monotonic()
                await self._try("power_button", self._press)
            if await self._gone_within(LOOK_EVERY_S):
                return True
            if await self._guest_is_off():
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

    async def _quit(self, patience_s: float) -> bool:
        """Ask the VMM, not the guest, to end; only sensible once the guest has its say."""
        if not await self._guest_is_off():
            return False
        await self._try("quit", lambda: self._port.quit(self._vm))
        return await self._gone_within(patience_s)

    async def _signal(self, number: signal.Signals, patience_s: float) -> bool:
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
