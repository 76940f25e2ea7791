"""`Client`: typed calls over one connection, any number at a time.

Every failure is a ChvError. A connection or deadline lost under a mutating call is
OutcomeUnknown, under any other Unavailable or DeadlineExceeded; a request that never went out is
one of the latter two, whatever the method. There is no reconnecting and no retry here: only the
caller knows whether repeating is right. A cancelled call leaves the connection usable; its late
reply is dropped and the descriptors in it are closed.
"""

from __future__ import annotations

import itertools
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import msgspec
from msgspec import Raw, UnsetType

from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    OutcomeUnknown,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from chv.common.layout import check_socket_path
from chv.common.rpc.channel import Channel, ChannelClosed, close_fds, peer_of
from chv.common.rpc.envelope import (
    CANCEL,
    CancelParams,
    Incoming,
    decode_event,
    decode_incoming,
    decode_typed,
    encode_request,
    error_of,
)
from chv.common.rpc.framing import FRAME_BYTES_MAX, FrameTooLong, LineFramer
from chv.common.rpc.method import Method, P, R

CONNECT_TIMEOUT_S = 5.0
CONNECT_PAUSE_S = 0.01
# Events that may wait for a caller that is not scheduled; one receive brings about a thousand.
EVENTS_MAX = 4096
FDS_MAX = 64


@dataclass
class _Waiter:
    """A call in flight, filled by the reader."""

    wake: anyio.Event = field(default_factory=anyio.Event)
    sent: bool = False
    reply: Incoming | None = None
    fds: list[int] = field(default_factory=list)
    events: deque[Raw] = field(default_factory=deque)
    overflowed: bool = False


class Client:
    """One connection. Made by `connect`."""

    def __init__(self, channel: Channel, tasks: anyio.abc.TaskGroup) -> None:
        self._channel = channel
        self._tasks = tasks
        self._ids = itertools.count(1)
        self._waiters: dict[int | str, _Waiter] = {}
        self._fds: list[int] = []
        self._lost = ""
        # What the server said when it would not have us at all.
        self._refusal: ChvError | None = None

    @property
    def lost(self) -> str:
        """Why the connection is gone; empty while it is there."""
        return self._lost

    async def call(self, method: Method[P, R], params: P, *, timeout_s: float | None = None) -> R:
        """Call and return the typed result. Descriptors that come along are closed."""
        reply, fds = await self._exchange(method, params, timeout_s, None)
        close_fds(fds)
        return self._result(method, reply)

    async def call_fds(
        self, method: Method[P, R], params: P, *, timeout_s: float | None = None
    ) -> tuple[R, list[int]]:
        """Call and return the result and its descriptors, which are the caller's from now on."""
        reply, fds = await self._exchange(method, params, timeout_s, None)
        try:
            return self._result(method, reply), fds
        except BaseException:
            close_fds(fds)
            raise

    async def stream(
        self,
        method: Method[P, R],
        params: P,
        on_event: Callable[[Any], None],
        *,
        timeout_s: float | None = None,
    ) -> R:
        """Call, hand each event to `on_event` in order, and return the result after the last."""
        assert method.events, f"{method.name} declares no events"
        reply, fds = await self._exchange(method, params, timeout_s, on_event)
        close_fds(fds)
        return self._result(method, reply)

    # --- one call

    async def _exchange(
        self,
        method: Method[Any, Any],
        params: msgspec.Struct,
        timeout_s: float | None,
        on_event: Callable[[Any], None] | None,
    ) -> tuple[Incoming, list[int]]:
        """Send, wait, and return the reply with its descriptors; raise what went wrong."""
        budget_s = _budget_s(method.timeout_s if timeout_s is None else timeout_s)
        call_id = next(self._ids)
        frame = encode_request(method.name, params, call_id, budget_s)
        if len(frame) > FRAME_BYTES_MAX:
            raise InvalidArgument(f"params of {method.name} are {len(frame)} bytes, over the limit")
        waiter = self._waiters[call_id] = _Waiter()
        try:
            with anyio.move_on_after(budget_s):
                await self._send(frame, waiter)
                await self._wait(method, waiter, on_event)
            if waiter.reply is None:
                raise self._failure(method, waiter, budget_s)
            fds, waiter.fds = waiter.fds, []
            return waiter.reply, fds
        finally:
            del self._waiters[call_id]
            close_fds(waiter.fds)
            if waiter.sent and waiter.reply is None and not (method.mutating or self._lost):
                self._tasks.start_soon(self._leave, call_id)

    async def _send(self, frame: bytes, waiter: _Waiter) -> None:
        # A send that fails says little: the reader finds out why, and what the server said last.
        with suppress(ChannelClosed):
            await self._channel.send(frame)
            waiter.sent = True

    async def _wait(
        self,
        method: Method[Any, Any],
        waiter: _Waiter,
        on_event: Callable[[Any], None] | None,
    ) -> None:
        """Return when the reply is there, the connection is lost or too many events came."""
        while True:
            while waiter.events:
                event = decode_typed(method.events or object, waiter.events.popleft(), "event")
                if on_event is not None:
                    on_event(event)
            if waiter.reply is not None or waiter.overflowed or self._lost:
                return
            await waiter.wake.wait()
            waiter.wake = anyio.Event()

    def _failure(self, method: Method[Any, Any], waiter: _Waiter, budget_s: float) -> ChvError:
        """Return the error of a call that got no reply."""
        if self._refusal is not None:
            refusal = self._refusal
            return type(refusal)(refusal.message, resource=refusal.resource, hint=refusal.hint)
        if waiter.overflowed:
            return ResourceExhausted(f"{method.name}: over {EVENTS_MAX} events wait to be read")
        why = self._lost or f"no reply within {budget_s:g} s"
        if waiter.sent and method.mutating:
            return OutcomeUnknown(f"{method.name}: {why}", hint="observe, then decide")
        error = Unavailable if self._lost else DeadlineExceeded
        return error(f"{method.name}: {why}")

    def _result(self, method: Method[P, R], reply: Incoming) -> R:
        if not isinstance(reply.error, UnsetType):
            raise error_of(reply.error)
        result: R = decode_typed(method.result, reply.result, f"reply to {method.name}")
        return result

    async def _leave(self, call_id: int) -> None:
        """Tell the server that nobody waits for this call any more, so that it stops it."""
        with suppress(ChannelClosed):  # then there is nobody left to tell
            await self._channel.send(encode_request(CANCEL, CancelParams(call_id), None))

    # --- the reader

    async def run(
        self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Read until the connection is gone, then wake every caller. Raises nothing."""
        task_status.started()
        why = "the connection was closed here"
        try:
            why = await self._read()
        finally:
            self._lose(why)
            close_fds(self._fds)
            self._fds = []

    async def _read(self) -> str:
        """Deliver what comes in; return why it ended."""
        framer = LineFramer()
        first = True
        try:
            while True:
                chunk, fds = await self._channel.receive()
                self._keep(fds)
                for frame in framer.feed(chunk):
                    self._deliver(decode_incoming(frame), is_first=first)
                    first = False
                if not framer.pending_bytes:
                    self._drop_unclaimed()
        except ChannelClosed as error:
            return str(error)
        except (FrameTooLong, ChvError) as error:
            self._channel.abort(str(error))
            return str(error)

    def _keep(self, fds: list[int]) -> None:
        """Hold descriptors until the frame that names them is complete."""
        self._fds += fds
        if len(self._fds) > FDS_MAX:
            raise Internal(f"the server sent {len(self._fds)} descriptors that no reply names")

    def _drop_unclaimed(self) -> None:
        close_fds(self._fds)
        self._fds = []

    def _deliver(self, message: Incoming, *, is_first: bool) -> None:
        """Give one reply or event to the call that waits for it, or drop it."""
        if message.method:
            self._deliver_event(message)
            return
        if message.id is None:
            raise self._connection_error(message, is_first=is_first)
        fds = self._claim(message.fds)
        waiter = self._waiters.get(message.id)
        if waiter is None or waiter.reply is not None:
            close_fds(fds)  # nobody waits any more
            return
        waiter.reply, waiter.fds = message, fds
        waiter.wake.set()

    def _claim(self, count: int) -> list[int]:
        """Take the descriptors that a reply names; exactly these must have come with it."""
        if count > len(self._fds):
            raise Internal(f"a reply names {count} descriptors and {len(self._fds)} came")
        claimed, self._fds = self._fds[:count], self._fds[count:]
        return claimed

    def _deliver_event(self, message: Incoming) -> None:
        params = decode_event(message.params)
        waiter = self._waiters.get(params.id)
        if waiter is None:
            return
        if len(waiter.events) < EVENTS_MAX:
            waiter.events.append(params.event)
        else:
            waiter.overflowed = True
        waiter.wake.set()

    def _connection_error(self, message: Incoming, *, is_first: bool) -> ChvError:
        """Return what the server says of the connection as a whole, which ends it."""
        if isinstance(message.error, UnsetType):
            return Internal("the server sent a reply without an id")
        error = error_of(message.error)
        if is_first and isinstance(error, PermissionDenied | ResourceExhausted):
            self._refusal = error  # refused at the door: no request has been read
        return error

    def _lose(self, why: str) -> None:
        self._lost = self._lost or why
        for waiter in self._waiters.values():
            waiter.wake.set()


def _budget_s(timeout_s: float) -> float:
    """Return `timeout_s` or what an enclosing scope leaves, whichever is less."""
    return max(0.0, min(timeout_s, anyio.current_effective_deadline() - anyio.current_time()))


@asynccontextmanager
async def connect(
    path: Path | str, *, peer_uids: frozenset[int] | None = None
) -> AsyncIterator[Client]:
    """Connect to a server, of one of `peer_uids` where given, for the length of the block."""
    sock = await _connected(Path(path))
    try:
        _check_peer(sock, Path(path), peer_uids)
        channel = Channel(sock, fds_max=FDS_MAX)
    except BaseException:
        sock.close()
        raise
    failure: Exception | None = None
    try:
        async with anyio.create_task_group() as tasks:
            client = Client(channel, tasks)
            tasks.start_soon(channel.pump)
            await tasks.start(client.run)
            try:
                yield client
            except Exception as error:  # noqa: BLE001  raised again below, see there
                failure = error
            finally:
                tasks.cancel_scope.cancel()
    finally:
        channel.close()
    # Raised inside the task group, the caller's error would come out as an ExceptionGroup.
    if failure is not None:
        raise failure


async def _connected(path: Path) -> socket.socket:
    """Return a connected socket; a full queue of the server is waited for."""
    check_socket_path(path)
    deadline = anyio.current_time() + CONNECT_TIMEOUT_S
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        while True:
            try:
                sock.connect(str(path))
                return sock
            except BlockingIOError:
                if anyio.current_time() > deadline:
                    raise Unavailable(f"{str(path)!r} does not accept connections") from None
                await anyio.sleep(CONNECT_PAUSE_S)
    except PermissionError as error:
        sock.close()
        raise PermissionDenied(f"may not connect to {str(path)!r}") from error
    except OSError as error:
        sock.close()
        raise Unavailable(f"cannot connect to {str(path)!r}: {error.strerror}") from error
    except BaseException:
        sock.close()
        raise


def _check_peer(sock: socket.socket, path: Path, peer_uids: frozenset[int] | None) -> None:
    """Raise unless the listening process belongs to one of `peer_uids`."""
    if peer_uids is None:
        return
    uid = peer_of(sock).uid
    if uid not in peer_uids:
        raise PermissionDenied(
            f"{str(path)!r} is served by uid {uid}, expected {sorted(peer_uids)}"
        )
