"""What `chv events` asks for and prints, and how it goes on when the agent ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from chv.cli import connect
from chv.cli.commands import events, logs
from chv.cli.last_events import last_events, print_events
from chv.cli.parser import build_parser
from chv.common.errors import ChvError, FailedPrecondition, InvalidArgument, Unavailable
from chv.common.wire import agent
from chv.common.wire.agent_events import Event, EventChunk, EventsEnd, WatchEvents
from chv.common.wire.types import Done


def chunk(*seqs: int, last: int = 0) -> EventChunk:
    found = [
        Event(seq=n, at="t", reason="Started", kind="VirtualMachine", namespace="default",
              name="web", message="a\nb")
        for n in seqs
    ]  # fmt: skip
    return EventChunk(last_seq=last or seqs[-1], log="l0", events=found)


class Agent:
    """Plays lives of an agent: chunks, then how it ended."""

    def __init__(self, *lives: tuple[list[EventChunk], ChvError | None]) -> None:
        self.asked: list[Any] = []
        self._lives = list(lives)

    def stream(self, method: Any, request: Any, show: Callable[[Any], None]) -> Any:
        del method
        self.asked.append(request)
        chunks, error = self._lives.pop(0)
        for each in chunks:
            show(each)
        if error is not None:
            raise error
        return EventsEnd(last_seq=0, oldest_seq=1, log="l0")


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    def use(found: Any) -> None:
        @contextmanager
        def client(explicit: str | None) -> Iterator[Any]:
            yield found

        monkeypatch.setattr(connect, "client", client)

    monkeypatch.setattr(events, "RETRY_S", 0.0)
    return use


def run(*words: str) -> int:
    return events.events(build_parser().parse_args(["events", *words]))


def test_filters_are_asked_for(serve: Callable[[Any], None]) -> None:
    played = Agent(([], None), ([], None), ([], None))
    serve(played)
    run("vm/web", "--type", "Warning", "--after", "7", "--operation", "op-1")
    run("node")
    run("daemon/nwd")
    first, node, daemon = played.asked
    assert first == WatchEvents(
        after_seq=7, kind="VirtualMachine", namespace="default", name="web", type="Warning",
        operation_id="op-1",
    )  # fmt: skip
    assert node == WatchEvents(kind="Node")
    assert daemon == WatchEvents(kind="Daemon", name="nwd")


def test_who_follows_goes_on_after_the_last_number_when_the_agent_is_back(
    serve: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    gone = Unavailable("the agent closed the connection")
    played = Agent(
        ([chunk(1, 2), chunk(3, last=9)], gone), ([], gone), ([chunk(10, last=10)], None)
    )
    serve(played)
    assert run("--follow", "--json", "--since", "2026-01-01T00:00:00Z") == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["seq"] for line in out.splitlines()] == [1, 2, 3, 10]
    assert json.loads(out.splitlines()[0])["operation_id"] == ""  # every field is there
    assert [(each.after_seq, each.log) for each in played.asked] == [
        (None, ""), (9, "l0"), (9, "l0"),
    ]  # fmt: skip
    assert played.asked[1].since == ""  # the number says it by now
    assert err.count("waiting for the agent") == 1
    assert "going on after event 9" in err


def test_what_cannot_be_gone_on_from_ends_it(serve: Callable[[Any], None]) -> None:
    serve(Agent(([chunk(1)], FailedPrecondition("events 2 to 8 are not kept any more"))))
    with pytest.raises(FailedPrecondition):
        run("--follow")
    serve(Agent(([], Unavailable("no node"))))
    with pytest.raises(Unavailable):  # there is no agent to begin with
        run("--follow")
    with pytest.raises(InvalidArgument):
        run("--after", "-1")


def test_an_event_is_one_line(
    serve: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    serve(Agent(([chunk(12)], None)))
    run()
    assert capsys.readouterr().out == (
        "12     t  Normal   VirtualMachine/default/web  Started  a b\n"
    )


def test_the_last_events_of_an_object(capsys: pytest.CaptureFixture[str]) -> None:
    played: Any = Agent(([chunk(4, 5)], None))
    found = last_events(played, "VirtualMachine", "default", "web")
    assert [event.seq for event in found] == [4, 5]
    print_events([])
    assert capsys.readouterr().out == ""


def test_lines_of_an_operation_come_from_all_daemons_by_their_time() -> None:
    texts = {
        "daemon/agent": '{"time":"1","operation_id":"op-1"}\n{"time":"4","operation_id":"op-1"}\n',
        "daemon/stord": '{"time":"3","operation_id":"op-1"}\n{"time":"2","operation_id":"op-2"}\n',
        "daemon/nwd": 'no JSON\n{"time":"2","x":1,"operation_id":"op-1"}\n',
    }

    class Logs:
        def stream(self, method: Any, request: Any, show: Callable[[Any], None]) -> Done:
            del method
            text = texts[request.target]
            for start in range(0, len(text), 7):  # lines are cut anywhere
                show(agent.LogChunk(text=text[start : start + 7]))
            return Done()

    played: Any = Logs()
    lines = logs.of_operation(played, "op-1", "")
    assert [json.loads(line)["time"] for line in lines] == ["1", "2", "3", "4"]
