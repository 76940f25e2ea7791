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
        node.require_create("start")
    node.require_alive("stop")


def test_failed_refuses_everything_and_names_the_way_out() -> None:
    node = ready_node()
    node.fatal("test")
    with pytest.raises(FailedPrecondition) as caught:
        node.require_alive("stop")
    assert "chv node reset" in caught.value.hint


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
