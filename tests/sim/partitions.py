"""Schedules of a node whose control plane comes and goes: for minutes, a week, or by the second.

Lives, faults and kills are those of `schedule`. Here the users are a control plane that wants
objects by generation, says old things again, and is cut off; and people on the spot, who try what
is forbidden as well. Long silences pass at once: the clock is set on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import anyio
import msgspec

from chv.agent.engine import Engine
from chv.agent.records import FINAL_STATES, Change, PutObject, PutOperation
from chv.agent.upstream.link import GRACE_S
from chv.agent.upstream.outbox import spec_of
from chv.agent.upstream.records import PutAssignment
from chv.common.errors import ChvError, FailedPrecondition
from chv.common.ids import Ids
from chv.common.wire import agent as api
from chv.common.wire.agent import Operation
from chv.common.wire.types import GENERATION_MAX
from chv.common.wire.upstream import Wanted
from tests.sim.bench import bare, image, volume
from tests.sim.chaos import TIMEOUT_S
from tests.sim.schedule import Result, Schedule
from tests.sim.upstream import Plane, PlaneUpstream
from tests.sim.world import Machine

ACTIONS = 24
VMS = 3
SILENCES_S = (60.0, 3_600.0, 7 * 86_400.0)
PAUSES_S = (0.1, 1.0, 6.0, 25.0)
# From the last word on: the grace, a commit under way that hangs, and a life without an instant.
CERTAIN_S = GRACE_S + TIMEOUT_S + 15.0
CONVERGE_S_MAX = 900.0
PLANE = "control plane"
STRATEGIES = ("Always", "RerunOnFailure", "Halted", "Manual")
VERBS = ("start", "stop", "stop", "restart", "reset", "pause", "resume")


class ManagedMachine(Machine):
    """A machine whose store sees what a node does while it is cut off."""

    def __init__(self, schedule: PartitionSchedule) -> None:
        super().__init__(schedule.seed, schedule.chaos)
        self.plane = Plane(now=self.clock.true_s)
        self.upstream = lambda chaos: PlaneUpstream(self.plane, chaos)
        self.outcomes: dict[str, Operation] = {}  # of what was assigned
        self.cut_off_commits = 0  # things that a node did while it knew

    @property
    def surely_cut_off(self) -> bool:
        """Tell whether every node must know by now that it is."""
        return self.plane.cut and self.clock.true_s() - self.plane.heard_s > CERTAIN_S

    def commit(self, changes: tuple[Change, ...]) -> None:
        assigned = set(self.store.tables.assignments)
        for change in changes:
            self._check_generation(change)
            if self.surely_cut_off:
                self.cut_off_commits += 1
                self._check_cut_off(change)
        self._check_override(changes)
        super().commit(changes)
        assigned |= set(self.store.tables.assignments)
        for change in changes:
            if isinstance(change, PutOperation) and change.operation.uid in assigned:
                self._note(change.operation)

    def _note(self, operation: Operation) -> None:
        if operation.state in FINAL_STATES:
            self.outcomes[operation.id] = operation

    def _check_generation(self, change: Change) -> None:
        """I2: what the plane wanted is applied in its order, and nothing that it never wanted."""
        if not isinstance(change, PutAssignment):
            return
        new = change.assignment
        known = self.store.tables.assignments.get(new.uid)
        if known is not None and new.generation < known.generation:
            self._violate(f"I2: {new.uid} goes back from {known.generation} to {new.generation}")
        if new.generation > self.plane.newest.get(new.uid, 0):
            self._violate(f"I2: {new.uid} has a generation that nobody wanted: {new.generation}")

    def _check_cut_off(self, change: Change) -> None:
        """I9: nothing new while cut off."""
        tables = self.store.tables
        if isinstance(change, PutAssignment):
            known = tables.assignments.get(change.assignment.uid)
            if known is None or known.generation < change.assignment.generation:
                self._violate(f"I9: desired state of {change.assignment.uid} taken while cut off")
        if isinstance(change, PutObject) and change.object.uid not in tables.objects:
            self._violate(f"I9: {change.object.title} is made while cut off")

    def _check_override(self, changes: Sequence[Change]) -> None:
        """What was stopped on the spot stays so until a newer generation."""
        tables = self.store.tables
        by_plane = {
            change.operation.uid
            for change in changes
            if isinstance(change, PutOperation) and change.operation.requester == PLANE
        }
        newer = {
            change.assignment.uid
            for change in changes
            if isinstance(change, PutAssignment)
            and change.assignment.generation
            > getattr(tables.assignments.get(change.assignment.uid), "generation", 0)
        }
        for change in changes:
            if not isinstance(change, PutObject) or change.object.uid not in by_plane - newer:
                continue
            known = tables.assignments.get(change.object.uid)
            if known is not None and known.override and spec_of(change.object) == known.spec:
                self._violate(f"an override of {change.object.title} is lost")


class Crowd:
    """The plane and the people, as a list of what they do and the position in it."""

    def __init__(self, machine: ManagedMachine, draw: random.Random) -> None:
        self._machine = machine
        self._plane = machine.plane
        self._draw = draw
        ids = Ids(draw.randrange(2**31))
        self._image, self._volume = ids.uid(), ids.uid()
        self._vms = [ids.uid() for _ in range(VMS)]
        self._ids = ids
        self.position = 0
        self.acknowledged: dict[str, int] = {}
        self.operations: set[str] = set()
        self.denied = 0  # since the node was cut off
        self._plane.wanted_as(self._image, image(), 1)
        self._plane.wanted_as(self._volume, volume("data"), 1)
        for number in range(VMS - 1):
            self._want_vm(number)

    async def run(self, engine: Engine) -> None:
        """Do what is left, in order."""
        while self.position < ACTIONS:
            await anyio.sleep(self._draw.choice(PAUSES_S))
            self.position += 1
            match self._draw.choice(
                ("want", "want", "want", "gone", "again", "cut", "cut", "heal", "flap")
                + ("act",) * 6
                + ("make", "delete")
            ):
                case "want":
                    self._want_vm(self._draw.randrange(VMS))
                case "gone":
                    self._let_go(self._draw.randrange(VMS))
                case "again":
                    self._say_again()
                case "cut":
                    await self._cut()
                case "heal":
                    self._plane.cut = False
                case "flap":
                    await self._flap()
                case "act":
                    await self._act(engine)
                case "make":
                    await self._make(engine)
                case "delete":
                    await self._delete(engine)

    # --- the plane

    def _want_vm(self, number: int) -> None:
        uid, name = self._vms[number], f"vm{number}"
        if uid in self._plane.gone or getattr(self._plane.wanted.get(uid), "deleting", False):
            if uid not in self._plane.gone:
                return
            uid = self._vms[number] = self._ids.uid()
        disks = [{"name": "data", "volume": "data"}] if number == 0 else []
        strategy = self._draw.choice(STRATEGIES)
        manifest = bare(name, disks=disks, runStrategy=strategy, cpus=self._draw.choice((1, 2)))
        self._plane.wanted_as(uid, manifest, self._newer(uid))

    def _newer(self, uid: str) -> int:
        newest = self._plane.newest.get(uid, 0)
        huge = self._draw.random() < 0.03 and newest < GENERATION_MAX - 1000
        return GENERATION_MAX - 1000 if huge else newest + self._draw.choice((1, 1, 7))

    def _let_go(self, number: int) -> None:
        wanted = self._plane.wanted.get(self._vms[number])
        if wanted is not None and not wanted.deleting:
            tree = msgspec.json.decode(wanted.object)
            self._plane.wanted_as(wanted.uid, tree, wanted.generation + 1, deleting=True)

    def _say_again(self) -> None:
        """Things that were true once, once more and in another order."""
        said = self._draw.sample(self._plane.said, min(4, len(self._plane.said)))
        for wanted in said:
            self._plane.tell(wanted)

    async def _cut(self) -> None:
        self._plane.cut = True
        silence_s = self._draw.choice(SILENCES_S)
        await anyio.sleep(min(silence_s, self._draw.choice((5.0, CERTAIN_S + 5.0))))
        if silence_s > CERTAIN_S and self._plane.cut:
            self._machine.clock.offset_s += silence_s

    async def _flap(self) -> None:
        for _ in range(6):
            self._plane.cut = not self._plane.cut
            await anyio.sleep(self._draw.choice((0.3, 2.0, 17.0)))

    # --- people on the spot

    async def _act(self, engine: Engine) -> None:
        name = f"vm{self._draw.randrange(VMS)}"
        verb = api.VmVerb(self._draw.choice(VERBS))
        before = self._machine.store.tables.find("VirtualMachine", "default", name)
        cut_off = self._machine.surely_cut_off
        if not await self._done(
            engine.act(api.ActOnVm(verb=verb, name=name, requester="sim", force=False))
        ):
            return
        known = self._machine.store.tables.assignments.get(before.uid) if before else None
        halted = known is not None and b'"runStrategy":"Halted"' in known.spec.encode()
        if cut_off and halted and verb in (api.VmVerb.START, api.VmVerb.RESTART):
            self._machine.violations.append(f"I9: {verb} of {name}, which is wanted Halted")

    async def _make(self, engine: Engine) -> None:
        raw = msgspec.Raw(msgspec.json.encode(image(f"own{self._draw.randrange(2)}")))
        await self._done(engine.apply(api.Apply(objects=[raw], requester="sim")))

    async def _delete(self, engine: Engine) -> None:
        number, force = self._draw.randrange(VMS), self._draw.random() < 0.3
        stored = self._machine.store.tables.find("VirtualMachine", "default", f"vm{number}")
        cut_off, deleting = self._machine.surely_cut_off, stored is not None and stored.deleting
        request = api.DeleteObject(
            kind="VirtualMachine",
            name=f"vm{number}",
            requester="sim",
            force=force,
            reason="because" if force else "",
        )
        if await self._done(engine.delete(request)) and cut_off and not (force or deleting):
            self._machine.violations.append(f"I9: vm{number} deleted while cut off")

    async def _done(self, asked: Any) -> bool:
        cut_off = self._machine.surely_cut_off
        try:
            await asked
        except FailedPrecondition as error:
            self.denied += cut_off and "control plane" in error.message
            return False
        except ChvError:
            return False
        return True


class PartitionSchedule(Schedule):
    """See the module."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.machine: ManagedMachine = ManagedMachine(self)
        self.crowd = Crowd(self.machine, random.Random(seed + 1))
        self.client = self.crowd  # type: ignore[assignment]

    async def _quiet(self, engine: Engine) -> None:
        """The plane is seen again, for good: all must come together."""
        self.machine.plane.cut = False
        self.chaos.quiet = True
        self.machine.gate.open = True
        with anyio.move_on_after(CONVERGE_S_MAX):
            while self._apart():  # noqa: ASYNC110
                await anyio.sleep(5.0)
        await super()._quiet(engine)

    def run(self) -> Result:
        """Run to the end; never raises for what the agent does wrong."""
        result = super().run()
        result.problems += self.machine.plane.problems
        result.problems += self._apart()
        return result

    def _apart(self) -> list[str]:
        """In what node and plane differ."""
        tables, plane = self.machine.store.tables, self.machine.plane
        found = [f"reports wait: {len(tables.outbox)}"] if tables.outbox else []
        for wanted in plane.wanted.values():
            found += self._apart_in(wanted)
        for operation in self.machine.outcomes.values():
            told = plane.outcomes.get(operation.id)
            if told is None or told.operation is None:
                found.append(f"I10: nobody was told of {operation.id} ({operation.verb})")
            elif told.operation.state is not operation.state:
                found.append(f"I10: {operation.id} was told otherwise")
        return found

    def _apart_in(self, wanted: Wanted) -> list[str]:
        tables, plane = self.machine.store.tables, self.machine.plane
        if wanted.deleting or wanted.uid in plane.gone:  # gone: deleted on the spot, by force
            return [f"I3: {wanted.uid} is not gone"] if wanted.uid in tables.objects else []
        known = tables.assignments.get(wanted.uid)
        if known is None or known.generation != wanted.generation:
            seen = known.generation if known is not None else 0
            return [f"I3: {wanted.uid} is wanted as {wanted.generation} and is {seen}"]
        told = plane.statuses.get(wanted.uid)
        if told is None or told.generation != wanted.generation:
            return [f"I3: {wanted.uid} is not shown as {wanted.generation}"]
        same = spec_of(tables.objects[wanted.uid]) == known.spec
        if not same and not (known.override and told.override):
            return [f"I3: {wanted.uid} is not as wanted, and nobody says why"]
        return []


def run(seed: int) -> Result:
    """Run the schedule of a seed."""
    return PartitionSchedule(seed).run()
