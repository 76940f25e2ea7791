"""One side of a session: a socket that never blocks, messages in and out.

Owns its socket and every descriptor that passes: received ones until they were sent on, and all
of them at `close`. Raises `Left` when the peer is gone and `Malformed` for what no peer may do;
the session is over then. Nothing here waits: the caller polls.
"""

from __future__ import annotations

import os
import socket
import time
from array import array

from chv.stord.proxy.message import FDS_MAX, Malformed, Message, Reader

HALF_MESSAGE_S_MAX = 5.0
# A handshake has some fifty messages; more than this within the window is no VMM at work.
MESSAGES_MAX = 5000
WINDOW_S = 10.0
_FD_BYTES = array("i").itemsize
_RIGHTS_BYTES = socket.CMSG_SPACE(FDS_MAX * _FD_BYTES)


class Left(Exception):
    """The peer has closed the connection, or it broke."""


class Channel:
    """Messages over one connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.has_left = False  # the peer
        self._sock = sock
        self._reader = Reader()
        self._output: list[tuple[bytes, tuple[int, ...]]] = []
        self._half_since: float | None = None
        self._window_since = 0.0
        self._window_count = 0

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._sock.fileno()

    @property
    def is_blocked(self) -> bool:
        """Tell whether something waits to be sent."""
        return bool(self._output)

    def patience_s(self) -> float | None:
        """Return how long a half message may still take; None: there is none."""
        if self._half_since is None:
            return None
        return max(0.0, self._half_since + HALF_MESSAGE_S_MAX - time.monotonic())

    def receive(self) -> Message | None:
        """Return the next message when all of it is there."""
        while True:
            try:
                data, ancillary, flags, _ = self._sock.recvmsg(
                    self._reader.wants, _RIGHTS_BYTES, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return None
            except OSError as error:
                self.has_left = True
                raise Left(str(error.strerror)) from error
            message = self._reader.feed(data, _descriptors(ancillary))
            if not data:
                self.has_left = True
                raise Left("closed")
            if message is not None:
                self._half_since = None
                return self._checked(message, flags)
            if flags & socket.MSG_CTRUNC:
                raise Malformed(f"more than {FDS_MAX} descriptors at once")
            self._half_since = self._half_since or time.monotonic()

    def _checked(self, message: Message, flags: int) -> Message:
        """Count a message and refuse one that lost descriptors or is one too many."""
        now = time.monotonic()
        if now - self._window_since > WINDOW_S:
            self._window_since, self._window_count = now, 0
        self._window_count += 1
        truncated = flags & socket.MSG_CTRUNC
        if not truncated and self._window_count <= MESSAGES_MAX:
            return message
        close_all(message.fds)
        raise Malformed(
            f"more than {FDS_MAX} descriptors at once"
            if truncated
            else f"more than {MESSAGES_MAX} messages in {WINDOW_S:g} s"
        )

    def send(self, message: Message) -> None:
        """Send a message, or queue what the socket does not take; its descriptors become ours."""
        self._output.append((message.encode(), message.fds))
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes."""
        while self._output:
            data, fds = self._output[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data], rights)
            except BlockingIOError:
                return
            except OSError as error:
                self.has_left = True
                raise Left(str(error.strerror)) from error
            close_all(fds)  # they went with the first byte
            self._output[0] = (data[sent:], ())
            if sent == len(data):
                del self._output[0]

    def close(self) -> None:
        """Close the socket and every descriptor that is still here."""
        close_all(self._reader.drop())
        for _data, fds in self._output:
            close_all(fds)
        self._output.clear()
        self._sock.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, ...]:
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
    return tuple(fds)


def close_all(fds: tuple[int, ...]) -> None:
    """Close descriptors that a peer has sent."""
    for fd in fds:
        try:
            os.close(fd)
        except OSError:  # what a stranger's file says at its close is not our concern; it is gone
            continue
