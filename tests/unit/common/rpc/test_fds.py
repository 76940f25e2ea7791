"""File descriptors travel with the reply that names them, and none is ever lost."""

from __future__ import annotations

import array
import fcntl
import json
import os
import socket
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from chv.common.errors import DeadlineExceeded, Internal, OutcomeUnknown, Unavailable
from chv.common.rpc import Client, Method, WithFds, connect
from chv.common.rpc.channel import CHUNK_BYTES_MAX
from tests.helpers import wait_until
from tests.unit.common.rpc.sample_api import (
    GET,
    OPEN,
    Ping,
    Pong,
    Raw,
    open_fds,
    running,
    socket_directory,
)


async def baseline(client: Client) -> int:
    """Return how many descriptors there are once both ends of the connection are."""
    await client.call(GET, Ping())
    return open_fds()


async def test_descriptors_arrive_in_order_usable_and_close_on_exec() -> None:
    async with running() as sample, connect(sample.path) as client:
        result, fds = await client.call_fds(OPEN, Ping(n=3))
        assert result == Pong(n=3)
        try:
            assert [os.read(fd, 100) for fd in fds] == [b"pipe 0", b"pipe 1", b"pipe 2"]
            assert all(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for fd in fds)
        finally:
            for fd in fds:
                os.close(fd)


async def test_no_descriptor_leaks_whoever_leaves_when() -> None:
    async with running() as sample, connect(sample.path) as client:
        before = await baseline(client)
        for n in range(200):
            with anyio.move_on_after(0.0003 * (n % 6)):
                _, fds = await client.call_fds(OPEN, Ping(n=4))
                for fd in fds:
                    os.close(fd)
        for _ in range(50):
            await client.call(OPEN, Ping(n=4))
        assert (await client.call(GET, Ping(n=1))).n == 2
        await wait_until(lambda: open_fds() == before)


async def test_many_at_once_get_their_own_descriptors() -> None:
    done: list[int] = []

    async def ask(count: int) -> None:
        _, fds = await client.call_fds(OPEN, Ping(n=count))
        assert len(fds) == count
        assert [os.read(fd, 100) for fd in fds] == [f"pipe {i}".encode() for i in range(count)]
        for fd in fds:
            os.close(fd)
        done.append(count)

    async with running() as sample, connect(sample.path) as client:
        async with anyio.create_task_group() as tasks:
            for n in range(100):
                tasks.start_soon(ask, n % 5)
                tasks.start_soon(client.call, GET, Ping(text="x" * 5000))
        assert len(done) == 100


async def test_more_descriptors_than_the_table_allows_are_a_bug_and_are_closed() -> None:
    async with running() as sample, connect(sample.path) as client:
        before = await baseline(client)
        with pytest.raises(Internal):
            await client.call_fds(OPEN, Ping(n=5))
        assert open_fds() == before


async def test_descriptors_of_a_reply_without_a_reader_are_closed() -> None:
    """The peer never reads and goes: what waited for it must not stay open."""
    async with running() as sample:
        before = open_fds()
        with Raw(sample.path) as raw:
            for n in range(400):
                await raw.ask(
                    jsonrpc="2.0", id=n, method="Open", params={"n": 4, "text": "x" * 900}
                )
        await wait_until(lambda: open_fds() == before)


async def peer_with_fds(path: Path, replies: list[tuple[bytes, int]]) -> None:
    """Accept one client, read its request, send each reply with that many descriptors."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.setblocking(False)
    with listener:
        await anyio.wait_readable(listener)
        connection, _ = listener.accept()
    with connection:
        connection.setblocking(False)
        await anyio.wait_readable(connection)
        connection.recv(CHUNK_BYTES_MAX)
        for data, count in replies:
            fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            connection.sendmsg([data], rights if fds else [])
            for fd in fds:
                os.close(fd)
        await anyio.wait_readable(connection)


RESULT = {"jsonrpc": "2.0", "id": 1, "result": {"n": 1}}
PLAIN = json.dumps(RESULT).encode() + b"\n"
NAMED = json.dumps(RESULT | {"fds": 2}).encode() + b"\n"
STRAY = b'{"jsonrpc":"2.0","method":"X/event","params":{"id":9,"event":{}}}\n'


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        ([(NAMED, 2)], 2),
        ([(STRAY, 0), (NAMED[:10], 2), (NAMED[10:], 0)], 2),
        ([(STRAY, 3), (PLAIN, 0)], 0),
        ([(PLAIN, 4)], 0),
        ([(NAMED, 1)], OutcomeUnknown),
        ([(STRAY[:9], 60), (STRAY[9:20], 60), (PLAIN, 0)], OutcomeUnknown),
    ],
)
async def test_descriptors_that_no_reply_names_are_closed(
    replies: list[tuple[bytes, int]], expected: int | type[Exception]
) -> None:
    before = open_fds()
    method = Method("Set", Ping, Pong, fds=2)
    with socket_directory() as directory:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(peer_with_fds, directory / "s", replies)
            await wait_until((directory / "s").exists)
            async with connect(directory / "s") as client:
                if isinstance(expected, int):
                    _, fds = await client.call_fds(method, Ping())
                    assert len(fds) == expected
                    for fd in fds:
                        os.close(fd)
                else:
                    with pytest.raises(expected):
                        await client.call_fds(method, Ping())
    assert open_fds() == before


async def test_descriptors_sent_to_a_server_are_dropped_by_the_kernel() -> None:
    async with running() as sample:
        before = open_fds()
        with Raw(sample.path) as raw:
            request = b'{"jsonrpc":"2.0","id":1,"method":"Get"}\n'
            for _ in range(20):
                socket.send_fds(raw.sock, [request], [0, 1, 2])
                assert (await raw.line())["id"] == 1
            assert open_fds() == before + 2


async def test_late_reply_with_descriptors_is_closed_on_arrival() -> None:
    gate = anyio.Event()

    async def late(params: Ping) -> WithFds[Pong]:
        with anyio.CancelScope(shield=True):  # deaf to the deadline that the caller sent
            await gate.wait()
        return WithFds(Pong(n=1), [os.open("/dev/null", os.O_RDONLY)])

    async with running() as sample, connect(sample.path) as client:
        sample.server._dispatcher.entries["Open"].handler = late
        before = await baseline(client)
        with pytest.raises(DeadlineExceeded):
            await client.call_fds(OPEN, Ping(), timeout_s=0.05)
        gate.set()
        assert (await client.call(GET, Ping(n=1))).n == 2
        await wait_until(lambda: open_fds() == before)


async def test_connection_that_is_lost_closes_what_came_for_nobody() -> None:
    async def ask(client: Client) -> None:
        with pytest.raises(Unavailable):
            await client.call_fds(OPEN, Ping(n=4))

    async with running() as sample:
        async with connect(sample.path) as client, anyio.create_task_group() as tasks:
            before = await baseline(client)
            for _ in range(10):
                tasks.start_soon(ask, client)
            await anyio.lowlevel.checkpoint()
            assert len(client._waiters) == 10
            client._channel.abort("gone")
        # Both ends of the connection are closed as well.
        await wait_until(lambda: open_fds() == before - 2)
