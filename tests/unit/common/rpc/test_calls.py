"""Calls through a real socket: typed both ways, errors kept, many at once, cancelled safely."""

from __future__ import annotations

import logging
import os

import anyio
import anyio.lowlevel
import msgspec
import pytest

from chv.common.errors import (
    ChvError,
    Internal,
    InUse,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from chv.common.rpc import FRAME_BYTES_MAX, Client, Method, connect
from tests.helpers import wait_until
from tests.unit.common.rpc.sample_api import (
    DEEP,
    FAIL,
    GET,
    HANG,
    ME,
    Nested,
    Ping,
    Pong,
    running,
)


async def test_result_comes_back_typed() -> None:
    async with running() as sample, connect(sample.path) as client:
        assert await client.call(GET, Ping(n=1, text="ä\n\x00")) == Pong(n=2, text="ä\n\x00")


async def test_handler_learns_the_caller_from_the_kernel() -> None:
    async with running() as sample, connect(sample.path) as client:
        assert await client.call(ME, Ping()) == Pong(n=os.getpid(), text=str(os.getuid()))


async def test_error_keeps_its_class_text_and_members() -> None:
    async with running() as sample, connect(sample.path) as client:
        with pytest.raises(InUse, match="disk is attached") as caught:
            await client.call(FAIL, Ping())
        assert caught.value.resource == "vol-1"


async def test_error_leaves_the_connect_block_as_itself() -> None:
    async with running() as sample:
        with pytest.raises(InUse):
            async with connect(sample.path) as client:
                await client.call(FAIL, Ping())


async def test_error_from_a_task_group_of_the_handler_is_unwrapped() -> None:
    async with running() as sample, connect(sample.path) as client:
        sample.service.error = ExceptionGroup("g", [ExceptionGroup("h", [NotFound("gone")])])
        with pytest.raises(NotFound, match="gone"):
            await client.call(FAIL, Ping())


@pytest.mark.parametrize(
    "bug",
    [
        RuntimeError("secret /etc/x"),
        TimeoutError("secret"),
        AssertionError("secret"),
        ExceptionGroup("g", [NotFound("secret"), KeyError("secret")]),
    ],
)
async def test_unexpected_exception_is_logged_once_and_told_to_nobody(
    bug: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    async with running() as sample, connect(sample.path) as client:
        sample.service.error = bug
        with caplog.at_level(logging.ERROR), pytest.raises(Internal) as caught:
            await client.call(FAIL, Ping())
        assert "secret" not in str(caught.value)
        assert [record.message for record in caplog.records] == ["rpc.handler_failed"]
        assert "secret" in caplog.text
        assert (await client.call(GET, Ping(n=1))).n == 2


async def test_handler_that_returns_another_type_is_a_bug_of_ours() -> None:
    async with running() as sample, connect(sample.path) as client:
        sample.server._dispatcher.entries["Get"].handler = sample.server._dispatcher.admit  # type: ignore[assignment]
        with pytest.raises(Internal):
            await client.call(GET, Ping())


async def test_unknown_method_is_unsupported() -> None:
    async with running() as sample, connect(sample.path) as client:
        with pytest.raises(Unsupported, match="'Nope'"):
            await client.call(Method("Nope", Ping, Pong), Ping())


async def test_wrong_params_are_refused_with_the_path() -> None:
    class Loose(msgspec.Struct):
        inner: list[dict[str, str]]

    async with running() as sample, connect(sample.path) as client:
        with pytest.raises(InvalidArgument) as caught:
            await client.call(Method("Deep", Loose, Pong), Loose([{"n": "1"}]))
        assert caught.value.field == "inner[0].n"
        assert (await client.call(DEEP, Nested(inner=[Ping()]))).n == 1


async def test_reply_that_does_not_fit_the_type_is_internal() -> None:
    class Other(msgspec.Struct):
        missing: int

    async with running() as sample, connect(sample.path) as client:
        with pytest.raises(Internal, match="reply to Get"):
            await client.call(Method("Get", Ping, Other, mutating=False), Ping())
        assert (await client.call(GET, Ping())).n == 1


async def test_params_over_the_limit_never_leave() -> None:
    async with running() as sample, connect(sample.path) as client:
        with pytest.raises(InvalidArgument, match="over the limit"):
            await client.call(GET, Ping(text="x" * FRAME_BYTES_MAX))
        assert (await client.call(GET, Ping(n=1))).n == 2


async def test_reply_over_the_limit_is_an_error_of_that_call_alone() -> None:
    async with running() as sample, connect(sample.path) as client:
        sample.service.reply_text = "x" * FRAME_BYTES_MAX
        with pytest.raises(Internal):
            await client.call(GET, Ping())
        sample.service.reply_text = ""
        assert (await client.call(GET, Ping(n=1))).n == 2


async def test_two_hundred_calls_at_once_each_get_their_own_answer() -> None:
    answers: dict[int, int] = {}

    async def ask(client: Client, n: int) -> None:
        answers[n] = (await client.call(GET, Ping(n=n, text="x" * (n * 100)))).n

    async with (
        running() as sample,
        connect(sample.path) as client,
        anyio.create_task_group() as tasks,
    ):
        for n in range(200):
            tasks.start_soon(ask, client, n)
        await wait_until(lambda: len(answers) == 200)
    assert answers == {n: n + 1 for n in range(200)}


async def test_cancelled_calls_leave_the_connection_in_order() -> None:
    async with running() as sample, connect(sample.path) as client:
        for n in range(300):
            with anyio.move_on_after(0.0002 * (n % 5)):
                await client.call(GET, Ping(n=n, text="x" * 30_000))
        assert (await client.call(GET, Ping(n=7))).n == 8
        assert not client._waiters


async def test_caller_cancelled_in_the_middle_of_a_frame_does_not_tear_it() -> None:
    """The server reads nothing until the frame is half out and its sender gone."""
    async with running() as sample, connect(sample.path) as client:
        big = Ping(n=1, text="x" * (FRAME_BYTES_MAX - 1000))
        with anyio.CancelScope() as scope:
            scope.cancel()
            await client.call(GET, big)
        with anyio.move_on_after(0):
            await client.call(GET, big)
        assert client._channel._backlog
        assert (await client.call(GET, Ping(n=41))).n == 42


async def test_two_thousand_cancelled_calls_leave_nothing_running() -> None:
    async with running() as sample, connect(sample.path) as client:
        for _ in range(20):
            async with anyio.create_task_group() as tasks:
                for _ in range(100):
                    tasks.start_soon(client.call, HANG, Ping())
                await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
        await wait_until(lambda: sample.service.hanging == 0)
        assert not client._waiters
        assert (await client.call(GET, Ping(n=1))).n == 2


async def test_nobody_there_is_unavailable(tmp_path: os.PathLike[str]) -> None:
    with pytest.raises(Unavailable, match="cannot connect"):
        async with connect(f"{os.fspath(tmp_path)}/none"):
            pass


async def test_server_of_another_uid_is_not_trusted() -> None:
    async with running() as sample:
        with pytest.raises(PermissionDenied, match=f"served by uid {os.getuid()}, expected"):
            async with connect(sample.path, peer_uids=frozenset({os.getuid() + 1})):
                pass
        async with connect(sample.path, peer_uids=frozenset({os.getuid()})) as client:
            assert (await client.call(GET, Ping())).n == 1


async def test_path_that_no_socket_can_have_is_named() -> None:
    with pytest.raises(ChvError, match="longer than 107 bytes"):
        async with connect("/tmp/" + "x" * 120):
            pass
