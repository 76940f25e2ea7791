"""HTTP as the real server speaks it: 10 connections, requests with descriptors, odd refusals.

What the protocol forbids is answered here; a request that is whole goes to `handle`.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.doubles.cloud_hypervisor.loop import Loop

CONNECTIONS_MAX = 10
LINE_BYTES_MAX = 1024
BODY_BYTES_MAX = 51200
FDS_MAX = 253
METHODS = ("GET", "PUT", "PATCH")
TOO_MANY = (
    b"HTTP/1.1 503\r\nServer: Firecracker API\r\nConnection: close\r\nContent-Length: 40\r\n\r\n"
    b'{ "error": "Too many open connections" }'
)
CONTINUE = b"HTTP/1.1 100 \r\nServer: Firecracker API\r\nConnection: keep-alive\r\n\r\n"


@dataclass
class Request:
    method: str
    path: str
    body: bytes | None
    fds: list[int] = field(default_factory=list)


Handle = Callable[[Request], bytes]


class Bad(Exception):
    """The protocol was not kept to."""


def response(status: int, body: bytes | None, server: str = "Cloud Hypervisor API") -> bytes:
    """Return an answer; 204 has neither type nor length."""
    head = f"HTTP/1.1 {status} \r\nServer: {server}\r\nConnection: keep-alive\r\n"
    if status != 204:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body or b'')}\r\n"
    return head.encode() + b"\r\n" + (body or b"")


def refused(message: str) -> bytes:
    """Return an answer of the protocol's own: its text holds a raw newline."""
    text = f'{{ "error": "{message}\nAll previous unanswered requests will be dropped." }}'
    return response(400, text.encode(), "Firecracker API")


class Parser:
    """Bytes in, requests out; `Bad` drops whatever came with it."""

    def __init__(self) -> None:
        self.data = b""
        self._head: Request | None = None
        self._length = 0
        self.expects = False

    def feed(self, data: bytes) -> list[Request]:
        self.data += data
        found = []
        try:
            while (request := self._next()) is not None:
                found.append(request)
        except Bad:
            self.data, self._head, self._length = b"", None, 0
            raise
        return found

    def _next(self) -> Request | None:
        if self._head is None and not self._read_head():
            return None
        assert self._head is not None
        if len(self.data) < self._length:
            return None
        body, self.data = self.data[: self._length], self.data[self._length :]
        request, self._head = self._head, None
        request.body = body if self._length else None
        return request

    def _read_head(self) -> bool:
        head, end, rest = self.data.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        if len(lines[0]) > LINE_BYTES_MAX:
            raise Bad("Invalid request.")
        if not end:
            if len(lines[-1]) > LINE_BYTES_MAX:
                raise _too_long(lines[-1])
            if len(lines) > 1:  # read line by line, so refused before the rest is there
                _request_line(lines[0])
            return False
        self._head, self._length, self.expects = _request_line(lines[0]), 0, False
        for line in lines[1:]:
            self._header(line)
        if self._length > BODY_BYTES_MAX:
            raise Bad(
                f"Request payload with size {self._length} is larger than the limit of"
                f" {BODY_BYTES_MAX} allowed by server."
            )
        self.data = rest
        return True

    def _header(self, line: bytes) -> None:
        if len(line) > LINE_BYTES_MAX:
            raise _too_long(line)
        name, colon, value = line.decode(errors="replace").partition(":")
        value = value.strip()
        if not colon:
            raise Bad(f"Invalid header. Reason: Header is incorrectly formatted. Key: {name}")
        if name.lower() == "content-length":
            if not re.fullmatch(r"\+?[0-9]{1,10}", value):
                raise Bad(
                    f"Invalid header. Reason: Invalid value. Key:Content-Length; Value: {value}"
                )
            self._length = int(value)
        elif name.lower() == "expect":
            self.expects = value == "100-continue"
        elif name.lower() == "accept-encoding" and "identity;q=0" in value:
            raise Bad(f"Invalid header. Reason: Invalid value. Key:Accept-Encoding; Value:{value}")


def _too_long(line: bytes) -> Bad:
    start = line[: LINE_BYTES_MAX + 1].decode(errors="replace")
    return Bad(f"Invalid header. Reason: Invalid content length. Header: {start}")


def _request_line(line: bytes) -> Request:
    words = line.decode(errors="replace").split(" ")
    if len(words) != 3:
        raise Bad("Invalid request.")
    method, target, version = words
    if method not in METHODS:
        raise Bad("Invalid HTTP Method: Unsupported HTTP method.")
    if version not in ("HTTP/1.0", "HTTP/1.1"):
        raise Bad("Invalid HTTP Version: Unsupported HTTP version.")
    return Request(method, re.sub(r"^http://[^/]*", "", target), None)


class Connection:
    def __init__(self, server: Server, channel: socket.socket) -> None:
        self.server, self.channel, self.parser = server, channel, Parser()
        self.fds: list[int] = []

    def readable(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self.channel, 65536, FDS_MAX)
        except OSError:
            data, fds = b"", []
        self.fds += fds
        if not data:
            self.server.hang_up(self)
            return
        try:
            requests = self.parser.feed(data)
        except Bad as error:
            self._drop_fds()
            self.send(refused(str(error)))
            return
        if self.parser.expects:
            self.parser.expects = False
            self.send(CONTINUE)
        if self._gone():  # before it was served: real one may or may not have seen it yet
            self.server.hang_up(self)
            return
        for request in requests:
            self._serve(request)

    def _gone(self) -> bool:
        try:
            return self.channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _serve(self, request: Request) -> None:
        request.fds, self.fds = self.fds, []
        self.send(self.server.handle(request))
        for fd in request.fds:  # what nobody took
            os.close(fd)

    def _drop_fds(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.fds = []

    def send(self, data: bytes) -> None:
        """Send, or lose it: the result of a call whose caller has gone is nobody's."""
        with contextlib.suppress(OSError):
            self.channel.sendall(data)

    def close(self) -> None:
        self._drop_fds()
        self.channel.close()


class Server:
    """Accepts on a listening socket that it was given."""

    def __init__(self, loop: Loop, listener: socket.socket, handle: Handle) -> None:
        self.loop, self.listener, self.handle = loop, listener, handle
        self.connections: set[Connection] = set()
        loop.watch(listener.fileno(), self._accept)

    def _accept(self) -> None:
        channel, _ = self.listener.accept()
        if len(self.connections) == CONNECTIONS_MAX:
            with contextlib.suppress(OSError):
                channel.sendall(TOO_MANY)
            channel.close()
            return
        connection = Connection(self, channel)
        self.connections.add(connection)
        self.loop.watch(channel.fileno(), connection.readable)

    def hang_up(self, connection: Connection) -> None:
        self.loop.forget(connection.channel.fileno())
        self.connections.discard(connection)
        connection.close()
