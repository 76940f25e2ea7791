"""The steps of a VM's plan: one effect each, as data. What they do is in `apply`.

As dataclasses the forty of them took the agent's start a twentieth of a second.
"""

from __future__ import annotations

import msgspec

from chv.agent.records import EndKind


class WaitStep(msgspec.Struct, frozen=True):
    """Somebody else must move first; `retry_s` is how long at most to sit still.

    `position` is that in a queue, from 1; 0: it waits in none.
    """

    condition: str
    reason: str
    message: str
    retry_s: float = 30.0
    position: int = 0


class AdoptStep(msgspec.Struct, frozen=True):
    """Record the pid of a process found by its intent."""

    worker_id: str


class SelectVmmStep(msgspec.Struct, frozen=True):
    """Choose VMM and accelerator, once."""


class PrepareStep(msgspec.Struct, frozen=True):
    """Make the directories."""


class AttachVolumeStep(msgspec.Struct, frozen=True):
    """Let stord serve a volume to this VM."""

    volume_uid: str
    generation: int
    read_only: bool


class AttachVolumesStep(msgspec.Struct, frozen=True):
    """Let stord serve several volumes to this VM, all with one start of its storage daemon."""

    volumes: tuple[AttachVolumeStep, ...]


class AttachNicStep(msgspec.Struct, frozen=True):
    """Let nwd make or update the NIC."""

    nic_id: str


class EnsureSeedStep(msgspec.Struct, frozen=True):
    """Write the seed disk."""


class SpawnStep(msgspec.Struct, frozen=True):
    """Record the intent, start the VMM, record the process."""


class CreateStep(msgspec.Struct, frozen=True):
    """Make the VM in a VMM that was started without one."""


class AttachConsoleStep(msgspec.Struct, frozen=True):
    """Let the console holder take the serial line."""


class BootStep(msgspec.Struct, frozen=True):
    """Let the vCPUs run for the first time."""


class MarkRecoveringStep(msgspec.Struct, frozen=True):
    """Record that a reset is due before the vCPUs run again, and reset a first time."""


class PauseStep(msgspec.Struct, frozen=True):
    """Stop the vCPUs."""


class HaltStep(msgspec.Struct, frozen=True):
    """Let no vCPU run on, whatever its disks do."""


class RecoverBackendStep(msgspec.Struct, frozen=True):
    """Let stord start a new storage daemon."""


class AwaitDisksStep(msgspec.Struct, frozen=True):
    """Wait until the VMM has its disks again."""


class ResetStep(msgspec.Struct, frozen=True):
    """Hard reset; fulfils a recovery and a request."""


class RestartStorageStep(msgspec.Struct, frozen=True):
    """Let stord replace the storage daemon under the running guest."""


class ResumeStep(msgspec.Struct, frozen=True):
    """Let the vCPUs run again."""


class StopStep(msgspec.Struct, frozen=True):
    """Walk the stop ladder; `ask` is whether the guest gets a say."""

    kind: EndKind
    ask: bool


class CleanupStep(msgspec.Struct, frozen=True):
    """Remove what the dead VMM left."""


class DetachVolumeStep(msgspec.Struct, frozen=True):
    """Let stord stop serving a volume to this VM."""

    volume_uid: str


class ForgetWorkerStep(msgspec.Struct, frozen=True):
    """Drop the worker's record and take the consequences of its end."""


class DetachNicStep(msgspec.Struct, frozen=True):
    """Let nwd remove a NIC."""

    nic_id: str


class RemoveFilesStep(msgspec.Struct, frozen=True):
    """Remove seed, host keys and directories."""


class FinishDeleteStep(msgspec.Struct, frozen=True):
    """Replace the object by its tombstone."""


class AddDiskStep(msgspec.Struct, frozen=True):
    """Record and plug a disk of a running VM."""

    disk_id: str
    volume_uid: str


class RemoveDiskStep(msgspec.Struct, frozen=True):
    """Unplug a disk of a running VM and drop it from the record."""

    disk_id: str


class AddNicStep(msgspec.Struct, frozen=True):
    """Record and plug a NIC of a running VM."""

    nic_id: str


class RemoveNicStep(msgspec.Struct, frozen=True):
    """Unplug a NIC of a running VM and drop it from the record."""

    nic_id: str


class SetCpusStep(msgspec.Struct, frozen=True):
    """Give a running VM another number of CPUs, then record it."""

    cpus: int


class SetMemoryStep(msgspec.Struct, frozen=True):
    """Give a running VM more memory, then record it."""

    memory_bytes: int


class ThawStep(msgspec.Struct, frozen=True):
    """Thaw a guest that somebody froze who is no more."""


class RestoreDisksStep(msgspec.Struct, frozen=True):
    """Bring the volumes back to a snapshot."""


class WithdrawStep(msgspec.Struct, frozen=True):
    """Take back what was handed over of a snapshot."""

    snapshot_uid: str


class RunRestoredStep(msgspec.Struct, frozen=True):
    """Let a guest run on that a VMM has read back from a snapshot."""


class SwapRootStep(msgspec.Struct, frozen=True):
    """Give the VM its new root disk under the name of the former one."""


class DropRootStep(msgspec.Struct, frozen=True):
    """Let the former root disk go."""


class AbandonRebuildStep(msgspec.Struct, frozen=True):
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
