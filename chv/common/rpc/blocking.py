"""A blocking client for short-lived commands: one call at a time, no event loop to import.

`chv get` must answer within a human blink, and importing an event loop costs more than the call.
Same envelopes, same errors as the asynchronous client.
"""

from __future__ import annotations

import array
import math
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from chv.common.errors import ChvError, DeadlineExceeded, OutcomeUnknown, Unavailable
from chv.common.rpc import envelope
from chv.common.rpc.framing import LineFramer
from chv.common.rpc.method import Method

P = TypeVar("P", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)

CHUNK_BYTES = 65536
REPLY_FDS_MAX = 8
FD_BYTES = array.array("i").itemsize


class BlockingClient:
    """One connection. Not for threads; a failed call closes it and the next call reconnects."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._framer = LineFramer()
        self._next_id = 0

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def call(self, method: Method[P, R], params: P, *, timeout_s: float | None = None) -> R:
        """Call and return the typed result; raises the ChvError that the server sent."""
        result, fds = self._exchange(method, params, timeout_s, None)
        _close_all(fds)
        return result

    def call_fds(
        self, method: Method[P, R], params: P, *, timeout_s: float | None = None
    ) -> tuple[R, list[int]]:
        """Call and return the result with the descriptors that came; the caller owns these."""
        return self._exchange(method, params, timeout_s, None)

    def stream(self, method: Method[P, R], params: P, on_event: Callable[[Any], None]) -> R:
        """Call and hand each event to `on_event` until the result comes."""
        result, fds = self._exchange(method, params, math.inf, on_event)
        _close_all(fds)
        return result

    def _connected(self) -> socket.socket:
        if self._socket is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(str(self._path))
            except OSError as error:
                connection.close()
                raise Unavailable(
                    f"no agent answers at {self._path}: {error.strerror}",
                    hint="start a node with `chv up`",
                ) from error
            self._socket = connection
            self._framer = LineFramer()
        return self._socket

    def _exchange(
        self,
        method: Method[P, R],
        params: P,
        timeout_s: float | None,
        on_event: Callable[[Any], None] | None,
    ) -> tuple[R, list[int]]:
        connection = self._connected()
        limit_s = method.timeout_s if timeout_s is None else timeout_s
        self._next_id += 1
        request_id = self._next_id
        fds: list[int] = []
        try:
            connection.sendall(envelope.encode_request(method.name, params, request_id, limit_s))
            reply = self._reply(request_id, method, limit_s, fds, on_event)
        except _OfListener as failed:
            _close_all(fds)
            self.close()
            raise failed.error from None
        except TimeoutError as error:
            raise self._lost(method, fds, DeadlineExceeded, f"no reply in {limit_s:g} s") from error
        except OSError as error:
            raise self._lost(method, fds, Unavailable, str(error.strerror or error)) from error
        except BaseException:
            # Interrupted or unreadable: what is left on the connection belongs to nobody.
            _close_all(fds)
            self.close()
            raise
        if isinstance(reply.error, envelope.ErrorBody):
            _close_all(fds)
            raise envelope.error_of(reply.error)
        return self._result(method, reply, fds), fds

    def _result(self, method: Method[P, R], reply: envelope.Incoming, fds: list[int]) -> R:
        try:
            result: R = envelope.decode_typed(
                method.result, reply.result, f"result of {method.name}"
            )
        except ChvError:
            _close_all(fds)
            raise
        return result

    def _lost(
        self, method: Method[P, R], fds: list[int], read_error: type[ChvError], why: str
    ) -> ChvError:
        """Close the connection; return what a lost reply means for this kind of call."""
        _close_all(fds)
        self.close()
        if method.mutating:
            return OutcomeUnknown(f"{method.name}: {why}", hint="look before you repeat it")
        return read_error(f"{method.name}: {why}")

    def _reply(
        self,
        request_id: int,
        method: Method[P, R],
        limit_s: float,
        fds: list[int],
        on_event: Callable[[Any], None] | None,
    ) -> envelope.Incoming:
        connection = self._connected()
        deadline = time.monotonic() + limit_s
        while True:
            # The server keeps the deadline too; the margin lets its own error arrive.
            left_s = deadline - time.monotonic() + 1.0
            if left_s <= 0:
                raise TimeoutError
            connection.settimeout(None if math.isinf(left_s) else left_s)
            chunk, received = _receive(connection)
            fds.extend(received)
            if not chunk:
                raise ConnectionResetError("the agent closed the connection")
            for frame in self._framer.feed(chunk):
                incoming = envelope.decode_incoming(frame)
                if incoming.method:
                    self._event(method, incoming, on_event)
                elif incoming.id in (request_id, None):
                    return incoming

    def _event(
        self,
        method: Method[P, R],
        incoming: envelope.Incoming,
        on_event: Callable[[Any], None] | None,
    ) -> None:
        if on_event is not None and incoming.method == method.event_name:
            event = envelope.decode_event(incoming.params)
            decoded = envelope.decode_typed(method.events or dict, event.event, "event")
            try:
                on_event(decoded)
            except OSError as error:
                # Not the connection's: a reader of the output (head, less) has left, say.
                raise _OfListener(error) from error


class _OfListener(Exception):
    """What a listener to events raised that a failing connection raises, too."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive bytes and close-on-exec descriptors (socket.recv_fds ignores its flags)."""
    space = socket.CMSG_SPACE(REPLY_FDS_MAX * FD_BYTES)
    chunk, ancillary, _, _ = connection.recvmsg(CHUNK_BYTES, space, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % FD_BYTES])
    return chunk, list(fds)


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        socket.close(fd)
    fds.clear()
