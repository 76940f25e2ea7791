"""The VM planner against an ideal world: converges, never breaks the order of safety.

`Model` applies steps as a faultless world would; hypothesis drives what is wanted, how much of
a plan is carried out, and what goes wrong in between.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chv.agent.records import EndKind
from chv.agent.vm import model as m
from chv.agent.vm import plan as p
from chv.agent.vm import steps as s
from chv.common.wire.manifest_rules import MEMORY_STEP_BYTES
from chv.vmm.driver import VmmState

PASSES_MAX = 5
VM = "vm"
STANDING = (VmmState.EMPTY, VmmState.CREATED)


@dataclass
class Model:
    """An ideal world for one VM."""

    worker: m.ObservedWorker | None = None
    attached: set[str] = field(default_factory=set)
    serving: bool = True
    nics: dict[str, m.ObservedNic] = field(default_factory=dict)
    selected: bool = False
    files: bool = False
    seed: bool = False
    console: bool = False
    gone: bool = False
    clean: bool = True
    stale: bool = False  # the guest's storage was lost and it was not reset
    recorded: dict[str, str] = field(default_factory=dict)  # disk id -> volume, in the store
    plugged: dict[str, str] = field(default_factory=dict)  # ditto, in the VMM
    pending: set[str] = field(default_factory=set)  # volumes that are larger than the guest knows
    full: set[str] = field(default_factory=set)
    regrown: set[str] = field(default_factory=set)
    restarting: bool = False
    recorded_nics: set[str] = field(default_factory=set)
    plugged_nics: set[str] = field(default_factory=set)
    frozen: bool = False
    marked: bool = False  # it is in the store that the guest may be frozen
    serial: int = 0
    two_phases: bool = False  # the next VMM starts empty
    halts_for_good: bool = False  # so this one did

    def observe(self, desired: m.DesiredVm) -> m.ObservedVm:
        backend = m.Backend.ABSENT
        if self.attached:
            backend = m.Backend.SERVING if self.serving else m.Backend.LOST
            if self.serving and self.restarting:
                backend = m.Backend.RESTARTING
        worker = self.worker
        if worker is not None and worker.life is m.Life.ALIVE:
            worker = replace(
                worker,
                disks=dict(self.recorded),
                plugged=frozenset(self.plugged),
                nics=frozenset(self.recorded_nics),
                plugged_nics=frozenset(self.plugged_nics),
                frozen=self.marked,
            )
        return m.ObservedVm(
            worker=worker,
            attached=frozenset(self.attached),
            backend=backend,
            nics=dict(self.nics),
            volumes={
                disk.volume_uid: m.ObservedVolume(
                    generation=disk.generation,
                    state="open",
                    pending=disk.volume_uid in self.pending,
                    full=disk.volume_uid in self.full,
                )
                for disk in desired.disks
            },
            regrown=frozenset(self.regrown),
            networks={nic.network_uid: nic.network_generation for nic in desired.nics},
            selected=self.selected,
            files_made=self.files,
            console=self.console,
        )

    def apply(self, step: s.Step, desired: m.DesiredVm) -> None:
        alive = self.worker is not None and self.worker.life is m.Life.ALIVE
        match step:
            case s.SelectVmmStep():
                self.selected = True
            case s.PrepareStep():
                self.files = True
            case s.AttachVolumeStep(volume_uid=uid):
                runs = alive and self.worker and self.worker.state is VmmState.RUNNING
                assert not (runs and uid in self.plugged.values())
                assert self.serving or not self.attached, "attached to a dead storage daemon"
                assert not (self.restarting and self.attached), "attached to one that comes back"
                self.attached.add(uid)
                self.pending.discard(uid)
                self.serving = True
            case s.AttachVolumesStep(volumes=volumes):
                assert len(volumes) > 1
                for each in volumes:
                    self.apply(each, desired)
            case s.AttachNicStep(nic_id=nic_id):
                nic = next(nic for nic in desired.nics if nic.nic_id == nic_id)
                self.nics[nic_id] = m.ObservedNic(
                    generation=nic.generation, network_uid=nic.network_uid, attached=True
                )
            case s.EnsureSeedStep():
                self.seed = True
            case s.SpawnStep():
                self._spawn(desired)
            case s.AttachConsoleStep():
                assert alive
                self.console = True
            case s.StopStep():
                assert alive
                assert not (step.ask and self.stale), "a guest without its disks was asked"
                self._put(life=m.Life.DEAD, ending=step.kind)
                self.clean = False
            case s.CleanupStep():
                assert not alive
                self.console, self.clean = False, True
            case s.DetachVolumeStep(volume_uid=uid):
                held = {*self.plugged.values(), *self.recorded.values()} if alive else set()
                assert uid not in held, "I5: a volume was closed under a VMM"
                self.attached.discard(uid)
                self.serving = self.serving or not self.attached
                self.restarting = self.restarting and bool(self.attached)
                self.regrown |= {d.grow_now for d in desired.disks if d.volume_uid == uid}
            case s.ForgetWorkerStep():
                assert not alive
                assert self.clean
                assert not self.attached
                self.worker, self.stale = None, False
                self.recorded, self.plugged = {}, {}
                self.recorded_nics, self.plugged_nics = set(), set()
                self.frozen = self.marked = False
            case s.DetachNicStep(nic_id=nic_id):
                held = self.recorded_nics | self.plugged_nics if alive else set()
                assert nic_id not in held, "a tap was removed under a VMM"
                del self.nics[nic_id]
            case s.RemoveFilesStep():
                assert not alive
                self.files = self.seed = False
            case s.FinishDeleteStep():
                assert self.worker is None
                assert not (self.attached or self.nics or self.files or self.seed)
                self.gone = True
            case s.AdoptStep():
                self._put(recorded=True)
            case s.WaitStep():
                raise AssertionError(f"an ideal world makes nobody wait: {step}")
            case _:
                assert alive
                self._on_monitor(step, desired)

    def _on_monitor(self, step: s.Step, desired: m.DesiredVm) -> None:
        assert self.worker is not None
        match step:
            case s.BootStep() | s.ResumeStep():
                assert not (self.stale and self.serving), "vCPUs ran before the reset"
                writable = {d.volume_uid for d in desired.disks if not d.read_only}
                full = self.full & writable
                assert self.worker.state is not VmmState.EMPTY, "nothing to run"
                assert self.worker.state is VmmState.RUNNING or not full, "ran without space"
                assert not desired.paused or self.worker.state is VmmState.RUNNING, "ran paused"
                self._put(state=VmmState.RUNNING, booted=True)
                if isinstance(step, s.BootStep):
                    self._put(recovering=False)
            case s.CreateStep():
                if self.worker.state is VmmState.EMPTY:
                    self._put(state=VmmState.CREATED)
            case s.MarkRecoveringStep():
                assert self.worker.state is not VmmState.EMPTY, "there is nothing to reset"
                self._put(recovering=True)
            case s.HaltStep() if self.halts_for_good:
                assert self.worker.state in (VmmState.RUNNING, VmmState.PAUSED)
                self._put(state=VmmState.CREATED)
                self.stale = self.frozen = False
            case s.HaltStep():
                self._put(state=VmmState.PAUSED)
            case s.PauseStep():
                if self.worker.state is VmmState.RUNNING:
                    self._put(state=VmmState.PAUSED)
            case s.RecoverBackendStep():
                assert self.worker.state is not VmmState.RUNNING
                self.serving = True
            case s.AwaitDisksStep():
                assert self.serving
            case s.ResetStep():
                self.stale = self.frozen = self.marked = False
                self._put(recovering=False)
            case s.RestartStorageStep():
                assert self.worker.state is VmmState.RUNNING, "it may not come back to its disks"
                assert not self.restarting
            case s.AddDiskStep(disk_id=disk_id, volume_uid=uid):
                assert uid in self.attached
                assert self.serving
                assert self.recorded.get(disk_id, uid) == uid or disk_id not in self.plugged
                self.recorded[disk_id] = self.plugged[disk_id] = uid
            case s.RemoveDiskStep(disk_id=disk_id):
                assert self.worker.state is VmmState.RUNNING, "nobody can let go"
                self.plugged.pop(disk_id, None)
                self.recorded.pop(disk_id, None)
            case s.AddNicStep(nic_id=nic_id):
                assert self.nics[nic_id].attached
                self.recorded_nics.add(nic_id)
                self.plugged_nics.add(nic_id)
            case s.RemoveNicStep(nic_id=nic_id):
                assert self.worker.state is VmmState.RUNNING, "nobody can let go"
                self.plugged_nics.discard(nic_id)
                self.recorded_nics.discard(nic_id)
            case s.SetCpusStep(cpus=cpus):
                assert self.worker.state is VmmState.RUNNING
                assert cpus <= self.worker.cpus_max, "more than it was started for"
                self._put(cpus=cpus)
            case s.SetMemoryStep(memory_bytes=memory_bytes):
                assert self.worker.state is VmmState.RUNNING
                assert self.worker.memory_bytes < memory_bytes <= self.worker.memory_max_bytes
                self._put(memory_bytes=memory_bytes)
            case s.ThawStep():
                assert self.worker.state is VmmState.RUNNING, "nobody can thaw"
                self.frozen = self.marked = False
            case _:
                raise AssertionError(f"the model does not know {step}")

    def _spawn(self, desired: m.DesiredVm) -> None:
        assert self.worker is None, "I1: a second VMM"
        assert desired.running
        assert self.files
        assert self.seed
        assert {disk.volume_uid for disk in desired.disks} == self.attached
        assert {nic.nic_id for nic in desired.nics} == set(self.nics)
        assert self.serving
        assert not self.full & {d.volume_uid for d in desired.disks if not d.read_only}
        self.serial += 1
        self.recorded = {d.disk_id: d.volume_uid for d in desired.disks}
        self.plugged = dict(self.recorded)
        self.recorded_nics = {nic.nic_id for nic in desired.nics}
        self.plugged_nics = set(self.recorded_nics)
        self.halts_for_good = self.two_phases
        self.worker = m.ObservedWorker(
            worker_id=f"w{self.serial}",
            life=m.Life.ALIVE,
            state=VmmState.EMPTY if self.two_phases else VmmState.CREATED,
            cpus=desired.cpus,
            cpus_max=4,
            memory_bytes=desired.memory_bytes,
            memory_max_bytes=4 * MEMORY_STEP_BYTES,
        )

    def _put(self, **changes: object) -> None:
        assert self.worker is not None
        self.worker = replace(self.worker, **changes)  # type: ignore[arg-type]


class PlannerMachine(RuleBasedStateMachine):
    """Wishes, faults and half-done plans in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.desired = m.DesiredVm(uid=VM, running=False)
        self.grown = 0

    @initialize(runs=st.booleans())
    def begin(self, runs: bool) -> None:
        """Half of the time with a VM that runs: most of what can happen needs one."""
        if runs:
            self.want_parts(disks={"v1", "v2"}, nics={"n1"}, generation=1)
            self.want(running=True, force=False)
            self.converge()

    def _idle(self) -> bool:
        return self.model.worker is None and not self.model.gone

    @rule(
        disks=st.sets(st.sampled_from(["v1", "v2", "v3"]), max_size=2),
        nics=st.sets(st.sampled_from(["n1", "n2"]), max_size=2),
        generation=st.integers(1, 3),
    )
    def want_parts(self, disks: set[str], nics: set[str], generation: int) -> None:
        """Also under a running VM; the NIC of another generation has other groups."""
        if self.desired.deleting:
            return
        self.want_disks(disks=sorted(disks))
        newest = max((nic.generation for nic in self.desired.nics), default=0)
        self.desired = replace(
            self.desired,
            nics=tuple(
                m.DesiredNic(
                    name=uid,
                    nic_id=uid,
                    network="net",
                    network_uid="net",
                    network_generation=1,
                    generation=max(generation, newest),
                )
                for uid in sorted(nics)
            ),
        )

    @rule(
        disks=st.lists(st.sampled_from(["v1", "v2", "v3"]), max_size=3, unique=True),
        only_read=st.sets(st.sampled_from(["v1", "v2", "v3"])),
    )
    def want_disks(self, disks: list[str], only_read: Set[str] = frozenset()) -> None:
        """Also under a running VM; by the order, names change as well as volumes."""
        if not self.desired.deleting:
            kept = {d.volume_uid: d.read_only for d in self.desired.disks}
            self.desired = replace(
                self.desired,
                disks=tuple(
                    m.DesiredDisk(
                        name=f"d{index}",
                        volume=uid,
                        volume_uid=uid,
                        generation=1,
                        read_only=kept.get(uid, uid in only_read),
                    )
                    for index, uid in enumerate(disks)
                ),
            )

    @rule(number=st.integers(0, 2))
    def grow_now(self, number: int) -> None:
        disks = list(self.desired.disks)
        if number < len(disks) and not self.desired.deleting:
            uid = disks[number].volume_uid
            if uid in self.model.attached:
                self.model.pending.add(uid)
                self.grown += 1
                disks[number] = replace(disks[number], grow_now=f"op{self.grown}")
                self.desired = replace(self.desired, disks=tuple(disks))

    @rule(full=st.sets(st.sampled_from(["v1", "v2"]), max_size=1))
    def space_changes(self, full: set[str]) -> None:
        self.model.full = set(full)

    @rule(restarting=st.booleans())
    def storage_restarts(self, restarting: bool) -> None:
        self.model.restarting = restarting and bool(self.model.attached)

    @rule()
    def an_agent_dies_while_the_guest_is_frozen(self) -> None:
        worker = self.model.worker
        if worker is not None and worker.life is m.Life.ALIVE and worker.booted:
            self.model.marked = True
            self.model.frozen = worker.state is VmmState.RUNNING

    @rule()
    def the_agent_is_new(self) -> None:
        self.model.regrown.clear()

    @rule(nic=st.sampled_from(["n1", "n2"]), recorded=st.booleans())
    def a_plug_of_a_nic_is_cut_short(self, nic: str, recorded: bool) -> None:
        """What was recorded is perhaps not plugged."""
        worker = self.model.worker
        alive = worker is not None and worker.life is m.Life.ALIVE
        if alive and recorded and nic in self.model.nics:
            self.model.recorded_nics.add(nic)
        elif alive:
            self.model.plugged_nics.discard(nic)

    @rule(two_phases=st.booleans())
    def the_next_vmm_is_another(self, two_phases: bool) -> None:
        self.model.two_phases = two_phases

    @rule(paused=st.booleans())
    def want_pause(self, paused: bool) -> None:
        worker = self.model.worker
        runs = worker is not None and worker.life is m.Life.ALIVE and worker.booted
        self.desired = replace(self.desired, paused=paused and runs)

    @rule(cpus=st.integers(1, 6), blocks=st.integers(1, 6))
    def want_sizes(self, cpus: int, blocks: int) -> None:
        memory_bytes = blocks * MEMORY_STEP_BYTES
        self.desired = replace(self.desired, cpus=cpus, memory_bytes=memory_bytes)

    @rule(running=st.booleans(), force=st.booleans())
    def want(self, running: bool, force: bool) -> None:
        if not self.desired.deleting:
            self.desired = replace(self.desired, running=running, force_stop=force)

    @rule()
    def want_restart(self) -> None:
        if self.desired.running and self.model.worker is not None:
            self.desired = replace(self.desired, replace_worker=self.model.worker.worker_id)

    @rule()
    def want_reset(self) -> None:
        if self.desired.running:
            self.desired = replace(self.desired, reset_request="op")

    @rule()
    def want_another_storage_daemon(self) -> None:
        if self.desired.running:
            self.desired = replace(self.desired, storage_request="op")

    @rule()
    def delete(self) -> None:
        self.desired = replace(self.desired, running=False, deleting=True)

    @rule()
    def vmm_dies(self) -> None:
        if self.model.worker is not None and self.model.worker.life is m.Life.ALIVE:
            self.model._put(life=m.Life.DEAD)
            self.model.clean = False

    @rule(state=st.sampled_from([VmmState.SHUTDOWN, VmmState.PANICKED]))
    def guest_ends(self, state: VmmState) -> None:
        worker = self.model.worker
        if worker is not None and worker.life is m.Life.ALIVE and worker.state is VmmState.RUNNING:
            self.model._put(state=state)

    @rule()
    def storage_dies(self) -> None:
        if self.model.attached:
            self.model.serving = False
            worker = self.model.worker
            self.model.stale = (
                worker is not None
                and worker.life is m.Life.ALIVE
                and not (self.model.halts_for_good and worker.state in STANDING)
            )

    @rule()
    def nic_vanishes(self) -> None:
        for nic_id, nic in self.model.nics.items():
            self.model.nics[nic_id] = replace(nic, attached=False)

    @rule(part=st.integers(0, 12))
    def partly_apply(self, part: int) -> None:
        """The agent is killed in the middle of a plan."""
        if not self.model.gone:
            steps = p.plan(self.desired, self.model.observe(self.desired))
            for step in steps[:part]:
                if isinstance(step, s.WaitStep):
                    assert step.reason in ("StorageSpace", "BackendRestarting")
                    break
                self.model.apply(step, self.desired)
            self._end_pause()

    @rule()
    def converge(self) -> None:
        """Some passes bring it to what is wanted, and the next one has nothing to do."""
        self.model.restarting = False
        if self._stands_for_want_of_space():
            return
        for _ in range(PASSES_MAX):
            if self.model.gone:
                return
            for step in p.plan(self.desired, self.model.observe(self.desired)):
                self.model.apply(step, self.desired)
            self._fulfilled()
        if self.model.gone:
            return
        assert p.plan(self.desired, self.model.observe(self.desired)) == []
        worker = self.model.worker
        if self.desired.running:
            assert worker is not None
            assert not worker.recovering
            if self.desired.paused:
                assert worker.state in (VmmState.PAUSED, VmmState.CREATED)
                return
            assert worker.state is VmmState.RUNNING
            assert worker.cpus == self.desired.cpus or self.desired.cpus > worker.cpus_max
            wanted = {d.disk_id: d.volume_uid for d in self.desired.disks}
            assert self.model.plugged == self.model.recorded == wanted
            assert self.model.attached == set(wanted.values())
            nics = {nic.nic_id for nic in self.desired.nics}
            assert self.model.plugged_nics == self.model.recorded_nics == nics
            assert set(self.model.nics) == nics
            assert not self.model.pending & self._to_grow()
            assert not self.model.frozen
        else:
            assert worker is None
            assert not self.model.attached

    def _to_grow(self) -> set[str]:
        return {d.volume_uid for d in self.desired.disks if d.grow_now}

    def _stands_for_want_of_space(self) -> bool:
        """Such a VM stands still and says why; when there is space again it goes on."""
        full = self.model.full & {d.volume_uid for d in self.desired.disks if not d.read_only}
        if not full or not self.desired.running or self.model.gone:
            return False
        for _ in range(PASSES_MAX):
            steps = p.plan(self.desired, self.model.observe(self.desired))
            for step in steps:
                if not isinstance(step, s.WaitStep):
                    self.model.apply(step, self.desired)
            self._fulfilled()
        (wait,) = p.plan(self.desired, self.model.observe(self.desired))
        assert isinstance(wait, s.WaitStep)
        assert wait.reason == "StorageSpace"
        worker = self.model.worker
        assert worker is None or worker.state in (VmmState.PAUSED, VmmState.CREATED)
        return True

    def _fulfilled(self) -> None:
        """Requests end with their fulfilment, as the applier does it."""
        self.desired = replace(self.desired, reset_request="", storage_request="")
        self._end_pause()

    def _end_pause(self) -> None:
        """A pause ends with the VMM, as the transaction that forgets it has it."""
        if self.model.worker is None:
            self.desired = replace(self.desired, paused=False)

    @invariant()
    def the_plan_is_a_function(self) -> None:
        observed = self.model.observe(self.desired)
        assert p.plan(self.desired, observed) == p.plan(self.desired, observed)


TestPlanner = PlannerMachine.TestCase
TestPlanner.settings = settings(max_examples=300, stateful_step_count=25, deadline=None)


def test_in_doubt_nothing_is_done() -> None:
    worker = m.ObservedWorker(worker_id="w", life=m.Life.UNKNOWN)
    for running in (True, False):
        for deleting in (True, False):
            desired = m.DesiredVm(uid=VM, running=running, deleting=deleting)
            for observed in (m.ObservedVm(worker=worker), m.ObservedVm(stranger=True)):
                (step,) = p.plan(desired, observed)
                assert isinstance(step, s.WaitStep)


def test_a_start_waits_for_each_part_and_says_for_which() -> None:
    disk = m.DesiredDisk(name="d", volume="data", volume_uid="v", generation=2)
    nic = m.DesiredNic(
        name="e",
        nic_id="n",
        network="net",
        network_uid="u",
        network_generation=2,
        generation=1,
    )
    desired = m.DesiredVm(uid=VM, running=True, disks=(disk,), nics=(nic,), boot_image="tiny")
    ready = m.ObservedVm(
        volumes={"v": m.ObservedVolume(generation=2, state="open")}, networks={"u": 2}
    )
    cases = {
        "BackOff": replace(ready, backoff_s=3.0),
        "ImageNotReady": replace(ready, image_ready=False),
        "VolumeNotReady": replace(ready, volumes={}),
        "NetworkNotReady": replace(ready, networks={"u": 1}),
        "StorageUnavailable": replace(ready, storage_known=False),
        "NetworkUnavailable": replace(ready, network_known=False),
    }
    for reason, observed in cases.items():
        (step,) = p.plan(desired, observed)
        assert isinstance(step, s.WaitStep)
        assert step.reason == reason
    assert s.SpawnStep() in p.plan(desired, ready)


def test_a_volume_of_another_vm_is_waited_for() -> None:
    disk = m.DesiredDisk(name="d", volume="data", volume_uid="v", generation=1)
    desired = m.DesiredVm(uid=VM, running=True, disks=(disk,))
    taken = m.ObservedVolume(generation=1, state="open", attached_to="other")
    (step,) = p.plan(desired, m.ObservedVm(volumes={"v": taken}))
    assert isinstance(step, s.WaitStep)
    assert "other" in step.message


def test_a_volume_that_is_to_grow_is_let_go_of_before_the_start() -> None:
    disk = m.DesiredDisk(name="d", volume="data", volume_uid="v", generation=2)
    desired = m.DesiredVm(uid=VM, running=True, disks=(disk,))
    old = m.ObservedVolume(generation=1, state="open", attached_to=VM)
    observed = m.ObservedVm(
        volumes={"v": old}, attached=frozenset({"v"}), backend=m.Backend.SERVING
    )
    first, second = p.plan(desired, observed)
    assert first == s.DetachVolumeStep("v")
    assert isinstance(second, s.WaitStep)


def test_a_vm_whose_disks_do_not_come_back_is_ended_as_lost() -> None:
    worker = m.ObservedWorker(worker_id="w", life=m.Life.ALIVE, state=VmmState.PAUSED, booted=True)
    observed = m.ObservedVm(
        worker=replace(worker, recovering=True), recovery_failures=p.RECOVERY_FAILURES_MAX
    )
    assert p.plan(m.DesiredVm(uid=VM, running=True), observed) == [
        s.StopStep(EndKind.STORAGE_LOST, ask=False)
    ]


def test_a_vmm_that_never_came_up_is_ended_but_one_that_runs_is_not() -> None:
    desired = m.DesiredVm(uid=VM, running=True)
    for state, ended in (
        (VmmState.CREATED, True),
        (VmmState.UNKNOWN, True),
        (VmmState.RUNNING, False),
    ):
        worker = m.ObservedWorker(worker_id="w", life=m.Life.ALIVE, state=state, start_expired=True)
        steps = p.plan(desired, m.ObservedVm(worker=worker, console=True))
        assert (steps == [s.StopStep(EndKind.START_TIMEOUT, ask=False)]) is ended


DATA = m.DesiredDisk(name="d", volume="data", volume_uid="v", generation=1)
MORE = m.DesiredDisk(name="e", volume="more", volume_uid="w", generation=1)
OPEN = m.ObservedVolume(generation=1, state="open")
RUNS = m.DesiredVm(uid=VM, running=True, disks=(DATA,))


def running(**changes: object) -> m.ObservedVm:
    """A VM that runs with one disk, but for `changes`."""
    worker = m.ObservedWorker(
        worker_id="w",
        life=m.Life.ALIVE,
        state=VmmState.RUNNING,
        booted=True,
        disks={"disk-d": "v"},
        plugged=frozenset({"disk-d"}),
    )
    seen = m.ObservedVm(
        worker=worker,
        attached=frozenset({"v"}),
        backend=m.Backend.SERVING,
        volumes={"v": OPEN, "w": OPEN},
        console=True,
    )
    return replace(seen, **changes)  # type: ignore[arg-type]


def test_a_storage_daemon_that_restarts_by_itself_is_no_loss() -> None:
    assert p.plan(RUNS, running(backend=m.Backend.RESTARTING)) == []


def test_no_disk_is_served_by_a_storage_daemon_that_is_coming_back() -> None:
    desired = replace(RUNS, disks=(DATA, MORE))
    assert p.plan(desired, running()) == [
        s.AttachVolumeStep("w", 1, read_only=False),
        s.AddDiskStep("disk-e", "w"),
    ]
    (wait,) = p.plan(desired, running(backend=m.Backend.RESTARTING))
    assert isinstance(wait, s.WaitStep)
    assert wait.reason == "BackendRestarting"


def test_a_volume_is_detached_only_after_guest_and_vmm_have_let_go() -> None:
    assert p.plan(replace(RUNS, disks=()), running()) == [
        s.RemoveDiskStep("disk-d"),
        s.DetachVolumeStep("v"),
    ]


NIC = m.DesiredNic(
    name="e", nic_id="n", network="net", network_uid="u", network_generation=1, generation=2
)
SEEN = m.ObservedNic(generation=2, network_uid="u", attached=True)


def with_nics(
    recorded: Set[str], plugged: Set[str] | None, nics: Set[str], **changes: object
) -> m.ObservedVm:
    """A VM that runs and its NICs."""
    seen = running(networks={"u": 1}, nics=dict.fromkeys(nics, SEEN), **changes)
    assert seen.worker is not None
    known = frozenset(plugged) if plugged is not None else None
    worker = replace(seen.worker, nics=frozenset(recorded), plugged_nics=known)
    return replace(seen, worker=worker)


def test_a_nic_is_attached_before_it_is_plugged_and_detached_after_it_was_unplugged() -> None:
    wants = replace(RUNS, nics=(NIC,))
    assert p.plan(wants, with_nics(set(), set(), set())) == [
        s.AttachNicStep("n"),
        s.AddNicStep("n"),
    ]
    assert p.plan(wants, with_nics({"n"}, {"n"}, {"n"})) == []
    assert p.plan(RUNS, with_nics({"n"}, {"n"}, {"n"})) == [
        s.RemoveNicStep("n"),
        s.DetachNicStep("n"),
    ]
    assert p.plan(RUNS, with_nics(set(), set(), {"n"})) == [s.DetachNicStep("n")]


def test_a_nic_goes_before_another_comes_that_may_have_its_address() -> None:
    assert p.plan(replace(RUNS, nics=(NIC,)), with_nics({"o"}, {"o"}, {"o"})) == [
        s.RemoveNicStep("o"),
        s.DetachNicStep("o"),
        s.AttachNicStep("n"),
        s.AddNicStep("n"),
    ]


def test_a_nic_that_is_recorded_and_not_plugged_is_plugged_again() -> None:
    wants = replace(RUNS, nics=(NIC,))
    assert p.plan(wants, with_nics({"n"}, set(), {"n"})) == [s.AddNicStep("n")]
    assert p.plan(RUNS, with_nics({"n"}, set(), {"n"}))[0] == s.RemoveNicStep("n")


def test_no_nic_is_touched_where_the_vmm_is_silent_or_its_vcpus_stand() -> None:
    wants = replace(RUNS, nics=(NIC,))
    for desired in (wants, RUNS):
        assert p.plan(desired, with_nics({"o"}, None, {"o"})) == []
        silent = with_nics({"o"}, {"o"}, {"o"}, network_known=False)
        assert p.plan(desired, silent) == []
    seen = with_nics({"o"}, {"o"}, {"o"})
    assert seen.worker is not None
    stands = replace(seen, worker=replace(seen.worker, state=VmmState.PAUSED))
    assert p.plan(RUNS, stands) == [s.ResumeStep()]


def test_a_nic_whose_network_is_not_ready_waits_and_the_others_go_on() -> None:
    wants = replace(RUNS, nics=(replace(NIC, network_generation=2),), disks=(DATA, MORE))
    steps = p.plan(wants, with_nics(set(), set(), set()))
    assert steps[:-1] == [s.AttachVolumeStep("w", 1, read_only=False), s.AddDiskStep("disk-e", "w")]
    assert isinstance(steps[-1], s.WaitStep)
    assert steps[-1].reason == "NetworkNotReady"


def test_a_disk_that_was_let_go_of_once_for_an_operation_is_not_let_go_of_again() -> None:
    desired = replace(RUNS, disks=(replace(DATA, grow_now="op"),))
    grown = running(volumes={"v": replace(OPEN, pending=True)})
    assert p.plan(desired, grown) == [s.RemoveDiskStep("disk-d"), s.DetachVolumeStep("v")]
    assert p.plan(desired, replace(grown, regrown=frozenset({"op"}))) == []
    assert p.plan(RUNS, grown) == [], "nobody asked for it"


def test_a_disk_that_the_guest_lost_sight_of_is_plugged_again() -> None:
    seen = running()
    assert seen.worker is not None
    lost = replace(seen, worker=replace(seen.worker, plugged=frozenset[str]()))
    assert p.plan(RUNS, lost) == [s.AddDiskStep("disk-d", "v")]
    silent = replace(seen, worker=replace(seen.worker, plugged=None))
    assert p.plan(replace(RUNS, disks=()), silent) == [], "whether it let go cannot be told"


def test_a_vm_stands_still_while_its_volume_can_take_no_more() -> None:
    full = running(volumes={"v": replace(OPEN, full=True)})
    pause, wait = p.plan(RUNS, full)
    assert pause == s.PauseStep()
    assert isinstance(wait, s.WaitStep)
    assert (wait.condition, wait.reason) == ("Paused", "StorageSpace")
    assert full.worker is not None
    stands = replace(full, worker=replace(full.worker, state=VmmState.PAUSED))
    assert p.plan(RUNS, stands) == [wait]
    assert p.plan(RUNS, replace(stands, volumes={"v": OPEN})) == [s.ResumeStep()]
    assert p.plan(replace(RUNS, running=False), stands) == [s.StopStep(EndKind.STOP, ask=True)]
    only_read = replace(RUNS, disks=(replace(DATA, read_only=True),))
    assert p.plan(only_read, full) == []


def test_a_vm_that_was_reset_and_stands_is_not_paused_before_its_disks_come_back() -> None:
    seen = running()
    assert seen.worker is not None
    stands = replace(seen.worker, state=VmmState.CREATED, recovering=True)
    lost = replace(seen, worker=stands, backend=m.Backend.LOST)
    assert p.plan(RUNS, lost) == [
        s.RecoverBackendStep(),
        s.AwaitDisksStep(),
        s.ResetStep(),
        s.BootStep(),
    ]


def test_no_vm_starts_on_a_volume_without_space() -> None:
    (wait,) = p.plan(RUNS, m.ObservedVm(volumes={"v": replace(OPEN, full=True)}))
    assert isinstance(wait, s.WaitStep)
    assert (wait.condition, wait.reason) == ("VolumesReady", "StorageSpace")


def test_a_read_only_volume_goes_to_several_vms() -> None:
    shared = replace(DATA, shared=True, read_only=True)
    taken = m.ObservedVm(volumes={"v": replace(OPEN, attached_to="other")})
    steps = p.plan(replace(RUNS, disks=(shared,)), taken)
    assert s.AttachVolumeStep("v", 1, read_only=True) in steps
