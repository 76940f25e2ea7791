"""What a VM's status says of its disks and of the storage daemon behind them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from chv.agent.conditions import condition
from chv.agent.records import WorkerRow
from chv.agent.vm.model import Backend, DesiredDisk, DesiredVm
from chv.agent.vm.observe import Sight
from chv.agent.vm.steps import AddDiskStep, RemoveDiskStep, Step, WaitStep
from chv.agent.volume.wish import shown_limits
from chv.common.wire.resources import Condition, DiskStatus, VolumeLimits
from chv.common.wire.stord import AttachmentInfo, VolumeInfo


def wait_for(steps: Sequence[Step], kind: str) -> WaitStep | None:
    """Return what the plan waits for, where this condition tells of it."""
    waits = [step for step in steps if isinstance(step, WaitStep)]
    return next((step for step in waits if step.condition == kind), None)


def volumes_ready(desired: DesiredVm, sight: Sight, steps: Sequence[Step]) -> Condition:
    """Tell whether the VM has its disks."""
    seen = sight.vm
    if not seen.storage_known:
        return condition("VolumesReady", None, "StorageUnavailable", "stord does not answer")
    wait = wait_for(steps, "VolumesReady")
    if wait is not None:
        return condition("VolumesReady", False, wait.reason, wait.message)
    if desired.disks and seen.backend in (Backend.LOST, Backend.RESTARTING):
        reason = "BackendLost" if seen.backend is Backend.LOST else "BackendRestarting"
        return condition("VolumesReady", False, reason, "the storage daemon is gone")
    leaving = [step.disk_id for step in steps if isinstance(step, RemoveDiskStep)]
    if leaving:
        message = f"the guest is asked to let go of {', '.join(leaving)}"
        return condition("VolumesReady", False, "Unplugging", message)
    missing = [d.volume for d in desired.disks if d.volume_uid not in seen.attached]
    if missing:
        return condition("VolumesReady", False, "NotAttached", f"not attached: {missing}")
    coming = [step.disk_id for step in steps if isinstance(step, AddDiskStep)]
    if coming:
        return condition("VolumesReady", False, "Plugging", f"to be plugged: {', '.join(coming)}")
    paths = [a.export_path for a in sight.attachments.values()]
    return condition("VolumesReady", True, "Attached", evidence=", ".join(sorted(paths)))


def storage_lost(sight: Sight, row: WorkerRow | None, *, alive: bool) -> Condition:
    """Tell every loss of the storage daemon under the VM, and what was done about it."""
    session = sight.session
    losses = session.losses if session is not None else 0
    evidence = session.last_loss if session is not None else ""
    resets = row.storage_resets if row is not None else 0
    recovering = sight.vm.worker is not None and sight.vm.worker.recovering
    if (alive and sight.vm.backend is Backend.LOST) or recovering:
        message = f"the VM waits for a reset; {_times(losses)}" if losses else "waits for a reset"
        return condition("StorageLost", True, "BackendLost", message, evidence)
    if not sight.vm.storage_known:
        return condition("StorageLost", None, "StorageUnavailable", "stord does not answer")
    if alive and sight.vm.backend is Backend.RESTARTING:
        message = "the storage daemon is being restarted, the VM goes on"
        return condition("StorageLost", False, "Restarting", message, evidence)
    if not losses and not resets:
        return condition("StorageLost", False, "NeverLost")
    reason = "Recovered" if resets else "Kept"
    return condition("StorageLost", False, reason, _history(losses, resets), evidence)


def _history(losses: int, resets: int) -> str:
    kept = max(0, losses - resets)
    told = [_times(max(losses, resets))]
    if resets:
        told.append(f"the VM was reset before its disks came back: {resets}")
    if kept:
        told.append(f"the storage daemon was restarted and the VM kept: {kept}")
    return "; ".join(told)


def _times(count: int) -> str:
    return f"the storage daemon was lost under the VM: {count}"


def disk_status(
    disk: DesiredDisk, attachment: AttachmentInfo | None, volume: VolumeInfo | None
) -> DiskStatus:
    """Return a disk as stord has it."""
    if attachment is None:
        return DiskStatus(name=disk.name, volume=disk.volume, read_only=disk.read_only)
    limits = volume is not None and volume.limits_live
    return DiskStatus(
        name=disk.name,
        volume=disk.volume,
        export=f"vhost-user-blk:{attachment.export_path}",
        crash_class=attachment.crash_class.value,
        proxy=attachment.proxy_pid > 0,
        read_only=attachment.read_only,
        limits=shown_limits(volume.limits) if limits and volume is not None else VolumeLimits(),
    )
