"""Plugs and unplugs disks and NICs of a VM.

The VMM itself is asked what is there before each change, so that every function may be repeated
after any interruption. A removal is only asked for: the device stays in the tree until the guest
has let go, must not be asked for twice, and its id is not free before. What the VMM was told to
let go of is in its tree and no more in its configuration.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from chv.common.errors import (
    ChvError,
    Conflict,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    Unavailable,
)
from chv.vmm.cloud_hypervisor import api, backends, spec, taps
from chv.vmm.cloud_hypervisor.api import Info
from chv.vmm.cloud_hypervisor.machine import Machine, require
from chv.vmm.cloud_hypervisor.refusals import Refused
from chv.vmm.driver import DiskConfig, NicConfig, PluggedDisk, VmmState

KEPT = "the VMM keeps its tap until it ends: stop the VM and start it again"
REMOVE_S_MAX = 8.0
POLL_S = 0.02


async def disks(machine: Machine) -> tuple[PluggedDisk, ...]:
    """Return the vhost-user disks; the VMM does not tell whether they are connected."""
    info = (await machine.look()).present
    found = {str(disk["id"]) for disk in backends.vhost_disks(info)}
    found |= _leaving(info, "disks", spec.DISK_PREFIX)
    ids = sorted(device.removeprefix(spec.DISK_PREFIX) for device in found)
    return tuple(PluggedDisk(id=disk_id, connected=None) for disk_id in ids)


async def add_disk(machine: Machine, disk: DiskConfig) -> None:
    """Plug a disk and read back that it is there."""
    if disk.kind != spec.VHOST:
        raise InvalidArgument(f"{disk.kind!r} cannot be plugged later", field="disk.kind")
    body = spec.disk_config(disk)
    info = (await machine.look()).present
    if _configured(info, "disks", body["id"]):
        return
    _require_free(info, body["id"], f"disk {disk.id}")
    if not backends.listens(disk.path):
        raise Unavailable(f"nothing answers on {disk.path}", field="disk.path")
    await machine.api.put("vm.add-disk", body, limit_s=api.BOOT_S_MAX)
    await _read_back(machine, "disks", body)


async def remove_disk(machine: Machine, disk_id: str) -> None:
    """Unplug a disk, with the guest's help."""
    hint = "unmount it in the guest; one that still boots, or does no PCI hot-plug, cannot"
    await _remove(machine, ("disks", spec.disk_device(disk_id)), f"disk {disk_id}", hint)


async def nics(machine: Machine) -> tuple[str, ...]:
    """Return the ids of the NICs."""
    info = (await machine.look()).present
    found = {str(nic["id"]) for nic in info.listed("net")}
    found |= _leaving(info, "net", spec.NIC_PREFIX)
    return tuple(sorted(device.removeprefix(spec.NIC_PREFIX) for device in found))


async def add_nic(machine: Machine, nic: NicConfig, fds: Sequence[int]) -> None:
    """Plug a NIC and read back that it is there."""
    body = spec.nic_config(nic, fds)
    info = (await machine.look()).present
    if _configured(info, "net", body["id"]):
        return
    _require_free(info, body["id"], f"NIC {nic.id}")
    taps.require_up(nic, fds)
    refused: ChvError | None = None
    try:
        await machine.api.change("vm.add-net", body, fds)
    except (Refused, InvalidArgument, Conflict) as error:
        refused = error
    if refused is not None:
        machine.journal.mark("tap-kept", {"nic": nic.id})
        raise FailedPrecondition(refused.message, field="nics", hint=KEPT)
    await _read_back(machine, "net", body)


async def drop_nic(machine: Machine, nic_id: str) -> None:
    """Say where the tap of a NIC that is not plugged cannot be had back.

    The VMM closes no descriptor of a NIC that it refused, nor of one that it noted down in a VM
    that was not finished: the first costs the VM its process, the second has run no guest.
    """
    seen = await machine.look()
    if nic_id in seen.history.kept_taps:
        raise FailedPrecondition(f"NIC {nic_id} was refused before", field="nics", hint=KEPT)
    if seen.state is VmmState.EMPTY and seen.info is not None:
        await machine.clear(seen)


async def remove_nic(machine: Machine, nic_id: str) -> None:
    """Unplug a NIC, with the guest's help; its tap goes with it."""
    hint = "a guest that still boots, or does no PCI hot-plug, cannot"
    await _remove(machine, ("net", spec.nic_device(nic_id)), f"NIC {nic_id}", hint)


def _configured(info: Info, kind: str, device: str) -> bool:
    return any(entry.get("id") == device for entry in info.listed(kind))


def _leaving(info: Info, kind: str, prefix: str) -> set[str]:
    known = {str(entry["id"]) for entry in info.listed(kind)}
    return {device for device in info.device_tree or {} if device.startswith(prefix)} - known


def _require_free(info: Info, device: str, what: str) -> None:
    if device in (info.device_tree or {}):
        raise FailedPrecondition(
            f"the guest has not let go of the {what} that was there before",
            hint="try again when it has, or reset the VM",
        )


async def _read_back(machine: Machine, kind: str, body: spec.Body) -> None:
    info = (await machine.look()).present
    found = next((entry for entry in info.listed(kind) if entry.get("id") == body["id"]), None)
    spec.check_reported(body, found, kind)


async def _remove(machine: Machine, what: tuple[str, str], name: str, hint: str) -> None:
    kind, device = what
    seen = await machine.look()
    configured = _configured(seen.present, kind, device)
    if not configured and device not in (seen.present.device_tree or {}):
        return
    require(f"remove {name}", seen.state, VmmState.RUNNING)
    if configured:
        await machine.api.change("vm.remove-device", {"id": device})
    with anyio.move_on_after(REMOVE_S_MAX):
        while device in ((await machine.look()).present.device_tree or {}):  # noqa: ASYNC110
            await anyio.sleep(POLL_S)
        return
    raise DeadlineExceeded(f"the guest has not let go of {name} in {REMOVE_S_MAX:g} s", hint=hint)
