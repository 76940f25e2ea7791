"""The node's state machine: the table is total and closed, readiness is recomputed."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chv.agent.node import (
    LADDER,
    TABLE,
    IllegalTransition,
    Node,
    NodeEvent,
    NodeState,
    Predicate,
    highest,
    next_state,
)
from chv.agent.node_gate import NodeGate
from chv.agent.node_record import Hold, NodeIntent, NodeRecord
from chv.common.errors import FailedPrecondition


class StillClock:
    """A wall clock that stands."""

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC)

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


def state_of(node: Node) -> NodeState:
    """Read anew: a type checker would believe the state that an earlier assertion saw."""
    return node.state


def ready_node() -> Node:
    node = Node(StillClock())
    node.bootstrap()
    for predicate in Predicate:
        node.observe(predicate, holds=True, reason="Test")
    return node


def test_table_names_every_state_and_leads_nowhere_else() -> None:
    assert set(TABLE) == set(NodeState)
    targets = {target for row in TABLE.values() for target in row.values() if target is not None}
    assert targets <= set(NodeState)


def test_unlisted_pair_raises() -> None:
    listed = {(state, event) for state, row in TABLE.items() for event in row}
    for pair in set(itertools.product(NodeState, NodeEvent)) - listed:
        with pytest.raises(IllegalTransition):
            next_state(*pair, frozenset())


# The design's table, said once more in other words: target None is "recomputed".
LISTED = """
Discovered: bootstrap>Bootstrapping, lost>Discovered, back>Discovered
Bootstrapping: passed>HostReady, failed>Failed
HostReady: stord>StorageReady, lost>Degraded
StorageReady: nwd>NetworkReady, lost>Degraded
NetworkReady: adopted>TenantReady, lost>Degraded
TenantReady: lost>Degraded, drain>Draining
Degraded: lost>Degraded, back>?, drain>Draining
Draining: drained>Maintenance, cancelled>?, lost>Draining, back>Draining
Maintenance: resume>Bootstrapping, lost>Maintenance, back>Maintenance
Failed: reset>Bootstrapping, lost>Failed, back>Failed
"""
SHORT = {
    "bootstrap": NodeEvent.BOOTSTRAP,
    "passed": NodeEvent.CHECKS_PASSED,
    "failed": NodeEvent.CHECKS_FAILED,
    "stord": NodeEvent.STORD_READY,
    "nwd": NodeEvent.NWD_READY,
    "adopted": NodeEvent.ADOPTED,
    "lost": NodeEvent.PREDICATE_LOST,
    "back": NodeEvent.PREDICATE_BACK,
    "drain": NodeEvent.DRAIN,
    "drained": NodeEvent.DRAINED,
    "cancelled": NodeEvent.DRAIN_CANCELLED,
    "resume": NodeEvent.RESUME,
    "reset": NodeEvent.RESET,
}


def test_table_is_the_one_of_the_design_in_every_pair_of_state_and_event() -> None:
    wanted: dict[NodeState, dict[NodeEvent, NodeState | None]] = {}
    for line in LISTED.strip().splitlines():
        state, _, pairs = line.partition(": ")
        row = (pair.split(">") for pair in pairs.split(", "))
        wanted[NodeState(state)] = {
            SHORT[event]: None if target == "?" else NodeState(target) for event, target in row
        } | {NodeEvent.FATAL: NodeState.FAILED}
    assert wanted == TABLE


@pytest.mark.parametrize("state", list(NodeState))
def test_fatal_leads_to_failed_from_everywhere(state: NodeState) -> None:
    assert next_state(state, NodeEvent.FATAL, frozenset()) is NodeState.FAILED


def test_node_climbs_to_tenant_ready_whatever_the_order_of_facts() -> None:
    for order in itertools.permutations(Predicate):
        node = Node(StillClock())
        node.bootstrap()
        for predicate in order:
            assert state_of(node) is not NodeState.TENANT_READY
            node.observe(predicate, holds=True, reason="Test")
        assert state_of(node) is NodeState.TENANT_READY


@pytest.mark.parametrize("predicate", list(Predicate))
def test_each_lost_predicate_degrades_and_its_return_restores(predicate: Predicate) -> None:
    node = ready_node()
    node.observe(predicate, holds=False, reason="Gone")
    assert state_of(node) is NodeState.DEGRADED
    node.observe(predicate, holds=True, reason="Back")
    assert state_of(node) is NodeState.TENANT_READY


def test_degraded_node_recovers_to_the_highest_state_that_holds() -> None:
    node = ready_node()
    node.observe(Predicate.NWD, holds=False, reason="Gone")
    node.observe(Predicate.STORD, holds=False, reason="Gone")
    node.observe(Predicate.STORD, holds=True, reason="Back")
    assert state_of(node) is NodeState.STORAGE_READY
    node.observe(Predicate.NWD, holds=True, reason="Back")
    assert state_of(node) is NodeState.TENANT_READY


def test_failed_host_check_fails_the_bootstrap_and_names_the_reason() -> None:
    node = Node(StillClock())
    node.bootstrap()
    node.observe(Predicate.HOST, holds=False, reason="ChecksFailed", message="no /dev/net/tun")
    assert state_of(node) is NodeState.FAILED
    assert "no /dev/net/tun" in node.transitions[-1]


def test_failed_node_stays_failed_until_reset_and_then_recomputes() -> None:
    node = ready_node()
    node.fatal("stord: restart intensity")
    node.observe(Predicate.STORD, holds=False, reason="Gone")
    assert state_of(node) is NodeState.FAILED
    node.observe(Predicate.STORD, holds=True, reason="Back")
    node.reset()
    assert state_of(node) is NodeState.TENANT_READY


def test_reset_is_refused_outside_of_failed() -> None:
    with pytest.raises(FailedPrecondition, match="TenantReady"):
        ready_node().reset()


def test_degraded_refuses_creation_and_allows_stopping() -> None:
    node = ready_node()
    node.observe(Predicate.NWD, holds=False, reason="Gone")
    with pytest.raises(FailedPrecondition, match="NetworkReady"):
        NodeGate(node).check("start")
    NodeGate(node).check("stop")


def test_failed_refuses_everything_and_names_the_way_out() -> None:
    node = ready_node()
    node.fatal("test")
    with pytest.raises(FailedPrecondition) as caught:
        NodeGate(node).check("stop")
    assert "chv node reset" in caught.value.hint


# --- what an operator wants, which is durable


def record(intent: NodeIntent) -> NodeRecord:
    return NodeRecord(intent=intent, hold=Hold(requester="ann", reason="fans"))


@pytest.mark.parametrize(
    ("intent", "state"),
    [(NodeIntent.DRAIN, NodeState.DRAINING), (NodeIntent.MAINTAIN, NodeState.MAINTENANCE)],
)
def test_agent_that_finds_it_recorded_begins_there(intent: NodeIntent, state: NodeState) -> None:
    node = Node(StillClock())
    NodeGate(node).follow(record(intent))
    assert state_of(node) is NodeState.DISCOVERED
    node.bootstrap()
    assert state_of(node) is state
    assert "ann: fans" in node.transitions[-1]
    for predicate in Predicate:
        node.observe(predicate, holds=True, reason="Test")
    assert state_of(node) is state


def test_reset_of_a_node_in_maintenance_leads_back_to_it_and_starts_nothing() -> None:
    seen: list[bool] = []
    node = Node(StillClock(), lambda state: seen.append(node.serves))
    gate = NodeGate(node)
    gate.follow(record(NodeIntent.MAINTAIN))
    node.bootstrap()
    for predicate in Predicate:
        node.observe(predicate, holds=True, reason="Test")
    node.fatal("nwd: restart intensity")
    node.reset()
    assert state_of(node) is NodeState.MAINTENANCE
    assert seen and not any(seen)


def test_resumed_node_serves_only_after_its_host_was_checked_again() -> None:
    node = ready_node()
    gate = NodeGate(node)
    gate.follow(record(NodeIntent.MAINTAIN))
    gate.follow(NodeRecord())
    assert state_of(node) is NodeState.BOOTSTRAPPING
    node.observe(Predicate.HOST, holds=True, reason="ChecksPassed")
    assert state_of(node) is NodeState.TENANT_READY


def test_resumed_node_whose_host_fails_its_checks_is_failed() -> None:
    node = ready_node()
    gate = NodeGate(node)
    gate.follow(record(NodeIntent.MAINTAIN))
    gate.follow(NodeRecord())
    node.observe(Predicate.HOST, holds=False, reason="ChecksFailed")
    assert state_of(node) is NodeState.FAILED


def test_recorded_drain_can_be_taken_back_while_the_node_comes_up() -> None:
    node = Node(StillClock())
    node.bootstrap()
    NodeGate(node).follow(record(NodeIntent.DRAIN))
    NodeGate(node).allow(NodeEvent.DRAIN_CANCELLED)
    with pytest.raises(FailedPrecondition):
        NodeGate(node).allow(NodeEvent.DRAIN)


WISH = st.sampled_from(list(NodeIntent))
FACT = st.tuples(st.sampled_from(list(Predicate)), st.booleans())
MOVES = st.lists(st.one_of(WISH, FACT, st.sampled_from(["fatal", "reset"])), max_size=40)


@given(MOVES)
def test_node_serves_never_while_it_is_held_and_always_ends_where_it_is_wanted(
    moves: list[NodeIntent | tuple[Predicate, bool] | str],
) -> None:
    """Every event in every state that it reaches; a pair that is not listed would raise."""
    node = Node(StillClock())
    gate = NodeGate(node)
    node.bootstrap()
    node.observe(Predicate.HOST, holds=True, reason="Test")
    for move in moves:
        match move:
            case NodeIntent():
                if not (move is NodeIntent.DRAIN and node.state is NodeState.MAINTENANCE):
                    gate.follow(record(move))
            case (Predicate() as predicate, bool(holds)):
                node.observe(predicate, holds=holds, reason="Test")
            case "fatal":
                node.fatal("test")
            case "reset" if node.state is NodeState.FAILED:
                node.reset()
        assert node.intent is NodeIntent.SERVE or not node.serves
        assert gate.starts_allowed() == node.serves
        if node.intent is NodeIntent.SERVE:
            assert node.state not in (NodeState.DRAINING, NodeState.MAINTENANCE)
    if node.state is NodeState.FAILED:
        node.reset()
    for predicate in Predicate:
        node.observe(predicate, holds=True, reason="Test")
    wanted = {
        NodeIntent.SERVE: NodeState.TENANT_READY,
        NodeIntent.DRAIN: NodeState.DRAINING,
        NodeIntent.MAINTAIN: NodeState.MAINTENANCE,
    }
    assert state_of(node) is wanted[node.intent]


@given(st.lists(st.tuples(st.sampled_from(list(Predicate)), st.booleans()), max_size=30))
def test_tenant_ready_if_and_only_if_every_predicate_holds(
    facts: list[tuple[Predicate, bool]],
) -> None:
    node = Node(StillClock())
    node.bootstrap()
    node.observe(Predicate.HOST, holds=True, reason="Test")
    for predicate, holds in facts:
        node.observe(predicate, holds=holds, reason="Test")
        assert (state_of(node) is NodeState.TENANT_READY) == (node.held == frozenset(Predicate))


@given(st.frozensets(st.sampled_from(list(Predicate))))
def test_highest_state_needs_no_predicate_that_is_missing(held: frozenset[Predicate]) -> None:
    state = highest(held)
    for rung, needed in LADDER:
        if rung is state:
            assert held.issuperset(needed)
