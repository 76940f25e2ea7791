"""What `chv history`, `diff`, `rollback` and `why` take and print."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from chv.cli import connect
from chv.cli.commands import history, why
from chv.cli.parser import build_parser
from chv.common.errors import InvalidArgument
from chv.common.wire import agent_history as wire
from chv.common.wire.agent_events import Event, EventChunk
from chv.common.wire.resource_base import Condition, ConditionStatus

SPECS = {1: {"memory": "1Gi", "cpus": 1}, 2: {"memory": "2Gi", "cpus": 1}}


class Agent:
    """Answers as the agent would."""

    def __init__(self, reply: Any = None) -> None:
        self.asked: list[Any] = []
        self._reply = reply

    def call(self, method: Any, request: Any) -> Any:
        self.asked.append(request)
        if method is not wire.GET_GENERATION:
            return self._reply
        number = request.generation or 2
        manifest = {"kind": "VirtualMachine", "metadata": {"name": "web"}, "spec": SPECS[number]}
        info = wire.GenerationInfo(generation=number, at="then", requester="bob")
        return wire.GenerationReply(
            generation=info, object=msgspec.Raw(msgspec.json.encode(manifest))
        )

    def stream(self, method: Any, request: Any, show: Callable[[Any], None]) -> None:
        self.asked.append(request)
        event = Event(seq=4, at="2026-01-01T00:00:00Z", reason="Crashed", message="it ended")
        show(EventChunk(last_seq=4, log="l", events=[event]))


def arguments(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(list(words))


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Agent:
    return served(monkeypatch, None)


def served(monkeypatch: pytest.MonkeyPatch, reply: Any) -> Agent:
    found = Agent(reply)

    @contextmanager
    def client(explicit: str | None) -> Any:
        yield found

    monkeypatch.setattr(connect, "client", client)
    return found


@pytest.mark.parametrize("text", ["web", "vm/", "vm/web@", "vm/web@x", "vm/web@0", "vm/web@-1"])
def test_what_is_no_generation_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        history.target(text)


def test_a_diff_is_unified_and_tells_by_its_exit_code(
    agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    assert history.diff(arguments("diff", "vm/web@1", "vm/web@2")) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "--- vm/web@1\tthen bob"
    assert "-  memory: 1Gi" in lines
    assert "+  memory: 2Gi" in lines
    assert history.diff(arguments("diff", "vm/web@2", "vm/web@2")) == 0
    assert capsys.readouterr().out == ""


def test_a_diff_with_one_generation_is_against_now(
    agent: Agent, capsys: pytest.CaptureFixture[str]
) -> None:
    assert history.diff(arguments("diff", "vm/web@1", "-o", "json")) == 1
    assert [request.generation for request in agent.asked] == [1, 0]
    assert msgspec.json.decode(capsys.readouterr().out) == [
        {"field": "spec.memory", "from": "1Gi", "to": "2Gi"}
    ]


def test_a_history_is_a_table_and_tells_of_others_of_the_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    info = wire.GenerationInfo(generation=4, requester="bob", verb="update", changed=["memory"])
    served(monkeypatch, wire.GenerationsReply(uid="u", generations=[info], others=["old"]))
    assert history.history(arguments("history", "vm/web")) == 0
    printed = capsys.readouterr()
    assert "memory" in printed.out.splitlines()[1]
    assert "old" in printed.err


def test_a_rollback_needs_an_object_without_a_generation(agent: Agent) -> None:
    with pytest.raises(InvalidArgument):
        history.rollback(arguments("rollback", "vm/web@3", "--to", "3"))


def test_why_is_one_line_where_all_is_well(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = wire.WhyReply(
        kind="VirtualMachine", namespace="default", name="web", uid="u", phase="Running",
        as_wanted=True, verdict="all is well",
    )  # fmt: skip
    asked = served(monkeypatch, reply)
    assert why.why(arguments("why", "web")) == 0
    assert capsys.readouterr().out == "all is well\n"
    assert asked.asked[0].kind == "VirtualMachine"


def test_why_shows_conditions_words_and_what_to_type(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Condition(
        type="VMMRunning", status=ConditionStatus.FALSE, reason="GivenUp", message="too often"
    )
    reply = wire.WhyReply(
        kind="VirtualMachine", namespace="default", name="web", uid="u", phase="Failed",
        as_wanted=False, verdict="vm/web is Failed", conditions=[bad], serial=["panic"],
        words=[wire.Words(source="vmm.log", lines=["no such file"])], fixes=["chv start web"],
        obstacles=[wire.Obstacle(kind="Volume", name="data", problem="it is Failed")],
    )  # fmt: skip
    served(monkeypatch, reply)
    assert why.why(arguments("why", "vm/web")) == 0
    printed = capsys.readouterr().out
    for text in ("too often", "panic", "no such file", "chv start web", "Volume/data", "it ended"):
        assert text in printed
