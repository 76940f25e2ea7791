"""One VM: its API, its journal, and what the two say together about its state.

The API calls a VM that its guest powered off the same as one that never ran; the journal tells.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chv.common.errors import ChvError, FailedPrecondition, Unavailable
from chv.vmm.cloud_hypervisor import api, backends, spec
from chv.vmm.cloud_hypervisor.api import Api, Info
from chv.vmm.cloud_hypervisor.events import History
from chv.vmm.cloud_hypervisor.journal import Journal
from chv.vmm.cloud_hypervisor.line import LineLost
from chv.vmm.cloud_hypervisor.refusals import NoVm, Refused
from chv.vmm.driver import VmmState

# A VMM that confined itself to the files of its first VM opens no others.
AGAIN = "the VM was removed from its VMM: create it again, with other files in a new VMM"
ENDED = "its VMM has ended, as it would have kept the taps of its NICs: begin with a new VMM"
NOT_FOUND_SINCE = 53  # before, a missing VM is a failure like any other

_STATES = {
    "Running": VmmState.RUNNING,
    "Paused": VmmState.PAUSED,
    "Created": VmmState.CREATED,
    "Shutdown": VmmState.CREATED,
}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look at a VM showed. `info` is None where there is none."""

    state: VmmState
    info: Info | None
    history: History

    @property
    def present(self) -> Info:
        """The VM's description; FailedPrecondition where there is no VM."""
        if self.info is None:
            raise FailedPrecondition("the VMM has no VM yet", hint="create it")
        return self.info


class Machine:
    """The VM whose own directory is `runtime_dir`."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self.api = Api(spec.api_socket(runtime_dir))
        self.journal = Journal(spec.events_file(runtime_dir))
        self.version = ""

    async def look(self) -> Seen:
        """Ask for the state."""
        info = await self._info()
        history = self.journal.read()
        if info is None:
            return Seen(VmmState.EMPTY, None, history)
        state = _STATES.get(info.state, VmmState.UNKNOWN)
        if state is VmmState.RUNNING and history.stops_due:
            self.journal.mark("undone")  # it was announced and never done
        if state is VmmState.RUNNING and history.panicked:
            state = VmmState.PANICKED
        off = history.guest_off or (history.up and not history.stops_due)
        if state is VmmState.CREATED and off:
            state = VmmState.SHUTDOWN  # the event may come a moment after the state
        if state is VmmState.CREATED and not history.made:
            state = VmmState.EMPTY  # a `create` that was cut short: devices may be missing
        return Seen(state, info, history)

    async def _info(self) -> Info | None:
        refused: ChvError | None = None
        try:
            return await self.api.info()
        except NoVm:
            return None
        except Refused as error:
            refused = error
        # Nothing is wrong with a VMM that has no VM; one that ends says so to a ping.
        if spec.major((await self.api.ping()).version) < NOT_FOUND_SINCE:
            return None
        raise refused

    async def told_version(self) -> str:
        """Return the version that answers; asked for once."""
        if not self.version:
            self.version = (await self.api.ping()).version
        return self.version

    async def boot(self, seen: Seen) -> None:
        """Build the VM and let it run. After a failure there is no VM any more: create it again."""
        if seen.history.boot_begun:
            hint = await self.give_up(seen)
            raise FailedPrecondition("an earlier boot failed half-way", hint=hint)
        backends.require_listening(seen.present)
        refused: ChvError | None = None
        try:
            await self.api.put("vm.boot", limit_s=api.BOOT_S_MAX)
        except Refused as error:
            refused = error
        if refused is not None:
            hint = await self.give_up(seen)  # its device lists may be gone
            raise FailedPrecondition(refused.message, hint=hint)

    async def reboot(self, seen: Seen) -> None:
        """Rebuild the running VM; as `boot`."""
        backends.require_listening(seen.present)
        refused: ChvError | None = None
        try:
            with self.journal.announced("reboot"):
                await self.api.put("vm.reboot", limit_s=api.BOOT_S_MAX)
        except Refused as error:
            refused = error
        if refused is not None:
            hint = await self.give_up(seen)
            raise FailedPrecondition(refused.message, hint=hint)

    async def stop(self) -> None:
        """Cut the VM off; waits for no disk."""
        with self.journal.announced("stop"):
            await self.api.change("vm.shutdown")
        self.journal.mark("reset")

    async def delete(self) -> None:
        """Let the VMM forget its VM. None there: no effect."""
        self.journal.mark("making")
        await self.api.change("vm.delete")
        self._unlink_serial()

    async def give_up(self, seen: Seen) -> str:
        """Make way for another attempt; returns where that is to be made.

        A NIC that was noted down and never built keeps its tap until the VMM ends, whatever becomes
        of the VM: nobody could open that tap again.
        """
        if seen.info is not None and seen.info.listed("net"):
            await self.end()
            return ENDED
        await self.delete()
        return AGAIN

    async def end(self) -> None:
        """End the VMM; it may hang up instead of answering."""
        with suppress(Unavailable):
            self.journal.mark("stop")
        with suppress(LineLost):
            await self.api.change("vmm.shutdown")

    async def clear(self, seen: Seen) -> None:
        """Make way for a new VM; Unavailable where that takes a new VMM."""
        if seen.info is None:
            self.journal.mark("making")
            self._unlink_serial()
        elif await self.give_up(seen) == ENDED:
            raise Unavailable("an earlier attempt to make this VM was cut short", hint=ENDED)

    def _unlink_serial(self) -> None:
        """Of a VM that never ran, and of a dead VMM, the socket stays, and the next cannot bind."""
        (self.runtime_dir / spec.SERIAL_SOCKET).unlink(missing_ok=True)


def require(verb: str, state: VmmState, *allowed: VmmState) -> None:
    """Refuse what the state does not allow."""
    if state not in allowed:
        raise FailedPrecondition(f"{verb}: the VM is {state}, not {' or '.join(allowed)}")
