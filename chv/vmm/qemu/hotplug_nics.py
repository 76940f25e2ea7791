"""Plugs and unplugs NICs of a running QEMU, by its monitor.

A tap reaches QEMU as a descriptor for each queue, which a network back end takes and a device
uses. QEMU cannot be asked what it holds beside devices, so that whatever an attempt that was cut
short may have left is dropped before the next one, and when the device is gone. Fails as
`hotplug` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from chv.common.errors import FailedPrecondition, InvalidArgument
from chv.vmm import spec
from chv.vmm.driver import NicConfig
from chv.vmm.qemu import hotplug
from chv.vmm.qemu.qmp import Monitor


async def nics(monitor: Monitor) -> tuple[str, ...]:
    """Return the ids of the NICs that are plugged."""
    known = await hotplug.devices(monitor)
    return tuple(
        sorted(
            name.removeprefix(spec.NIC_PREFIX)
            for name, kind in known.items()
            if kind in (spec.NIC_DEVICE, spec.NIC_DEVICE_MMIO)
        )
    )


async def add(monitor: Monitor, nic: NicConfig, fds: Sequence[int], port: str = "") -> None:
    """Plug a NIC into a root port, a free one if none is named."""
    if len(fds) != nic.queues:
        raise InvalidArgument(f"{len(fds)} descriptors for {nic.queues} queues", field="fds")
    known = await hotplug.devices(monitor)
    if spec.nic_device(nic.id) in known:
        return
    port = port or await hotplug.free_port(monitor, known)
    connection, arguments = spec.nic_connection(nic), spec.nic_arguments(nic, port)
    await drop(monitor, nic.id)
    refusal: FailedPrecondition | None = None
    try:
        for name, fd in zip(spec.nic_fd_names(nic.id, nic.queues), fds, strict=True):
            await monitor.give(name, fd)
        await monitor.tell("netdev_add", connection)
        await monitor.tell("device_add", arguments)
    except FailedPrecondition as error:
        refusal = error
    if refusal is not None:
        await drop(monitor, nic.id)
        raise refusal


async def remove(monitor: Monitor, nic_id: str) -> None:
    """Ask the guest to let go of a NIC and return once QEMU has, of its tap as well."""
    hint = "a guest that still boots, or does no PCI hot-plug, cannot"
    await hotplug.let_go(monitor, spec.nic_device(nic_id), f"NIC {nic_id}", hint)
    await drop(monitor, nic_id)


async def drop(monitor: Monitor, nic_id: str) -> None:
    """Close what QEMU may hold of a tap; it refuses what it does not have."""
    if spec.nic_device(nic_id) in await hotplug.devices(monitor):
        return
    with contextlib.suppress(FailedPrecondition):
        await monitor.tell("netdev_del", {"id": spec.nic_backend(nic_id)})
    for name in spec.nic_fd_names(nic_id, spec.QUEUES_MAX):
        with contextlib.suppress(FailedPrecondition):
            await monitor.tell("closefd", {"fdname": name})
