"""One VM's whole life, with a kill or an error at every single seam, before and after it.

Every call to the store, stord, nwd, VMM, images and seeds is a seam. After the fault a new
agent (or the same one) has to bring the life to its end, with every invariant kept.
"""

from __future__ import annotations

import os
import random

import anyio
import pytest

from chv.agent.engine import Engine
from chv.common import virtual_time
from chv.common.errors import ChvError, NotFound
from tests.sim.bench import Bench, everything, volume
from tests.sim.chaos import Chaos, is_kill
from tests.sim.checks import problems
from tests.sim.client import Client
from tests.sim.verdict import fail_with
from tests.sim.world import Machine

STAGES = ("create", "restart", "replace", "storage", "stop", "start", "delete")
DELETED = (
    ("VirtualMachine", "web"),
    ("Volume", "data"),
    ("Volume", "more"),
    ("Network", "net"),
    ("Image", "tiny"),
)
DISKS = [{"name": "data", "volume": "data"}, {"name": "more", "volume": "more"}]
SEAMS_MIN = 150
# Every seam in long runs, each n-th in short ones. Dying before a seam is nearly dying after the
# one before, so that the kinds begin at seams of their own.
STRIDE = int(os.environ.get("CHV_SIM_STRIDE", "1" if "CHV_LONG" in os.environ else "9"))
KINDS = ("kill_after", "kill_before", "fail_before", "fail_after")


class Life:
    """The scripted life; what is done is remembered over the lives of agents."""

    stages: tuple[str, ...] = STAGES
    deleted: tuple[tuple[str, str], ...] = DELETED

    def __init__(self, plan: dict[int, str]) -> None:
        self.machine = Machine(1, Chaos(random.Random(1), plan=plan))
        self.client = Client(random.Random(1), 0)
        self.done: list[str] = []
        self.spans: dict[str, tuple[int, int]] = {}  # of each stage: its first call, and the next's
        self.lives = 0

    def run(self) -> list[str]:
        """Return what is wrong at the end."""
        while self.lives < 5:
            self.lives += 1
            self.machine.host.exits = type(self.machine.host.exits)()
            try:
                virtual_time.run(self._life)
                return problems(self.machine, self.client) + self._leftovers()
            except BaseException as error:  # noqa: ASYNC103  a kill is one
                if not is_kill(error):
                    raise
        return ["the agent does not get through a life"]

    async def _life(self) -> None:
        machine = self.machine
        engine = Engine(machine.agent_store(), machine.world())
        bench = Bench(machine, engine)
        try:
            await self._retried(engine.load)
            await self._retried(engine.recover)
            async with anyio.create_task_group() as group:
                await group.start(engine.run)
                for stage in self.stages[len(self.done) :]:
                    first, _ = self.spans.setdefault(stage, (machine.chaos.calls, 0))
                    await getattr(self, f"_{stage}")(bench)
                    self.spans[stage] = (first, machine.chaos.calls)
                    self.done.append(stage)
                group.cancel_scope.cancel()
            assert not engine.bugs()
        finally:
            machine.clock.offset_s += anyio.current_time()

    async def _create(self, bench: Bench) -> None:
        objects = [*everything(disks=DISKS), volume("more")]
        await self._retried(lambda: bench.apply(*objects, idempotency_key="create"))
        await bench.until("VMMRunning", timeout_s=600)
        await self._idle(bench)

    async def _restart(self, bench: Bench) -> None:
        await self._retried(lambda: bench.act("restart", idempotency_key="restart"))
        await self._idle(bench)

    async def _replace(self, bench: Bench) -> None:
        await self._retried(lambda: bench.act("restart_storage", idempotency_key="replace"))
        await self._idle(bench)
        (session,) = self.machine.host.stord.sessions.values()
        assert (len(session.restarts), session.losses) == (1, 0)

    async def _storage(self, bench: Bench) -> None:
        uid = bench.engine.vm_uid("web", "default")
        self.machine.host.lose_storage(uid)
        self.done.append("storage")  # it happens once
        await self._idle(bench)
        self.done.pop()

    async def _stop(self, bench: Bench) -> None:
        await self._retried(lambda: bench.act("stop", idempotency_key="stop"))
        await self._idle(bench)
        assert bench.process() is None

    async def _start(self, bench: Bench) -> None:
        await self._retried(lambda: bench.act("start", idempotency_key="start"))
        await self._idle(bench)
        assert bench.process() is not None

    async def _delete(self, bench: Bench) -> None:
        for kind, name in self.deleted:
            try:
                await self._retried(lambda kind=kind, name=name: bench.delete(kind, name))
                await bench.until("deleted", name, kind, timeout_s=600)
            except NotFound:
                continue  # deleted in an earlier life, or meanwhile

    async def _idle(self, bench: Bench) -> None:
        """Wait until no operation is under way and the VM is as wanted."""
        with anyio.fail_after(900):
            while self.machine.store.tables.active or problems(  # noqa: ASYNC110
                self.machine, self.client
            ):
                await anyio.sleep(1)

    @staticmethod
    async def _retried(act: object) -> None:
        for _ in range(5):
            try:
                await act()  # type: ignore[operator]
                return
            except NotFound:
                raise
            except ChvError:
                await anyio.sleep(1)
        raise AssertionError("five times refused")

    def _leftovers(self) -> list[str]:
        """I4: of a whole life nothing is left."""
        host, tables = self.machine.host, self.machine.store.tables
        left = {
            "objects": tables.objects,
            "workers": tables.workers,
            "volumes": host.stord.volumes,
            "sessions": host.stord.sessions,
            "networks": host.nwd.networks,
            "nics": host.nwd.nics,
            "seeds": host.seeds,
            "directories": host.dirs,
            "consoles": host.consoles,
            "remains": host.remains,
            "processes": [p for p in host.processes.values() if p.alive],
        }
        return [f"I4: {what} left: {things}" for what, things in left.items() if things]


def test_a_whole_life_without_faults_leaves_nothing_and_passes_many_seams() -> None:
    life = Life({})
    assert not life.run()
    assert life.machine.chaos.calls >= SEAMS_MIN


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_every_single_seam_is_survived(kind: str) -> None:
    undisturbed = Life({})
    undisturbed.run()
    found = []
    first = 2 * KINDS.index(kind) % STRIDE
    for number in range(first, undisturbed.machine.chaos.calls, STRIDE):
        life = Life({number: kind})
        found += [f"{kind} at {number}: {problem}" for problem in life.run()]
    fail_with(found)


@pytest.mark.slow
def test_a_second_kill_during_recovery_is_survived() -> None:
    undisturbed = Life({})
    undisturbed.run()
    generator = random.Random(7)
    found = []
    for number in range(0, undisturbed.machine.chaos.calls, 2 * STRIDE):
        second = number + 1 + generator.randrange(12)
        plan = {number: "kill_after", second: generator.choice(["kill_before", "kill_after"])}
        found += [f"{plan}: {problem}" for problem in Life(plan).run()]
    fail_with(found)
