"""The monitor against a scripted QMP server: lost, late, refused and garbled answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import SocketStream

from chv.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    OutcomeUnknown,
    Unavailable,
)
from chv.vmm.qemu import qmp
from chv.vmm.qemu.qmp import Monitor, MonitorLost
from tests.helpers import wait_until

GREETING = {"QMP": {"version": {"qemu": {"major": 9, "minor": 1, "micro": 2}}, "capabilities": []}}
Request = dict[str, Any]
Answer = Callable[["Peer", Request], Awaitable[None]]


class Peer:
    """The server's end of one connection."""

    def __init__(self, stream: SocketStream) -> None:
        self.stream = stream

    async def say(self, message: object) -> None:
        await self.stream.send(msgspec.json.encode(message) + b"\n")

    async def reply(self, request: Request, result: object) -> None:
        await self.say({"return": result, "id": request.get("id")})


class Server:
    """Greets, negotiates, then hands every request to `answer`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.connections = 0

    async def handle(self, stream: SocketStream) -> None:
        self.connections += 1
        peer = Peer(stream)
        async with stream:
            await peer.say(GREETING)
            while True:
                try:
                    text = (await stream.receive()).decode()
                except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                    return
                while text.strip():  # the client ends no line: QMP is a stream of objects
                    request, end = json.JSONDecoder().raw_decode(text)
                    text = text[end:].lstrip()
                    await self._serve(peer, request)

    async def _serve(self, peer: Peer, request: Request) -> None:
        if request["execute"] == "qmp_capabilities":
            await peer.reply(request, {})
        else:
            await self.answer(peer, request)


@asynccontextmanager
async def served(path: Path, answer: Answer) -> AsyncIterator[tuple[Monitor, Server]]:
    server = Server(answer)
    monitor = Monitor(path)
    async with (
        await anyio.create_unix_listener(path) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, server.handle)
        yield monitor, server
        await monitor.close()
        group.cancel_scope.cancel()


@pytest.fixture(autouse=True)
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qmp, "COMMAND_S_MAX", 0.3)


async def hang_up(peer: Peer, request: Request) -> None:
    await peer.stream.aclose()


async def stay_silent(peer: Peer, request: Request) -> None:
    return


async def refuse(peer: Peer, request: Request) -> None:
    error = {"class": "GenericError", "desc": "not in this state"}
    await peer.say({"error": error, "id": request["id"]})


async def agree(peer: Peer, request: Request) -> None:
    await peer.reply(request, {"status": "running"})


async def test_an_answer_is_returned_and_the_connection_is_kept(tmp_path: Path) -> None:
    async with served(tmp_path / "qmp", agree) as (monitor, server):
        for _ in range(3):
            assert await monitor.ask("query-status") == {"status": "running"}
        assert server.connections == 1
        assert monitor.version() == "9.1.2"


async def test_hanging_up_on_a_read_is_unavailable(tmp_path: Path) -> None:
    async with served(tmp_path / "qmp", hang_up) as (monitor, _):
        with pytest.raises(Unavailable):
            await monitor.ask("query-status")


async def test_hanging_up_on_a_change_leaves_its_outcome_unknown(tmp_path: Path) -> None:
    async with served(tmp_path / "qmp", hang_up) as (monitor, _):
        with pytest.raises(MonitorLost):
            await monitor.tell("stop")


async def test_a_lost_connection_is_made_anew_by_the_next_call(tmp_path: Path) -> None:
    async with served(tmp_path / "qmp", hang_up) as (monitor, server):
        with pytest.raises(Unavailable):
            await monitor.ask("query-status")
        server.answer = agree
        assert await monitor.ask("query-status") == {"status": "running"}
        assert server.connections == 2


async def test_a_late_answer_to_a_read_is_a_missed_deadline(tmp_path: Path) -> None:
    async with served(tmp_path / "qmp", stay_silent) as (monitor, _):
        with pytest.raises(DeadlineExceeded):
            await monitor.ask("query-status")


async def test_a_late_answer_to_a_change_leaves_its_outcome_unknown(tmp_path: Path) -> None:
    async with served(tmp_path / "qmp", stay_silent) as (monitor, _):
        with pytest.raises(OutcomeUnknown):
            await monitor.tell("stop")


async def test_a_change_that_waited_behind_a_hung_call_was_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def note(peer: Peer, request: Request) -> None:
        asked.append(request["execute"])

    async def ask(monitor: Monitor) -> None:
        with pytest.raises(DeadlineExceeded):
            await monitor.ask("query-status")

    async with (
        served(tmp_path / "qmp", note) as (monitor, _),
        anyio.create_task_group() as callers,
    ):
        callers.start_soon(ask, monitor)
        await wait_until(lambda: asked)
        monkeypatch.setattr(qmp, "COMMAND_S_MAX", 0.05)
        with pytest.raises(DeadlineExceeded):
            await monitor.tell("stop")
    assert asked == ["query-status"]


async def test_an_answer_that_comes_too_late_is_not_taken_for_the_next(tmp_path: Path) -> None:
    late: list[Request] = []

    async def first_late(peer: Peer, request: Request) -> None:
        if not late:
            late.append(request)
            return
        await peer.reply(late[0], {"status": "stale"})
        await peer.reply(request, {"status": "fresh"})

    async with served(tmp_path / "qmp", first_late) as (monitor, _):
        with pytest.raises(DeadlineExceeded):
            await monitor.ask("query-status")
        assert await monitor.ask("query-status") == {"status": "fresh"}


async def test_a_refusal_carries_the_words_of_qemu(tmp_path: Path) -> None:
    async with served(tmp_path / "qmp", refuse) as (monitor, _):
        with pytest.raises(FailedPrecondition, match="not in this state"):
            await monitor.tell("cont")


async def test_an_awaited_event_must_come_after_the_command(tmp_path: Path) -> None:
    async def event_after(peer: Peer, request: Request) -> None:
        await peer.reply(request, {})
        if request["execute"] == "system_reset":
            await peer.say({"event": "RESET", "data": {}, "timestamp": {}})

    async with served(tmp_path / "qmp", event_after) as (monitor, server):
        await monitor.tell_until("system_reset", "RESET")
        server.answer = agree
        with pytest.raises(OutcomeUnknown, match="RESET"):
            await monitor.tell_until("system_reset", "RESET")


async def test_the_reason_of_a_shutdown_is_remembered(tmp_path: Path) -> None:
    async def shut_down(peer: Peer, request: Request) -> None:
        data = {"guest": True, "reason": "guest-shutdown"}
        await peer.say({"event": "SHUTDOWN", "data": data, "timestamp": {}})
        await peer.reply(request, {"status": "shutdown"})

    async with served(tmp_path / "qmp", shut_down) as (monitor, _):
        await monitor.ask("query-status")
        assert monitor.shutdown_reason == "guest-shutdown"


async def test_a_peer_that_does_not_speak_qmp_is_unavailable(tmp_path: Path) -> None:
    async def babble(stream: SocketStream) -> None:
        async with stream:
            await stream.send(b"SSH-2.0-hello\n")

    path = tmp_path / "qmp"
    async with (
        await anyio.create_unix_listener(path) as listener,
        anyio.create_task_group() as group,
    ):
        group.start_soon(listener.serve, babble)
        with pytest.raises(Unavailable):
            await Monitor(path).ask("query-status")
        group.cancel_scope.cancel()


async def test_no_socket_is_unavailable_for_a_change_too(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        await Monitor(tmp_path / "qmp").tell("stop")
