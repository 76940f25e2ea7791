"""Events: in order, before the result, and no longer than somebody listens."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from chv.common.errors import DeadlineExceeded, ResourceExhausted
from chv.common.rpc import Client, connect
from chv.common.rpc import client as client_module
from tests.helpers import wait_until
from tests.unit.common.rpc.sample_api import (
    GET,
    WATCH,
    Ping,
    Pong,
    Raw,
    Tick,
    peer_that_answers,
    running,
)


async def test_events_come_in_order_and_before_the_result() -> None:
    seen: list[Tick] = []
    async with running() as sample, connect(sample.path) as client:
        result = await client.stream(WATCH, Ping(n=5000), seen.append)
    assert result == Pong(n=5000)
    assert seen == [Tick(n=n) for n in range(5000)]


async def test_events_on_the_wire_name_their_call() -> None:
    async with running() as sample:
        with Raw(sample.path) as raw:
            await raw.ask(jsonrpc="2.0", id="w", method="Watch", params={"n": 1})
            event = await raw.line()
            assert event == {
                "jsonrpc": "2.0",
                "method": "Watch/event",
                "params": {"id": "w", "event": {"n": 0}},
            }
            assert (await raw.line())["id"] == "w"


async def test_other_calls_go_on_beside_a_stream() -> None:
    seen: list[Tick] = []
    async with (
        running(calls_max=1) as sample,
        connect(sample.path) as client,
        anyio.create_task_group() as tasks,
    ):
        for _ in range(5):
            tasks.start_soon(client.stream, WATCH, Ping(), seen.append)
        await wait_until(lambda: len(seen) == 5)
        assert (await client.call(GET, Ping(n=1))).n == 2
        tasks.cancel_scope.cancel()


async def test_caller_that_leaves_a_stream_ends_it_on_the_server() -> None:
    async with running() as sample, connect(sample.path) as client:
        with anyio.move_on_after(0.1):
            await client.stream(WATCH, Ping(), lambda _: None)
        await wait_until(lambda: sample.service.watching == 0)
        assert (await client.call(GET, Ping(n=1))).n == 2


async def test_stream_has_a_deadline_when_the_caller_wants_one() -> None:
    async with running() as sample, connect(sample.path) as client:
        with pytest.raises(DeadlineExceeded):
            await client.stream(WATCH, Ping(), lambda _: None, timeout_s=0.1)
        await wait_until(lambda: sample.service.watching == 0)


async def test_connection_that_ends_takes_its_streams_along() -> None:
    async with running() as sample:
        with Raw(sample.path) as raw:
            await raw.ask(jsonrpc="2.0", id=1, method="Watch")
            await wait_until(lambda: sample.service.watching == 1)
        await wait_until(lambda: sample.service.watching == 0)


async def test_exception_of_the_listener_reaches_the_caller_alone() -> None:
    def refuse(_: Tick) -> None:
        raise LookupError("not mine")

    async with running() as sample, connect(sample.path) as client:
        with pytest.raises(LookupError, match="not mine"):
            await client.stream(WATCH, Ping(), refuse)
        await wait_until(lambda: sample.service.watching == 0)
        assert (await client.call(GET, Ping(n=1))).n == 2


async def test_more_events_than_may_wait_fail_the_stream_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "EVENTS_MAX", 3)
    event = b'{"jsonrpc":"2.0","method":"Watch/event","params":{"id":1,"event":{"n":1}}}\n'
    reply = b'{"jsonrpc":"2.0","id":2,"result":{"n":7}}\n'

    async def watch(client: Client) -> None:
        with pytest.raises(ResourceExhausted, match="Watch: over 3 events"):
            await client.stream(WATCH, Ping(), lambda _: None)

    async with (
        peer_that_answers(event * 4 + reply) as path,
        connect(path) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(watch, client)
        await anyio.lowlevel.checkpoint()
        assert (await client.call(GET, Ping())).n == 7


async def test_cancel_of_a_stranger_is_ignored() -> None:
    async with running() as sample:
        with Raw(sample.path) as raw:
            for params in ({"id": 99}, {"id": [1]}, {"other": 1}):
                await raw.ask(jsonrpc="2.0", method="Cancel", params=params)
            await raw.ask(jsonrpc="2.0", id=1, method="Get")
            assert (await raw.line())["id"] == 1
