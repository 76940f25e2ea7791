"""How many CPUs and how much memory a VM has, and giving it more, or fewer CPUs, while it runs.

CPUs come and go by ACPI, one by one, the lowest free number first. Memory comes as modules, each
in a slot of its own and in steps of 128 MiB, and does not go: a guest that has used it cannot give
it back. QEMU is asked before and after each change, so that every function may be repeated.
"""

from __future__ import annotations

import contextlib
from typing import Any

import anyio
import msgspec

from chv.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    OutcomeUnknown,
    ResourceExhausted,
    Unsupported,
)
from chv.vmm import spec_machine
from chv.vmm.driver import Sizes, VmmState
from chv.vmm.qemu import hotplug, machine
from chv.vmm.qemu.qmp import Monitor

RESIZE_S_MAX = 8.0
POLL_S = 0.02
# A guest that was still booting may have missed the request.
ASK_AGAIN_S = 2.0


class Dimm(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that was plugged: its slot, how much, and where the guest sees it."""

    slot: int
    size_bytes: int
    address: int


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    """A place for a CPU. `path`: of what is in it; empty where nothing is."""

    kind: str
    place: dict[str, int]
    path: str

    @property
    def number(self) -> int:
        """Its core's number: there is one socket and one thread to a core."""
        return self.place["core-id"]


async def sizes(monitor: Monitor) -> Sizes:
    """Ask for both."""
    size_bytes, most_bytes = await _memory(monitor)
    if await machine.is_microvm(monitor):
        cpus = len(await monitor.ask("query-cpus-fast"))
        return Sizes(cpus=cpus, cpus_max=cpus, memory_bytes=size_bytes, memory_max_bytes=size_bytes)
    places = await cpu_places(monitor)
    return Sizes(
        cpus=sum(bool(cpu.path) for cpu in places),
        cpus_max=len(places),
        memory_bytes=size_bytes,
        memory_max_bytes=most_bytes,
    )


async def _memory(monitor: Monitor) -> tuple[int, int]:
    """Return how much there is and how much there may be; before 7.1 QEMU does not tell that."""
    now = await monitor.ask("query-memory-size-summary")
    size_bytes = int(now["base-memory"]) + int(now.get("plugged-memory", 0))
    try:
        answer: Any = await monitor.ask("qom-get", {"path": "/machine", "property": "memory"})
    except FailedPrecondition:
        return size_bytes, size_bytes
    return size_bytes, max(size_bytes, int(answer.get("max-size", 0)))


async def cpu_places(monitor: Monitor) -> list[Cpu]:
    """Return all places for CPUs, by their number."""
    answer: list[dict[str, Any]] = await monitor.ask("query-hotpluggable-cpus")
    found = [
        Cpu(kind=entry["type"], place=entry["props"], path=entry.get("qom-path", ""))
        for entry in answer
    ]
    return sorted(found, key=lambda cpu: cpu.number)


async def set_cpus(monitor: Monitor, cpus: int) -> None:
    """Change the number of CPUs."""
    await machine.require_ports(monitor, "change the number of CPUs")
    places = await cpu_places(monitor)
    if not 1 <= cpus <= len(places):
        raise InvalidArgument(
            f"{cpus} CPUs are not 1 to {len(places)}",
            field="cpus",
            hint="cpusMax is fixed when the VM starts",
        )
    present = sum(bool(cpu.path) for cpu in places)
    if cpus == present:
        return
    allowed = (VmmState.RUNNING, VmmState.PAUSED) if cpus > present else (VmmState.RUNNING,)
    machine.require("change CPUs", await machine.state(monitor), *allowed)
    if cpus < present:
        await _remove_cpus(monitor, cpus)
    else:
        await add_cpus(monitor, cpus)
    if (seen := (await sizes(monitor)).cpus) != cpus:
        raise OutcomeUnknown(f"the VM has {seen} CPUs after the change, not {cpus}")


async def add_cpus(monitor: Monitor, cpus: int) -> None:
    """Plug CPUs until there are so many."""
    places = await cpu_places(monitor)
    missing = cpus - sum(bool(cpu.path) for cpu in places)
    for cpu in [place for place in places if not place.path][: max(0, missing)]:
        device = f"{spec_machine.CPU_PREFIX}{cpu.number}"
        await monitor.tell("device_add", {"driver": cpu.kind, "id": device, **cpu.place})


async def _remove_cpus(monitor: Monitor, cpus: int) -> None:
    if not (await monitor.ask("query-kvm"))["enabled"]:
        raise Unsupported(
            "QEMU without KVM takes no CPU away: its heap is corrupt afterwards",
            field="cpus",
            hint="stop the VM, then start it with fewer",
        )
    asked_at = float("-inf")
    with anyio.move_on_after(RESIZE_S_MAX):
        while True:
            there = [cpu for cpu in await cpu_places(monitor) if cpu.path]
            if len(there) <= cpus:
                return
            if anyio.current_time() - asked_at > ASK_AGAIN_S:
                asked_at = anyio.current_time()
                await _ask_to_let_go(monitor, there[cpus:])
            await anyio.sleep(POLL_S)
    raise DeadlineExceeded(
        f"the guest has not let go of its CPUs in {RESIZE_S_MAX:g} s",
        field="cpus",
        hint="a guest without ACPI CPU hot-plug cannot",
    )


async def _ask_to_let_go(monitor: Monitor, cpus: list[Cpu]) -> None:
    for cpu in reversed(cpus):
        with contextlib.suppress(FailedPrecondition):  # a request is pending, or it is just gone
            await monitor.tell("device_del", {"id": cpu.path})


async def dimms(monitor: Monitor) -> tuple[Dimm, ...]:
    """Return the memory that was plugged."""
    answer: list[dict[str, Any]] = await monitor.ask("query-memory-devices")
    return tuple(
        Dimm(
            slot=int(entry["data"]["slot"]),
            size_bytes=int(entry["data"]["size"]),
            address=int(entry["data"]["addr"]),
        )
        for entry in answer
        if entry["type"] == "dimm"
    )


async def set_memory(monitor: Monitor, memory_bytes: int) -> None:
    """Give the VM more memory, which back ends of its disks are told of by QEMU."""
    await machine.require_ports(monitor, "change the memory")
    present = await sizes(monitor)
    step = memory_bytes - present.memory_bytes
    if step == 0:
        return
    _check_step(present, step)
    allowed = (VmmState.RUNNING, VmmState.PAUSED)
    machine.require("change memory", await machine.state(monitor), *allowed)
    taken = {dimm.slot for dimm in await dimms(monitor)}
    free = [slot for slot in range(spec_machine.MEMORY_SLOTS) if slot not in taken]
    if not free:
        raise ResourceExhausted(
            f"memory was added {len(taken)} times, which takes all slots",
            field="memory_bytes",
            hint="a restart gives the VM all of it in one",
        )
    await plug_dimm(monitor, free[0], step)
    if (seen := (await sizes(monitor)).memory_bytes) != memory_bytes:
        raise OutcomeUnknown(f"the VM has {seen} bytes after the change, not {memory_bytes}")


def _check_step(present: Sizes, step: int) -> None:
    if step < 0:
        raise Unsupported(
            "QEMU takes no memory away from a running VM here",
            field="memory_bytes",
            hint="stop the VM, then start it with less",
        )
    if present.memory_bytes + step > present.memory_max_bytes:
        raise InvalidArgument(
            f"{present.memory_bytes + step} bytes are more than {present.memory_max_bytes}",
            field="memory_bytes",
            hint="memoryMax is fixed when the VM starts",
        )
    if step % spec_machine.MEMORY_STEP_BYTES:
        raise InvalidArgument(
            f"{step} bytes more are not a multiple of 128 MiB", field="memory_bytes"
        )


async def plug_dimm(monitor: Monitor, slot: int, size_bytes: int, address: int = 0) -> None:
    """Plug memory into a slot, at an address where one is given. There already: no effect."""
    arguments = spec_machine.dimm_arguments(slot)
    if arguments["id"] in await hotplug.devices(monitor):
        return
    backend = {"id": spec_machine.dimm_backend(slot)}
    with contextlib.suppress(FailedPrecondition):  # of an attempt that was cut short
        await monitor.tell("object-del", backend)
    await monitor.tell("object-add", spec_machine.dimm_memory(slot, size_bytes))
    refusal: FailedPrecondition | None = None
    try:
        place = {"addr": address} if address else {}
        await monitor.tell("device_add", arguments | place)
    except FailedPrecondition as error:
        refusal = error
    if refusal is not None:
        await monitor.tell("object-del", backend)
        raise refusal
