"""Connections to monitors: kept while they are in order, and several commands at once."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream

from chv.common.errors import DeadlineExceeded, NotFound, Unavailable
from chv.stord.qsd import monitor as monitor_module
from chv.stord.qsd.monitor import connect
from chv.stord.qsd.monitors import Monitors

GREETING: dict[str, Any] = {"QMP": {"version": {}, "capabilities": []}}
UID = os.getuid()


class Daemon:
    """Speaks QMP to one client at a time, as a storage daemon does."""

    def __init__(self) -> None:
        self.clients = 0
        self.asked: list[str] = []
        self.silent = False
        self.answers_after = 1  # of so many commands
        self._turn = anyio.Lock()

    async def serve(self, stream: SocketStream) -> None:
        async with self._turn, stream:
            self.clients += 1
            await self._send(stream, GREETING)
            with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await self._converse(stream)

    async def _converse(self, stream: SocketStream) -> None:
        text, waiting = "", list[dict[str, Any]]()
        while True:
            text += (await stream.receive()).decode()
            while text := text.lstrip():  # the client sends whole messages
                message, end = json.JSONDecoder().raw_decode(text)
                text = text[end:]
                waiting.append(message)
            if waiting[0]["execute"] == "qmp_capabilities":
                await self._send(stream, {"return": {}})
                waiting = []
            elif len(waiting) >= self.answers_after and not self.silent:
                self.asked += [message["execute"] for message in waiting]
                for message in waiting:
                    await self._send(stream, answer(message))
                waiting = []

    @staticmethod
    async def _send(stream: SocketStream, message: dict[str, Any]) -> None:
        await stream.send(json.dumps(message).encode() + b"\n")


def answer(message: dict[str, Any]) -> dict[str, Any]:
    if message["execute"].startswith("bad"):
        text = f"{message['execute']} not found"
        return {"error": {"class": "GenericError", "desc": text}, "id": message["id"]}
    return {"return": {}, "id": message["id"]}


@asynccontextmanager
async def daemon(path: Path) -> AsyncIterator[Daemon]:
    made = Daemon()
    async with (
        await anyio.create_unix_listener(path) as listener,
        anyio.create_task_group() as all_,
    ):
        all_.start_soon(listener.serve, made.serve)
        yield made
        all_.cancel_scope.cancel()


async def use(monitors: Monitors, path: Path) -> None:
    monitor = await monitors.take("vm", path, UID)
    try:
        await monitor.ping()
    finally:
        await monitors.give_back("vm", path, monitor)


async def test_commands_of_a_batch_are_all_sent_before_the_first_is_answered(
    tmp_path: Path,
) -> None:
    async with daemon(tmp_path / "m") as made:
        made.answers_after = 4
        monitor = await connect(tmp_path / "m", UID)

        answers = await monitor.batch(*((name, {}) for name in ("a", "bad1", "b", "bad2")))

        assert made.asked == ["a", "bad1", "b", "bad2"]
        assert [type(each) for each in answers] == [dict, NotFound] * 2
        assert monitor.usable
        await monitor.close()


async def test_one_connection_serves_one_piece_of_work_after_the_other(tmp_path: Path) -> None:
    monitors = Monitors()
    async with daemon(tmp_path / "m") as made:
        for _ in range(3):
            await use(monitors, tmp_path / "m")
        await monitors.close()

        assert made.clients == 1


async def test_the_next_incarnation_gets_a_connection_of_its_own(tmp_path: Path) -> None:
    monitors = Monitors()
    async with daemon(tmp_path / "one") as first, daemon(tmp_path / "two") as second:
        await use(monitors, tmp_path / "one")
        await use(monitors, tmp_path / "two")
        await monitors.close()

        assert (first.clients, second.clients) == (1, 1)


async def test_a_connection_with_an_open_question_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitors = Monitors()
    async with daemon(tmp_path / "m") as made:
        made.silent = True
        with monkeypatch.context() as patch:
            patch.setattr(monitor_module, "CALL_TIMEOUT_S", 0.1)
            with pytest.raises(DeadlineExceeded):
                await use(monitors, tmp_path / "m")
        made.silent = False

        await use(monitors, tmp_path / "m")

        assert made.clients == 2
        await monitors.close()


async def test_a_connection_whose_daemon_went_away_is_not_used_again(tmp_path: Path) -> None:
    monitors = Monitors()
    async with daemon(tmp_path / "m"):
        await use(monitors, tmp_path / "m")
    (tmp_path / "m").unlink()

    async with daemon(tmp_path / "m") as second:
        with contextlib.suppress(Unavailable):  # it may take a moment until that is noticed
            await use(monitors, tmp_path / "m")
        await use(monitors, tmp_path / "m")

        assert second.clients == 1
        await monitors.close()


async def test_whoever_waits_for_the_daemon_gets_it_from_the_one_before(tmp_path: Path) -> None:
    monitors = Monitors()
    async with daemon(tmp_path / "m") as made:
        held = await monitors.take("vm", tmp_path / "m", UID)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(use, monitors, tmp_path / "m")
            await anyio.wait_all_tasks_blocked()
            await monitors.give_back("vm", tmp_path / "m", held)

        assert made.clients == 2
        await monitors.close()


async def test_what_was_dropped_is_closed(tmp_path: Path) -> None:
    monitors = Monitors()
    async with daemon(tmp_path / "m") as made:
        await use(monitors, tmp_path / "m")
        await monitors.drop("vm")
        await monitors.drop("vm")
        await use(monitors, tmp_path / "m")

        assert made.clients == 2
        await monitors.close()


async def test_the_version_is_what_the_daemon_greets_with_and_nothing_where_it_says_nonsense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"qemu": {"major": 10, "minor": 0, "micro": 13}, "package": "Debian"}
    for number, told in enumerate(("10.0.13", "", "")):
        version = (said, {"qemu": {"major": "x"}}, {})[number]
        monkeypatch.setitem(GREETING["QMP"], "version", version)
        monitors, path = Monitors(), tmp_path / f"m{number}"
        async with daemon(path):
            monitor = await monitors.take("vm", path, UID)
            assert (monitor.version, monitors.versions["vm"]) == (told, told)
            await monitors.give_back("vm", path, monitor)
            await monitors.drop("vm")
            assert "vm" not in monitors.versions
