"""What has to be done for one VM: a pure function of what is wanted and what is seen.

`plan` returns typed steps in the order of their effects, and nothing where the VM is as wanted.
The order carries the safety rules: nothing is started while an earlier VMM is not proven gone
and forgotten; volumes are let go of only after the VMM is; vCPUs never run between a storage
daemon's return and the reset. A `WaitStep` ends a plan: somebody else has to move first.
"""

from __future__ import annotations

from chv.agent.records import EndKind
from chv.agent.vm.model import (
    Backend,
    DesiredDisk,
    DesiredVm,
    Life,
    ObservedVm,
    ObservedVolume,
    ObservedWorker,
    RebuildStage,
)
from chv.agent.vm.plan_disks import (
    detach_volumes,
    missing_disks,
    replug,
    restart_storage,
    volume_problem,
)
from chv.agent.vm.plan_nics import (
    attach_nics,
    change_nics,
    nics_blocked,
    nics_wait,
    replug_nics,
    settle_nics,
    unwanted_nics,
)
from chv.agent.vm.plan_sizes import resize
from chv.agent.vm.steps import (
    AbandonRebuildStep,
    AdoptStep,
    AttachConsoleStep,
    AwaitDisksStep,
    BootStep,
    CleanupStep,
    CreateStep,
    DetachNicStep,
    DropRootStep,
    EnsureSeedStep,
    FinishDeleteStep,
    ForgetWorkerStep,
    HaltStep,
    MarkRecoveringStep,
    PauseStep,
    PrepareStep,
    RecoverBackendStep,
    RemoveFilesStep,
    ResetStep,
    RestoreDisksStep,
    ResumeStep,
    RunRestoredStep,
    SelectVmmStep,
    SpawnStep,
    Step,
    StopStep,
    SwapRootStep,
    ThawStep,
    WaitStep,
    WithdrawStep,
)
from chv.vmm.driver import VmmState

RECOVERY_FAILURES_MAX = 3


def plan(desired: DesiredVm, observed: ObservedVm) -> list[Step]:
    """Return the steps that bring what is seen to what is wanted; none where it is."""
    worker = observed.worker
    if observed.stranger:
        return [_in_doubt("a VMM of this VM runs that no record explains")]
    if desired.rebuild is RebuildStage.OFF and not desired.deleting:
        return [AbandonRebuildStep()]  # and look again: it has no effect but on records
    if worker is None:
        return _without_worker(desired, observed)
    if worker.life is Life.UNKNOWN:
        return [_in_doubt("it cannot be told whether the recorded VMM still lives")]
    if worker.life is Life.DEAD:
        return _after_end(observed)
    steps: list[Step] = [] if worker.recorded else [AdoptStep(worker.worker_id)]
    return steps + _alive(desired, observed, worker)


def _in_doubt(message: str) -> WaitStep:
    return WaitStep("VMMRunning", "InDoubt", message, retry_s=5.0)


def _daemons(observed: ObservedVm) -> WaitStep | None:
    """Return what to wait for where a daemon does not answer."""
    if not observed.storage_known:
        message = "the storage daemon service does not answer"
        return WaitStep("VolumesReady", "StorageUnavailable", message, retry_s=5.0)
    if not observed.network_known:
        message = "the network daemon service does not answer"
        return WaitStep("NetworkReady", "NetworkUnavailable", message, retry_s=5.0)
    return None


def _without_worker(desired: DesiredVm, observed: ObservedVm) -> list[Step]:
    silent = _daemons(observed)
    if silent is not None:
        return [silent]
    if desired.deleting:
        return [*_withdraw(desired), *_delete(observed)]
    if desired.rebuild is RebuildStage.DUE:
        return [*_withdraw(desired), *detach_volumes(observed.attached), SwapRootStep()]
    if not desired.running:
        return [
            *_withdraw(desired),
            *detach_volumes(observed.attached),
            *unwanted_nics(desired, observed),
            *settle_nics(desired, observed),
        ]
    if desired.restore and not desired.disks_restored:
        return [*detach_volumes(observed.attached), RestoreDisksStep()]
    unwanted = [
        *_withdraw(desired),
        *_leftovers(desired, observed),
        *unwanted_nics(desired, observed),
    ]
    blocked = _blocked(desired, observed)
    if blocked is not None:
        return [*unwanted, *settle_nics(desired, observed), blocked]
    return unwanted + _start(desired, observed)


def _withdraw(desired: DesiredVm) -> list[Step]:
    """A snapshot that it is no longer to start from."""
    return [WithdrawStep(desired.lent)] if desired.lent and not desired.restore else []


def _delete(observed: ObservedVm) -> list[Step]:
    steps = detach_volumes(observed.attached)
    steps += [DetachNicStep(nic_id) for nic_id in sorted(observed.nics)]
    if observed.files_made:
        steps.append(RemoveFilesStep())
    return [*steps, FinishDeleteStep()]


def _leftovers(desired: DesiredVm, observed: ObservedVm) -> list[Step]:
    """What an earlier spec wanted and this one does not: removed before anything is added.

    A volume that is to grow is let go of as well: it grows only while nobody has it.
    """
    wanted = {disk.volume_uid for disk in desired.disks if not _is_behind(disk, observed.volumes)}
    return detach_volumes(observed.attached - wanted)


def _is_behind(disk: DesiredDisk, volumes: dict[str, ObservedVolume]) -> bool:
    volume = volumes.get(disk.volume_uid)
    return volume is not None and volume.generation < disk.generation


def _blocked(desired: DesiredVm, observed: ObservedVm) -> WaitStep | None:
    """Return what a start has to wait for."""
    if observed.backoff_s > 0:
        message = f"starts again in {observed.backoff_s:.0f} s"
        return WaitStep("VMMRunning", "BackOff", message, retry_s=observed.backoff_s)
    if not observed.image_ready:
        return WaitStep("VMMRunning", "ImageNotReady", f"image {desired.boot_image} is not ready")
    for disk in desired.disks:
        problem = volume_problem(desired.uid, disk, observed.volumes.get(disk.volume_uid))
        if problem:
            return WaitStep("VolumesReady", "VolumeNotReady", f"volume {disk.volume} {problem}")
    full = _full(desired, observed)
    if full is not None:
        return WaitStep("VolumesReady", full.reason, full.message)
    return nics_blocked(desired, observed)


def _start(desired: DesiredVm, observed: ObservedVm) -> list[Step]:
    steps: list[Step] = [] if observed.selected else [SelectVmmStep()]
    steps.append(PrepareStep())
    if observed.attached and observed.backend is not Backend.SERVING:
        # Its storage daemon died before a VMM came: attach afresh, nothing can be lost.
        steps += detach_volumes(observed.attached)
        steps += missing_disks(desired.disks, frozenset())
    else:
        steps += missing_disks(desired.disks, observed.attached)
    steps += attach_nics(desired, observed)
    return [*steps, EnsureSeedStep(), SpawnStep(), *_first_run(desired)]


def _first_run(desired: DesiredVm) -> list[Step]:
    """From a VMM that is up to a guest that runs."""
    run = RunRestoredStep() if desired.restore else BootStep()
    return [CreateStep(), AttachConsoleStep(), run]


def _after_end(observed: ObservedVm) -> list[Step]:
    if not observed.storage_known:
        message = "the storage daemon service does not answer"
        return [CleanupStep(), WaitStep("VolumesReady", "StorageUnavailable", message, 5.0)]
    return [CleanupStep(), *detach_volumes(observed.attached), ForgetWorkerStep()]


def _alive(desired: DesiredVm, observed: ObservedVm, worker: ObservedWorker) -> list[Step]:
    stop = _stop(desired, observed, worker)
    if stop is not None:
        return [stop]
    if _storage_is_lost(observed, worker) or worker.recovering:
        return _recover(desired, observed, worker)
    if worker.state is VmmState.UNKNOWN:
        return [WaitStep("VMMRunning", "MonitorSilent", "the VMM does not answer", retry_s=2.0)]
    full = _full(desired, observed)
    if worker.state is VmmState.EMPTY:
        return _first_run(desired) if full is None else [full]
    if desired.saving:
        return [_being_saved()]
    if desired.restore:
        console: list[Step] = [] if observed.console else [AttachConsoleStep()]
        return [*console, RunRestoredStep() if full is None else full]
    steps = change_nics(desired, observed, worker) if observed.network_known else []
    if not observed.console:
        steps.append(AttachConsoleStep())
    held = full is not None or desired.paused or observed.held
    steps += _run(worker, held=held)
    if desired.reset_request:
        steps.append(ResetStep())
    if full is not None:
        return [*steps, full]
    if held:  # a guest that stands lets go of nothing and thaws nothing
        return steps
    if worker.frozen:
        steps.append(ThawStep())
    steps += replug_nics(desired, observed, worker)
    steps += replug(desired, observed, worker)
    if not _waits(steps):
        steps += resize(desired, worker)
    if desired.storage_request and not _waits(steps):
        # Last: by then the vCPUs run. A VMM whose vCPUs stand may not come back to its disks.
        steps.append(restart_storage(observed))
    if desired.rebuild is RebuildStage.SWAPPED and worker.booted and not _waits(steps):
        steps.append(DropRootStep())
    waits = nics_wait(desired, observed) if observed.network_known else None
    # A plan ends with the first thing that it waits for.
    return [*steps, waits] if waits is not None and not _waits(steps) else steps


def _being_saved() -> WaitStep:
    """Nothing is changed meanwhile; whoever saves it wakes us."""
    return WaitStep("Paused", "Saving", "it stands still while it is saved", retry_s=5.0)


def _waits(steps: list[Step]) -> bool:
    return bool(steps) and isinstance(steps[-1], WaitStep)


def _run(worker: ObservedWorker, *, held: bool) -> list[Step]:
    """Let the vCPUs run, or stand where they may not; where they run already, record it."""
    running = worker.state is VmmState.RUNNING
    steps: list[Step] = []
    if (running and not worker.booted) or (worker.state is VmmState.CREATED and not held):
        steps.append(BootStep())
    if running and held:
        steps.append(PauseStep())
    if worker.state is VmmState.PAUSED and not held:
        steps.append(ResumeStep())
    return steps


def _full(desired: DesiredVm, observed: ObservedVm) -> WaitStep | None:
    """Return what to wait for where a volume can take no more of what the guest writes."""
    for disk in desired.disks:
        volume = observed.volumes.get(disk.volume_uid)
        if volume is not None and volume.full and not disk.read_only:
            message = f"hardly any space is left where volume {disk.volume} is"
            return WaitStep("Paused", "StorageSpace", message)
    return None


def _stop(desired: DesiredVm, observed: ObservedVm, worker: ObservedWorker) -> StopStep | None:
    """Return how this VMM is to end, where it is."""
    guest_is_up = worker.state in (VmmState.RUNNING, VmmState.PAUSED, VmmState.UNKNOWN)
    # A guest that has lost its disks must not run on to be asked.
    sound = not worker.recovering and not _storage_is_lost(observed, worker)
    ask = guest_is_up and sound and not desired.force_stop
    if desired.deleting:
        return StopStep(EndKind.DELETE, ask)
    if not desired.running:
        return StopStep(EndKind.DRAIN if desired.held else EndKind.STOP, ask)
    if desired.rebuild is RebuildStage.DUE:
        return StopStep(EndKind.REBUILD, ask and not desired.rebuild_force)
    if desired.replace_worker == worker.worker_id:
        kind = EndKind.RESTORE if desired.restore else EndKind.RESTART
        return StopStep(kind, ask)
    if worker.ending is not None:  # begun by an earlier agent; it cannot be taken back
        return StopStep(worker.ending, ask)
    if worker.state is VmmState.SHUTDOWN:
        return StopStep(EndKind.GUEST_SHUTDOWN, ask=False)
    if worker.state is VmmState.PANICKED:
        return StopStep(EndKind.PANIC, ask=False)
    stuck = worker.state in (VmmState.EMPTY, VmmState.CREATED, VmmState.UNKNOWN)
    if worker.start_expired and stuck and _full(desired, observed) is None:
        return StopStep(EndKind.START_TIMEOUT, ask=False)
    if observed.recovery_failures >= RECOVERY_FAILURES_MAX:
        return StopStep(EndKind.STORAGE_LOST, ask=False)
    return None


def _storage_is_lost(observed: ObservedVm, worker: ObservedWorker) -> bool:
    """Tell whether the guest is without a disk that it has. A restart under it is no loss."""
    if not observed.storage_known:
        return False
    missing = set(worker.disks.values()) - observed.attached
    return observed.backend is Backend.LOST or bool(missing)


def _recover(desired: DesiredVm, observed: ObservedVm, worker: ObservedWorker) -> list[Step]:
    """The vCPUs stand from before the storage daemon comes back until after the reset.

    They are stopped before it is written down: until the storage daemon comes back, which is
    later, whoever looks sees the loss.
    """
    # Created: they stand already, since a reset or because they never ran.
    stands = worker.state in (VmmState.EMPTY, VmmState.CREATED)
    steps: list[Step] = [] if stands else [HaltStep()]
    if not observed.storage_known:
        return [*steps, WaitStep("StorageLost", "StorageUnavailable", "stord is silent", 2.0)]
    if not worker.recovering and worker.state is not VmmState.EMPTY:
        steps.append(MarkRecoveringStep())
    if observed.backend is Backend.RESTARTING:
        message = "the storage daemon is coming back by itself"
        return [*steps, WaitStep("StorageLost", "BackendRestarting", message, retry_s=1.0)]
    if observed.attached and observed.backend is not Backend.SERVING:
        steps.append(RecoverBackendStep())
    had = set(worker.disks.values())
    steps += missing_disks([d for d in desired.disks if d.volume_uid in had], observed.attached)
    if worker.state is VmmState.EMPTY:  # no guest has seen the loss
        return [*steps, *_first_run(desired)]
    steps += [AwaitDisksStep(), ResetStep()]
    if _full(desired, observed) is None and not desired.paused and not observed.held:
        steps.append(BootStep() if worker.state is VmmState.CREATED else ResumeStep())
    return steps
