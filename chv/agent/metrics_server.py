"""`metrics.sock`: HTTP/1.1 on a Unix socket, one GET a connection; the same over TCP if configured.

Small on purpose: an HTTP library would cost every agent more memory than all metrics take. Slow,
large and foreign requests are cut off or refused; nothing here can stop the agent.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import anyio
from anyio.abc import ByteStream, Listener, SocketStream, TaskStatus, UNIXSocketStream

from chv.agent.metrics_text import CONTENT_TYPE
from chv.common import logs
from chv.common.rpc.listener import listen_unix

log = logs.get(__name__)
HEAD_BYTES_MAX = 8192
CONNECTIONS_MAX = 16
REQUEST_TIMEOUT_S = 10.0
RETRY_S = 5.0  # while its address is taken
PATHS = ("/metrics", "/")


class MetricsServer:
    """Serves what `text` returns to whoever may open the socket."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self._slots = anyio.Semaphore(CONNECTIONS_MAX)

    async def serve(
        self, path: Path, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until cancelled; the caller holds the agent's lock."""
        listener = listen_unix(path, mode=0o660, gid=None)
        try:
            async with anyio.create_task_group() as connections:
                task_status.started()
                while True:
                    await self._slots.acquire()
                    connections.start_soon(self._connection, await listener.accept())
        finally:
            listener.close()

    async def serve_tcp(self, address: tuple[str, int]) -> None:
        """Serve on an address of this machine alone, until cancelled; waits while it is taken."""
        listener = await self._listen(address)
        log.info("metrics.listening", address=address[0], port=address[1])
        async with listener:
            await listener.serve(self._stream)

    async def _listen(self, address: tuple[str, int]) -> Listener[SocketStream]:
        while True:
            try:
                return await anyio.create_tcp_listener(local_host=address[0], local_port=address[1])
            except OSError as error:
                log.error("metrics.not_listening", address=address, error=str(error))
            await anyio.sleep(RETRY_S)

    async def _stream(self, stream: SocketStream) -> None:
        async with self._slots, stream:
            await self._serve(stream)

    async def _connection(self, connection: socket.socket) -> None:
        try:
            async with await UNIXSocketStream.from_socket(connection) as stream:
                await self._serve(stream)
        finally:
            connection.close()
            self._slots.release()

    async def _serve(self, stream: ByteStream) -> None:
        try:
            with anyio.move_on_after(REQUEST_TIMEOUT_S):
                await stream.send(self._answer(await _head(stream)))
        except (OSError, anyio.BrokenResourceError, anyio.EndOfStream):
            log.debug("metrics.reader_left")

    def _answer(self, head: bytes) -> bytes:
        parts = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
            return _response("400 Bad Request", "not an HTTP request\n")
        if parts[0] not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "only GET\n")
        if parts[1].partition("?")[0] not in PATHS:
            return _response("404 Not Found", "metrics are at /metrics\n")
        answer = _response("200 OK", self._text())
        return answer if parts[0] == "GET" else answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"


async def _head(stream: ByteStream) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data and len(data) < HEAD_BYTES_MAX:
        data += await stream.receive(HEAD_BYTES_MAX)
    return data if b"\r\n\r\n" in data else b""


def _response(status: str, body: str) -> bytes:
    data = body.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data
