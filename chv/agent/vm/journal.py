"""What the journal and the failpoints call each step of a VM's plan. Pure."""

from __future__ import annotations

from chv.agent.vm import steps
from chv.agent.vm.ladder import Rung

# The journal's name of each step; `agent.vm.<name>.before` and `.after` are failpoints.
NAMES: dict[type[steps.Step], str] = {
    steps.AdoptStep: "adopt",
    steps.SelectVmmStep: "select_vmm",
    steps.PrepareStep: "prepare",
    steps.AttachVolumeStep: "attach_volume",
    steps.AttachVolumesStep: "attach_volumes",
    steps.AttachNicStep: "attach_nic",
    steps.EnsureSeedStep: "seed",
    steps.SpawnStep: "spawn",
    steps.CreateStep: "create",
    steps.AttachConsoleStep: "attach_console",
    steps.BootStep: "boot",
    steps.MarkRecoveringStep: "mark_recovering",
    steps.PauseStep: "pause",
    steps.HaltStep: "halt",
    steps.RecoverBackendStep: "recover_backend",
    steps.AwaitDisksStep: "await_disks",
    steps.ResetStep: "reset",
    steps.RestartStorageStep: "restart_storage",
    steps.ResumeStep: "resume",
    steps.AddDiskStep: "add_disk",
    steps.RemoveDiskStep: "remove_disk",
    steps.AddNicStep: "add_nic",
    steps.RemoveNicStep: "remove_nic",
    steps.SetCpusStep: "set_cpus",
    steps.SetMemoryStep: "set_memory",
    steps.ThawStep: "thaw",
    steps.StopStep: "stop",
    steps.CleanupStep: "cleanup",
    steps.DetachVolumeStep: "detach_volume",
    steps.ForgetWorkerStep: "forget",
    steps.DetachNicStep: "detach_nic",
    steps.RemoveFilesStep: "remove_files",
    steps.FinishDeleteStep: "finish_delete",
    steps.RestoreDisksStep: "restore_disks",
    steps.RunRestoredStep: "run_restored",
    steps.WithdrawStep: "withdraw",
    steps.SwapRootStep: "swap_root",
    steps.DropRootStep: "drop_root",
    steps.AbandonRebuildStep: "abandon_rebuild",
}
# Around the parts of a spawn, a plug, an unplug and a freeze there are more.
FAILPOINTS = (
    *(
        f"agent.vm.{name}.{moment}"
        for name in (*NAMES.values(), "spawn_process", "spawn_record")
        for moment in ("before", "after")
    ),
    "agent.vm.add_disk_effect.before",
    "agent.vm.remove_disk_record.before",
    "agent.vm.add_nic_effect.before",
    "agent.vm.remove_nic_record.before",
    "agent.vm.freeze.before",
    "agent.vm.freeze.after",
    "agent.vm.freeze.thawed",
    *(f"agent.vm.stop_{rung.value}.before" for rung in Rung),
)


def title(name: str, step: steps.Step) -> str:
    """The step as the journal shows it: with the object that it is about."""
    match step:
        case steps.AttachVolumeStep(volume_uid=uid) | steps.DetachVolumeStep(volume_uid=uid):
            return f"{name} {uid}"
        case steps.AttachVolumesStep(volumes=volumes):
            return f"{name} {' '.join(each.volume_uid for each in volumes)}"
        case steps.AttachNicStep(nic_id=uid) | steps.DetachNicStep(nic_id=uid):
            return f"{name} {uid}"
        case steps.AddNicStep(nic_id=uid) | steps.RemoveNicStep(nic_id=uid):
            return f"{name} {uid}"
        case steps.AddDiskStep(disk_id=disk_id) | steps.RemoveDiskStep(disk_id=disk_id):
            return f"{name} {disk_id}"
        case steps.StopStep(kind=kind):
            return f"{name} {kind.value}"
        case _:
            return name
