"""The client of the guest agent against agents that answer well, late, wrongly or with malice."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import pytest

from chv.common.errors import FailedPrecondition, OutcomeUnknown, Unavailable
from chv.vmm.qemu import guest_agent

Say = Callable[[dict[str, object]], list[bytes] | None]


class Agent:
    """A guest agent: `say` may answer in its place; None lets it answer as the real one does."""

    def __init__(self, say: Say = lambda request: None) -> None:
        self.say = say
        self.frozen = False
        self.asked: list[str] = []

    def serve(self, listener: socket.socket) -> None:
        """Serve one connection after the other until the listener is shut down."""
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        buffer = b""
        while data := connection.recv(4096):
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                for answer in self.answer(line):
                    connection.sendall(answer)

    def answer(self, line: bytes) -> list[bytes]:
        request = json.loads(line.removeprefix(b"\xff"))
        command = request["execute"]
        self.asked.append(command)
        told = self.say(request)
        if told is not None:
            return told
        match command:
            case "guest-sync-delimited":
                return [b"\xff", reply(request["arguments"]["id"])]
            case "guest-fsfreeze-status":
                return [reply("frozen" if self.frozen else "thawed")]
            case "guest-fsfreeze-freeze" | "guest-fsfreeze-thaw":
                self.frozen = command.endswith("freeze")
                return [reply(1)]
        raise AssertionError(command)


def reply(value: object) -> bytes:
    return json.dumps({"return": value}).encode() + b"\n"


def only(command: str, answers: list[bytes]) -> Say:
    return lambda request: answers if request["execute"] == command else None


@contextmanager
def serving(agent: Agent, path: Path) -> Iterator[Path]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=agent.serve, args=(listener,))
        thread.start()
        try:
            yield path
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            assert not thread.is_alive()


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SYNC_S_MAX", "COMMAND_S_MAX", "FREEZE_S_MAX"):
        monkeypatch.setattr(guest_agent, name, 0.3)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.sock"


async def test_freeze_and_thaw_are_asked_for_once_and_read_back(path: Path) -> None:
    agent = Agent()
    with serving(agent, path):
        await guest_agent.ping(path)
        for _ in range(2):
            await guest_agent.freeze(path)
            assert await guest_agent.frozen(path)
        for _ in range(2):
            await guest_agent.thaw(path)
            assert not await guest_agent.frozen(path)
    changes = [name for name in agent.asked if name.endswith(("-freeze", "-thaw"))]
    assert changes == ["guest-fsfreeze-freeze", "guest-fsfreeze-thaw"]


async def test_answers_to_an_earlier_question_are_not_taken_for_ours(path: Path) -> None:
    def with_remains(request: dict[str, object]) -> list[bytes] | None:
        if request["execute"] != "guest-sync-delimited":
            return None
        arguments = request["arguments"]
        assert isinstance(arguments, dict)
        remains = [reply("frozen"), b"\xff" + reply(arguments["id"] + 1), b'{"return": "tru']
        return [*remains, b"\xff", reply(arguments["id"])]

    with serving(Agent(with_remains), path):
        assert not await guest_agent.frozen(path)


@pytest.mark.parametrize(
    "answers",
    [
        [],
        [b"no JSON\n"],
        [b'{"return": {}}\n'],
        [b"\xff" + reply("7")],
        [b"\xff" + b"[" * 50_000 + b"\n"],
        [b"x" * 100_000],
    ],
)
async def test_a_guest_that_answers_nonsense_is_not_there_and_nothing_was_asked(
    path: Path, answers: list[bytes]
) -> None:
    agent = Agent(only("guest-sync-delimited", answers))
    with serving(agent, path):
        for act in (guest_agent.ping, guest_agent.freeze, guest_agent.thaw):
            with anyio.fail_after(3), pytest.raises(Unavailable):
                await act(path)
    assert set(agent.asked) == {"guest-sync-delimited"}


async def test_nobody_listens(path: Path) -> None:
    with pytest.raises(Unavailable):
        await guest_agent.ping(path)


@pytest.mark.parametrize("answers", [[], [b"no JSON\n"], [b"x" * 100_000]])
@pytest.mark.parametrize("act", [guest_agent.freeze, guest_agent.thaw])
async def test_a_change_without_an_answer_is_in_doubt(
    path: Path, answers: list[bytes], act: Callable[[Path], Awaitable[None]]
) -> None:
    command = f"guest-fsfreeze-{act.__name__}"
    agent = Agent(only(command, answers))
    agent.frozen = act is guest_agent.thaw
    with serving(agent, path), anyio.fail_after(3), pytest.raises(OutcomeUnknown):
        await act(path)


async def test_a_guest_that_says_yes_and_does_not_is_found_out(path: Path) -> None:
    agent = Agent(only("guest-fsfreeze-freeze", [reply(1)]))
    with serving(agent, path), pytest.raises(OutcomeUnknown, match="not frozen"):
        await guest_agent.freeze(path)


async def test_a_refusal_is_shown_without_what_could_harm_a_terminal(path: Path) -> None:
    refusal = {"error": {"class": "GenericError", "desc": "no\x1b[2J " + "x" * 1000}}
    agent = Agent(only("guest-fsfreeze-freeze", [json.dumps(refusal).encode() + b"\n"]))
    with serving(agent, path), pytest.raises(FailedPrecondition) as caught:
        await guest_agent.freeze(path)
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < 300
