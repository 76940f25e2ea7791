"""Planted bugs of the node's drain, of moves, consoles and histories; see `mutants`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any
from unittest.mock import patch

from chv.agent import ledger
from chv.agent.draining import NodeDesk
from chv.agent.node_gate import NodeGate
from chv.agent.records import Change, PutObject
from chv.agent.vm import desired, plan, reconciler
from chv.agent.vm.steps import AttachConsoleStep
from chv.agent.volume import move
from tests.sim.world import Machine


@contextmanager
def a_drained_node_lets_vms_run() -> Iterator[None]:
    """Neither the plan nor the gate asks whether the node is held."""
    with ExitStack() as patches:
        patches.enter_context(patch.object(desired, "_held", lambda tables, stored: ""))
        patches.enter_context(patch.object(NodeGate, "starts_allowed", lambda self: True))
        yield


@contextmanager
def maintenance_begins_while_vms_live() -> Iterator[None]:
    """A drain does not wait for the VMs."""
    with patch.object(NodeDesk, "_left", lambda self: []):
        yield


@contextmanager
def a_copy_begins_while_the_guest_runs() -> Iterator[None]:
    """Nobody lets the vCPUs stand for the moment in which a mirror begins."""

    @asynccontextmanager
    async def standing(context: Any, vm_uid: str) -> AsyncIterator[None]:
        yield

    with patch.object(move, "standing", standing):
        yield


@contextmanager
def a_generation_leaves_no_history() -> Iterator[None]:
    """What is wanted changes and nobody writes down what was wanted before."""
    with patch.object(ledger, "with_history", lambda tables, changes, moment: changes):
        yield


@contextmanager
def a_console_is_not_missed() -> Iterator[None]:
    """A VM whose serial line nobody holds is as wanted."""

    def planner(wanted: Any, seen: Any) -> list[Any]:
        return [s for s in plan.plan(wanted, seen) if not isinstance(s, AttachConsoleStep)]

    with patch.object(reconciler, "plan", planner):
        yield


@contextmanager
def one_commit_is_lost() -> Iterator[None]:
    """The store acknowledges one transaction of objects that it has not kept: the canary."""
    real, lost = Machine.commit, set[str]()

    def commit(self: Machine, changes: tuple[Change, ...]) -> None:
        if not lost and any(isinstance(each, PutObject) for each in changes):
            lost.add("once")
            return
        real(self, changes)

    with patch.object(Machine, "commit", commit):
        yield


NODE_MUTANTS = (
    a_drained_node_lets_vms_run,
    maintenance_begins_while_vms_live,
    a_copy_begins_while_the_guest_runs,
    a_generation_leaves_no_history,
    a_console_is_not_missed,
)
