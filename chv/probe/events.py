"""What the probe says of machine, CPU and power: one Struct for each event.

`at_us` counts from the guest's first instruction. Names are those of the guest's lines: event
`cpu-done` is `CpuDone`, its keys are the fields. A key that is not here is ignored, so that a newer
guest can be read. Devices are in `device_events`; nothing here reads bytes: `lines` does.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the guest."""

    at_us: int


class Noise(Event, frozen=True):
    """Bytes between lines that are no event: firmware, a line cut short, an unknown event."""

    text: str


class Boot(Event, frozen=True):
    """The first line; a second one means that the VM was reset."""

    protocol: int


class BootError(Event, frozen=True):
    """The guest was not entered as it expects."""

    reason: str


class Clock(Event, frozen=True):
    """How time is measured."""

    source: Literal["pmtimer", "none"]
    tsc_khz: int
    apic_khz: int


class Command(Event, frozen=True):
    """The kernel command line as it arrived."""

    text: str


class Memory(Event, frozen=True):
    """One range of RAM, in bytes."""

    start: str
    size: int


class Machine(Event, frozen=True):
    """Bytes of RAM, and processors."""

    memory: int
    cpus: int
    cpus_max: int


class Acpi(Event, frozen=True):
    """The registers that were found; 0x0: not there."""

    dsdt_bytes: int
    sleep: str = "0x0"
    pm1: str = "0x0"
    reset: str = "0x0"
    ged: str = "0x0"
    pci: str = "0x0"
    cpus: str = "0x0"
    memory: str = "0x0"


class Ready(Event, frozen=True):
    """All devices that were there at the start are known; the plans go on."""

    virtio: int


class CpuTry(Event, frozen=True):
    """An instruction is tried now: the last word before a VMM that cannot emulate it dies."""

    insn: str


class Cpu(Event, frozen=True):
    """How an instruction ended. absent: CPUID does not promise it, it was not tried."""

    insn: str
    result: Literal["ok", "fault", "wrong", "absent"]
    vector: int | None = None
    value: str | None = None
    wanted: str | None = None


class CpuDone(Event, frozen=True):
    """All instructions of a list are tried."""

    ok: int
    failed: int
    absent: int


class CpuAdded(Event, frozen=True):
    """A processor was plugged."""

    id: int


class CpuRemoved(Event, frozen=True):
    """A processor was asked for and given back."""

    id: int


class Cpus(Event, frozen=True):
    """Processors after a change."""

    present: int
    max: int


class MemoryAdded(Event, frozen=True):
    """A range of memory was plugged, in bytes."""

    slot: int
    start: str
    size: int


class Button(Event, frozen=True):
    """The power button was pressed."""

    name: str


class ButtonSet(Event, frozen=True):
    """What the power button does from now on."""

    how: str


class Beat(Event, frozen=True):
    """Still alive."""

    n: int


class Pong(Event, frozen=True):
    """Answer to `ping=TOKEN` on the serial port."""

    token: str


class InputRefused(Event, frozen=True):
    """A command on the serial port that was not understood, or met no device."""

    text: str


class Done(Event, frozen=True):
    """Every plan that ends has ended; printed once for the command line's plans."""

    ok: bool
    passed: int
    failed: int


class End(Event, frozen=True):
    """The guest now ends as it was told."""

    how: str


class EndFailed(Event, frozen=True):
    """The machine did not heed it."""

    how: str


class Fault(Event, frozen=True):
    """An exception that was not expected; the guest stands still."""

    vector: int
    error: str
    rip: str
    cr2: str


class Fatal(Event, frozen=True):
    """The guest cannot go on."""

    reason: str
