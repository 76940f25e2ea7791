"""`chv node`: what a drained node looks like, and what waiting for it says."""

from __future__ import annotations

import argparse
from typing import Any, cast

import pytest

from chv.cli import connect
from chv.cli.commands import node, node_verbs
from chv.cli.parser import build_parser
from chv.common.errors import DeadlineExceeded, FailedPrecondition
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire.agent import NodeStatusReply, Operation, OperationReply, OperationState
from chv.common.wire.agent_node import (
    ACT_ON_NODE,
    DrainedVm,
    DrainProgress,
    NodeHold,
    NodeVerb,
    NodeVerbReply,
)

HOLD = NodeHold(requester="cli:ann(uid=0)", reason="fans", since="2026-01-01T00:00:00Z")


def status(state: str = "Draining", **more: Any) -> NodeStatusReply:
    given: dict[str, Any] = {
        "name": "n",
        "instance": "i",
        "since": "",
        "version": "1",
        "pid": 1,
        "boot_id": "b",
    }
    return NodeStatusReply(state=state, run_dir="/r", state_dir="/s", **given, **more)


class FakeAgent:
    """An agent in one state, whose operation has ended in one way."""

    def __init__(self, state: str, ended: OperationState = OperationState.SUCCEEDED) -> None:
        self.state, self.ended = state, ended
        self.asked: list[Any] = []

    def __enter__(self) -> FakeAgent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, method: object, request: object, **_options: Any) -> object:
        if method is ACT_ON_NODE:
            self.asked.append(request)
            return NodeVerbReply(state="Draining", operation_id="op-1")
        if method.name == "GetNodeStatus":  # type: ignore[attr-defined]
            return status(self.state)
        operation = Operation(
            id="op-1", verb="drain", kind="Node", namespace="", name="node", uid="node",
            generation=0, requester="ann", state=self.ended, message="by bob",
        )  # fmt: skip
        return OperationReply(operation=operation)


def run(agent: FakeAgent, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(connect, "client", lambda socket: agent)
    arguments: argparse.Namespace = build_parser().parse_args(["node", *words])
    return int(getattr(node_verbs, arguments.handler.split(":")[1])(arguments))


@pytest.mark.parametrize(
    ("words", "verb"),
    [
        (("drain",), NodeVerb.DRAIN),
        (("drain", "--cancel", "--no-wait"), NodeVerb.CANCEL_DRAIN),
        (("maintenance", "--reason", "fans"), NodeVerb.MAINTENANCE),
        (("resume", "--no-wait"), NodeVerb.RESUME),
        (("pause-scheduling", "--reason", "fans"), NodeVerb.PAUSE_SCHEDULING),
        (("resume-scheduling",), NodeVerb.RESUME_SCHEDULING),
    ],
)
def test_each_command_asks_for_its_verb(
    words: tuple[str, ...], verb: NodeVerb, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = FakeAgent("Maintenance")
    assert run(agent, monkeypatch, *words) == 0
    (asked,) = agent.asked
    assert asked.verb is verb
    assert asked.reason == ("fans" if "--reason" in words else "")


def test_drain_that_somebody_else_cancels_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = FakeAgent("TenantReady", OperationState.CANCELLED)
    with pytest.raises(FailedPrecondition, match="cancelled: by bob"):
        run(agent, monkeypatch, "drain")


def test_resumed_node_is_waited_for_until_it_serves_or_cannot() -> None:
    client = cast("BlockingClient", FakeAgent("TenantReady"))
    assert node_verbs._until_here(client, 1.0) == "TenantReady"
    with pytest.raises(FailedPrecondition, match="Failed"):
        node_verbs._until_here(cast("BlockingClient", FakeAgent("Failed")), 1.0)
    with pytest.raises(DeadlineExceeded, match="HostReady"):
        node_verbs._until_here(cast("BlockingClient", FakeAgent("HostReady")), 0.0)


def test_status_says_who_drains_how_many_are_left_and_which_one_blocks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocking = [DrainedVm(namespace="default", name="db", phase="Stopping", why="asked to go")]
    drain = DrainProgress(total=3, left=1, blocking=blocking)
    node._held(status(hold=HOLD, drain=drain, scheduling_paused=HOLD))
    out = capsys.readouterr().out
    assert "draining for" in out and "by cli:ann(uid=0): fans" in out
    assert "1 of 3 VMs left" in out
    assert "default/db  Stopping  asked to go" in out
    assert "scheduling paused for" in out
