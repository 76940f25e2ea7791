"""The steps of a VM's plan: one effect each, as data. What they do is in `apply`."""

from __future__ import annotations

from dataclasses import dataclass

from chv.agent.records import EndKind


@dataclass(frozen=True, slots=True)
class WaitStep:
    """Somebody else must move first; `retry_s` is how long at most to sit still.

    `position` is that in a queue, from 1; 0: it waits in none.
    """

    condition: str
    reason: str
    message: str
    retry_s: float = 30.0
    position: int = 0


@dataclass(frozen=True, slots=True)
class AdoptStep:
    """Record the pid of a process found by its intent."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class SelectVmmStep:
    """Choose VMM and accelerator, once."""


@dataclass(frozen=True, slots=True)
class PrepareStep:
    """Make the directories."""


@dataclass(frozen=True, slots=True)
class AttachVolumeStep:
    """Let stord serve a volume to this VM."""

    volume_uid: str
    generation: int
    read_only: bool


@dataclass(frozen=True, slots=True)
class AttachVolumesStep:
    """Let stord serve several volumes to this VM, all with one start of its storage daemon."""

    volumes: tuple[AttachVolumeStep, ...]


@dataclass(frozen=True, slots=True)
class AttachNicStep:
    """Let nwd make or update the NIC."""

    nic_id: str


@dataclass(frozen=True, slots=True)
class EnsureSeedStep:
    """Write the seed disk."""


@dataclass(frozen=True, slots=True)
class SpawnStep:
    """Record the intent, start the VMM, record the process."""


@dataclass(frozen=True, slots=True)
class CreateStep:
    """Make the VM in a VMM that was started without one."""


@dataclass(frozen=True, slots=True)
class AttachConsoleStep:
    """Let the console holder take the serial line."""


@dataclass(frozen=True, slots=True)
class BootStep:
    """Let the vCPUs run for the first time."""


@dataclass(frozen=True, slots=True)
class MarkRecoveringStep:
    """Record that a reset is due before the vCPUs run again, and reset a first time."""


@dataclass(frozen=True, slots=True)
class PauseStep:
    """Stop the vCPUs."""


@dataclass(frozen=True, slots=True)
class HaltStep:
    """Let no vCPU run on, whatever its disks do."""


@dataclass(frozen=True, slots=True)
class RecoverBackendStep:
    """Let stord start a new storage daemon."""


@dataclass(frozen=True, slots=True)
class AwaitDisksStep:
    """Wait until the VMM has its disks again."""


@dataclass(frozen=True, slots=True)
class ResetStep:
    """Hard reset; fulfils a recovery and a request."""


@dataclass(frozen=True, slots=True)
class RestartStorageStep:
    """Let stord replace the storage daemon under the running guest."""


@dataclass(frozen=True, slots=True)
class ResumeStep:
    """Let the vCPUs run again."""


@dataclass(frozen=True, slots=True)
class StopStep:
    """Walk the stop ladder; `ask` is whether the guest gets a say."""

    kind: EndKind
    ask: bool


@dataclass(frozen=True, slots=True)
class CleanupStep:
    """Remove what the dead VMM left."""


@dataclass(frozen=True, slots=True)
class DetachVolumeStep:
    """Let stord stop serving a volume to this VM."""

    volume_uid: str


@dataclass(frozen=True, slots=True)
class ForgetWorkerStep:
    """Drop the worker's record and take the consequences of its end."""


@dataclass(frozen=True, slots=True)
class DetachNicStep:
    """Let nwd remove a NIC."""

    nic_id: str


@dataclass(frozen=True, slots=True)
class RemoveFilesStep:
    """Remove seed, host keys and directories."""


@dataclass(frozen=True, slots=True)
class FinishDeleteStep:
    """Replace the object by its tombstone."""


@dataclass(frozen=True, slots=True)
class AddDiskStep:
    """Record and plug a disk of a running VM."""

    disk_id: str
    volume_uid: str


@dataclass(frozen=True, slots=True)
class RemoveDiskStep:
    """Unplug a disk of a running VM and drop it from the record."""

    disk_id: str


@dataclass(frozen=True, slots=True)
class AddNicStep:
    """Record and plug a NIC of a running VM."""

    nic_id: str


@dataclass(frozen=True, slots=True)
class RemoveNicStep:
    """Unplug a NIC of a running VM and drop it from the record."""

    nic_id: str


@dataclass(frozen=True, slots=True)
class SetCpusStep:
    """Give a running VM another number of CPUs, then record it."""

    cpus: int


@dataclass(frozen=True, slots=True)
class SetMemoryStep:
    """Give a running VM more memory, then record it."""

    memory_bytes: int


@dataclass(frozen=True, slots=True)
class ThawStep:
    """Thaw a guest that somebody froze who is no more."""


@dataclass(frozen=True, slots=True)
class RestoreDisksStep:
    """Bring the volumes back to a snapshot."""


@dataclass(frozen=True, slots=True)
class WithdrawStep:
    """Take back what was handed over of a snapshot."""

    snapshot_uid: str


@dataclass(frozen=True, slots=True)
class RunRestoredStep:
    """Let a guest run on that a VMM has read back from a snapshot."""


@dataclass(frozen=True, slots=True)
class SwapRootStep:
    """Give the VM its new root disk under the name of the former one."""


@dataclass(frozen=True, slots=True)
class DropRootStep:
    """Let the former root disk go."""


@dataclass(frozen=True, slots=True)
class AbandonRebuildStep:
    """Take back a rebuild: the VM keeps the root disk that it has."""


# Effects on records alone.
RebuildStep = SwapRootStep | DropRootStep | AbandonRebuildStep
# Effects on a VMM that is there.
VmmStep = (
    CreateStep
    | AttachConsoleStep
    | AddDiskStep
    | RemoveDiskStep
    | AddNicStep
    | RemoveNicStep
    | SetCpusStep
    | SetMemoryStep
    | ThawStep
    | BootStep
    | MarkRecoveringStep
    | PauseStep
    | HaltStep
    | RecoverBackendStep
    | AwaitDisksStep
    | ResetStep
    | ResumeStep
    | CleanupStep
)
Step = (
    VmmStep
    | RebuildStep
    | WaitStep
    | AdoptStep
    | SelectVmmStep
    | PrepareStep
    | AttachVolumeStep
    | AttachVolumesStep
    | RestartStorageStep
    | AttachNicStep
    | EnsureSeedStep
    | RestoreDisksStep
    | RunRestoredStep
    | WithdrawStep
    | SpawnStep
    | StopStep
    | DetachVolumeStep
    | ForgetWorkerStep
    | DetachNicStep
    | RemoveFilesStep
    | FinishDeleteStep
)
