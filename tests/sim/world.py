"""One simulated machine with its durable store; hands out the `World` of each life."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import anyio

from chv.agent.events_record import EventPage
from chv.agent.generations import Generation, GenerationRow
from chv.agent.node import Node, NodeEvent, NodeState, Predicate
from chv.agent.node_gate import NodeGate
from chv.agent.node_record import NodeIntent, NodeRecord, PutNode
from chv.agent.ports import Limits, World
from chv.agent.records import (
    Change,
    PutFacts,
    PutObject,
    PutOperation,
    PutWorker,
    RequestRow,
    Snapshot,
    VmFacts,
)
from chv.agent.store_memory import MemoryStore
from chv.agent.upstream.link import GRACE_S, Link
from chv.agent.upstream.port import Embedded, Upstream
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.virtual_time import EPOCH
from chv.common.wire.agent import Operation, OperationState
from chv.common.wire.agent_events import WatchEvents
from tests.sim.chaos import Chaos
from tests.sim.copies import second_life
from tests.sim.daemons import SimCaller
from tests.sim.events import told_wrongly
from tests.sim.saves import SimSaves
from tests.sim.vmms import SimGuests, SimHost, SimImages, SimSeeds, SimVmms

TEN_YEARS_S = 10 * 365 * 86_400.0


class SimClock:
    """Time that goes on over the lives of agents, each of which has a loop of its own.

    The agent sees clocks that may lie: the wall clock jumps, the monotonic one begins with a boot.
    """

    def __init__(self) -> None:
        self.offset_s = 0.0
        self.booted_s = 0.0
        self.wall_s = 0.0  # how wrong the wall clock is
        self.boots = 1

    @property
    def boot_id(self) -> str:
        return f"boot-{self.boots}"

    def boot(self) -> None:
        self.booted_s, self.boots = self.true_s(), self.boots + 1

    def true_s(self) -> float:
        return self.offset_s + anyio.current_time()

    def now(self) -> datetime:
        return EPOCH + timedelta(seconds=self.true_s() + self.wall_s)

    def monotonic(self) -> float:
        return self.true_s() - self.booted_s

    async def sleep(self, seconds: float) -> None:
        await anyio.sleep(seconds)


class SimGate:
    """The gate of the real node, all of whose predicates hold; shut while a daemon is down.

    A node of each life: what was recorded of it is followed anew.
    """

    def __init__(self, clock: SimClock) -> None:
        self.open = True
        self._clock = clock
        self.node: Node
        self._gate: NodeGate

    def boot(self, connected: Callable[[], bool]) -> None:
        """A new life: the first thing that is followed is what the store says."""
        self.node = Node(self._clock)
        self._gate = NodeGate(self.node, connected)

    def check(self, verb: str, *, desired: bool = False, forced_by: str = "") -> None:
        self._gate.check(verb, desired=desired, forced_by=forced_by)

    def starts_allowed(self) -> bool:
        return self.open and self._gate.starts_allowed()

    def allow(self, event: NodeEvent) -> None:
        self._gate.allow(event)

    def follow(self, record: NodeRecord) -> None:
        self._gate.follow(record)
        if self.node.state is NodeState.DISCOVERED:
            self.node.bootstrap()
        for predicate in Predicate:
            self.node.observe(predicate, holds=True, reason="Sim")


class SimStore:
    """The durable store as one life sees it: every call is a seam."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._store = machine.store
        self._chaos = machine.chaos
        self._life = machine.chaos.life

    async def load(self) -> Snapshot:
        return await self._chaos.seam(
            self._life, "store.load", self._store.tables.snapshot, mutating=False
        )

    async def commit(self, changes: tuple[Change, ...]) -> None:
        names = ",".join(type(change).__name__ for change in changes)
        await self._chaos.seam(
            self._life, f"store.commit {names}", lambda: self._machine.commit(changes)
        )

    async def operation(self, operation_id: str) -> Operation | None:
        self._chaos.check(self._life)
        return await self._store.operation(operation_id)

    async def operations(self, **wanted: Any) -> list[Operation]:
        return await self._store.operations(**wanted)

    async def request(self, key: str) -> RequestRow | None:
        self._chaos.check(self._life)
        return await self._store.request(key)

    async def events(self, after_seq: int, wanted: WatchEvents, limit: int) -> EventPage:
        self._chaos.check(self._life)
        return await self._store.events(after_seq, wanted, limit)

    async def last_events(self, wanted: WatchEvents, limit: int) -> EventPage:
        self._chaos.check(self._life)
        return await self._store.last_events(wanted, limit)

    async def histories(self, kind: str, namespace: str, name: str) -> list[str]:
        return await self._store.histories(kind, namespace, name)

    async def history(self, uid: str) -> list[GenerationRow]:
        self._chaos.check(self._life)
        return await self._store.history(uid)

    async def generation(self, uid: str, generation: int) -> Generation | None:
        return await self._store.generation(uid, generation)

    async def shortage(self) -> str:
        self._chaos.check(self._life)
        return await self._store.shortage()


class Machine:
    """Everything that outlives an agent."""

    def __init__(self, seed: int, chaos: Chaos | None = None, limits: Limits | None = None) -> None:
        self.chaos = chaos or Chaos(random.Random(seed))
        self.violations: list[str] = []
        self.host = SimHost(self._violate)
        self.store = MemoryStore()
        self.upstream: Callable[[Chaos], Upstream] = lambda chaos: Embedded()
        self.grace_s = GRACE_S
        self.clock = SimClock()
        self.gate = SimGate(self.clock)
        self.seed = seed
        self.limits = limits or Limits(parallel_starts=2, restarts_max=3, restart_window_s=300.0)
        self.host.now = self.host.stord.now = self.clock.true_s
        self.host.boot_id = self.clock.boot_id
        self.reboots = 0
        self.chaos.on_kill = self._after_kill
        self._fates = random.Random(seed + 3)  # draws of its own: others keep theirs
        self.reboot_rate = self._fates.choice((0.0, 0.1, 0.5))
        self.restarts_due: dict[str, float] = {}  # VM -> not before that true time
        self.host.intended = self._intended
        self.host.intends_disk = self._intends_disk
        self.host.intends_nic = self._intends_nic
        self.host.marks_freeze = self._marks_freeze
        self.host.marks_saving = self._marks_saving
        for daemon in (self.host.stord, self.host.nwd):
            daemon.operation_known = lambda operation: operation in self.store.tables.operations

    def _violate(self, text: str) -> None:
        self.violations.append(f"at call {self.chaos.calls}: {text}")

    def _intended(self, vm_uid: str, worker_id: str) -> bool:
        row = self.store.tables.workers.get(vm_uid)
        return row is not None and row.worker_id == worker_id

    def _intends_disk(self, vm_uid: str, disk_id: str, volume_uid: str) -> bool:
        row = self.store.tables.workers.get(vm_uid)
        recorded = row.config.disks if row is not None else ()
        return any(d.id == disk_id and d.volume_id == volume_uid for d in recorded)

    def _intends_nic(self, vm_uid: str, nic_id: str) -> bool:
        row = self.store.tables.workers.get(vm_uid)
        return row is not None and any(nic.id == nic_id for nic in row.config.nics)

    def _marks_freeze(self, vm_uid: str) -> bool:
        row = self.store.tables.workers.get(vm_uid)
        return row is not None and row.frozen

    def _marks_saving(self, vm_uid: str, snapshot_uid: str) -> bool:
        stored = self.store.tables.objects.get(vm_uid)
        facts = stored.facts if stored is not None else None
        return facts is not None and facts.saving == snapshot_uid

    def commit(self, changes: tuple[Change, ...]) -> None:
        """Store the changes, and see that an operation succeeds only with what it is for."""
        for change in changes:
            self._check_held(change)
            self._check_memory(change)
            self._check_backoff(change)
        for text in told_wrongly(self.store.tables, changes):
            self._violate(text)
        if outlived := second_life(self.store.tables, changes):
            self._violate(outlived)
        self.store.tables.apply(changes)
        for change in changes:
            if isinstance(change, PutOperation):
                self._check_success(change.operation)

    def _check_memory(self, change: Change) -> None:
        """No VMM is begun for which there is no memory beside those that may live."""
        tables, capacity = self.store.tables, self.limits.capacity.memory_bytes
        if not isinstance(change, PutWorker) or capacity is None:
            return
        others = [row for uid, row in tables.workers.items() if uid != change.row.vm_uid]
        if change.row.vm_uid not in tables.workers:
            promised = sum(row.config.memory_bytes for row in (*others, change.row))
            if promised > capacity:
                self._violate(f"memory: {promised} bytes are promised of {capacity}")

    def _check_held(self, change: Change) -> None:
        """While the node is held no VMM is begun, and in Maintenance none is left."""
        tables = self.store.tables
        if isinstance(change, PutWorker) and tables.node.holds_vms:
            row = tables.workers.get(change.row.vm_uid)
            if row is None or row.worker_id != change.row.worker_id:
                self._violate(f"node: a VMM is intended while {tables.node.words}")
        if isinstance(change, PutNode) and change.record.intent is NodeIntent.MAINTAIN:
            alive = [each.pid for each in self.host.processes.values() if each.alive]
            if alive:
                self._violate(f"node: Maintenance while VMMs {alive} live")

    def _check_backoff(self, change: Change) -> None:
        """No VM is started again before its back-off is over, whoever the agent is by then."""
        match change:
            case PutFacts(uid=uid, facts=VmFacts() as facts):
                self._note_backoff(uid, facts)
            case PutObject(object=stored) if stored.facts is not None:
                self._note_backoff(stored.uid, stored.facts)
            case PutWorker(row=row) if row.vm_uid not in self.store.tables.workers:
                early_s = self.restarts_due.get(row.vm_uid, 0.0) - self.clock.true_s()
                if early_s > 0.1:
                    self._violate(f"VM {row.vm_uid} is restarted {early_s:.1f} s too early")

    def _note_backoff(self, uid: str, facts: VmFacts) -> None:
        before = self.store.tables.objects.get(uid)
        known = before.facts.crashes if before is not None and before.facts is not None else ()
        if facts.backoff_s <= 0:
            self.restarts_due.pop(uid, None)
        elif facts.crashes != known:
            self.restarts_due[uid] = self.clock.true_s() + facts.backoff_s

    def _check_success(self, operation: Operation) -> None:
        if operation.state is not OperationState.SUCCEEDED:
            return
        if operation.verb == "delete" and operation.uid not in self.store.tables.tombstones:
            self._violate(f"I10: {operation.id} has deleted {operation.name}, which is there")
        process = self.host.live(operation.uid)
        if operation.verb == "stop" and process is not None:
            self._violate(f"I10: {operation.id} has stopped {operation.name}, which runs")
        if operation.verb in ("create", "update") and not self._is_as_wanted(operation):
            self._violate(f"I10: {operation.id} has made {operation.name}, which is not as wanted")

    def _is_as_wanted(self, operation: Operation) -> bool:
        """Tell whether what a daemon has is as new as what an operation was for."""
        match operation.kind:
            case "Volume":
                volume = self.host.stord.volumes.get(operation.uid)
                return volume is not None and volume.generation >= operation.generation
            case "Network":
                network = self.host.nwd.networks.get(operation.uid)
                return network is not None and network.generation >= operation.generation
            case "SecurityGroup" | "Exposure":
                nwd, stored = self.host.nwd, self.store.tables.objects.get(operation.uid)
                there = nwd.groups.get(operation.uid) or nwd.exposures.get(operation.uid)
                sent = stored.sent_facts if stored is not None else None
                if there is None or sent is None:
                    return False
                return there.generation >= sent.generation
            case "VolumeSnapshot":
                return operation.uid in self.host.stord.taken
            case "VirtualMachineSnapshot":
                return self._is_of_one_instant(operation.uid)
        return True

    def _is_of_one_instant(self, snapshot_uid: str) -> bool:
        saved, volumes = self.host.saved.get(snapshot_uid), self.host.stord.volumes
        if saved is None or not (saved.written and saved.kept):
            return False
        return all(
            volumes[uid].contents.get(snapshot_uid) == content
            for uid, content in saved.contents.items()
        )

    def world(self) -> World:
        """Return the world for a new life."""
        chaos, life, host = self.chaos, self.chaos.life, self.host
        upstream = self.upstream(chaos)
        link = Link(self.clock, embedded=upstream.embedded, grace_s=self.grace_s)
        self.gate.boot(lambda: link.connected)
        stord = SimCaller(chaos, life, "stord", host.stord)
        nwd = SimCaller(chaos, life, "nwd", host.nwd)
        stord.now = nwd.now = self.clock.true_s
        return World(
            stord=stord,
            nwd=nwd,
            vmm=SimVmms(host, chaos, life),
            images=SimImages(host, chaos, life),
            seeds=SimSeeds(host, chaos, life),
            saves=SimSaves(host, chaos, life),
            guest=SimGuests(host, chaos, life),
            gate=self.gate,
            clock=self.clock,
            ids=Ids(self.seed * 1000 + life),
            layout=Layout(instance="simsim"),
            limits=self.limits,
            boot_id=self.clock.boot_id,
            upstream=upstream,
            link=link,
        )

    def reboot(self) -> None:
        """Power is cut and comes back: what was in memory is gone, disks and records are there."""
        self.reboots += 1
        self.clock.boot()
        self.host.reboot(self.clock.boot_id)

    def _after_kill(self) -> None:
        """An agent was killed: perhaps because the power was cut; clocks may be set meanwhile."""
        if self._fates.random() < self.reboot_rate:
            self.reboot()
        if self._fates.random() < self.reboot_rate:
            self.clock.wall_s += self._fates.choice((-TEN_YEARS_S, TEN_YEARS_S))

    def agent_store(self) -> SimStore:
        """Return the store for a new life."""
        return SimStore(self)
