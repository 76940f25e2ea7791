"""The process table of the simulation: VMMs with guests, seeds, images, consoles.

Outlives the agent. A guest obeys the power button after a while, or never; a VMM may die, a
guest may power off. What no correct agent would do is reported to `violate`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

import anyio.lowlevel

from chv.agent.ports import (
    ArtifactInfo,
    ImageArtifacts,
    OnProgress,
    SeedInfo,
    SeedRequest,
    SpawnRequest,
    VmHandle,
    VmmSelection,
)
from chv.agent.watch import Watch
from chv.common.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, Unavailable
from chv.common.process.records import AdoptVerdict, WorkerRecord
from chv.common.wire.resources import VmmChoice
from chv.images.store import Collected
from chv.vmm.driver import DiskConfig, NicConfig, PluggedDisk, VmmConfig, VmmObservation, VmmState
from tests.sim import saves
from tests.sim.chaos import Chaos
from tests.sim.daemons import SimNwd, SimStord
from tests.sim.saves import SimSaved

OBEDIENT_S = 2.0


@dataclass
class SimProcess:
    """A VMM process and its guest."""

    pid: int
    vm_uid: str
    config: VmmConfig
    obedient: bool
    alive: bool = True
    state: VmmState = VmmState.CREATED
    cpus: int = 0
    memory_bytes: int = 0
    halts_for_good: bool = False  # as Cloud Hypervisor: what is halted can only boot again
    button_at: float = -1.0
    boots: int = 0
    resets: int = 0
    reset_due: bool = False  # its storage was lost: the vCPUs must not run before a reset
    ran_at: float = 0.0
    disks: dict[str, str] = field(default_factory=dict)  # plugged: disk id -> volume
    leaving: set[str] = field(default_factory=set)  # that the guest was asked to let go of
    nics: set[str] = field(default_factory=set)  # plugged
    clings: int = 0  # so often the guest does not let go in time
    frozen: bool = False
    memory_of: str = ""  # the snapshot that it has read and not run from yet
    runs: int = 0  # how often its vCPUs began to run
    reboots: int = 0  # by the guest itself
    boot_id: str = ""

    @property
    def record(self) -> WorkerRecord:
        return WorkerRecord(
            worker_id=self.config.worker_id,
            pid=self.pid,
            start_time=self.pid * 10,
            boot_id=self.boot_id,
            executable="/sim/vmm",
        )


class SimHost:
    """What is on the machine beside the daemons' things."""

    def __init__(self, violate: Callable[[str], None]) -> None:
        self.violate = violate
        self.processes: dict[int, SimProcess] = {}
        self.stord = SimStord(violate)
        self.nwd = SimNwd(violate)
        for daemon in (self.stord, self.nwd):
            daemon.vmm_alive = self.vmm_alive
        self.stord.vcpus_run = self.vcpus_run
        self.stord.guest_has = self.guest_has
        self.nwd.guest_has = self.guest_has_nic
        self.boot_id = "boot-1"
        self.dirs: set[str] = set()
        self.runtime: set[str] = set()  # those under /run
        self.seeds: dict[str, str] = {}  # vm uid -> host key
        self.keys_made = 0
        self.consoles: set[str] = set()
        self.remains: set[str] = set()  # sockets and cgroups of dead VMMs
        self.artifacts: dict[str, ArtifactInfo] = {}
        self.marks_freeze: Callable[[str], bool] = lambda vm: True
        self.exits = Watch()
        self.intended: Callable[[str, str], bool] = lambda vm, worker: True
        self.intends_disk: Callable[[str, str, str], bool] = lambda vm, disk, volume: True
        self.intends_nic: Callable[[str, str], bool] = lambda vm, nic: True
        self.saved: dict[str, SimSaved] = {}  # by snapshot
        self.given: dict[str, str] = {}  # vm uid -> the snapshot that its VMM may read
        self.marks_saving: Callable[[str, str], bool] = lambda vm, snapshot: True
        self.no_saves = False  # no VMM here can save
        self.now: Callable[[], float] = lambda: 0.0
        self.spawned = 0
        self._pids = 0  # begin anew with each boot
        self.two_phases = 0.5  # how likely a VMM is one that starts empty

    # --- what happens by itself

    def live(self, vm_uid: str) -> SimProcess | None:
        """Return the live VMM of a VM."""
        return next((p for p in self.processes.values() if p.vm_uid == vm_uid and p.alive), None)

    def vmm_alive(self, vm_uid: str) -> bool:
        """Tell whether a VMM of this VM lives."""
        return self.live(vm_uid) is not None

    def vcpus_run(self, vm_uid: str) -> bool:
        """Tell whether vCPUs of this VM run."""
        process = self.live(vm_uid)
        return process is not None and process.state is VmmState.RUNNING

    def guest_has(self, vm_uid: str, volume_uid: str) -> bool:
        """Tell whether a volume is plugged into a live VMM."""
        process = self.live(vm_uid)
        return process is not None and volume_uid in process.disks.values()

    def guest_has_nic(self, vm_uid: str, nic_id: str) -> bool:
        """Tell whether a NIC is plugged into a live VMM."""
        process = self.live(vm_uid)
        return process is not None and nic_id in process.nics

    def die(self, process: SimProcess) -> None:
        """The process ends, whatever the reason."""
        if process.alive:
            process.alive = False
            self.remains.add(process.vm_uid)
            self.exits.notify(str(process.pid))

    def reboot(self, boot_id: str) -> None:
        """The machine boots: no process, nothing under /run, no namespace, no cgroup is left."""
        self.boot_id = boot_id
        self.processes, self._pids = {}, 0
        self.exits.notify_all()
        self.runtime.clear()
        self.remains.clear()
        self.consoles.clear()
        self.stord.reboot()
        self.nwd.reboot()

    def recorded(self, record: WorkerRecord) -> SimProcess | None:
        """Return the process that a record is about, dead or alive; None where it never can be."""
        process = self.processes.get(record.pid)
        same = process is not None and process.record == record
        return process if same else None

    def power_off(self, process: SimProcess) -> None:
        """The guest powers itself off; the VMM stays."""
        if process.alive and process.state is VmmState.RUNNING:
            process.state = VmmState.SHUTDOWN

    def lose_storage(self, vm_uid: str) -> None:
        """The storage daemon of a VM dies under it."""
        self.stord.lose_backend(vm_uid)
        process = self.live(vm_uid)
        if process is None or not process.disks:
            return  # without one it has lost nothing
        stands = process.state in (VmmState.EMPTY, VmmState.CREATED)
        if not (process.halts_for_good and stands):  # such a one connects only when it boots
            process.reset_due = True

    def settle(self, process: SimProcess) -> None:
        """Let the guest's own time pass: it obeys the button a while after it was pressed."""
        pressed = process.button_at >= 0 and self.now() - process.button_at >= OBEDIENT_S
        if pressed and process.obedient and process.state is VmmState.RUNNING:
            process.state = VmmState.SHUTDOWN

    # --- what the agent does

    def spawn(self, request: SpawnRequest, obedient: bool) -> WorkerRecord:
        """Start a VMM."""
        uid, config = request.vm.uid, request.config
        if self.vmm_alive(uid):
            self.violate(f"I1: a second VMM for {uid}")
        if not self.intended(uid, config.worker_id):
            self.violate(f"I7: VMM {config.worker_id} started without a recorded intent")
        self._check_parts(request)
        self.spawned += 1
        self._pids += 1
        pid = 1000 + self._pids
        disks = {disk.id: _volume(disk) for disk in config.disks if disk.kind == "vhost-user-blk"}
        nics = {nic.id for nic in config.nics}
        process = SimProcess(pid, uid, config, obedient, disks=disks, nics=nics)
        process.boot_id = self.boot_id
        process.cpus, process.memory_bytes = config.cpus, config.memory_bytes
        self.processes[pid] = process
        return process.record

    def _check_parts(self, request: SpawnRequest) -> None:
        uid, config = request.vm.uid, request.config
        session = self.stord.sessions.get(uid)
        for disk in config.disks:
            if disk.kind != "vhost-user-blk":
                if uid not in self.seeds:
                    self.violate(f"{uid} started without its seed")
                continue
            volume = _volume(disk)
            if session is None or volume not in session.attachments:
                self.violate(f"{uid} started with a disk {volume} that is not attached")
        for nic in config.nics:
            if nic.id not in self.nwd.nics or self.nwd.nics[nic.id].absent:
                self.violate(f"{uid} started with a NIC {nic.id} that is not there")
        if uid not in self.dirs or uid not in self.runtime:
            self.violate(f"{uid} started without its directories")

    def monitor(self, vm_uid: str) -> SimProcess:
        """Return the VMM whose monitor answers."""
        process = self.live(vm_uid)
        if process is None:
            raise Unavailable("no monitor answers")
        self.settle(process)
        return process

    def run(self, vm_uid: str) -> None:
        """Let vCPUs run."""
        process = self.monitor(vm_uid)
        if process.state not in (VmmState.CREATED, VmmState.PAUSED, VmmState.RUNNING):
            raise FailedPrecondition(f"the VM is {process.state.value}")
        session = self.stord.sessions.get(vm_uid)
        served = session is None or session.serving
        if process.reset_due and process.state is not VmmState.RUNNING and served:
            self.violate(f"vCPUs of {vm_uid} ran after a storage loss without a reset")
        if process.state is VmmState.CREATED:
            process.boots += 1
        if process.state is not VmmState.RUNNING:
            saves.runs(self, process)
        process.state = VmmState.RUNNING
        process.ran_at = self.now()

    def create(self, vm_uid: str, config: VmmConfig) -> None:
        """Make the VM in a VMM that has none yet."""
        process = self.monitor(vm_uid)
        if process.state is VmmState.EMPTY:
            if config.worker_id != process.config.worker_id:
                self.violate(f"{vm_uid} was made of another incarnation's configuration")
            process.state = VmmState.CREATED
            if config.restore_dir:
                saves.read(self, process)

    def halt(self, vm_uid: str) -> None:
        """Stop the vCPUs, or cut them off."""
        process = self.monitor(vm_uid)
        if process.state not in (VmmState.RUNNING, VmmState.PAUSED):
            return
        process.state = VmmState.CREATED if process.halts_for_good else VmmState.PAUSED
        if process.halts_for_good:
            process.reset_due = False  # no vCPU of that boot runs on
            process.frozen = False
            _eject(process)

    def reset(self, vm_uid: str) -> None:
        """Reset in place."""
        process = self.monitor(vm_uid)
        if process.state is VmmState.EMPTY:
            raise FailedPrecondition("the VM is empty")
        process.resets += 1
        process.frozen = False
        _eject(process)
        session = self.stord.sessions.get(vm_uid)
        if session is None or session.serving:
            process.reset_due = False
        process.ran_at = self.now()

    def set_cpus(self, vm_uid: str, cpus: int) -> None:
        """Give a VM that many CPUs; it clings to those that it has as it does to disks."""
        process = self.monitor(vm_uid)
        if cpus > process.config.cpus_max:
            self.violate(f"{vm_uid} was to have {cpus} CPUs, {process.config.cpus_max} at most")
        if cpus < process.cpus and process.clings > 0:
            process.clings -= 1
            raise DeadlineExceeded("the guest keeps its CPUs")
        process.cpus = cpus

    def set_memory(self, vm_uid: str, memory_bytes: int) -> None:
        """Give a VM more memory."""
        process = self.monitor(vm_uid)
        if not process.memory_bytes <= memory_bytes <= process.config.memory_max_bytes:
            self.violate(f"{vm_uid} was to have {memory_bytes} bytes of memory")
        process.memory_bytes = memory_bytes

    # --- disks and the guest agent

    def add_disk(self, vm_uid: str, disk: DiskConfig) -> None:
        """Plug a disk that is served."""
        process, volume = self.monitor(vm_uid), _volume(disk)
        session = self.stord.sessions.get(vm_uid)
        if session is None or volume not in session.attachments:
            self.violate(f"{vm_uid} was given a disk {volume} that is not attached")
        if not self.intends_disk(vm_uid, disk.id, volume):
            self.violate(f"I7: {vm_uid} was given a disk {disk.id} that is not recorded")
        if disk.id in process.leaving:
            raise FailedPrecondition("the guest is about to let go of it")
        process.disks.setdefault(disk.id, volume)

    def remove_disk(self, vm_uid: str, disk_id: str) -> None:
        """Ask the guest to let go; it does, at once or after it was asked again."""
        if disk_id in self.monitor(vm_uid).disks:
            self._ask_to_let_go(vm_uid, disk_id)

    def _ask_to_let_go(self, vm_uid: str, device: str) -> None:
        process = self.monitor(vm_uid)
        if process.state is not VmmState.RUNNING:
            raise FailedPrecondition(f"the VM is {process.state.value}")
        process.leaving.add(device)
        if process.clings > 0:
            process.clings -= 1
            raise DeadlineExceeded("the guest has not let go")
        _eject(process)

    def add_nic(self, vm_uid: str, nic: NicConfig) -> None:
        """Plug a NIC that is attached."""
        process = self.monitor(vm_uid)
        if nic.id not in self.nwd.nics:
            self.violate(f"{vm_uid} was given a NIC {nic.id} that is not attached")
        if not self.intends_nic(vm_uid, nic.id):
            self.violate(f"I7: {vm_uid} was given a NIC {nic.id} that is not recorded")
        if nic.id in process.leaving:
            raise FailedPrecondition("the guest is about to let go of it")
        process.nics.add(nic.id)

    def remove_nic(self, vm_uid: str, nic_id: str) -> None:
        """Ask the guest to let go of a NIC."""
        if nic_id in self.monitor(vm_uid).nics:
            self._ask_to_let_go(vm_uid, nic_id)

    def agent(self, vm_uid: str) -> SimProcess:
        """Return the VMM of a guest whose agent answers."""
        process = self.monitor(vm_uid)
        if process.state is not VmmState.RUNNING:
            raise Unavailable("no guest agent answers")
        return process

    def freeze(self, vm_uid: str, *, frozen: bool) -> None:
        """Freeze or thaw the guest's file systems."""
        process = self.agent(vm_uid)
        if frozen and not self.marks_freeze(vm_uid):
            self.violate(f"I7: the guest of {vm_uid} was frozen, and it is not recorded")
        process.frozen = frozen


def _eject(process: SimProcess) -> None:
    for device in process.leaving:
        gone = process.disks.pop(device, None)
        if gone is not None and not process.disks:
            process.reset_due = False  # what its disk has lost, the guest has let go of
        process.nics.discard(device)
    process.leaving.clear()


def _volume(disk: DiskConfig) -> str:
    return disk.path.rpartition("/")[2].removesuffix(".sock")


class SimVmms:
    """The `VmmPort` of one life."""

    def __init__(self, host: SimHost, chaos: Chaos, life: int) -> None:
        self._host = host
        self._chaos = chaos
        self._life = life

    async def _do(self, name: str, effect: Callable[[], object], mutating: bool = True) -> object:
        return await self._chaos.seam(self._life, f"vmm.{name}", effect, mutating=mutating)

    async def select(self, choice: VmmChoice) -> VmmSelection:
        await self._do("select", lambda: None, False)
        return VmmSelection(name="fake", accelerator="", version="1", reason="simulation")

    async def prepare(self, vm: VmHandle) -> None:
        def effect() -> None:
            self._host.dirs.add(vm.uid)
            self._host.runtime.add(vm.uid)

        await self._do("prepare", effect)

    async def spawn(self, request: SpawnRequest) -> WorkerRecord:
        obedient = self._chaos.random.random() < 0.7
        clings = 0 if self._chaos.quiet else self._chaos.random.choice((0, 1, 2))
        two_phases = self._chaos.random.random() < self._host.two_phases

        def effect() -> WorkerRecord:
            made = self._host.spawn(request, obedient)
            process = self._host.processes[made.pid]
            process.clings = clings
            if two_phases:
                process.state, process.halts_for_good = VmmState.EMPTY, True
            elif process.config.restore_dir:
                saves.read(self._host, process)
            return made

        record = await self._do("spawn", effect)
        assert isinstance(record, WorkerRecord)
        return record

    async def find(self, worker_id: str) -> WorkerRecord | None:
        def look() -> WorkerRecord | None:
            for process in self._host.processes.values():
                if process.alive and process.config.worker_id == worker_id:
                    return process.record
            return None

        found = await self._do("find", look, False)
        assert found is None or isinstance(found, WorkerRecord)
        return found

    async def find_all(self) -> list[WorkerRecord]:
        await self._do("find_all", lambda: None, False)
        return [p.record for p in self._host.processes.values() if p.alive]

    async def verify(self, record: WorkerRecord) -> AdoptVerdict:
        def look() -> AdoptVerdict:
            process = self._host.recorded(record)
            alive = process is not None and process.alive
            return AdoptVerdict.ALIVE if alive else AdoptVerdict.GONE

        verdict = await self._do("verify", look, False)
        assert isinstance(verdict, AdoptVerdict)
        return verdict

    async def observe(self, vm: VmHandle) -> VmmObservation:
        def look() -> VmmObservation:
            process = self._host.monitor(vm.uid)
            return VmmObservation(
                state=process.state,
                evidence="sim",
                reboots=process.reboots,
                resets=process.reboots,
            )

        seen = await self._do("observe", look, False)
        assert isinstance(seen, VmmObservation)
        return seen

    async def create(self, vm: VmHandle, config: VmmConfig) -> None:
        await self._do("create", lambda: self._host.create(vm.uid, config))

    async def boot(self, vm: VmHandle) -> None:
        await self._do("boot", lambda: self._host.run(vm.uid))

    async def pause(self, vm: VmHandle) -> None:
        def effect() -> None:
            process = self._host.monitor(vm.uid)
            if process.state is VmmState.RUNNING:
                process.state = VmmState.PAUSED

        await self._do("pause", effect)

    async def halt(self, vm: VmHandle) -> None:
        await self._do("halt", lambda: self._host.halt(vm.uid))

    async def resume(self, vm: VmHandle) -> None:
        await self._do("resume", lambda: self._host.run(vm.uid))

    async def reset(self, vm: VmHandle) -> None:
        await self._do("reset", lambda: self._host.reset(vm.uid))

    async def power_button(self, vm: VmHandle) -> None:
        def effect() -> None:
            process = self._host.monitor(vm.uid)
            if process.button_at < 0:
                process.button_at = self._host.now()

        await self._do("power_button", effect)

    async def quit(self, vm: VmHandle) -> None:
        await self._do("quit", lambda: self._host.die(self._host.monitor(vm.uid)))

    async def await_disks(self, vm: VmHandle, disk_ids: tuple[str, ...]) -> None:
        def effect() -> None:
            session = self._host.stord.sessions.get(vm.uid)
            if disk_ids and (session is None or not session.serving):
                raise Unavailable("the disks are not back")

        await self._do("await_disks", effect)

    async def disks(self, vm: VmHandle) -> tuple[PluggedDisk, ...]:
        def look() -> tuple[PluggedDisk, ...]:
            disks = self._host.monitor(vm.uid).disks
            return tuple(PluggedDisk(id=disk_id, connected=True) for disk_id in disks)

        seen = await self._do("disks", look, False)
        assert isinstance(seen, tuple)
        return seen

    async def add_disk(self, vm: VmHandle, disk: DiskConfig) -> None:
        await self._do("add_disk", lambda: self._host.add_disk(vm.uid, disk))

    async def remove_disk(self, vm: VmHandle, disk_id: str) -> None:
        await self._do("remove_disk", lambda: self._host.remove_disk(vm.uid, disk_id))

    async def nics(self, vm: VmHandle) -> tuple[str, ...]:
        def look() -> tuple[str, ...]:
            return tuple(sorted(self._host.monitor(vm.uid).nics))

        seen = await self._do("nics", look, False)
        assert isinstance(seen, tuple)
        return seen

    async def add_nic(self, vm: VmHandle, nic: NicConfig) -> None:
        await self._do("add_nic", lambda: self._host.add_nic(vm.uid, nic))

    async def remove_nic(self, vm: VmHandle, nic_id: str) -> None:
        await self._do("remove_nic", lambda: self._host.remove_nic(vm.uid, nic_id))

    async def set_cpus(self, vm: VmHandle, cpus: int) -> None:
        await self._do("set_cpus", lambda: self._host.set_cpus(vm.uid, cpus))

    async def set_memory(self, vm: VmHandle, memory_bytes: int) -> None:
        await self._do("set_memory", lambda: self._host.set_memory(vm.uid, memory_bytes))

    def can_save(self, driver: str) -> bool:
        return bool(driver) and not self._host.no_saves

    async def save(self, vm: VmHandle, directory: str) -> None:
        def effect() -> None:
            saves.write(self._host, self._host.monitor(vm.uid), directory)

        await self._do("save", effect)

    async def identify(self, record: WorkerRecord) -> str:
        return str(await self._do("identify", lambda: "ab" * 32, False))

    async def find_binary(self, driver: str, sha256: str, hint: str) -> str:
        def look() -> str:
            if sha256 != "ab" * 32:
                raise FailedPrecondition(f"no {driver} with {sha256}")
            return "/sim/vmm"

        return str(await self._do("find_binary", look, False))

    async def unfiltered(self, vm: VmHandle, record: WorkerRecord) -> tuple[str, ...] | None:
        return None

    async def ping_guest(self, vm: VmHandle) -> None:
        await self._do("ping_guest", lambda: self._host.agent(vm.uid), False)

    async def freeze_guest(self, vm: VmHandle) -> None:
        await self._do("freeze_guest", lambda: self._host.freeze(vm.uid, frozen=True))

    async def thaw_guest(self, vm: VmHandle) -> None:
        await self._do("thaw_guest", lambda: self._host.freeze(vm.uid, frozen=False))

    async def signal(self, record: WorkerRecord, number: signal.Signals) -> None:
        def effect() -> None:
            process = self._host.recorded(record)
            if process is not None and (number is signal.SIGKILL or process.obedient):
                self._host.die(process)

        await self._do("signal", effect)

    async def wait_gone(self, record: WorkerRecord) -> None:
        self._chaos.check(self._life)
        exited = self._host.exits.event(str(record.pid))
        process = self._host.recorded(record)
        if process is not None and process.alive:
            await exited.wait()
        self._chaos.check(self._life)

    async def cleanup(self, vm: VmHandle, record: WorkerRecord | None) -> None:
        def effect() -> None:
            if self._host.vmm_alive(vm.uid):
                self._host.violate(f"{vm.uid} was cleaned up while its VMM lives")
            self._host.remains.discard(vm.uid)

        await self._do("cleanup", effect)

    async def remove(self, vm: VmHandle) -> None:
        def effect() -> None:
            if self._host.vmm_alive(vm.uid):
                self._host.violate(f"{vm.uid} was removed while its VMM lives")
            self._host.dirs.discard(vm.uid)
            self._host.runtime.discard(vm.uid)

        await self._do("remove", effect)

    async def attach_console(self, vm: VmHandle) -> None:
        await self._do("attach_console", lambda: self._host.consoles.add(vm.uid))

    async def detach_console(self, vm: VmHandle) -> None:
        await self._do("detach_console", lambda: self._host.consoles.discard(vm.uid))

    def console_attached(self, vm: VmHandle) -> bool:
        return vm.uid in self._host.consoles


class SimImages:
    """The `ImagePort` of one life."""

    def __init__(self, host: SimHost, chaos: Chaos, life: int) -> None:
        self._host = host
        self._chaos = chaos
        self._life = life

    async def ensure_builtin(self, name: str) -> ImageArtifacts:
        def effect() -> ImageArtifacts:
            return ImageArtifacts(
                kernel=self._put("a" * 64),
                initramfs=self._put("b" * 64),
                disk=self._put("e" * 64, "raw"),
            )

        made = await self._chaos.seam(self._life, "image.builtin", effect)
        assert isinstance(made, ImageArtifacts)
        return made

    async def import_file(
        self, path: str, sha256: str, format: str, on_progress: OnProgress | None = None
    ) -> ArtifactInfo:
        if path.endswith("missing"):
            raise InvalidArgument(f"{path}: no such file", field="path")

        def effect() -> ArtifactInfo:
            return self._put(sha256 or "c" * 64, format)

        return await self._chaos.seam(self._life, "image.import", effect)

    async def fetch(
        self, url: str, sha256: str, format: str, on_progress: OnProgress | None = None
    ) -> ArtifactInfo:
        if url.endswith("missing"):
            raise InvalidArgument(f"{url}: the server answers 404", field="url")
        if on_progress is not None:
            await on_progress(1, 2)

        def effect() -> ArtifactInfo:
            return self._put(sha256 or "d" * 64, format)

        return await self._chaos.seam(self._life, "image.fetch", effect)

    def open_upload(self, size_bytes_max: int) -> tuple[str, int]:
        raise NotImplementedError("no pipes in virtual time")

    async def take_upload(
        self, upload_id: str, size_bytes: int, sha256: str, format: str
    ) -> ArtifactInfo:
        raise NotImplementedError("no pipes in virtual time")

    async def collect(self, keep: frozenset[str], *, dry_run: bool) -> Collected:
        def effect() -> Collected:
            gone = sorted(set(self._host.artifacts) - keep)
            for sha256 in [] if dry_run else gone:
                del self._host.artifacts[sha256]
            return Collected(gone, len(gone))

        return await self._chaos.seam(self._life, "image.collect", effect)

    async def find(self, sha256: str) -> ArtifactInfo | None:
        return await self._chaos.seam(
            self._life, "image.find", lambda: self._host.artifacts.get(sha256), mutating=False
        )

    async def remove(self, sha256: str) -> None:
        await self._chaos.seam(
            self._life, "image.remove", lambda: self._host.artifacts.pop(sha256, None)
        )

    def _put(self, sha256: str, format_name: str = "raw") -> ArtifactInfo:
        info = ArtifactInfo(
            sha256=sha256, size_bytes=1, format=format_name, path=f"/sim/images/{sha256}"
        )
        self._host.artifacts[sha256] = info
        return info


class SimSeeds:
    """The `SeedPort` of one life."""

    def __init__(self, host: SimHost, chaos: Chaos, life: int) -> None:
        self._host = host
        self._chaos = chaos
        self._life = life

    async def ensure(self, vm: VmHandle, request: SeedRequest) -> SeedInfo:
        def effect() -> SeedInfo:
            if vm.uid not in self._host.seeds:
                self._host.keys_made += 1
                self._host.seeds[vm.uid] = f"ssh-ed25519 key{self._host.keys_made}"
            return SeedInfo(path=f"/sim/seed/{vm.uid}", host_key_public=self._host.seeds[vm.uid])

        return await self._chaos.seam(self._life, "seed.ensure", effect)

    async def remove(self, vm: VmHandle) -> None:
        await self._chaos.seam(
            self._life, "seed.remove", lambda: self._host.seeds.pop(vm.uid, None)
        )


class SimGuests:
    """The `GuestPort` of one life: SSH answers a second after the vCPUs began to run."""

    BOOT_S = 1.0

    def __init__(self, host: SimHost, chaos: Chaos, life: int) -> None:
        self._host = host
        self._chaos = chaos
        self._life = life

    async def probe_ssh(self, nic_id: str, port: int) -> str:
        def effect() -> str:
            nic = self._host.nwd.nics.get(nic_id)
            process = self._host.live(nic.vm_id) if nic is not None else None
            if process is None or process.state is not VmmState.RUNNING:
                raise Unavailable("connection refused")
            if self._host.now() - process.ran_at < self.BOOT_S:
                raise Unavailable("connection refused")
            return "SSH-2.0-sim"

        return await self._chaos.seam(self._life, "guest.ssh", effect, mutating=False)

    async def serial_evidence(self, vm: VmHandle, since_s: float = 0.0) -> str:
        del since_s
        self._chaos.check(self._life)
        await anyio.lowlevel.checkpoint()
        process = self._host.live(vm.uid)
        return "login:" if process is not None and process.state is VmmState.RUNNING else ""
