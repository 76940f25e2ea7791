"""One connection of a server: reads requests, runs each in a task, writes replies.

Rules: a frame that cannot be read gets an error with id null; over 1 MiB the connection ends
after such an error; an id already in flight is refused; a notification is never executed. Of
these `Cancel` alone has a meaning: the caller left that call, which is stopped and answers
CANCELLED. More than PENDING_MAX requests without a reply, or PENDING_BYTES_MAX of them, are
refused and not left unread, for a Cancel could be behind them. When the peer leaves or closes
its sending half, its calls are cancelled. Nothing here can end another session or the server.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio
import anyio.abc
import msgspec
from msgspec import UnsetType

from chv.common.errors import (
    JSONRPC_CHV_ERROR,
    JSONRPC_INVALID_REQUEST,
    InvalidArgument,
    ResourceExhausted,
)
from chv.common.rpc.channel import Channel, ChannelClosed, Peer
from chv.common.rpc.dispatch import Call, Dispatcher
from chv.common.rpc.envelope import (
    CANCEL,
    DECODE_ERRORS,
    CancelParams,
    Request,
    RequestError,
    decode_request,
    encode_error,
)
from chv.common.rpc.framing import FrameTooLong, LineFramer

log = logging.getLogger("chv.rpc")
PENDING_MAX = 1024
PENDING_BYTES_MAX = 16 << 20


class Session:
    """Serves one peer until it leaves."""

    def __init__(self, channel: Channel, peer: Peer, dispatcher: Dispatcher) -> None:
        self._channel = channel
        self._peer = peer
        self._dispatcher = dispatcher
        self._calls: dict[int | str, Call] = {}
        # Calls whose reply is not on its way yet; a peer that does not read holds these up.
        self._pending = 0
        self._pending_bytes = 0

    async def run(self) -> None:
        """Return when the connection has ended; raises nothing that could reach a sibling."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._channel.pump)
                await self._read(tasks)
                tasks.cancel_scope.cancel()
        except Exception:  # the firewall of one session
            log.exception("rpc.session_failed", extra={"uid": self._peer.uid})
        finally:
            self._channel.close()

    async def _read(self, tasks: anyio.abc.TaskGroup) -> None:
        framer = LineFramer()
        try:
            while True:
                chunk, _ = await self._channel.receive()
                for frame in framer.feed(chunk):
                    await self._accept(frame, tasks)
        except FrameTooLong as error:
            refusal = InvalidArgument(str(error), hint="the connection is closed")
            await self._send(encode_error(None, refusal, JSONRPC_INVALID_REQUEST))
        except ChannelClosed as gone:
            log.debug("rpc.session_ended", extra={"uid": self._peer.uid, "why": str(gone)})

    async def _accept(self, frame: bytes, tasks: anyio.abc.TaskGroup) -> None:
        """Start the call in `frame`, or say what is wrong with it."""
        try:
            request = decode_request(frame)
            if isinstance(request.id, UnsetType):
                self._notified(request)
                return
            self._check_room(request.id, len(frame))
        except RequestError as error:
            await self._send(encode_error(error.request_id, error.error, error.jsonrpc_code))
            return
        self._pending += 1
        self._pending_bytes += len(frame)
        call = Call(request.id, self._peer, self._send, anyio.CancelScope())
        self._calls[request.id] = call
        tasks.start_soon(self._call, request, call, len(frame))

    def _check_room(self, call_id: int | str, size_bytes: int) -> None:
        """Raise RequestError when this call may not join those in flight."""
        if call_id in self._calls:
            twice = InvalidArgument(f"id {call_id!r} is already in flight", field="id")
            raise RequestError(JSONRPC_INVALID_REQUEST, twice, None)
        if self._pending >= PENDING_MAX or self._pending_bytes + size_bytes > PENDING_BYTES_MAX:
            full = ResourceExhausted(f"{self._pending} calls of this connection wait for a reply")
            raise RequestError(JSONRPC_CHV_ERROR, full, call_id)

    def _notified(self, request: Request) -> None:
        """Obey Cancel, ignore every other notification: each call of ours needs its answer."""
        if request.method != CANCEL:
            log.debug("rpc.notification_ignored", extra={"method": request.method})
            return
        try:
            call_id = msgspec.json.decode(request.params, type=CancelParams).id
        except DECODE_ERRORS:
            log.debug("rpc.notification_ignored", extra={"method": request.method})
            return
        if call := self._calls.get(call_id):
            call.scope.cancel()

    async def _call(self, request: Request, call: Call, size_bytes: int) -> None:
        try:
            answer = await self._dispatcher.answer(request, call)
            # Off the list before the reply: once the peer has that, it may use the id again.
            del self._calls[call.request_id]
            await self._send(answer.frame, answer.fds)
        finally:
            self._pending -= 1
            self._pending_bytes -= size_bytes

    async def _send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        try:
            await self._channel.send(frame, fds)
        except ChannelClosed:
            # The reader sees the same and ends the session, handlers included.
            log.debug("rpc.reply_dropped", extra={"uid": self._peer.uid})
