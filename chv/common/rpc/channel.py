"""A Unix stream socket that carries whole frames and file descriptors.

No JSON here. The owner runs `pump` in its task group and closes the channel when that group has
ended. A frame goes out whole or not at all, also when its sender is cancelled. Received
descriptors are close-on-exec from the first moment. Every failure, the peer's leaving included,
is `ChannelClosed`.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import anyio

SEND_TIMEOUT_S = 10.0
CHUNK_BYTES_MAX = 65536
FD_BYTES = array.array("i").itemsize
_UCRED = struct.Struct("3i")


class ChannelClosed(Exception):
    """The connection is gone; the text says how it went."""


@dataclass(frozen=True)
class Peer:
    """Who is at the other end, told by the kernel."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """Return the credentials that the peer had when it connected (or listened)."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return Peer(*_UCRED.unpack(raw))


def close_fds(fds: Iterable[int]) -> None:
    """Close descriptors that nobody will take."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


class Channel:
    """One connection. `fds_max`: how many descriptors one receive may bring; 0: none are wanted,
    and the kernel drops what is sent.
    """

    def __init__(self, sock: socket.socket, *, fds_max: int = 0) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._ancillary_bytes = socket.CMSG_SPACE(fds_max * FD_BYTES) if fds_max else 0
        self._closed_why = ""
        # What is left of the one frame that is on its way, and descriptors to go with its start.
        self._backlog = memoryview(b"")
        self._backlog_fds: Sequence[int] = ()
        self._drained = anyio.Event()
        self._wake = anyio.Event()

    async def receive(self) -> tuple[bytes, list[int]]:
        """Return the next bytes and the descriptors that came with them; the caller owns these."""
        while True:
            # Waiting first also keeps one peer that never pauses from starving the others.
            await anyio.wait_readable(self._sock)
            try:
                chunk, fds = self._receive_now()
            except BlockingIOError:
                continue
            except OSError as error:
                raise ChannelClosed(self._closed_why or os.strerror(error.errno or 0)) from error
            if not chunk:
                close_fds(fds)
                raise ChannelClosed(self._closed_why or "the peer closed the connection")
            return chunk, fds

    def _receive_now(self) -> tuple[bytes, list[int]]:
        if not self._ancillary_bytes:
            return self._sock.recv(CHUNK_BYTES_MAX), []
        # MSG_CMSG_CLOEXEC: a fork between receiving and marking would leak the descriptor.
        chunk, ancillary, _, _ = self._sock.recvmsg(
            CHUNK_BYTES_MAX, self._ancillary_bytes, socket.MSG_CMSG_CLOEXEC
        )
        fds = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(data[: len(data) - len(data) % FD_BYTES])
        return chunk, list(fds)

    async def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Return once `frame` is on its way: in the kernel, or its rest in the pump's hands.

        Takes `fds` over and closes them, whatever happens. Raises ChannelClosed only when the
        frame has not gone; cancelled while it waits for its turn, nothing of it has gone either.
        """
        try:
            while self._backlog:
                await self._drained.wait()
            if self._closed_why:
                raise ChannelClosed(self._closed_why)
        except BaseException:
            close_fds(fds)
            raise
        # No await from here on: the frame is the channel's as one step.
        self._backlog = memoryview(frame)
        self._backlog_fds = fds
        try:
            self._write_now()
        except OSError as error:
            self.abort(f"sending failed: {error.strerror}")
            raise ChannelClosed(self._closed_why) from error
        if self._backlog:
            self._drained = anyio.Event()
            self._wake.set()

    def _write_now(self) -> None:
        """Give the kernel as much of the backlog as it takes."""
        try:
            if self._backlog_fds:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self._backlog_fds))
                sent = self._sock.sendmsg([self._backlog], [rights])
            else:
                sent = self._sock.send(self._backlog)
        except BlockingIOError:
            return
        # The descriptors went with the first byte.
        self._drop_fds()
        self._backlog = self._backlog[sent:]

    def _drop_fds(self) -> None:
        close_fds(self._backlog_fds)
        self._backlog_fds = ()

    async def pump(self) -> None:
        """Finish frames that the kernel did not take at once; give up on a peer that is stuck."""
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            with anyio.move_on_after(SEND_TIMEOUT_S) as scope:
                await self._drain()
            if scope.cancelled_caught:
                self.abort(f"the peer did not read for {SEND_TIMEOUT_S:g} s")

    async def _drain(self) -> None:
        while self._backlog:
            await anyio.wait_writable(self._sock)
            try:
                self._write_now()
            except OSError as error:
                self.abort(f"sending failed: {error.strerror}")
        self._drained.set()

    def abort(self, why: str) -> None:
        """End the connection for both directions; the reader and waiting senders notice."""
        self._closed_why = self._closed_why or why
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._backlog = memoryview(b"")
        self._drop_fds()
        self._drained.set()

    def close(self) -> None:
        """Release the socket. Only once no task uses the channel any more."""
        self.abort("the connection was closed here")
        self._sock.close()
