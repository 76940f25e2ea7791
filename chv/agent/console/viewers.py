"""Who looks at one serial line: several viewers, one of them writes.

A viewer that reads too slowly is dropped and told why; the line is never waited for by the guest.
What a viewer types waits while the guest does not read, and nobody else waits with it.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

import anyio
import anyio.abc

from chv.common.errors import FailedPrecondition, ResourceExhausted
from chv.common.wire.agent_console import (
    DROPPED,
    ENDED,
    FRAME_BYTES_MAX,
    INPUT,
    OUTPUT,
    READER,
    WRITER,
    ConsoleReply,
    OpenLine,
)

VIEWERS_MAX = 8  # of one line
QUEUE_BYTES_MAX = 64 << 10  # of one viewer, beside the kernel's buffer
RING_BYTES = 8 << 10  # shown to who attaches
LAST_WORDS_S_MAX = 60.0
INPUT_POLL_S = 0.01


class Viewer:
    """One socket with its queue."""

    def __init__(self, connection: socket.socket, *, wants_pen: bool) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.wants_pen = wants_pen
        self.ending = False
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._wake = anyio.Event()
        self._patience = anyio.CancelScope()

    def offer(self, kind: bytes, data: bytes) -> None:
        """Queue a frame; one that does not fit ends the viewer."""
        if self.ending:
            return
        if self._queued + len(data) > QUEUE_BYTES_MAX:
            self._queue.clear()
            self.end(DROPPED, b"this viewer read too slowly")
            return
        self._put(kind + data)

    def end(self, kind: bytes, why: bytes) -> None:
        """Send what is queued, then why it ends, and close."""
        if not self.ending:
            self._put(kind + why)
            self.ending = True
            self._patience.deadline = anyio.current_time() + LAST_WORDS_S_MAX

    def _put(self, frame: bytes) -> None:
        self._queue.append(frame)
        self._queued += len(frame)
        self._wake.set()

    async def send(self) -> None:
        """Send until the end was sent; OSError where the viewer has gone."""
        with self._patience:
            while self._queue or not self.ending:
                if self._queue:
                    await anyio.wait_writable(self.connection)
                    self._send_one()
                else:
                    self._wake = anyio.Event()
                    await self._wake.wait()

    def _send_one(self) -> None:
        # What was queued may have made way for last words while this waited.
        with suppress(BlockingIOError):
            self.connection.send(self._queue[0])
            self._queued -= len(self._queue.popleft())


class Screen:
    """The viewers of one VM and the last bytes of its line. Survives a port that is made anew."""

    def __init__(self) -> None:
        self.connection: socket.socket | None = None
        self._ring = bytearray()
        self._viewers: list[Viewer] = []
        self._pen: Viewer | None = None

    def show(self, data: bytes) -> None:
        """Give what the guest said to everyone."""
        self._ring += data
        del self._ring[:-RING_BYTES]
        for viewer in self._viewers:
            viewer.offer(OUTPUT, data)

    def end(self, why: str) -> None:
        """The line is over."""
        for viewer in self._viewers:
            viewer.end(ENDED, why.encode())

    def open(
        self, request: OpenLine, tasks: anyio.abc.TaskGroup
    ) -> tuple[ConsoleReply, socket.socket]:
        """Add a viewer; returns its end of the socket. FailedPrecondition without a line."""
        if self.connection is None:
            raise FailedPrecondition(f"no serial line of {request.vm_id} is held")
        if len(self._viewers) >= VIEWERS_MAX:
            raise ResourceExhausted(f"{VIEWERS_MAX} viewers look at this line already")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        viewer = Viewer(ours, wants_pen=not request.read_only)
        self._viewers.append(viewer)
        self._choose_writer(viewer, take=request.take)
        if self._ring:
            viewer.offer(OUTPUT, bytes(self._ring))
        tasks.start_soon(self._serve, viewer)
        return ConsoleReply(writer=self._pen is viewer, viewers=len(self._viewers)), theirs

    def _choose_writer(self, viewer: Viewer, *, take: bool) -> None:
        if not viewer.wants_pen:
            viewer.offer(READER, b"read-only")
        elif self._pen is None:
            self._give_pen([viewer], b"")
        elif take:
            self._pen.offer(READER, b"another viewer took the pen: what you type is not sent")
            self._give_pen([viewer], b"")
        else:
            viewer.offer(READER, b"another viewer has the pen; --take takes it")

    def _give_pen(self, candidates: Iterable[Viewer], words: bytes) -> None:
        able = (each for each in candidates if each.wants_pen and not each.ending)
        self._pen = next(able, None)
        if self._pen is not None:
            self._pen.offer(WRITER, words)

    async def _serve(self, viewer: Viewer) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._receive, viewer, tasks.cancel_scope)
                with suppress(OSError):
                    await viewer.send()
                tasks.cancel_scope.cancel()
        finally:
            viewer.connection.close()
            self._viewers.remove(viewer)
            if self._pen is viewer:
                self._give_pen(self._viewers, b"the pen is yours: its holder has left")

    async def _receive(self, viewer: Viewer, gone: anyio.CancelScope) -> None:
        while True:
            await anyio.wait_readable(viewer.connection)
            try:
                frame = viewer.connection.recv(FRAME_BYTES_MAX)
            except BlockingIOError:
                continue
            except OSError:
                frame = b""
            if not frame:
                gone.cancel()
                return
            if frame[:1] == INPUT:
                await self._type(viewer, frame[1:])

    async def _type(self, viewer: Viewer, data: bytes) -> None:
        """Pass input on while this viewer has the pen; waits for a guest that does not read."""
        while data and self._pen is viewer and not viewer.ending:
            try:
                if self.connection is not None:
                    data = data[self.connection.send(data) :]
                    continue
            except BlockingIOError:
                pass
            except OSError:
                return  # the line ended: the reader of it sees that and says so
            await anyio.sleep(INPUT_POLL_S)
