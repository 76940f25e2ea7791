"""Listens for signs of life from inside a guest: the serial line and the SSH banner.

Runs beside the VM's worker and never delays it. Evidence belongs to one boot: after a reset or
a new VMM it starts from nothing. Asked often until SSH answers, seldom afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import anyio

from chv.agent.context import Context
from chv.agent.vm.desired import first_nic, handle_of, vm_of
from chv.agent.vm.status import Evidence
from chv.common.errors import ChvError, OutcomeUnknown

SSH_PORT = 22
EAGER_S_FIRST = 0.1
EAGER_S_MAX = 2.0
PATIENT_FROM = 100  # attempts, some three minutes: a guest that has no SSH will hardly get it now
PATIENT_S = 10.0
CALM_S = 30.0
SSH_S = 10.0


class Prober:
    """The evidence of one VM.

    `boot_of` names the boot that runs now, '' where none does; `began_s` tells when it began, since
    1970, 0 where that is not known.
    """

    def __init__(
        self,
        context: Context,
        uid: str,
        boot_of: Callable[[], str],
        began_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._context = context
        self._uid = uid
        self._boot_of = boot_of
        self._began_s = began_s
        self._boot = ""
        self._evidence = Evidence()
        self._asked_at = 0.0  # monotonic: when it was known last how SSH is
        self._stirred = anyio.Event()

    def evidence(self) -> Evidence:
        """Return what was heard from the boot that runs now."""
        if not self._boot or self._boot != self._boot_of():
            return Evidence()
        age_s = self._context.world.clock.monotonic() - self._asked_at
        return replace(self._evidence, ssh_age_s=age_s)

    def stir(self) -> None:
        """Look whether there is a new boot to listen to."""
        self._stirred.set()

    async def run(self) -> None:
        """Listen until cancelled."""
        while True:
            boot = self._boot_of()
            if not boot:
                await self._rest(float("inf"))
            else:
                await self._listen(boot)

    async def _listen(self, boot: str) -> None:
        if boot != self._boot:
            self._boot, self._evidence = boot, Evidence()
        pause_s, attempts = EAGER_S_FIRST, 0
        while self._boot_of() == boot:
            heard = await self._hear()
            if boot == self._boot_of() and heard != self._evidence:
                changed = _gist(heard) != _gist(self._evidence)
                self._evidence = heard
                if changed:
                    self._context.wake(self._uid)
            await self._rest(CALM_S if heard.ssh else pause_s)
            attempts += 1
            limit_s = EAGER_S_MAX if attempts < PATIENT_FROM else PATIENT_S
            pause_s = min(limit_s, pause_s * 1.5)

    async def _rest(self, seconds: float) -> None:
        self._stirred = anyio.Event()
        with anyio.move_on_after(seconds):
            await self._stirred.wait()

    async def _hear(self) -> Evidence:
        stored = self._context.stored(self._uid)
        if stored is None or stored.facts is None:
            return Evidence()
        seen = self._evidence
        if not seen.serial:
            guest = self._context.world.guest
            serial = await guest.serial_evidence(handle_of(stored), self._began_s())
            seen = replace(seen, serial=serial, serial_at=self._context.now() if serial else "")
        answer = await self._ssh()
        if answer is None:
            return seen
        banner, problem = answer
        self._asked_at, now = self._context.world.clock.monotonic(), self._context.now()
        return replace(seen, ssh=banner, ssh_problem=problem, asked=True, ssh_at=now)

    async def _ssh(self) -> tuple[str, str] | None:
        """Return the banner or why there is none; None where the guest could not be asked."""
        stored = self._context.stored(self._uid)
        if stored is None or SSH_PORT not in vm_of(stored).spec.guest_ports:
            return "", ""
        nic = first_nic(self._context.ledger.tables, stored)
        if not nic:
            return "", "the VM has no NIC"
        try:
            with anyio.fail_after(SSH_S):
                return await self._context.world.guest.probe_ssh(nic, SSH_PORT), ""
        except (OutcomeUnknown, TimeoutError):  # nwd is away: that says nothing about the guest
            return None
        except (ChvError, OSError) as error:
            return "", error.message if isinstance(error, ChvError) else str(error)


def _gist(evidence: Evidence) -> tuple[bool, bool, bool]:
    """Return what of the evidence changes a condition; the rest is shown with the next look."""
    return bool(evidence.ssh), bool(evidence.serial), evidence.asked
