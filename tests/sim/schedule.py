"""One schedule: users, faults and lives of agents until everything is quiet; then the checks.

A schedule is a function of its seed. The agent's code is the real one; time is virtual.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass, field, replace

import anyio

from chv.agent.engine import Engine
from chv.agent.resources.capacity import Capacity
from chv.agent.tables import Tables
from chv.agent.vm.freeze import frozen
from chv.common import virtual_time
from chv.common.errors import ChvError, FailedPrecondition
from chv.common.wire.agent import ActOnVm, VmVerb
from chv.common.wire.agent_node import ActOnNode, NodeVerb
from chv.common.wire.stord import CrashClass, StorageEvent
from tests.sim.chaos import TIMEOUT_S, Chaos, is_kill, swarm
from tests.sim.checks import problems
from tests.sim.client import Client
from tests.sim.events import Listener
from tests.sim.world import Machine

REQUESTS, KILLS_MAX = 16, 40  # of a full schedule
# Requests and kills of the others, which find the same bugs in two thirds of the time: it is mostly
# the start of the next agent that takes it. Seeds below the first of them are all full: those that
# have found bugs stay what they are.
SMALL = ((8, 8), (10, 8), (12, 6))
SMALL_FROM = 100_000
FULL_EACH = 8
# Of each so many, one is on a machine whose memory is enough for two or three VMs.
TIGHT_EACH = 5
TIGHT = Capacity(machine_bytes=900 << 20)
QUIET_S_MAX = 600.0  # restarts back off up to a minute, stops take up to 20 s
# A pass that began before the quiet may hang once and then show what it saw before.
RESYNC_S = TIMEOUT_S + 35.0
STILL_S = 35.0  # a resync of everything, in which nothing may happen
LIVES_MAX = 200
FREEZE_RATE = 0.1
EVENT_PAUSES_S = (0.5, 2.0, 5.0, 10.0)
HAPPENINGS = (
    "die", "off", "storage", "storage", "storage", "stord", "nwd", "gate", "cling", "full",
    "restart", "restart",
)  # fmt: skip


@dataclass
class Result:
    """What a schedule did."""

    seed: int
    problems: list[str]
    lives: int = 0
    faults: int = 0
    kills: int = 0
    events: int = 0
    calls: int = 0
    virtual_s: float = 0.0
    trace: list[str] = field(default_factory=list, repr=False)


class Schedule:
    """The state of one schedule over the lives of its agents."""

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        requests, kills_max = _size(seed)
        self.seed = seed
        self.client = Client(random.Random(seed + 1), requests)
        self.chaos = Chaos(generator, swarm(generator), kills_max=kills_max)
        self.machine = Machine(seed, self.chaos)
        if seed >= SMALL_FROM and seed % TIGHT_EACH == 0:
            self.machine.limits = replace(self.machine.limits, capacity=TIGHT)
        self.events_random = random.Random(seed + 2)
        self.event_rate = generator.choice((0.0, 0.3, 0.8, 0.8))
        self.events = 0
        self.lives = 0
        self.still_effects = -1
        self.listener = Listener()
        self.bugs: list[str] = []

    def run(self) -> Result:
        """Run to the end; never raises for what the agent does wrong."""
        found: list[str] = []
        try:
            while not self._live():
                if self.lives > LIVES_MAX:
                    found.append("the agent does not get through a life")
                    break
        except Exception as error:  # whatever the agent raises is a finding
            found.append(f"the agent crashed: {error!r} {_leaves(error)}")
        found += problems(self.machine, self.client)
        found += [f"bug: {bug}" for bug in self.bugs]
        found += self.listener.problems(self.machine.store.tables)
        if self.still_effects > 0:
            found.append(f"I3: {self.still_effects} effects while everything was as wanted")
        return Result(
            seed=self.seed,
            problems=found,
            lives=self.lives,
            faults=sum(self.chaos.faults.values()) + self.events,
            kills=self.chaos.kills,
            events=self.events,
            calls=self.chaos.calls,
            virtual_s=self.machine.clock.offset_s,
            trace=self.chaos.trace,
        )

    def _live(self) -> bool:
        """Run one agent until it is killed (False) or all is quiet (True)."""
        self.lives += 1
        self.machine.host.exits = type(self.machine.host.exits)()
        ended_at: list[float] = []
        try:
            virtual_time.run(self._life, ended_at)
        except BaseException as error:  # noqa: ASYNC103  a kill is a BaseException
            if not is_kill(error):
                raise
            return False  # noqa: ASYNC104
        finally:
            self.machine.clock.offset_s += ended_at[-1] if ended_at else 0.0
        return True

    async def _life(self, ended_at: list[float]) -> None:
        engine = Engine(self.machine.agent_store(), self.machine.world())
        try:
            await _until_it_works(engine.load)
            await _until_it_works(engine.recover)
            async with anyio.create_task_group() as group:
                await group.start(engine.run)
                group.start_soon(self.listener.follow, engine)
                if not self.chaos.quiet:
                    group.start_soon(self._happenings, engine)
                await self.client.run(engine)
                await self._quiet(engine)
                group.cancel_scope.cancel()
        finally:
            self.bugs += engine.bugs()
            ended_at.append(anyio.current_time())

    async def _quiet(self, engine: Engine) -> None:
        """No more faults: wait until all is as wanted, then see that nothing more is done."""
        self.chaos.quiet = True
        self.machine.gate.open = True
        for daemon in (self.machine.host.stord, self.machine.host.nwd):
            daemon.down_until = 0.0
        for volume in self.machine.host.stord.volumes.values():
            volume.full = False
        await self._serve(engine)
        await self._resume(engine)
        if self.events_random.random() < 0.5:  # a hint as well, which may be lost
            engine.notify_daemon_ready("all")
        # Longest waits: a restart's back-off, and the window that forgives crashes.
        with anyio.move_on_after(QUIET_S_MAX):
            while problems(self.machine, self.client):  # noqa: ASYNC110
                await anyio.sleep(5.0)
        await anyio.sleep(RESYNC_S)  # what was only missed in a status is found by then
        before = self.chaos.effects
        await anyio.sleep(STILL_S)
        self.still_effects = self.chaos.effects - before
        self.bugs += self.listener.missed(self.machine.store.tables)

    async def _serve(self, engine: Engine) -> None:
        """An operator who has gone home left the node drained: it is to serve again."""
        while engine.node.record.holds_vms:
            for verb in (NodeVerb.CANCEL_DRAIN, NodeVerb.RESUME):
                with suppress(ChvError):
                    await engine.node.act(ActOnNode(verb=verb, requester="sim"))
            await anyio.sleep(0.1)

    async def _resume(self, engine: Engine) -> None:
        """Let paused guests run on: what stands can let go of nothing."""
        if not _paused(self.machine.store.tables):
            return
        await anyio.sleep(RESYNC_S)
        for name in _paused(engine.tables()):
            with suppress(FailedPrecondition):  # it has ended meanwhile
                await engine.act(ActOnVm(verb=VmVerb.RESUME, name=name, requester="sim"))

    async def _happenings(self, engine: Engine) -> None:
        """What the world does by itself, until the quiet phase."""
        async with anyio.create_task_group() as group:
            while not self.chaos.quiet:
                await anyio.sleep(self.events_random.choice(EVENT_PAUSES_S))
                if not self.chaos.quiet and self.events_random.random() < self.event_rate:
                    self._happen(engine)
                    group.start_soon(self._freeze, engine)

    async def _freeze(self, engine: Engine) -> None:
        """Somebody freezes a guest for a moment, or for longer than is allowed."""
        draw, host = self.events_random, self.machine.host
        alive = [process for process in host.processes.values() if process.alive]
        pause_s = draw.choice((0.0, 1.0, 9.0))
        if alive and draw.random() < FREEZE_RATE:
            with suppress(ChvError):
                async with frozen(engine._context, draw.choice(alive).vm_uid, 5.0):
                    await anyio.sleep(pause_s)

    def _happen(self, engine: Engine) -> None:
        host, draw = self.machine.host, self.events_random
        alive = [process for process in host.processes.values() if process.alive]
        told = draw.random() < 0.5  # events are hints; half of them are lost
        self.events += 1
        match draw.choice(HAPPENINGS):
            case "die" if alive:
                host.die(draw.choice(alive))
            case "off" if alive:
                process = draw.choice(alive)
                host.power_off(process)
                if told:
                    engine.notify_vmm_exit(process.vm_uid)
            case "storage" if host.stord.sessions:
                vm_id = draw.choice(sorted(host.stord.sessions))
                host.lose_storage(vm_id)
                if told:
                    engine.notify_storage_event(
                        StorageEvent(
                            kind="backend_lost", vm_id=vm_id, crash_class=CrashClass.RESET_VM
                        )
                    )
            case "cling" if alive:
                draw.choice(alive).clings = draw.choice((1, 3))
            case "full" if host.stord.volumes:
                uid = draw.choice(sorted(host.stord.volumes))
                host.stord.volumes[uid].full = not host.stord.volumes[uid].full
                if told:
                    engine.notify_storage_event(StorageEvent(kind="space", volume_id=uid))
            case "restart" if host.stord.sessions:
                vm_id = draw.choice(sorted(host.stord.sessions))
                session = host.stord.sessions[vm_id]
                session.restarting_until = host.now() + draw.choice((0.5, 5.0, 10.0))
                if told:
                    engine.notify_storage_event(StorageEvent(kind="backend_lost", vm_id=vm_id))
            case "stord" | "nwd" as name:
                daemon = host.stord if name == "stord" else host.nwd
                daemon.down_until = host.now() + draw.choice((1.0, 10.0, 40.0))
            case "gate":
                self.machine.gate.open = not self.machine.gate.open
            case _:
                self.events -= 1


async def _until_it_works(act: object) -> None:
    while True:
        try:
            await act()  # type: ignore[operator]
            return
        except ChvError:
            await anyio.sleep(0.1)
        except BaseExceptionGroup as group:
            if is_kill(group):
                raise
            await anyio.sleep(0.1)


def _paused(tables: Tables) -> list[str]:
    """Return the VMs that were asked to stand."""
    vms = tables.of_kind("VirtualMachine")
    return [o.resource.metadata.name for o in vms if o.facts is not None and o.facts.paused]


def _size(seed: int) -> tuple[int, int]:
    """Return how many requests there are, and how many kills at most."""
    if seed < SMALL_FROM or seed % FULL_EACH == 0:
        return REQUESTS, KILLS_MAX
    return SMALL[seed % len(SMALL)]


def _leaves(error: BaseException) -> list[str]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in _leaves(each)]
    return [repr(error)]


def run(seed: int) -> Result:
    """Run the schedule of a seed."""
    return Schedule(seed).run()
