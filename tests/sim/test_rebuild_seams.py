"""Rebuilds with a fault at every seam: the VM ends with a new root disk, and never has none.

At each commit the root volume of the VM is one that stord has. Nothing is left: neither a disk
that was to be the new one nor a former one that nobody keeps.
"""

from __future__ import annotations

import os

import pytest

from chv.agent.records import Change
from chv.common.wire.agent_rebuild import RebuildVm
from tests.sim.bench import Bench, everything, volume
from tests.sim.test_every_seam import DISKS, KINDS, STRIDE, Life
from tests.sim.verdict import fail_with

REBUILD_STRIDE = STRIDE if "CHV_LONG" in os.environ else 5 * STRIDE
FORMER = "data-before-rebuild"


class RebuildLife(Life):
    """A VM rebuilt while it runs, while it is stopped, and with its former disk kept."""

    stages = ("create", "rebuild", "stop", "halted", "start", "keep", "delete")
    deleted = (("VirtualMachine", "web"), ("Volume", FORMER), *Life.deleted[1:])

    def __init__(self, plan: dict[int, str]) -> None:
        super().__init__(plan)
        self.roots: dict[str, str] = {}  # at the beginning of each stage
        self.has_root = False
        self._commit = self.machine.commit
        self.machine.commit = self._watched  # type: ignore[method-assign]

    def _watched(self, changes: tuple[Change, ...]) -> None:
        self._commit(changes)
        made = self._root() in self.machine.host.stord.volumes
        vm = self.machine.store.tables.find("VirtualMachine", "default", "web")
        if self.has_root and not made and vm is not None:
            self.machine.violations.append("the VM has no root disk")
        self.has_root = made

    def _root(self) -> str:
        stored = self.machine.store.tables.find("Volume", "default", "data")
        return stored.uid if stored is not None else ""

    async def _create(self, bench: Bench) -> None:
        root = volume("data", source={"image": "tiny"})
        objects = [each for each in everything(disks=DISKS) if each["kind"] != "Volume"]
        await self._retried(
            lambda: bench.apply(*objects, root, volume("more"), idempotency_key="create")
        )
        await bench.until("VMMRunning", timeout_s=600)
        await self._idle(bench)

    async def _again(self, bench: Bench, stage: str, *, keep: bool = False) -> None:
        before = self.roots.setdefault(stage, self._root())
        request = RebuildVm(name="web", requester="test", keep_old=keep, idempotency_key=stage)
        await self._retried(lambda: bench.engine.rebuild(request))
        await self._idle(bench)
        assert self._root() != before
        assert not self._named("data-rebuild")

    def _named(self, name: str) -> bool:
        return self.machine.store.tables.find("Volume", "default", name) is not None

    async def _rebuild(self, bench: Bench) -> None:
        await self._again(bench, "rebuild")
        assert bench.process() is not None and not self._named(FORMER)

    async def _halted(self, bench: Bench) -> None:
        await self._again(bench, "halted")
        assert bench.process() is None and self._named(FORMER)

    async def _start(self, bench: Bench) -> None:
        await super()._start(bench)
        assert not self._named(FORMER)

    async def _keep(self, bench: Bench) -> None:
        await self._again(bench, "keep", keep=True)
        assert self.machine.store.tables.find("Volume", "default", FORMER) is not None
        assert self._uid(FORMER) == self.roots["keep"]

    def _uid(self, name: str) -> str:
        stored = self.machine.store.tables.find("Volume", "default", name)
        assert stored is not None
        return stored.uid


def test_without_faults_each_rebuild_gives_another_root_disk_and_leaves_nothing() -> None:
    assert not RebuildLife({}).run()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_every_single_seam_is_survived(kind: str) -> None:
    undisturbed = RebuildLife({})
    undisturbed.run()
    found = []
    first = 9 * KINDS.index(kind) % REBUILD_STRIDE
    for number in range(first, undisturbed.machine.chaos.calls, REBUILD_STRIDE):
        found += [f"{kind} at {number}: {problem}" for problem in RebuildLife({number: kind}).run()]
    fail_with(found)
