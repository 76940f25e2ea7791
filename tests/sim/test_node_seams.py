"""A drain that ends in Maintenance, the way back, and a cancelled drain: a fault at every seam.

While the node is held no VMM is intended, and in Maintenance none lives: the machine's store sees
to that at each commit.
"""

from __future__ import annotations

import os

import anyio
import pytest

from chv.agent.node_record import NodeIntent
from chv.common.errors import ChvError
from chv.common.wire.agent_node import ActOnNode, NodeVerb
from tests.sim.bench import Bench
from tests.sim.test_every_seam import KINDS, STRIDE, Life
from tests.sim.verdict import fail_with

NODE_STRIDE = STRIDE if "CHV_LONG" in os.environ else 2 * STRIDE


class NodeLife(Life):
    """What an operator does to a node with a VM that is wanted to run."""

    stages = ("create", "drain", "resume", "hesitate", "delete")

    async def _wish(self, bench: Bench, verb: NodeVerb, *reached: NodeIntent) -> None:
        """Ask until it is recorded: a reply may be lost, and then it is refused the next time."""
        for _ in range(6):
            try:
                await bench.engine.node.act(ActOnNode(verb=verb, requester="ann", reason="test"))
            except ChvError:
                await anyio.sleep(1)
            if self.machine.store.tables.node.intent in reached:
                return
        raise AssertionError(f"{verb} is not recorded")

    async def _drain(self, bench: Bench) -> None:
        await self._wish(bench, NodeVerb.DRAIN, NodeIntent.DRAIN, NodeIntent.MAINTAIN)
        with anyio.fail_after(300):
            while self.machine.store.tables.node.intent is not NodeIntent.MAINTAIN:  # noqa: ASYNC110
                await anyio.sleep(0.5)
        assert bench.process() is None
        assert str(bench.get("VirtualMachine", "web").spec.run_strategy) == "RerunOnFailure"

    async def _resume(self, bench: Bench) -> None:
        await self._wish(bench, NodeVerb.RESUME, NodeIntent.SERVE)
        await self._idle(bench)
        assert bench.process() is not None

    async def _hesitate(self, bench: Bench) -> None:
        await self._wish(bench, NodeVerb.DRAIN, NodeIntent.DRAIN, NodeIntent.MAINTAIN)
        drained = self.machine.store.tables.node.intent is NodeIntent.MAINTAIN
        back = NodeVerb.RESUME if drained else NodeVerb.CANCEL_DRAIN
        await self._wish(bench, back, NodeIntent.SERVE)
        await self._idle(bench)
        assert bench.process() is not None


def test_without_faults_the_node_comes_back_and_leaves_nothing() -> None:
    assert not NodeLife({}).run()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_at_every_single_seam_is_survived(kind: str) -> None:
    undisturbed = NodeLife({})
    undisturbed.run()
    found = []
    first = 4 * KINDS.index(kind) % NODE_STRIDE
    for number in range(first, undisturbed.machine.chaos.calls, NODE_STRIDE):
        found += [f"{kind} at {number}: {problem}" for problem in NodeLife({number: kind}).run()]
    fail_with(found)
