"""The fake VMM's behaviour without its host: states, guest, faults. Pure but for a given clock.

Two hosts share it: the process `chv.vmm.fake` and `chv.vmm.in_process`. What the guest does later
(boot, obey the power button) is due at a time and happens at the next look, so no timer and no
thread is needed. Imports little, since a fake process must start fast. Fails as a real VMM does,
with FailedPrecondition, and with whatever fault was planted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Literal

import msgspec

from chv.common.errors import FailedPrecondition, InvalidArgument, Unavailable, Unsupported
from chv.vmm.driver import Sizes, VmmState

READY_LINE = "chv-guest: ready"
BOOT_LINES = ("chv-fake: Linux version 0.0.0-fake", "chv-fake: Run /init as init process")
FAULTS_MAX = 64
SECONDS_MAX = 3600.0

Seconds = Annotated[float, msgspec.Meta(ge=0, le=SECONDS_MAX)]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong at the next `times` calls of `command`.

    error: refused with `code`; drop: hung up on, not applied; apply_drop: applied, then hung up
    on; hang: never answered; exit: the VMM ends instead of answering; delay: answered after
    `seconds`.
    """

    command: str
    kind: Literal["error", "drop", "apply_drop", "hang", "exit", "delay"]
    times: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    seconds: Seconds = 0.0
    code: str = "INTERNAL"


class Behaviour(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a fake starts out; JSON of it in the environment variable `CHV_FAKE`."""

    boot_s: Seconds = 0.0
    button_s: Seconds = 0.0
    ignore_button: bool = False
    guest_agent: bool = True
    starts_empty: bool = False  # as Cloud Hypervisor: `create` makes the VM, `halt` cuts it off
    faults: Annotated[tuple[Fault, ...], msgspec.Meta(max_length=FAULTS_MAX)] = ()


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """What a fake's memory and devices are, in a snapshot or on the way to another process."""

    sizes: Sizes
    running: bool = False
    frozen: bool = False
    resets: int = 0


class FakeVm:
    """One VM. Commands are methods; `output` collects what the serial console prints."""

    sizes = Sizes(cpus=1, cpus_max=1, memory_bytes=0, memory_max_bytes=0)

    def __init__(
        self,
        behaviour: Behaviour,
        disks: Iterable[str],
        clock: Callable[[], float],
        nics: Iterable[str] = (),
    ) -> None:
        self.behaviour = behaviour
        self.disks = dict.fromkeys(disks, True)  # id: connected
        self.nics = set(nics)
        self.reason = ""
        self.resets = 0
        self.reboots = 0  # those of them that were the guest's
        self.frozen = False  # by the guest agent
        self._cpus_due = 0  # what is left when the guest has let go of the others; 0: no change
        self._leaving: set[tuple[str, str]] = set()  # what the guest was asked to let go of
        self._clings = False
        self.output: list[str] = []
        self._clock = clock
        self._state = VmmState.EMPTY if behaviour.starts_empty else VmmState.CREATED
        self._ignores_button = behaviour.ignore_button
        self._due: list[tuple[float, str]] = []
        self._faults = list(behaviour.faults)

    @property
    def state(self) -> VmmState:
        """Return the state after everything that is due by now."""
        self.advance()
        return self._state

    def next_due(self) -> float | None:
        """Return when something happens by itself next."""
        if self._state is not VmmState.RUNNING or not self._due:
            return None
        return min(self._due)[0]

    def advance(self) -> None:
        """Let the guest do what is due; it does nothing while its vCPUs stand."""
        now = self._clock()
        while self._state is VmmState.RUNNING and self._due and min(self._due)[0] <= now:
            event = min(self._due)
            self._due.remove(event)
            if event[1] == "ready":
                self.output.append(READY_LINE)
            else:
                self.guest("power_off")

    def await_image(self) -> None:
        """Be without a VM until `load` brings one."""
        self._state = VmmState.EMPTY

    # --- commands, named as in the driver port
    def create(self) -> None:
        """Make the VM where there is none."""
        if self.state is VmmState.EMPTY:
            self._state = VmmState.CREATED

    def halt(self) -> None:
        """Stop the vCPUs, or cut them off."""
        if not self.behaviour.starts_empty:
            self.pause()
        elif self.state is not VmmState.CREATED:
            self._require("halt", VmmState.RUNNING, VmmState.PAUSED)
            self._state = VmmState.PAUSED  # a reset of vCPUs that stand leaves them standing
            self.reset()

    def boot(self) -> None:
        """Run a created VM."""
        if self.state is not VmmState.RUNNING:
            self._require("boot", VmmState.CREATED)
            self._start()

    def resume(self) -> None:
        """Run a paused or reset VM."""
        if self.state is VmmState.CREATED:
            self._start()
        elif self.state is not VmmState.RUNNING:
            self._require("resume", VmmState.PAUSED)
            self._state = VmmState.RUNNING

    def pause(self) -> None:
        """Stop the vCPUs."""
        if self.state is not VmmState.PAUSED:
            self._require("pause", VmmState.RUNNING)
            self._state = VmmState.PAUSED

    def reset(self) -> None:
        """Hard reset."""
        if self.state is VmmState.EMPTY:
            self._require("reset", VmmState.CREATED)
        running = self.state is VmmState.RUNNING
        self.resets += 1
        self.reason = ""
        self._due.clear()
        self._eject()  # no guest is left that could cling to anything
        self.frozen = self._clings = False
        self._ignores_button = self.behaviour.ignore_button
        self._state = VmmState.CREATED
        if running:
            self._start()

    def power_button(self) -> None:
        """Press the button; a guest that heeds it is off `button_s` later."""
        if self.state is VmmState.SHUTDOWN:
            return
        self._require("power button", VmmState.RUNNING)
        if not self._ignores_button:
            self._due.append((self._clock() + self.behaviour.button_s, "off"))
            self.advance()

    # --- disks, NICs and guest agent
    def remove_disk(self, disk_id: str) -> None:
        """Ask the guest to let go of a disk; it does so at once unless it clings to it."""
        if disk_id not in self.disks:
            return
        if self.state is not VmmState.RUNNING:
            self._require("remove disk", VmmState.RUNNING)
        self._ask_to_let_go("disk", disk_id)

    def remove_nic(self, nic_id: str) -> None:
        """Ask the guest to let go of a NIC."""
        if nic_id not in self.nics:
            return
        if self.state is not VmmState.RUNNING:
            self._require("remove NIC", VmmState.RUNNING)
        self._ask_to_let_go("nic", nic_id)

    def _ask_to_let_go(self, kind: str, device: str) -> None:
        self._leaving.add((kind, device))
        if not self._clings:
            self._eject()

    def _eject(self) -> None:
        for kind, device in self._leaving:
            if kind == "disk":
                self.disks.pop(device, None)
            else:
                self.nics.discard(device)
        self._leaving.clear()
        if self._cpus_due:
            self.sizes = msgspec.structs.replace(self.sizes, cpus=self._cpus_due)
            self._cpus_due = 0

    def freeze(self) -> None:
        """Freeze the guest's file systems."""
        self.ask_agent()
        self.frozen = True

    def thaw(self) -> None:
        """Thaw them."""
        self.ask_agent()
        self.frozen = False

    def ask_agent(self) -> None:
        """Refuse where no guest agent answers."""
        if self.state is not VmmState.RUNNING or not self.behaviour.guest_agent:
            raise Unavailable("no guest agent answers")

    # --- sizes, snapshots and moves
    def set_cpus(self, cpus: int) -> None:
        """Change the number of CPUs; fewer once the guest lets go of the others."""
        if not 1 <= cpus <= self.sizes.cpus_max:
            raise InvalidArgument(f"{cpus} CPUs are not 1 to {self.sizes.cpus_max}", field="cpus")
        if self.state is not VmmState.PAUSED:
            self._require("change CPUs", VmmState.RUNNING)
        if cpus < self.sizes.cpus and self._clings:
            self._cpus_due = cpus
            return
        self._cpus_due = 0
        self.sizes = msgspec.structs.replace(self.sizes, cpus=cpus)

    def set_memory(self, memory_bytes: int) -> None:
        """Give the VM more memory."""
        if memory_bytes > self.sizes.memory_max_bytes:
            most = self.sizes.memory_max_bytes
            raise InvalidArgument(
                f"{memory_bytes} bytes are more than {most}", field="memory_bytes"
            )
        if memory_bytes < self.sizes.memory_bytes:
            raise Unsupported("the fake takes no memory away", field="memory_bytes")
        if self.state is not VmmState.PAUSED:
            self._require("change memory", VmmState.RUNNING)
        self.sizes = msgspec.structs.replace(self.sizes, memory_bytes=memory_bytes)

    def image(self) -> Image:
        """Return what there is to save, or to hand over."""
        running = self.state is VmmState.RUNNING
        if not running:
            self._require("save", VmmState.PAUSED)
        return Image(sizes=self.sizes, running=running, frozen=self.frozen, resets=self.resets)

    def load(self, image: Image) -> None:
        """Go on from what was saved or handed over."""
        if self.state is not VmmState.EMPTY:
            self._require("load", VmmState.EMPTY)
        self.sizes, self.frozen, self.resets = image.sizes, image.frozen, image.resets
        self._state = VmmState.RUNNING if image.running else VmmState.PAUSED

    def nmi(self) -> None:
        """Take an NMI, which changes nothing."""
        if self.state is not VmmState.RUNNING:
            self._require("NMI", VmmState.RUNNING)

    # --- what the guest does on its own, for tests
    def guest(self, action: str) -> None:
        """Let the guest power_off, panic, reboot, ignore_button or heed_button, cling or let_go."""
        if action in ("ignore_button", "heed_button"):
            self._ignores_button = action == "ignore_button"
            return
        if action in ("cling", "let_go"):
            self._clings = action == "cling"
            if not self._clings:
                self._eject()
            return
        if self._state is not VmmState.RUNNING:
            raise FailedPrecondition(f"the guest does not run: the VM is {self._state}")
        match action:
            case "power_off":
                self._halt(VmmState.SHUTDOWN, "guest-shutdown")
            case "panic":
                self.output.append("Kernel panic - not syncing: asked for")
                self._halt(VmmState.PANICKED, "guest-panicked")
            case "reboot":
                self.reboots += 1
                self.reset()
            case _:
                raise InvalidArgument(f"{action!r} is no guest action", field="action")

    # --- faults
    def plant(self, fault: Fault) -> None:
        """Let something go wrong later."""
        if len(self._faults) >= FAULTS_MAX:
            raise InvalidArgument(f"more than {FAULTS_MAX} faults", field="faults")
        self._faults.append(fault)

    def take_fault(self, command: str) -> Fault | None:
        """Return the fault of this call of `command`, if one is planted, and use it up."""
        for index, fault in enumerate(self._faults):
            if fault.command == command:
                left = fault.times - 1
                self._faults[index : index + 1] = (
                    [msgspec.structs.replace(fault, times=left)] if left else []
                )
                return fault
        return None

    def _start(self) -> None:
        self._state = VmmState.RUNNING
        self.output += BOOT_LINES
        self._due.append((self._clock() + self.behaviour.boot_s, "ready"))
        self.advance()

    def _halt(self, state: VmmState, reason: str) -> None:
        self._due.clear()
        self._state, self.reason = state, reason

    def _require(self, verb: str, *allowed: VmmState) -> None:
        if self._state not in allowed:
            names = " or ".join(allowed)
            raise FailedPrecondition(f"{verb}: the VM is {self._state}, not {names}")


MUTATIONS: dict[str, Callable[[FakeVm], None]] = {
    "create": FakeVm.create,
    "halt": FakeVm.halt,
    "boot": FakeVm.boot,
    "resume": FakeVm.resume,
    "pause": FakeVm.pause,
    "reset": FakeVm.reset,
    "power_button": FakeVm.power_button,
    "freeze": FakeVm.freeze,
    "thaw": FakeVm.thaw,
    "nmi": FakeVm.nmi,
}
