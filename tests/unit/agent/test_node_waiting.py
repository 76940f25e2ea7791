"""Waiting for a condition of the node: by type and state, early refusals, slips of the pen."""

from __future__ import annotations

from datetime import UTC, datetime
from unittest.mock import patch

import anyio
import pytest

from chv.agent.node import Node, NodeState, Predicate
from chv.agent.node_record import NodeIntent
from chv.agent.node_waiting import TYPES, NodeWaiting, check
from chv.common.clock import SystemClock
from chv.common.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from chv.common.wire.agent import NodeCondition
from chv.common.wire.agent_waiting import WaitNode
from tests.sim.virtual import simulated


def ready() -> Node:
    node = Node(SystemClock())
    node.bootstrap()
    for predicate in Predicate:
        node.observe(predicate, holds=True, reason="test")
    assert node.state is NodeState.TENANT_READY
    return node


def waiting(node: Node, *, paused: bool = False) -> NodeWaiting:
    def upstream() -> list[NodeCondition]:
        return [NodeCondition(type="UpstreamConnected", status="True", reason="Embedded")]

    return NodeWaiting(node, lambda: paused, upstream)


def asked(condition: str, status: str = "True", timeout_s: float = 10.0) -> WaitNode:
    return WaitNode(condition=condition, status=status, timeout_s=timeout_s)


@simulated
async def test_what_holds_is_answered_at_once_with_all_conditions() -> None:
    desk = waiting(ready())
    for type_ in TYPES:
        status = "False" if type_ == "SchedulingPaused" else "True"
        reply = await desk.wait(asked(type_, status))
        assert reply.state == "TenantReady"
        assert {each.type for each in reply.conditions} == set(TYPES)
    await desk.wait(asked("state=TenantReady"))


@simulated
async def test_a_loss_and_its_end_are_waited_for() -> None:
    node = ready()
    desk = waiting(node)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.wait, asked("StorageReady", "False"))
        tasks.start_soon(desk.wait, asked("state=Degraded"))
        await anyio.sleep(1)
        node.observe(Predicate.STORD, holds=False, reason="NotAnswering")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.wait, asked("TenantReady"))
        await anyio.sleep(1)
        node.observe(Predicate.STORD, holds=True, reason="Answering")


@simulated
async def test_a_wait_that_ends_says_how_it_is_instead() -> None:
    node = ready()
    node.observe(Predicate.NWD, holds=False, reason="NotAnswering", message="it hangs")
    with pytest.raises(DeadlineExceeded, match=r"NetworkReady is False \(NotAnswering: it hangs\)"):
        await waiting(node).wait(asked("NetworkReady", timeout_s=2.0))
    with pytest.raises(DeadlineExceeded, match="the node is Degraded, not TenantReady after 2 s"):
        await waiting(node).wait(asked("state=TenantReady", timeout_s=2.0))


@simulated
async def test_what_needs_a_person_fails_at_once() -> None:
    node = ready()
    node.follow(NodeIntent.MAINTAIN, "by ann: a new disk")
    with pytest.raises(FailedPrecondition, match="Maintenance: by ann") as caught:
        await waiting(node).wait(asked("TenantReady", timeout_s=3600.0))
    assert caught.value.hint == "chv node resume"
    failed = ready()
    failed.fatal("nwd: too often")
    with pytest.raises(FailedPrecondition) as caught:
        await waiting(failed).wait(asked("state=TenantReady", timeout_s=3600.0))
    assert caught.value.hint == "chv node reset"
    await waiting(failed).wait(asked("TenantReady", "False"))


@pytest.mark.parametrize(
    ("condition", "hint"),
    [
        ("tenantready", "TenantReady, HostReady"),
        ("state=Ready", "TenantReady, Degraded"),
        ("state=NAME", "Discovered"),
        ("phase=TenantReady", "UpstreamAgrees, state=NAME"),
        ("Ready", "AdoptionDone, SchedulingPaused"),
    ],
)
def test_nobody_waits_for_what_a_node_never_shows(condition: str, hint: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(condition)
    assert hint in caught.value.hint


def test_a_condition_of_the_node_says_when_it_was_seen_last() -> None:
    node = ready()
    first = {each.type: each.seen_at for each in node.conditions()}
    assert all(first.values())
    with patch.object(SystemClock, "now", return_value=datetime(2100, 1, 1, tzinfo=UTC)):
        node.confirm(Predicate.STORD)
    shown = {each.type: each for each in node.conditions()}
    assert shown["StorageReady"].seen_at.startswith("2100-01-01")
    assert shown["StorageReady"].since < "2100"
    assert shown["NetworkReady"].seen_at == first["NetworkReady"]
