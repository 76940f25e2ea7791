"""A small API on real sockets that the RPC tests call, and raw access to its socket."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import anyio
import anyio.abc
import msgspec

from chv.common.errors import InUse
from chv.common.rpc import CallContext, Method, Server, WithFds


class Ping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    n: Annotated[int, msgspec.Meta(ge=0, le=2**53)] = 0
    text: str = ""


class Nested(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    inner: list[Ping]


class Pong(msgspec.Struct, frozen=True, kw_only=True):
    n: int
    text: str = ""


class Tick(msgspec.Struct, frozen=True, kw_only=True):
    n: int


HELLO = Method("Hello", Ping, Pong, mutating=False)
GET = Method("Get", Ping, Pong, mutating=False)
SET = Method("Set", Ping, Pong)
DEEP = Method("Deep", Nested, Pong, mutating=False)
HANG = Method("Hang", Ping, Pong, timeout_s=30.0, mutating=False)
HANG_SET = Method("HangSet", Ping, Pong, timeout_s=30.0)
FAIL = Method("Fail", Ping, Pong, mutating=False)
OPEN = Method("Open", Ping, Pong, mutating=False, fds=4)
WATCH = Method("Watch", Ping, Pong, timeout_s=float("inf"), mutating=False, events=Tick)
ME = Method("Me", Ping, Pong, mutating=False)

METHODS = (HELLO, GET, SET, DEEP, HANG, HANG_SET, FAIL, OPEN, WATCH, ME)
ALL_UIDS = frozenset({os.getuid()})


@dataclass
class Service:
    """The handlers; `hanging` counts calls that are inside one of them."""

    hanging: int = 0
    watching: int = 0
    cut_short: int = 0
    error: Exception = field(default_factory=lambda: InUse("disk is attached", resource="vol-1"))
    reply_text: str = ""

    async def get(self, params: Ping) -> Pong:
        return Pong(n=params.n + 1, text=self.reply_text or params.text)

    async def deep(self, params: Nested) -> Pong:
        return Pong(n=len(params.inner))

    async def hang(self, params: Ping) -> Pong:
        self.hanging += 1
        try:
            await anyio.sleep_forever()
        finally:
            self.hanging -= 1
            self.cut_short += 1
        return Pong(n=params.n)

    async def fail(self, params: Ping) -> Pong:
        raise self.error

    async def open(self, params: Ping) -> WithFds[Pong]:
        """Return `n` pipes, each holding the line `pipe <i>`."""
        fds = []
        for index in range(params.n):
            reading, writing = os.pipe()
            os.write(writing, f"pipe {index}".encode())
            os.close(writing)
            fds.append(reading)
        return WithFds(Pong(n=params.n), fds)

    async def watch(self, params: Ping, context: CallContext) -> Pong:
        """Emit `n` ticks; none: stay until cancelled."""
        self.watching += 1
        try:
            for index in range(params.n):
                await context.emit(Tick(n=index))
            if not params.n:
                await context.emit(Tick(n=0))
                await anyio.sleep_forever()
        finally:
            self.watching -= 1
        return Pong(n=params.n)

    async def me(self, params: Ping, context: CallContext) -> Pong:
        return Pong(n=context.peer_pid, text=str(context.peer_uid))


def build(service: Service, **limits: Any) -> Server:
    """Return a server with every method of the table."""
    options: dict[str, Any] = {"allow_uids": ALL_UIDS, **limits}
    server = Server("sample", METHODS, **options)
    server.add(HELLO, service.get)
    server.add(GET, service.get)
    server.add(SET, service.get)
    server.add(DEEP, service.deep)
    server.add(HANG, service.hang)
    server.add(HANG_SET, service.hang)
    server.add(FAIL, service.fail)
    server.add(OPEN, service.open)
    server.add(WATCH, service.watch)
    server.add(ME, service.me)
    return server


@dataclass
class Running:
    """A server that is being served, and where."""

    path: Path
    server: Server
    service: Service


@contextmanager
def socket_directory() -> Iterator[Path]:
    """A directory whose name is short enough for any socket in it."""
    with tempfile.TemporaryDirectory(prefix="chv-rpc-") as directory:
        yield Path(directory)


@asynccontextmanager
async def running(**limits: Any) -> AsyncIterator[Running]:
    """Serve the sample API for the length of the block."""
    service = Service()
    server = build(service, **limits)
    with socket_directory() as directory:
        path = directory / "s.sock"
        async with anyio.create_task_group() as tasks:
            await tasks.start(server.serve, path)
            yield Running(path, server, service)
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def peer_that_answers(reply: bytes) -> AsyncIterator[Path]:
    """Serve a socket that reads one chunk, sends `reply` and closes."""

    async def serve_one(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            if reply:
                await stream.send(reply)

    with socket_directory() as directory:
        listener = await anyio.create_unix_listener(directory / "s")
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, serve_one)
            yield directory / "s"
            tasks.cancel_scope.cancel()


class Raw:
    """A client without manners: writes any bytes and reads lines."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.sock.connect(str(path))
        self._buffer = b""

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    async def send(self, data: bytes) -> None:
        """Write all of `data`, or raise OSError."""
        view = memoryview(data)
        while view:
            try:
                view = view[self.sock.send(view) :]
            except BlockingIOError:
                await anyio.wait_writable(self.sock)

    async def ask(self, **members: Any) -> None:
        """Send one object."""
        await self.send(json.dumps(members).encode() + b"\n")

    async def line(self) -> Any:
        """Return the next line as parsed JSON, or None at the end of the stream."""
        with anyio.fail_after(5):
            while b"\n" not in self._buffer:
                await anyio.wait_readable(self.sock)
                try:
                    chunk = self.sock.recv(65536)
                except ConnectionResetError:
                    return None
                if not chunk:
                    return None
                self._buffer += chunk
        frame, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(frame)


def open_fds() -> int:
    """How many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208
