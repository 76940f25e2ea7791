"""How many CPUs and how much memory a VM has, and giving it more, or fewer CPUs, while it runs.

A CPU that is taken away stays until the guest lets go of it, and no other change of CPUs is
accepted meanwhile. Memory comes by ACPI in steps of 128 MiB and does not go.
"""

from __future__ import annotations

import anyio

from chv.common.errors import DeadlineExceeded, InvalidArgument, OutcomeUnknown, Unsupported
from chv.vmm.cloud_hypervisor import spec
from chv.vmm.cloud_hypervisor.machine import Machine, Seen, require
from chv.vmm.cloud_hypervisor.refusals import Busy
from chv.vmm.driver import Sizes, VmmState

RESIZE_S_MAX = 8.0
BACK_OFF_S_MAX = 0.5
POLL_S = 0.02


async def sizes(machine: Machine) -> Sizes:
    """Ask for both."""
    return _sizes(await machine.look())


def _sizes(seen: Seen) -> Sizes:
    config = seen.present.config
    memory_bytes = int(config["memory"]["size"])
    promised = seen.history.limits.get("memory_max_bytes", memory_bytes)
    return Sizes(
        cpus=int(config["cpus"]["boot_vcpus"]),
        cpus_max=int(config["cpus"]["max_vcpus"]),
        memory_bytes=memory_bytes,
        memory_max_bytes=max(memory_bytes, promised),
    )


async def set_cpus(machine: Machine, cpus: int) -> None:
    """Change the number of CPUs; returns when none is still to go."""
    seen = await machine.look()
    present = _sizes(seen)
    if not 1 <= cpus <= present.cpus_max:
        raise InvalidArgument(
            f"{cpus} CPUs are not 1 to {present.cpus_max}",
            field="cpus",
            hint="cpusMax is fixed when the VM starts",
        )
    require("change CPUs", seen.state, VmmState.RUNNING, VmmState.PAUSED)
    shrinks = cpus < present.cpus
    with anyio.move_on_after(RESIZE_S_MAX):
        await _resize_cpus(machine, cpus)
        if shrinks:  # the same again is refused as long as a removal is pending
            await _resize_cpus(machine, cpus)
        if (await sizes(machine)).cpus != cpus:
            raise OutcomeUnknown(f"the VM has not {cpus} CPUs after the change")
        return
    raise DeadlineExceeded(
        f"the guest has not let go of its CPUs in {RESIZE_S_MAX:g} s",
        field="cpus",
        hint="a guest without ACPI CPU hot-plug cannot; a reset makes it so",
    )


async def _resize_cpus(machine: Machine, cpus: int) -> None:
    pause_s = POLL_S
    while True:
        try:
            await machine.api.change("vm.resize", {"desired_vcpus": cpus})
        except Busy:
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, BACK_OFF_S_MAX)
        else:
            return


async def set_memory(machine: Machine, memory_bytes: int) -> None:
    """Give the VM more memory."""
    seen = await machine.look()
    present = _sizes(seen)
    if memory_bytes == present.memory_bytes:
        return
    if memory_bytes > present.memory_max_bytes:
        raise InvalidArgument(
            f"{memory_bytes} bytes are more than {present.memory_max_bytes}",
            field="memory_bytes",
            hint="memoryMax is fixed when the VM starts",
        )
    step = memory_bytes - present.memory_bytes
    if step < 0:
        raise Unsupported(
            "Cloud Hypervisor takes no memory away from a running VM",
            field="memory_bytes",
            hint="stop the VM, then start it with less",
        )
    if step % spec.MEMORY_STEP_BYTES:
        raise InvalidArgument(
            f"{step} bytes more are not a multiple of 128 MiB",
            field="memory_bytes",
            hint=f"{memory_bytes - step % spec.MEMORY_STEP_BYTES} bytes, or 128 MiB more",
        )
    require("change memory", seen.state, VmmState.RUNNING, VmmState.PAUSED)
    await machine.api.change("vm.resize", {"desired_ram": memory_bytes})
    if (await sizes(machine)).memory_bytes != memory_bytes:
        raise OutcomeUnknown(f"the VM has not {memory_bytes} bytes after the change")
