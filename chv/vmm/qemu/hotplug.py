"""Plugs and unplugs vhost-user disks of a running QEMU, by its monitor; ports for NICs as well.

QEMU itself is asked what is there before each change, so that every function may be repeated
after any interruption. Nothing is plugged whose back end is not connected: QEMU's only thread
would wait for it, and the guest and the monitor with it.
"""

from __future__ import annotations

from typing import Any

import anyio

from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from chv.vmm import spec
from chv.vmm.driver import DiskConfig, PluggedDisk
from chv.vmm.qemu.qmp import Monitor

CONNECT_S_MAX = 5.0
REMOVE_S_MAX = 8.0
CHARDEV_S_MAX = 2.0
POLL_S = 0.02
# A guest that was still booting may have missed the request; QEMU refuses a repetition before.
ASK_AGAIN_S = 5.1
PERIPHERAL = "/machine/peripheral"


async def chardevs(monitor: Monitor) -> dict[str, bool]:
    """Return every connection by name, and whether it is up.

    QEMU makes the vhost handshake in the loop that answers QMP: an answer that shows the
    connection up comes after it, and a handshake that failed shows as disconnected.
    """
    answer: list[dict[str, Any]] = await monitor.ask("query-chardev")
    return {
        str(entry["label"]): not str(entry["filename"]).startswith("disconnected:")
        for entry in answer
    }


async def connected(monitor: Monitor, disk_ids: tuple[str, ...]) -> bool:
    """Tell whether all these disks are connected; NotFound where QEMU does not have one."""
    wanted = {spec.disk_chardev(disk_id) for disk_id in disk_ids}
    known = await chardevs(monitor)
    if unknown := wanted - known.keys():
        raise NotFound(f"QEMU has no {sorted(unknown)}", field="disk_ids")
    return all(known[label] for label in wanted)


async def disks(monitor: Monitor) -> tuple[PluggedDisk, ...]:
    """Return the vhost-user disks that are plugged."""
    known = await devices(monitor)
    up = await chardevs(monitor)
    found = sorted(
        name.removeprefix(spec.DISK_PREFIX)
        for name, kind in known.items()
        if kind in (spec.VHOST_DEVICE, spec.VHOST_DEVICE_MMIO)
    )
    return tuple(
        PluggedDisk(id=disk_id, connected=up.get(spec.disk_chardev(disk_id), False))
        for disk_id in found
    )


async def add(monitor: Monitor, disk: DiskConfig, version: tuple[int, int], port: str = "") -> None:
    """Plug a disk into a root port, a free one if none is named."""
    known = await devices(monitor)
    if spec.disk_device(disk.id) in known:
        return
    port = port or await free_port(monitor, known)
    await _drop_chardev(monitor, disk.id)  # of an attempt that was cut short, perhaps elsewhere
    await monitor.tell("chardev-add", spec.disk_connection(disk, version))
    refusal: ChvError | None = None
    try:
        await _await_connection(monitor, disk)
        await monitor.tell("device_add", spec.disk_arguments(disk, port))
    except (Unavailable, FailedPrecondition) as error:
        refusal = error
    if refusal is not None:
        await _drop_chardev(monitor, disk.id)
        raise refusal


async def remove(monitor: Monitor, disk_id: str) -> None:
    """Ask the guest to let go of a disk and return once QEMU has."""
    hint = "unmount it in the guest; one that still boots, or does no PCI hot-plug, cannot"
    await let_go(monitor, spec.disk_device(disk_id), f"disk {disk_id}", hint)
    await _drop_chardev(monitor, disk_id)


async def let_go(monitor: Monitor, device: str, what: str, hint: str) -> None:
    """Ask the guest to let go of a device until QEMU does not have it any more."""
    refusal: ChvError | None = None
    with anyio.move_on_after(REMOVE_S_MAX) as patience:
        asked_at = float("-inf")
        while device in await devices(monitor):
            if anyio.current_time() - asked_at > ASK_AGAIN_S:
                asked_at = anyio.current_time()
                refusal = await _ask_to_let_go(monitor, device)
            await anyio.sleep(POLL_S)
    if patience.cancelled_caught:
        raise DeadlineExceeded(
            f"the guest has not let go of {what} in {REMOVE_S_MAX:g} s", hint=hint
        ) from refusal


async def _ask_to_let_go(monitor: Monitor, device: str) -> ChvError | None:
    """Return QEMU's refusal: a request may be under way, and a device may just be gone."""
    try:
        await monitor.tell("device_del", {"id": device})
    except FailedPrecondition as error:
        return error
    return None


async def devices(monitor: Monitor) -> dict[str, str]:
    """Return what was plugged under an id, and of which type it is."""
    answer: list[dict[str, Any]] = await monitor.ask("qom-list", {"path": PERIPHERAL})
    return {
        str(entry["name"]): str(entry["type"])[len("child<") : -1]
        for entry in answer
        if str(entry["type"]).startswith("child<")
    }


async def free_port(monitor: Monitor, known: dict[str, str]) -> str:
    """Return the first root port behind which nothing sits."""
    taken = set((await places(monitor, known)).values())
    free = [name for name, kind in known.items() if kind == "pcie-root-port" and name not in taken]
    if not free:
        raise ResourceExhausted(
            "the VM has no free port for another device", hint="a restart gives it new ones"
        )
    return min(free, key=lambda name: int(name.removeprefix(spec.PORT_PREFIX)))


async def places(monitor: Monitor, known: dict[str, str]) -> dict[str, str]:
    """Return behind which bus each disk and NIC of `known` sits."""
    found = {}
    for name, kind in known.items():
        if kind in (spec.VHOST_DEVICE, spec.NIC_DEVICE):
            place = {"path": f"{PERIPHERAL}/{name}", "property": "parent_bus"}
            bus: str = await monitor.ask("qom-get", place)
            found[name] = bus.rpartition("/")[2]
    return found


async def _await_connection(monitor: Monitor, disk: DiskConfig) -> None:
    with anyio.move_on_after(CONNECT_S_MAX):
        while not (await chardevs(monitor))[spec.disk_chardev(disk.id)]:  # noqa: ASYNC110
            await anyio.sleep(POLL_S)
        return
    raise Unavailable(f"nothing answers on {disk.path}", field="disk.path")


async def _drop_chardev(monitor: Monitor, disk_id: str) -> None:
    """Remove a disk's connection; QEMU holds one for a moment after its device is gone."""
    label = spec.disk_chardev(disk_id)
    refusal: ChvError | None = None
    with anyio.move_on_after(CHARDEV_S_MAX):
        while label in await chardevs(monitor):
            try:
                await monitor.tell("chardev-remove", {"id": label})
            except FailedPrecondition as error:
                refusal = error
                await anyio.sleep(POLL_S)
        return
    raise DeadlineExceeded(f"QEMU keeps the connection {label}") from refusal
