"""Saved VMs of the simulation: who wrote what, who may read it, and whether disks belong to it.

Each time vCPUs begin to run, what is on the disks of the VM is something new. A snapshot is of one
instant where its disks are still those that the guest's memory knew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chv.agent.ports import VmHandle
from chv.common.errors import DataLoss, FailedPrecondition
from chv.vmm.driver import VmmState
from tests.sim.chaos import Chaos

if TYPE_CHECKING:
    from tests.sim.vmms import SimHost, SimProcess

SAVE, RESTORE = "/sim/save/", "/sim/restore/"


@dataclass
class SimSaved:
    """Memory of a VM: which disks it knew."""

    vm_uid: str
    contents: dict[str, str] = field(default_factory=dict)  # volume -> what was on it
    written: bool = False
    kept: bool = False


def contents(host: SimHost, process: SimProcess) -> dict[str, str]:
    """Return what is on the disks of a VM."""
    there = host.stord.volumes
    return {uid: there[uid].content for uid in process.disks.values() if uid in there}


def write(host: SimHost, process: SimProcess, directory: str) -> None:
    """A VMM writes memory and devices."""
    uid = directory.removeprefix(SAVE)
    if process.state is not VmmState.PAUSED:
        raise FailedPrecondition(f"the VM is {process.state.value}")
    if not host.marks_saving(process.vm_uid, uid):
        host.violate(f"I7: {process.vm_uid} is saved as {uid}, and it is not recorded")
    saved = host.saved.get(uid)
    if saved is None:
        host.violate(f"{process.vm_uid} is saved where there is no directory")
        return
    saved.contents, saved.written = contents(host, process), True


def read(host: SimHost, process: SimProcess) -> None:
    """A VMM takes up a snapshot: its guest goes on from there, and from those disks alone."""
    uid = host.given.get(process.vm_uid, "")
    if not process.config.restore_dir or not uid:
        host.violate(f"{process.vm_uid} is to read a snapshot that it was not given")
    process.state, process.memory_of = VmmState.PAUSED, uid


def runs(host: SimHost, process: SimProcess) -> None:
    """The vCPUs begin to run."""
    saved = host.saved.get(process.memory_of)
    if saved is not None and saved.contents != contents(host, process):
        host.violate(f"{process.vm_uid} goes on with other disks than its memory knew")
    process.memory_of = ""
    process.runs += 1
    for uid in process.disks.values():
        if uid in host.stord.volumes:
            host.stord.volumes[uid].content = f"{process.pid}.{process.runs}"


class SimSaves:
    """The `SavePort` of one life."""

    def __init__(self, host: SimHost, chaos: Chaos, life: int) -> None:
        self._host = host
        self._chaos = chaos
        self._life = life

    async def prepare(self, vm: VmHandle, snapshot_uid: str, size_bytes: int) -> str:
        def effect() -> str:
            self._host.saved[snapshot_uid] = SimSaved(vm.uid)
            return f"{SAVE}{snapshot_uid}"

        return await self._chaos.seam(self._life, "saves.prepare", effect)

    async def keep(self, vm: VmHandle, snapshot_uid: str) -> int:
        def effect() -> int:
            self._host.saved[snapshot_uid].kept = True
            return 4096

        return await self._chaos.seam(self._life, "saves.keep", effect)

    async def remove(self, vm_uid: str, snapshot_uid: str) -> None:
        await self._chaos.seam(
            self._life, "saves.remove", lambda: self._host.saved.pop(snapshot_uid, None)
        )

    async def is_kept(self, snapshot_uid: str) -> bool:
        def look() -> bool:
            saved = self._host.saved.get(snapshot_uid)
            return saved is not None and saved.kept

        return await self._chaos.seam(self._life, "saves.is_kept", look, mutating=False)

    async def hand_over(self, vm: VmHandle, snapshot_uid: str) -> str:
        def effect() -> str:
            saved = self._host.saved.get(snapshot_uid)
            if saved is None or not saved.kept:
                raise DataLoss("the snapshot's memory is not there")
            self._host.given[vm.uid] = snapshot_uid
            return f"{RESTORE}{vm.uid}"

        return await self._chaos.seam(self._life, "saves.hand_over", effect)

    async def withdraw(self, vm_uid: str, snapshot_uid: str) -> None:
        await self._chaos.seam(
            self._life, "saves.withdraw", lambda: self._host.given.pop(vm_uid, None)
        )
