"""What a caller is told when the reply does not come: known undone, or unknown."""

from __future__ import annotations

import socket
from pathlib import Path

import anyio
import anyio.abc
import pytest

from chv.common.errors import DeadlineExceeded, InvalidArgument, OutcomeUnknown, Unavailable
from chv.common.rpc import Client, Method, connect
from chv.common.rpc import channel as channel_module
from tests.helpers import wait_until
from tests.unit.common.rpc.sample_api import (
    GET,
    HANG,
    HANG_SET,
    SET,
    Ping,
    Pong,
    Raw,
    Service,
    build,
    peer_that_answers,
    running,
    socket_directory,
)


async def test_connection_lost_under_a_mutation_is_outcome_unknown() -> None:
    async with peer_that_answers(b"") as path, connect(path) as client:
        with pytest.raises(OutcomeUnknown, match="Set: the peer closed"):
            await client.call(SET, Ping())


async def test_connection_lost_under_a_read_is_unavailable() -> None:
    async with peer_that_answers(b"") as path, connect(path) as client:
        with pytest.raises(Unavailable, match="Get: the peer closed"):
            await client.call(GET, Ping())


async def test_mutation_on_a_connection_known_to_be_lost_is_unavailable() -> None:
    async with peer_that_answers(b"") as path, connect(path) as client:
        with pytest.raises(Unavailable):
            await client.call(GET, Ping())
        with pytest.raises(Unavailable):
            await client.call(SET, Ping())
        assert client.lost


@pytest.mark.parametrize(
    "reply",
    [
        b"nonsense\n",
        b"[]\n",
        b"{}\n",
        b'{"jsonrpc":"2.0","id":1,"result":{"n":1},"fds":2}\n',
        b"x" * (2 << 20),
        b'{"jsonrpc":"2.0","id":1,"resu',
    ],
)
async def test_reply_that_cannot_be_read_is_a_lost_reply(reply: bytes) -> None:
    async with peer_that_answers(reply) as path, connect(path) as client:
        with pytest.raises(OutcomeUnknown):
            await client.call(SET, Ping())


async def test_reply_to_nobody_is_dropped() -> None:
    replies = b'{"id":99,"result":{}}\n{"id":"1","result":{}}\n{"id":1,"result":{"n":5}}\n'
    async with peer_that_answers(replies) as path, connect(path) as client:
        assert await client.call(SET, Ping()) == Pong(n=5)


async def test_own_deadline_of_a_mutation_is_outcome_unknown_and_of_a_read_is_deadline() -> None:
    async with running() as sample, connect(sample.path) as client:
        with pytest.raises(OutcomeUnknown, match="HangSet"):
            await client.call(HANG_SET, Ping(), timeout_s=0.05)
        with pytest.raises(DeadlineExceeded, match="Hang"):
            await client.call(HANG, Ping(), timeout_s=0.05)
        assert (await client.call(GET, Ping(n=1))).n == 2


async def test_server_stops_the_work_at_the_deadline_that_the_caller_sent() -> None:
    async with running() as sample, connect(sample.path) as client:
        with pytest.raises(OutcomeUnknown):
            await client.call(HANG_SET, Ping(), timeout_s=0.05)
        await wait_until(lambda: sample.service.cut_short == 1)
        assert sample.service.hanging == 0


async def test_server_is_sent_what_an_enclosing_deadline_leaves() -> None:
    async with running() as sample, connect(sample.path) as client:
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.05):
                await client.call(HANG_SET, Ping())
        await wait_until(lambda: sample.service.cut_short == 1)


@pytest.mark.parametrize(
    ("method", "code"), [("HangSet", "OUTCOME_UNKNOWN"), ("Hang", "DEADLINE_EXCEEDED")]
)
async def test_server_says_what_its_own_deadline_means(method: str, code: str) -> None:
    async with running() as sample:
        with Raw(sample.path) as raw:
            await raw.ask(jsonrpc="2.0", id=1, method=method, params={}, deadline_s=0.05)
            assert (await raw.line())["error"]["data"]["code"] == code


async def test_method_limit_holds_whatever_the_caller_asks_for() -> None:
    quick = Method("Hang", Ping, Pong, timeout_s=0.05, mutating=False)
    async with running() as sample, connect(sample.path) as client:
        sample.server._dispatcher.entries["Hang"].method = quick
        with pytest.raises(DeadlineExceeded, match=r"not done within 0\.05 s"):
            await client.call(HANG, Ping(), timeout_s=20)


async def test_mutation_that_only_waited_for_a_slot_was_not_applied() -> None:
    async with running(calls_max=1) as sample:
        with Raw(sample.path) as raw:
            await raw.ask(jsonrpc="2.0", id=1, method="Hang")
            await wait_until(lambda: sample.service.hanging == 1)
            await raw.ask(jsonrpc="2.0", id=2, method="Set", params={}, deadline_s=0.05)
            reply = await raw.line()
            assert (reply["id"], reply["error"]["data"]["code"]) == (2, "DEADLINE_EXCEEDED")


async def test_no_time_left_sends_nothing() -> None:
    async with running() as sample, connect(sample.path) as client:
        for method in (HANG, HANG_SET):
            with pytest.raises((DeadlineExceeded, OutcomeUnknown)):
                await client.call(method, Ping(), timeout_s=0)
        with pytest.raises(InvalidArgument):
            await client.call(SET, Ping(text="x" * (2 << 20)))
        assert (await client.call(GET, Ping(n=1))).n == 2


async def test_server_that_goes_fails_what_is_in_flight() -> None:
    service = Service()
    server = build(service)
    outcomes: list[type[Exception]] = []

    async def ask(client: Client, method: Method[Ping, Pong]) -> None:
        try:
            await client.call(method, Ping())
        except (OutcomeUnknown, Unavailable) as error:
            outcomes.append(type(error))

    serving = anyio.CancelScope()

    async def serve(path: Path, *, task_status: anyio.abc.TaskStatus[None]) -> None:  # noqa: ASYNC128
        with serving:
            await server.serve(path, task_status=task_status)

    with socket_directory() as directory:
        async with anyio.create_task_group() as tasks:
            await tasks.start(serve, directory / "s")
            async with connect(directory / "s") as client, anyio.create_task_group() as calls:
                calls.start_soon(ask, client, HANG_SET)
                calls.start_soon(ask, client, HANG)
                await wait_until(lambda: service.hanging == 2)
                serving.cancel()
                await wait_until(lambda: len(outcomes) == 2, timeout_s=1)
    assert set(outcomes) == {OutcomeUnknown, Unavailable}
    assert service.hanging == 0


async def test_server_that_reads_nothing_holds_no_caller_beyond_its_deadline() -> None:
    """What went out in part may be applied; what waited behind it was not."""
    with socket_directory() as directory:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(directory / "s"))
        listener.listen()
        with listener:
            async with connect(directory / "s") as client:
                with anyio.fail_after(2):
                    with pytest.raises(OutcomeUnknown, match="no reply within"):
                        await client.call(SET, Ping(text="x" * 900_000), timeout_s=0.1)
                    with pytest.raises(DeadlineExceeded, match="no reply within"):
                        await client.call(SET, Ping(), timeout_s=0.1)


async def test_client_gives_up_a_server_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "SEND_TIMEOUT_S", 0.1)
    with socket_directory() as directory:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(directory / "s"))
        listener.listen()
        with listener:
            async with connect(directory / "s") as client:
                with anyio.fail_after(2), pytest.raises(OutcomeUnknown, match=r"read for 0\.1 s"):
                    await client.call(SET, Ping(text="x" * 900_000))
                with pytest.raises(Unavailable, match=r"read for 0\.1 s"):
                    await client.call(SET, Ping())
