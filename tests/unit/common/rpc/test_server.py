"""The server's own rules: who may connect and call, how many, when, and on which socket."""

from __future__ import annotations

import os
import socket
import stat
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from chv.common.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    OwnershipConflict,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from chv.common.rpc import Server, connect
from chv.common.rpc import session as session_module
from chv.common.rpc.listener import listen_unix
from tests.helpers import wait_until
from tests.unit.common.rpc.sample_api import (
    ALL_UIDS,
    GET,
    HANG,
    HELLO,
    SET,
    Ping,
    Raw,
    Service,
    build,
    running,
    socket_directory,
)


async def test_while_recovering_only_hello_and_the_like_answer() -> None:
    async with running() as sample, connect(sample.path) as client:
        sample.server.recovering = "reading 12 sessions"
        with pytest.raises(Unavailable, match="recovering: reading 12 sessions"):
            await client.call(GET, Ping())
        assert (await client.call(HELLO, Ping(n=1))).n == 2
        sample.server.recovering = None
        assert (await client.call(GET, Ping(n=1))).n == 2


async def test_method_added_for_recovery_answers_during_it() -> None:
    service = Service()
    server = Server("s", [GET], allow_uids=ALL_UIDS)
    server.add(GET, service.get, during_recovery=True)
    server.recovering = "x"
    with socket_directory() as directory:
        async with anyio.create_task_group() as tasks:
            await tasks.start(server.serve, directory / "s")
            async with connect(directory / "s") as client:
                assert (await client.call(GET, Ping(n=1))).n == 2
            tasks.cancel_scope.cancel()


async def test_method_may_be_kept_to_some_uids() -> None:
    async with running() as sample, connect(sample.path) as client:
        sample.server.restrict(SET, frozenset({os.getuid() + 1}))
        with pytest.raises(PermissionDenied, match=f"uid {os.getuid()} may not call Set"):
            await client.call(SET, Ping())
        assert (await client.call(GET, Ping(n=1))).n == 2


async def test_table_must_be_served_in_full_and_once() -> None:
    service = Service()
    with pytest.raises(AssertionError, match="occurs twice"):
        Server("s", [GET, GET], allow_uids=ALL_UIDS)
    server = Server("s", [GET, SET], allow_uids=ALL_UIDS)
    server.add(GET, service.get)
    with pytest.raises(AssertionError, match="has a handler already"):
        server.add(GET, service.get)
    with pytest.raises(AssertionError, match="not in the table"):
        server.add(HANG, service.get)
    with socket_directory() as directory, pytest.raises(AssertionError, match="'Set'"):
        await server.serve(directory / "s")


async def test_uid_that_is_not_allowed_is_told_so_and_read_nothing_of() -> None:
    async with running(allow_uids=frozenset({os.getuid() + 1})) as sample:
        with Raw(sample.path) as raw:
            refusal = await raw.line()
            assert refusal["id"] is None
            assert refusal["error"]["data"]["code"] == "PERMISSION_DENIED"
            assert await raw.line() is None
        with pytest.raises(PermissionDenied, match="may not use sample"):
            async with connect(sample.path) as client:
                await client.call(SET, Ping())


async def test_connections_over_the_limit_are_refused_and_room_is_given_back() -> None:
    async with running(connections_max=3) as sample:
        peers = [Raw(sample.path) for _ in range(3)]
        await wait_until(lambda: sample.server.connections == 3)
        with pytest.raises(ResourceExhausted, match="3 connections"):
            async with connect(sample.path) as client:
                await client.call(SET, Ping())
        for peer in peers:
            peer.sock.close()
        await wait_until(lambda: sample.server.connections == 0)
        async with connect(sample.path) as client:
            assert (await client.call(GET, Ping(n=1))).n == 2


async def test_calls_over_the_limit_wait_for_a_slot() -> None:
    async with running(calls_max=2) as sample, connect(sample.path) as client:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(client.call, HANG, Ping())
            await wait_until(lambda: sample.service.hanging == 2)
            with anyio.move_on_after(0.05):
                await client.call(GET, Ping())
                raise AssertionError("ran without a slot")
            assert sample.service.hanging == 2
            tasks.cancel_scope.cancel()
        assert (await client.call(GET, Ping(n=1))).n == 2


@pytest.mark.parametrize(("name", "limit"), [("PENDING_MAX", 3), ("PENDING_BYTES_MAX", 150)])
async def test_calls_without_reply_are_bounded_for_each_connection(
    name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, name, limit)
    async with running() as sample:
        with Raw(sample.path) as raw, Raw(sample.path) as other:
            for n in range(10):
                await raw.ask(jsonrpc="2.0", id=n, method="Hang")
            refused = [await raw.line() for _ in range(7)]
            assert {line["error"]["data"]["code"] for line in refused} == {"RESOURCE_EXHAUSTED"}
            assert [line["id"] for line in refused] == [3, 4, 5, 6, 7, 8, 9]
            await raw.ask(jsonrpc="2.0", method="Cancel", params={"id": 0})
            stopped = await raw.line()
            assert (stopped["id"], stopped["error"]["data"]["code"]) == (0, "CANCELLED")
            assert sample.service.hanging == 2
            await raw.ask(jsonrpc="2.0", id=11, method="Get")
            assert (await raw.line())["id"] == 11
            await other.ask(jsonrpc="2.0", id=1, method="Get")
            assert (await other.line())["id"] == 1


async def test_id_already_in_flight_is_refused_and_the_first_call_goes_on() -> None:
    async with running() as sample:
        with Raw(sample.path) as raw:
            await raw.ask(jsonrpc="2.0", id=1, method="Hang")
            await raw.ask(jsonrpc="2.0", id=1, method="Get")
            refusal = await raw.line()
            assert refusal["id"] is None
            assert "already in flight" in refusal["error"]["message"]
            assert sample.service.hanging == 1
            await raw.ask(jsonrpc="2.0", id="1", method="Get")
            assert (await raw.line())["id"] == "1"


async def test_id_may_be_used_again_after_its_reply() -> None:
    async with running() as sample:
        with Raw(sample.path) as raw:
            for n in range(50):
                await raw.ask(jsonrpc="2.0", id=1, method="Get", params={"n": n})
                assert (await raw.line())["result"]["n"] == n + 1


async def test_notification_is_never_executed() -> None:
    async with running() as sample:
        with Raw(sample.path) as raw:
            await raw.ask(jsonrpc="2.0", method="Hang")
            await raw.ask(jsonrpc="2.0", id=1, method="Get")
            assert (await raw.line())["id"] == 1
            assert sample.service.hanging == 0


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_socket_has_exactly_the_mode_and_group_asked_for(umask: int) -> None:
    old = os.umask(umask)
    try:
        with socket_directory() as directory:
            listener = listen_unix(directory / "s", mode=0o620, gid=os.getgid())
            status = (directory / "s").stat()
            assert stat.S_IMODE(status.st_mode) == 0o620
            assert status.st_gid == os.getgid()
            assert [entry.name for entry in directory.iterdir()] == ["s"]
            listener.close()
            assert list(directory.iterdir()) == []
    finally:
        os.umask(old)


async def test_second_server_on_a_live_path_is_refused() -> None:
    async with running() as sample:
        with pytest.raises(AlreadyExists, match="another server answers"):
            await build(Service()).serve(sample.path)
        async with connect(sample.path) as client:
            assert (await client.call(GET, Ping(n=1))).n == 2


async def test_stale_socket_and_a_half_made_one_are_replaced() -> None:
    with socket_directory() as directory:
        for name in ("s", "s~"):
            dead = socket.socket(socket.AF_UNIX)
            dead.bind(str(directory / name))
            dead.close()
        async with anyio.create_task_group() as tasks:
            await tasks.start(build(Service()).serve, directory / "s")
            async with connect(directory / "s") as client:
                assert (await client.call(GET, Ping(n=1))).n == 2
            tasks.cancel_scope.cancel()
        assert list(directory.iterdir()) == []


async def test_what_is_not_a_socket_is_never_replaced() -> None:
    with socket_directory() as directory:
        (directory / "s").write_text("precious")
        with pytest.raises(OwnershipConflict, match="not a socket"):
            await build(Service()).serve(directory / "s")
        assert (directory / "s").read_text() == "precious"


def test_socket_of_a_successor_is_left_alone() -> None:
    with socket_directory() as directory:
        first = listen_unix(directory / "s", mode=0o660, gid=None)
        (directory / "s").unlink()
        second = listen_unix(directory / "s", mode=0o660, gid=None)
        first.close()
        assert (directory / "s").exists()
        second.close()


@pytest.mark.parametrize(
    ("name", "error"), [("none/s", FailedPrecondition), ("x" * 200, InvalidArgument)]
)
async def test_path_that_cannot_be_served_is_named(name: str, error: type[Any]) -> None:
    with socket_directory() as directory:
        with pytest.raises(error, match=name[:20]):
            await build(Service()).serve(directory / name)
        assert list(directory.iterdir()) == []


async def test_two_thousand_connections_that_break_off_leave_the_server_as_it_was() -> None:
    async with running(connections_max=64) as sample:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for n in range(2000):
            with Raw(sample.path) as raw:
                if n % 2:
                    raw.sock.send(b'{"jsonrpc":"2.0","id":1,"method":"Hang"}\n{"js')
            await anyio.lowlevel.checkpoint()
        await wait_until(lambda: sample.server.connections == 0)
        await wait_until(lambda: sample.service.hanging == 0)
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
        async with connect(sample.path) as client:
            assert (await client.call(GET, Ping(n=1))).n == 2
