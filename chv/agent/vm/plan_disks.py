"""The planner's part about disks: attach, plug, unplug, detach. Pure.

A disk is served before it is plugged, and let go of by guest and VMM before stord stops serving
it. What is recorded as plugged counts as plugged until it was removed and the record with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from chv.agent.vm.model import (
    Backend,
    DesiredDisk,
    DesiredVm,
    ObservedVm,
    ObservedVolume,
    ObservedWorker,
)
from chv.agent.vm.steps import (
    AddDiskStep,
    AttachVolumesStep,
    AttachVolumeStep,
    DetachVolumeStep,
    RemoveDiskStep,
    RestartStorageStep,
    Step,
    WaitStep,
)
from chv.vmm.driver import VmmState


def detach_volumes(volume_uids: Iterable[str]) -> list[Step]:
    """Let stord stop serving these."""
    return [DetachVolumeStep(uid) for uid in sorted(volume_uids)]


def missing_disks(disks: Iterable[DesiredDisk], attached: frozenset[str]) -> list[Step]:
    """Let stord serve those of these disks that it does not serve, all of them in one go."""
    missing = tuple(
        AttachVolumeStep(disk.volume_uid, disk.generation, disk.read_only)
        for disk in disks
        if disk.volume_uid not in attached
    )
    return [AttachVolumesStep(missing)] if len(missing) > 1 else [*missing]


def volume_problem(vm_uid: str, disk: DesiredDisk, volume: ObservedVolume | None) -> str:
    """Return why a volume cannot be attached now, '' where it can."""
    if volume is None or volume.generation < disk.generation:
        late = "is not there yet, or not yet in its newest form"
        return f"has failed: {disk.failure}" if disk.failure else late
    if volume.state != "open":
        return f"is {volume.state}"
    if disk.held:
        return disk.held
    if volume.attached_to not in ("", vm_uid) and not disk.shared:
        return f"is still attached to {volume.attached_to}"
    return ""


def replug(desired: DesiredVm, observed: ObservedVm, worker: ObservedWorker) -> list[Step]:
    """Bring the disks of a running VM to what is wanted: remove before add."""
    plugged = worker.plugged
    if not observed.storage_known or plugged is None or worker.state is not VmmState.RUNNING:
        return []
    wanted = {d.disk_id: d for d in desired.disks if not _lets_go(d, observed)}
    steps: list[Step] = [
        RemoveDiskStep(disk_id)
        for disk_id, volume_uid in sorted(worker.disks.items())
        if disk_id not in wanted or wanted[disk_id].volume_uid != volume_uid
    ]
    steps += detach_volumes(observed.attached - {disk.volume_uid for disk in wanted.values()})
    waits: list[Step] = []
    for disk_id, disk in wanted.items():
        if worker.disks.get(disk_id) == disk.volume_uid and disk_id in plugged:
            continue
        problem = volume_problem(desired.uid, disk, observed.volumes.get(disk.volume_uid))
        if problem:
            message = f"volume {disk.volume} {problem}"
            waits.append(WaitStep("VolumesReady", "VolumeNotReady", message))
            continue
        steps += missing_disks([disk], observed.attached)
        steps.append(AddDiskStep(disk_id, disk.volume_uid))
    if steps and observed.backend is Backend.RESTARTING:
        message = "the storage daemon is coming back"
        return [WaitStep("VolumesReady", "BackendRestarting", message, retry_s=1.0)]
    return steps + waits[:1]


def restart_storage(observed: ObservedVm) -> Step:
    """Let the storage daemon be replaced, when it is there."""
    if not observed.storage_known:
        message = "the storage daemon service does not answer"
        return WaitStep("VolumesReady", "StorageUnavailable", message, retry_s=2.0)
    if observed.backend is Backend.RESTARTING:
        message = "the storage daemon is coming back"
        return WaitStep("VolumesReady", "BackendRestarting", message, retry_s=1.0)
    return RestartStorageStep()


def _lets_go(disk: DesiredDisk, observed: ObservedVm) -> bool:
    """Tell whether the VM lets go of a disk for a moment, so that it grows."""
    volume = observed.volumes.get(disk.volume_uid)
    return (
        bool(disk.grow_now)
        and disk.grow_now not in observed.regrown
        and disk.volume_uid in observed.attached
        and volume is not None
        and volume.pending
    )
