"""One connection: who waits, who leaves, what is never sent twice."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from chv.common.errors import DeadlineExceeded, OutcomeUnknown, Unavailable
from chv.vmm.cloud_hypervisor.line import Line

DONE = b"HTTP/1.1 204 \r\nServer: Cloud Hypervisor API\r\nConnection: keep-alive\r\n\r\n"
TOO_MANY = b"HTTP/1.1 503\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}"
Script = Callable[["Server"], Coroutine[Any, Any, None]]


class Server:
    """Takes requests of a Line one by one, as a script says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._peer: socket.socket | None = None
        self.fds: list[int] = []
        self.requests: list[bytes] = []

    async def accept(self) -> None:
        await anyio.wait_readable(self._listener)
        if self._peer is not None:
            self._peer.close()
        self._peer, _ = self._listener.accept()

    async def take(self) -> bytes:
        assert self._peer is not None
        data = b""
        while b"\r\n\r\n" not in data:
            await anyio.wait_readable(self._peer)
            part, fds, _, _ = socket.recv_fds(self._peer, 65536, 16)
            self.fds += fds
            if not part:
                break
            data += part
        self.requests.append(data.split(b" ")[1] if data else b"")
        return self.requests[-1]

    async def answer(self, data: bytes = DONE) -> None:
        assert self._peer is not None
        self._peer.sendall(data)

    def hang_up(self) -> None:
        assert self._peer is not None
        self._peer.close()
        self._peer = None

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        if self._peer is not None:
            self._peer.close()
        self._listener.close()


@asynccontextmanager
async def served(tmp_path: Path, script: Script) -> AsyncIterator[tuple[Line, Server]]:
    server, line = Server(tmp_path / "s"), Line(tmp_path / "s")
    try:
        with anyio.fail_after(5):
            async with anyio.create_task_group() as group:
                group.start_soon(script, server)
                yield line, server
    finally:
        line.close()
        server.close()


async def tell(line: Line, name: str = "vm.x", limit_s: float = 1.0, *fds: int) -> int:
    return (await line.tell(name, None, fds, limit_s=limit_s)).status


async def test_callers_are_served_one_by_one_on_one_connection(tmp_path: Path) -> None:
    async def script(server: Server) -> None:
        await server.accept()
        for _ in range(5):
            await server.take()
            await anyio.lowlevel.checkpoint()
            assert await quiet(server)
            await server.answer()

    async def quiet(server: Server) -> bool:
        with anyio.move_on_after(0.02):
            await server.take()
            return False
        return True

    async with served(tmp_path, script) as (line, _), anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(tell, line)


async def test_descriptors_arrive_with_their_request(tmp_path: Path) -> None:
    async def script(server: Server) -> None:
        await server.accept()
        for _ in range(2):
            await server.take()
            await server.answer()

    async with served(tmp_path, script) as (line, server):
        with (tmp_path / "file").open("w") as file:
            assert await tell(line, "vm.add-net", 1.0, file.fileno(), file.fileno()) == 204
            assert len(server.fds) == 2
            assert await tell(line) == 204
            assert os.fstat(server.fds[0]).st_ino == os.fstat(file.fileno()).st_ino
        assert len(server.fds) == 2


async def test_a_caller_that_leaves_leaves_its_answer_to_the_next(tmp_path: Path) -> None:
    gone = anyio.Event()

    async def script(server: Server) -> None:
        await server.accept()
        await server.take()
        await gone.wait()
        await server.answer(TOO_MANY.replace(b"503", b"500 ").replace(b"close", b"keep-alive"))
        await server.take()
        await server.answer()

    async with served(tmp_path, script) as (line, server):
        with anyio.move_on_after(0.05):
            await tell(line, "vm.first")
        gone.set()
        assert await tell(line, "vm.second") == 204
    assert server.requests == [b"/api/v1/vm.first", b"/api/v1/vm.second"]


async def test_behind_a_request_that_hangs_nothing_is_sent(tmp_path: Path) -> None:
    async def script(server: Server) -> None:
        await server.accept()
        await server.take()

    async with served(tmp_path, script) as (line, server):
        with pytest.raises(OutcomeUnknown, match=r"no answer to vm\.slow"):
            await tell(line, "vm.slow", 0.05)
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match=r"vm\.next was not sent.*vm\.slow"):
                await tell(line, "vm.next", 0.05)
    assert server.requests == [b"/api/v1/vm.slow"]


async def test_a_late_look_changes_nothing(tmp_path: Path) -> None:
    async def script(server: Server) -> None:
        await server.accept()
        await server.take()

    async with served(tmp_path, script) as (line, _):
        with pytest.raises(DeadlineExceeded):
            await line.ask("vm.info", limit_s=0.05)


async def test_a_change_whose_connection_is_lost_is_unknown_and_not_repeated(
    tmp_path: Path,
) -> None:
    async def script(server: Server) -> None:
        await server.accept()
        await server.take()
        server.hang_up()
        await server.accept()
        await server.take()
        await server.answer()

    async with served(tmp_path, script) as (line, server):
        with pytest.raises(OutcomeUnknown):
            await tell(line, "vm.once")
        assert await tell(line, "vm.after") == 204
    assert server.requests == [b"/api/v1/vm.once", b"/api/v1/vm.after"]


async def test_a_look_whose_connection_is_lost_is_unavailable(tmp_path: Path) -> None:
    async def script(server: Server) -> None:
        await server.accept()
        await server.take()
        await server.answer(b"HTTP/1.1 200 \r\nContent-Le")
        server.hang_up()

    async with served(tmp_path, script) as (line, _):
        with pytest.raises(Unavailable):
            await line.ask("vm.info", limit_s=1)


async def test_a_connection_found_closed_is_made_anew_before_anything_is_sent(
    tmp_path: Path,
) -> None:
    async def script(server: Server) -> None:
        for _ in range(2):
            await server.accept()
            await server.take()
            await server.answer()
            server.hang_up()

    async with served(tmp_path, script) as (line, _):
        assert await tell(line) == 204
        assert await tell(line) == 204


@pytest.mark.parametrize("extra", [TOO_MANY, DONE + DONE, b"nonsense\r\n\r\n"])
async def test_a_connection_that_says_more_than_it_was_asked_is_given_up(
    tmp_path: Path, extra: bytes
) -> None:
    async def script(server: Server) -> None:
        await server.accept()
        await server.take()
        await server.answer(extra)
        await server.accept()
        await server.take()
        await server.answer()

    async with served(tmp_path, script) as (line, _):
        if extra.startswith(b"nonsense"):
            with pytest.raises(OutcomeUnknown):
                await tell(line)
        else:
            assert await tell(line) in (503, 204)
        assert await tell(line) == 204


async def test_nobody_there_is_unavailable_at_once(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "stale"):
        if path.name == "stale":
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(path))
        with pytest.raises(Unavailable):
            await tell(Line(path))


async def test_a_large_request_is_sent_whole(tmp_path: Path) -> None:
    got = bytearray()

    async def script(server: Server) -> None:
        await server.accept()
        peer = server._peer
        assert peer is not None
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        while not got.endswith(b"z" * 50_000):
            await anyio.wait_readable(peer)
            got.extend(peer.recv(1000))
        await server.answer()

    async with served(tmp_path, script) as (line, _):
        answer = await line.tell("vm.create", b"z" * 50_000, (), limit_s=2)
        assert answer.status == 204
