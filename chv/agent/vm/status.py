"""The VM as it is shown: phase and conditions from what is wanted and what was seen. Pure.

The phase is a word for a table; each condition carries its evidence. What could not be seen is
Unknown, never assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from chv.agent.condition_vm import SSH_S
from chv.agent.conditions import condition, merge
from chv.agent.moments import Moment
from chv.agent.records import StoredObject, WorkerRow
from chv.agent.vm.crashes import loop_since, next_restart
from chv.agent.vm.desired import facts_of, vm_of
from chv.agent.vm.model import (
    DesiredVm,
    Life,
)
from chv.agent.vm.observe import Sight
from chv.agent.vm.pending import pending_changes, running_memory
from chv.agent.vm.reboots import Reboots
from chv.agent.vm.status_disks import disk_status, storage_lost, volumes_ready, wait_for
from chv.agent.vm.steps import (
    AddNicStep,
    RemoveNicStep,
    SpawnStep,
    Step,
    StopStep,
    WaitStep,
)
from chv.common.wire.resources import (
    Condition,
    ConditionStatus,
    DiskStatus,
    InterfaceStatus,
    VirtualMachineStatus,
    VmmStatus,
    VmPhase,
)
from chv.vmm.driver import VmmState


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was heard from inside the guest, of the boot that runs now."""

    serial: str = ""
    ssh: str = ""  # the banner
    ssh_problem: str = ""  # why there is none
    asked: bool = False  # False: this agent has not listened to this boot yet
    serial_at: str = ""  # when the line was read
    ssh_at: str = ""  # when SSH was asked last, and answered or did not
    ssh_age_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """All that a status is made from."""

    stored: StoredObject
    desired: DesiredVm
    sight: Sight
    steps: tuple[Step, ...]  # what is still to be done
    row: WorkerRow | None
    evidence: Evidence
    started_at: str
    now: Moment
    window_s: float  # in which crashes count
    problem: str = ""  # a final error
    same_boot: bool = True  # no reset since this agent came
    reboots: Reboots = field(default_factory=Reboots)

    def said_before(self, kind: str) -> Condition | None:
        """Return what was shown of this very boot, be it by an earlier agent."""
        before, record = vm_of(self.stored).status, self.sight.record
        if not self.same_boot or before is None or record is None or before.vmm.pid != record.pid:
            return None
        return next((each for each in before.conditions if each.type == kind), None)

    @property
    def alive(self) -> bool:
        """Tell whether its VMM is seen to live."""
        worker = self.sight.vm.worker
        return worker is not None and worker.life is Life.ALIVE

    @property
    def in_doubt(self) -> bool:
        """Tell whether a VMM may live that could not be judged."""
        seen = self.sight.vm
        return seen.stranger or (seen.worker is not None and seen.worker.life is Life.UNKNOWN)

    @property
    def state(self) -> VmmState:
        """What the monitor says."""
        worker = self.sight.vm.worker
        return worker.state if worker is not None else VmmState.UNKNOWN


def vm_status(picture: Picture, moment: str) -> VirtualMachineStatus:
    """Return the status to show."""
    facts = facts_of(picture.stored)
    metadata = picture.stored.resource.metadata
    before = vm_of(picture.stored).status
    earlier = before.conditions if before is not None else []
    return VirtualMachineStatus(
        observed_generation=metadata.generation,
        phase=phase(picture),
        vmm=_vmm(picture),
        interfaces=_interfaces(picture),
        disks=_disks(picture),
        restarts=facts.restarts,
        next_restart_at=_next_restart(picture),
        crash_loop_since=loop_since(facts, picture.now, picture.window_s),
        last_stop=facts.last_stop,
        ssh_host_key=facts.host_key,
        conditions=merge(earlier, _conditions(picture), metadata.generation, moment),
    )


def _next_restart(picture: Picture) -> str:
    """Return it where a restart is due; what was shown stays where it is still true."""
    before = vm_of(picture.stored).status
    if picture.alive or not picture.desired.running:
        return ""
    shown = before.next_restart_at if before is not None else ""
    return next_restart(facts_of(picture.stored), picture.now, shown)


def phase(picture: Picture) -> VmPhase:
    """Return the one word."""
    worker = picture.sight.vm.worker
    if picture.in_doubt:
        return VmPhase.UNKNOWN
    if picture.desired.deleting:
        return VmPhase.DELETING
    if any(isinstance(step, StopStep) for step in picture.steps):
        return VmPhase.STOPPING
    if picture.alive:
        return _phase_alive(picture)
    if worker is not None:
        return VmPhase.STARTING if picture.desired.running else VmPhase.STOPPING
    return _phase_without_worker(picture)


def _phase_alive(picture: Picture) -> VmPhase:
    worker = picture.sight.vm.worker
    assert worker is not None
    if picture.state is VmmState.UNKNOWN:
        return VmPhase.UNKNOWN if worker.booted else VmPhase.STARTING
    if picture.state is VmmState.CREATED and worker.booted and picture.desired.paused:
        return VmPhase.PAUSED  # it was reset meanwhile
    return {
        VmmState.EMPTY: VmPhase.STARTING,
        VmmState.CREATED: VmPhase.STARTING,
        VmmState.RUNNING: VmPhase.RUNNING,
        VmmState.PAUSED: VmPhase.PAUSED,
    }.get(picture.state, VmPhase.STOPPING)


def _phase_without_worker(picture: Picture) -> VmPhase:
    if picture.problem or facts_of(picture.stored).given_up:
        return VmPhase.FAILED
    if not picture.desired.running:
        return VmPhase.STOPPED
    starting = any(isinstance(step, SpawnStep) for step in picture.steps)
    return VmPhase.PREPARING if starting else VmPhase.PENDING


# --- conditions


def _conditions(picture: Picture) -> list[Condition]:
    return [
        volumes_ready(picture.desired, picture.sight, picture.steps),
        _network_ready(picture),
        _vmm_running(picture),
        _guest_booted(picture),
        _ssh_ready(picture),
        _paused(picture),
        storage_lost(picture.sight, picture.row, alive=picture.alive),
        _restart_required(picture),
    ]


def _network_ready(picture: Picture) -> Condition:
    seen = picture.sight.vm
    if not seen.network_known:
        return condition("NetworkReady", None, "NetworkUnavailable", "nwd does not answer")
    wait = wait_for(picture.steps, "NetworkReady")
    if wait is not None:
        return condition("NetworkReady", False, wait.reason, wait.message)
    going = [step for step in picture.steps if isinstance(step, RemoveNicStep)]
    if going:
        message = f"the guest is asked to let go of {len(going)} interface(s)"
        return condition("NetworkReady", False, "Unplugging", message)
    right = {nic_id for nic_id, nic in seen.nics.items() if nic.attached}
    missing = [nic.network for nic in picture.desired.nics if nic.nic_id not in right]
    if missing:
        return condition("NetworkReady", False, "NotAttached", f"no NIC yet on {missing}")
    coming = {step.nic_id for step in picture.steps if isinstance(step, AddNicStep)}
    if coming:
        names = ", ".join(nic.name for nic in picture.desired.nics if nic.nic_id in coming)
        return condition("NetworkReady", False, "Plugging", f"to be plugged: {names}")
    lost = _lost_taps(picture)
    if lost:
        name = vm_of(picture.stored).metadata.name
        message = f"the VMM has lost the tap of {', '.join(lost)}; chv restart {name} makes it anew"
        return condition("NetworkReady", False, "TapLost", message)
    taps = [f"{nic.tap} {nic.address}" for nic in picture.sight.nics.values()]
    return condition("NetworkReady", True, "Attached", evidence=", ".join(sorted(taps)))


def _lost_taps(picture: Picture) -> list[str]:
    """Return the NICs whose tap nobody holds, though a VMM that booted held it since its start.

    Its tap was deleted and nwd made another of that name, which the VMM does not have.
    """
    worker = picture.sight.vm.worker
    running = picture.state in (VmmState.RUNNING, VmmState.PAUSED)
    if worker is None or not (picture.alive and worker.booted and running):
        return []
    seen = picture.sight.nics
    return [
        repr(nic.name)
        for nic in picture.desired.nics
        if nic.nic_id in seen and nic.nic_id in worker.nics and not seen[nic.nic_id].carrier
    ]


def _vmm_running(picture: Picture) -> Condition:
    seen = picture.sight.vm
    wait = wait_for(picture.steps, "VMMRunning")
    if wait is not None and wait.reason in ("InDoubt", "MonitorSilent"):
        evidence = picture.sight.monitor.evidence if picture.sight.monitor is not None else ""
        return condition("VMMRunning", None, wait.reason, wait.message, evidence)
    if not picture.alive:
        return _not_running(picture, wait)
    if picture.state is VmmState.UNKNOWN:
        return condition("VMMRunning", None, "MonitorSilent", "the VMM does not answer")
    monitor = picture.sight.monitor
    evidence = monitor.evidence if monitor is not None else ""
    running = picture.state in (VmmState.RUNNING, VmmState.PAUSED)
    assert seen.worker is not None
    turn = wait.message if wait is not None else ""  # to be stopped, in a drain
    return condition("VMMRunning", running, picture.state.value.capitalize(), turn, evidence)


def _not_running(picture: Picture, wait: WaitStep | None) -> Condition:
    facts = facts_of(picture.stored)
    if picture.problem:
        return condition("VMMRunning", False, "Failed", picture.problem)
    if facts.given_up:
        return condition("VMMRunning", False, "GivenUp", facts.given_up, facts.last_stop)
    if picture.desired.held:
        return condition("VMMRunning", False, "HeldByNode", picture.desired.held, facts.last_stop)
    if wait is not None:
        if wait.reason != "BackOff":
            return condition("VMMRunning", False, wait.reason, wait.message)
        since = loop_since(facts, picture.now, picture.window_s)
        loop = f"; crashes since {since}: {len(facts.crashes)}" if since else ""
        return condition("VMMRunning", False, "BackOff", f"{wait.message}{loop}", facts.last_stop)
    reason = "Starting" if picture.desired.running else "Stopped"
    return condition("VMMRunning", False, reason, facts.last_stop)


def _without_vmm(picture: Picture, kind: str) -> Condition:
    if picture.in_doubt:
        return condition(kind, None, "InDoubt", "it cannot be told whether a VMM lives")
    return condition(kind, False, "NotRunning")


def _guest_booted(picture: Picture) -> Condition:
    if not picture.alive:
        return _without_vmm(picture, "GuestBooted")
    heard = picture.evidence.ssh or picture.evidence.serial
    if heard:
        source = "SshBanner" if picture.evidence.ssh else "SerialLine"
        at = picture.evidence.ssh_at if picture.evidence.ssh else picture.evidence.serial_at
        return condition("GuestBooted", True, source, evidence=heard, at=at)
    earlier = picture.said_before("GuestBooted")
    if earlier is not None and earlier.status is ConditionStatus.TRUE:
        return earlier  # a boot that was seen stays seen
    if not picture.evidence.asked:
        return earlier or condition("GuestBooted", None, "NotProbedYet")
    return condition("GuestBooted", False, "NoSignYet", "no serial line and no SSH banner so far")


def _ssh_ready(picture: Picture) -> Condition:
    if not picture.alive:
        return _without_vmm(picture, "SSHReady")
    heard = picture.evidence
    if heard.asked and heard.ssh_age_s > SSH_S:
        message = f"no answer of nwd about it since {heard.ssh_at}"
        return condition("SSHReady", None, "NotHeard", message, heard.ssh)
    if heard.ssh:
        return condition("SSHReady", True, "Banner", evidence=heard.ssh, at=heard.ssh_at)
    if not vm_of(picture.stored).spec.interfaces:
        return condition("SSHReady", False, "NoInterface", "spec.interfaces has none")
    if 22 not in vm_of(picture.stored).spec.guest_ports:
        return condition("SSHReady", False, "PortNotDeclared", "22 is not in spec.guestPorts")
    if not heard.asked and not picture.sight.vm.network_known:
        return condition("SSHReady", None, "NotHeard", "nwd does not answer")
    if not heard.asked:
        return picture.said_before("SSHReady") or condition("SSHReady", None, "NotProbedYet")
    return condition("SSHReady", False, "NoBanner", heard.ssh_problem, at=heard.ssh_at)


def _paused(picture: Picture) -> Condition:
    if not picture.alive:
        return _without_vmm(picture, "Paused")
    if picture.state is VmmState.UNKNOWN:
        return condition("Paused", None, "MonitorSilent")
    paused = picture.state is VmmState.PAUSED
    wait = wait_for(picture.steps, "Paused")
    if wait is not None:
        return condition("Paused", paused, wait.reason, wait.message)
    if picture.desired.paused:
        return condition("Paused", paused, "Asked")
    return condition("Paused", paused, "VcpusStand" if paused else "VcpusRun")


def _restart_required(picture: Picture) -> Condition:
    if not picture.alive or picture.row is None:
        return _without_vmm(picture, "RestartRequired")
    evidence = f"the VMM was started from generation {picture.row.generation}"
    pending = pending_changes(picture.row, vm_of(picture.stored).spec)
    if not pending:
        return condition("RestartRequired", False, "AsStarted", evidence=evidence)
    message = "; ".join(f"{field}: {words}" for field, words in pending.items())
    return condition("RestartRequired", True, "SpecChanged", message, evidence)


# --- details


def _vmm(picture: Picture) -> VmmStatus:
    selection = facts_of(picture.stored).selection
    record, row = picture.sight.record, picture.row if picture.alive else None
    if selection is None:
        return VmmStatus()
    return VmmStatus(
        name=selection.name,
        accelerator=selection.accelerator,
        version=selection.version,
        reason=selection.reason,
        pid=record.pid if record is not None and picture.alive else 0,
        started_at=_started_at(picture),
        cpus=row.config.cpus if row is not None else 0,
        memory=running_memory(row) if row is not None else "",
        seccomp=picture.sight.seccomp,
        guest_reboots=picture.reboots.count if picture.alive else 0,
        guest_rebooted_at=picture.reboots.at if picture.alive else "",
    )


def _started_at(picture: Picture) -> str:
    """Return the moment that was shown first; a new agent knows only when it came itself."""
    before, record = vm_of(picture.stored).status, picture.sight.record
    if not picture.alive:
        return ""
    if before is not None and record is not None and before.vmm.pid == record.pid:
        return before.vmm.started_at or picture.started_at
    return picture.started_at


def _interfaces(picture: Picture) -> list[InterfaceStatus]:
    before = vm_of(picture.stored).status
    if not picture.sight.vm.network_known and before is not None:
        return before.interfaces  # as nwd said last; that it is silent is a condition's to say
    found = []
    for nic in picture.desired.nics:
        info = picture.sight.nics.get(nic.nic_id)
        if info is not None:
            found.append(
                InterfaceStatus(
                    name=nic.name,
                    network=nic.network,
                    mac=info.mac,
                    address=info.address,
                    address6=info.address6,
                    tap=info.tap,
                    max_connections=info.connections_max,
                )
            )
    return found


def _disks(picture: Picture) -> list[DiskStatus]:
    return [
        disk_status(
            disk,
            picture.sight.attachments.get(disk.volume_uid),
            picture.sight.volumes.get(disk.volume_uid),
        )
        for disk in picture.desired.disks
    ]
