"""The effects on disks and NICs of a running VM: each is in the record whenever it may be plugged.

So it is written down before it is plugged, and struck out after guest and VMM have let go of it:
whoever finds it in the record after a crash does not let stord stop serving it, or nwd remove its
tap. All may be repeated. Fails with the error of the port.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from chv.agent.context import Context
from chv.agent.ports import VmHandle
from chv.agent.records import PutWorker, WorkerRow
from chv.agent.vm.config import boot_index_of, disk_config, nic_config
from chv.agent.vm.model import DesiredVm
from chv.agent.vm.steps import AddDiskStep, AddNicStep
from chv.common.errors import Conflict
from chv.common.failpoint import failpoint
from chv.common.wire.nwd import NicInfo
from chv.common.wire.stord import AttachmentInfo
from chv.vmm.driver import DiskConfig, NicConfig

_replace = msgspec.structs.replace


async def plug(
    context: Context,
    vm: VmHandle,
    desired: DesiredVm,
    step: AddDiskStep,
    served: Mapping[str, AttachmentInfo],
) -> None:
    """Record the disk, then plug it."""
    disk = next((each for each in desired.disks if each.disk_id == step.disk_id), None)
    info = served.get(step.volume_uid)
    if disk is None or info is None:
        raise Conflict("the disk is not served any more", resource=vm.uid)
    row = _row(context, vm.uid)
    config = disk_config(disk, info.export_path, boot_index_of(row.config, desired, disk))
    others = tuple(each for each in row.config.disks if each.id != config.id)
    await record(context, vm.uid, (*others, config))
    await failpoint("agent.vm.add_disk_effect.before")
    await context.world.vmm.add_disk(vm, config)


async def unplug(context: Context, vm: VmHandle, disk_id: str) -> None:
    """Let guest and VMM let go of the disk, then strike it out."""
    await context.world.vmm.remove_disk(vm, disk_id)
    await failpoint("agent.vm.remove_disk_record.before")
    disks = _row(context, vm.uid).config.disks
    await record(context, vm.uid, tuple(d for d in disks if d.id != disk_id))


async def plug_nic(
    context: Context, vm: VmHandle, step: AddNicStep, attached: Mapping[str, NicInfo]
) -> None:
    """Record the NIC, then plug it."""
    info = attached.get(step.nic_id)
    if info is None:
        raise Conflict("the NIC is not attached any more", resource=vm.uid)
    config = nic_config(info)
    await _record_nic(context, vm.uid, config.id, config)
    await failpoint("agent.vm.add_nic_effect.before")
    await context.world.vmm.add_nic(vm, config)


async def unplug_nic(context: Context, vm: VmHandle, nic_id: str) -> None:
    """Let guest and VMM let go of the NIC, then strike it out."""
    await context.world.vmm.remove_nic(vm, nic_id)
    await failpoint("agent.vm.remove_nic_record.before")
    await _record_nic(context, vm.uid, nic_id)


async def _record_nic(context: Context, vm_uid: str, nic_id: str, *made: NicConfig) -> None:
    async with context.ledger.writing():
        row = _row(context, vm_uid)
        others = (nic for nic in row.config.nics if nic.id != nic_id)
        row = _replace(row, config=_replace(row.config, nics=(*others, *made)))
        await context.ledger.commit_held(PutWorker(row=row))


async def record(context: Context, vm_uid: str, disks: tuple[DiskConfig, ...]) -> None:
    """Store which disks may be plugged, in the row as it is by then: others mark a freeze in it."""
    async with context.ledger.writing():
        row = _row(context, vm_uid)
        row = _replace(row, config=_replace(row.config, disks=disks))
        await context.ledger.commit_held(PutWorker(row=row))


def _row(context: Context, vm_uid: str) -> WorkerRow:
    row = context.ledger.tables.workers.get(vm_uid)
    if row is None:
        raise Conflict("the VMM was forgotten", resource=vm_uid)
    return row
