"""One connection of a server: reads requests, runs each in a task, writes replies.

Rules: a frame that cannot be read gets an error with id null; over 1 MiB the connection ends
after such an error; an id already in flight is refused; a notification is never executed, and
`Cancel` alone has a meaning: the caller left that call, stop it. At most PENDING_MAX requests are
read ahead of their replies. When the peer leaves or closes its sending half, its calls are
cancelled. Nothing here can end another session or the server.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import anyio
import anyio.abc
import msgspec
from msgspec import UnsetType

from chv.common.errors import JSONRPC_INVALID_REQUEST, InvalidArgument
from chv.common.rpc.channel import Channel, ChannelClosed, Peer
from chv.common.rpc.dispatch import Dispatcher
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
PENDING_MAX = 64


class Session:
    """Serves one peer until it leaves."""

    def __init__(self, channel: Channel, peer: Peer, dispatcher: Dispatcher) -> None:
        self._channel = channel
        self._peer = peer
        self._dispatcher = dispatcher
        self._calls: dict[int | str, anyio.CancelScope] = {}
        self._pending = anyio.Semaphore(PENDING_MAX, fast_acquire=True)

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
            if request.id in self._calls:
                busy = InvalidArgument(f"id {request.id!r} is already in flight", field="id")
                raise RequestError(JSONRPC_INVALID_REQUEST, busy, None)
        except RequestError as error:
            await self._send(encode_error(error.request_id, error.error, error.jsonrpc_code))
            return
        await self._pending.acquire()
        scope = self._calls[request.id] = anyio.CancelScope()
        tasks.start_soon(self._call, request, request.id, scope)

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
        if scope := self._calls.get(call_id):
            scope.cancel()

    async def _call(self, request: Request, call_id: int | str, scope: anyio.CancelScope) -> None:
        try:
            answer = None
            with scope:
                answer = await self._dispatcher.answer(request, call_id, self._peer, self._send)
            # Off the list before the reply: once the peer has that, it may use the id again.
            del self._calls[call_id]
            if answer is not None:
                await self._send(answer.frame, answer.fds)
        finally:
            self._pending.release()

    async def _send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        try:
            await self._channel.send(frame, fds)
        except ChannelClosed:
            # The reader sees the same and ends the session, handlers included.
            log.debug("rpc.reply_dropped", extra={"uid": self._peer.uid})
