"""`Daemons`: what becomes of a daemon that answers otherwise, late, or not at all."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from chv.agent import daemons as module
from chv.agent.daemons import DaemonEvents, Daemons
from chv.common import virtual_time
from chv.common.clock import SystemClock
from chv.common.errors import Conflict, DeadlineExceeded, FailedPrecondition, Unavailable
from chv.common.layout import Layout
from chv.common.wire.types import HELLO, HelloReply, HelloRequest


class Child:
    """A process that ends when it is told."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended = anyio.Event()

    async def wait(self) -> int:
        await self.ended.wait()
        return 0

    async def terminate(self, *, grace_s: float) -> str:
        return "term"


@dataclass
class World:
    """Both daemons, as the tests want them. `answer` says what Hello and GetHealth do."""

    answer: Callable[[World, str, Any], Any]
    started: list[str] = field(default_factory=list)
    told: list[tuple[str, ...]] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)

    async def spawn(self, argv: tuple[str, ...], **_: Any) -> Child:
        name = argv[2].removeprefix("chv.")
        self.started.append(name)
        self.pids[name] = 100 + len(self.started)
        return Child(self.pids[name])

    @asynccontextmanager
    async def connect(self, path: Path) -> AsyncIterator[Any]:
        yield _Client(self, path.name.removesuffix(".sock"))

    def hello(self, name: str, *, state: str = "ready", protocol: int = 1) -> HelloReply:
        return HelloReply(
            daemon=name, version="9.1", protocol=protocol, instance="abcdef", boot_id="b",
            pid=self.pids[name], state=state,
        )  # fmt: skip

    def starts(self, name: str) -> int:
        return self.started.count(name)


@dataclass
class _Client:
    world: World
    name: str

    async def call(self, method: Any, _params: Any, timeout_s: float = 5.0) -> Any:
        await anyio.sleep(0.001)
        answer = self.world.answer(self.world, self.name, method)
        if answer is None:
            await anyio.sleep(timeout_s)
            raise DeadlineExceeded("no answer")
        return answer


def live(
    monkeypatch: pytest.MonkeyPatch, world: World, body: Callable[[Daemons], Any], for_s: float
) -> Daemons:
    """Supervise for some virtual time beside `body`."""
    monkeypatch.setattr(module, "spawn_child", world.spawn)
    monkeypatch.setattr(module, "connect", world.connect)
    events = DaemonEvents(
        lambda name: world.told.append(("ready", name)),
        lambda name, reason: world.told.append(("lost", name, reason)),
        lambda name, reason: world.told.append(("failed", name, reason)),
    )

    async def main() -> Daemons:
        daemons = Daemons(Path("/etc/chv.toml"), Layout("abcdef"), SystemClock(), events)
        with anyio.move_on_after(for_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(daemons.run)
                await body(daemons)
                await anyio.sleep_forever()
        return daemons

    return virtual_time.run(main)


async def nothing(_: Daemons) -> None:
    await anyio.lowlevel.checkpoint()


def healthy(world: World, name: str, method: Any) -> Any:
    return world.hello(name) if method is HELLO else object()


def test_a_daemon_that_speaks_another_protocol_is_given_up_on_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(world: World, name: str, method: Any) -> Any:
        if name == "stord" and method is HELLO:
            return world.hello(name, protocol=7)
        return healthy(world, name, method)

    world = World(answer)
    live(monkeypatch, world, nothing, 60.0)
    assert world.starts("stord") == 1
    (failed,) = [each for each in world.told if each[0] == "failed"]
    assert failed[1] == "stord"
    assert "chv-stord 9.1 speaks protocol 7, this one 1" in failed[2]


def test_a_daemon_that_refuses_our_version_is_given_up_on_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(world: World, name: str, method: Any) -> Any:
        if name == "nwd" and method is HELLO:
            raise FailedPrecondition("agent speaks protocol 1, this one 2")
        return healthy(world, name, method)

    world = World(answer)
    live(monkeypatch, world, nothing, 60.0)
    assert world.starts("nwd") == 1
    assert [each[:2] for each in world.told if each[0] == "failed"] == [("failed", "nwd")]


def test_a_daemon_that_re_reads_a_large_world_is_let_do_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(world: World, name: str, method: Any) -> Any:
        if method is HELLO and anyio.current_time() < 200:
            return world.hello(name, state="recovering")
        return healthy(world, name, method)

    world = World(answer)
    live(monkeypatch, world, nothing, 250.0)
    assert world.starts("nwd") == world.starts("stord") == 1
    assert sorted(world.told) == [("ready", "nwd"), ("ready", "stord")]


def test_a_daemon_that_is_silent_from_its_start_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answer(world: World, name: str, method: Any) -> Any:
        if name == "nwd" and world.starts("nwd") == 1:
            return None
        return healthy(world, name, method)

    world = World(answer)
    live(monkeypatch, world, nothing, 20.0)
    assert world.starts("nwd") == 2
    assert ("ready", "nwd") in world.told


def test_a_hung_daemon_is_told_before_it_is_replaced_and_a_late_answer_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent = {"stord": (20.0, 27.0), "nwd": (20.0, 200.0)}

    def answer(world: World, name: str, method: Any) -> Any:
        first, last = silent[name]
        if first <= anyio.current_time() < last and world.starts(name) == 1:
            return None
        return healthy(world, name, method)

    world = World(answer)
    live(monkeypatch, world, nothing, 60.0)
    assert (world.starts("stord"), world.starts("nwd")) == (1, 2)
    lost = [each for each in world.told if each[0] == "lost" and each[1] == "stord"]
    assert lost
    assert world.told.count(("ready", "stord")) == 2


def test_a_restart_on_purpose_tells_of_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(healthy)

    async def restart(daemons: Daemons) -> None:
        for _ in range(10):  # the intensity allows five in a minute
            await anyio.sleep(1)
            await daemons.restart("stord")

    daemons = live(monkeypatch, world, restart, 60.0)
    assert world.starts("stord") == 11
    assert {each[0] for each in world.told} == {"ready"}
    assert {each.restarts for each in daemons.statuses()} == {0}


def test_a_restart_that_does_not_come_back_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(world: World, name: str, method: Any) -> Any:
        if name == "stord" and method is HELLO and world.starts(name) == 2:
            return world.hello(name, state="recovering")
        return healthy(world, name, method)

    world = World(answer)

    async def restart(daemons: Daemons) -> None:
        await anyio.sleep(1)
        with pytest.raises(Unavailable):
            await daemons.restart("stord")
        with pytest.raises(Unavailable):
            await daemons.link("stord").call(HELLO, HelloRequest())

    live(monkeypatch, world, restart, 40.0)
    assert [each[:2] for each in world.told if each[0] == "lost"] == [("lost", "stord")]


def test_a_second_restart_and_one_of_a_daemon_that_is_not_up_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(healthy)
    caught: list[type[BaseException]] = []

    async def restart(daemons: Daemons) -> None:
        with pytest.raises(FailedPrecondition):
            await daemons.restart("nwd")
        await anyio.sleep(1)

        async def again() -> None:
            try:
                await daemons.restart("nwd")
            except (Conflict, FailedPrecondition) as error:
                caught.append(type(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(again)
            tasks.start_soon(again)

    live(monkeypatch, world, restart, 20.0)
    assert world.starts("nwd") == 2
    assert len(caught) == 1
