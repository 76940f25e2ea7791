"""The life of a proxy: find the storage daemon, accept a VMM, carry messages, start over.

A VMM is accepted only when the storage daemon has *answered* on a fresh connection: a mere
connect may land with a process that is just dying, and a VMM whose handshake breaks gives its
disk up. Until then it waits in the backlog of the listener, which stays. When one side drops,
both are dropped: the VMM reconnects and hands its requests in flight to the next storage daemon.
A VMM none of whose rings run is kept instead and introduced to the next one (`prelude`). The
proxy never answers for the storage daemon. It ends only by a signal.
"""

from __future__ import annotations

import select
import socket
import sys
import time

from chv.stord.proxy.channel import HALF_MESSAGE_S_MAX, Channel, Left, close_all
from chv.stord.proxy.message import GET_FEATURES, Malformed, Message
from chv.stord.proxy.prelude import Prelude
from chv.stord.proxy.rewrite import Rewriter, WriteCache

ANSWER_S_MAX = 5.0
RETRY_S_MIN = 0.005
RETRY_S_MAX = 0.1
RETRY_GROWTH = 1.2
# Anyone who may connect could fill the log by doing so again and again.
LOG_LINES_MAX = 1000


class Proxy:
    """One listener, one path of a storage daemon's export, one VMM at a time."""

    def __init__(self, listener: socket.socket, backend_path: str) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._backend_path = backend_path
        self._cache = WriteCache()
        self._lines = 0

    def run(self) -> None:
        """Serve one VMM after the other, for ever."""
        while True:
            self.serve_once()

    def serve_once(self) -> None:
        """One storage daemon, and the VMM that came for it, until either is gone."""
        backend = self._find_backend()
        vmm = None
        try:
            vmm = self._accept(backend)
            self._say("connected")
            self._serve(Session(vmm, backend, self._cache))
        except (Left, Malformed) as error:
            self._say(f"{'session ended' if vmm else 'storage daemon left'}: {error}")
        finally:
            if vmm is not None:
                vmm.close()
            backend.close()

    def _serve(self, session: Session) -> None:
        """Carry messages, past the ends of storage daemons while there is no ring that runs."""
        try:
            while True:
                try:
                    session.carry()
                except Left:
                    if not session.outlives_its_backend:
                        raise
                session.resume(self._find_backend(session.vmm))
                self._say("kept, at the next storage daemon")
        finally:
            session.backend.close()

    def _find_backend(self, vmm: Channel | None = None) -> Channel:
        """Return a connection on which the storage daemon has answered; Left when `vmm` leaves."""
        pause_s = RETRY_S_MIN
        while True:
            channel = _dial(self._backend_path)
            if channel is not None:
                return channel
            if vmm is not None and _has_left(vmm):
                raise Left("closed, between two storage daemons")
            time.sleep(pause_s)
            pause_s = min(pause_s * RETRY_GROWTH, RETRY_S_MAX)

    def _accept(self, backend: Channel) -> Channel:
        """Wait for a VMM; raise Left when the storage daemon leaves first."""
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.register(backend, select.POLLIN)
        while True:
            ready = {fd for fd, _events in poll.poll()}
            if backend.fileno() in ready:
                raise Left("before a VMM came")
            try:
                return Channel(self._listener.accept()[0])
            except (BlockingIOError, ConnectionAbortedError):
                continue  # it has left again

    def _say(self, text: str) -> None:
        self._lines += 1
        if self._lines <= LOG_LINES_MAX:
            last = " (no further lines)" if self._lines == LOG_LINES_MAX else ""
            sys.stderr.write(f"{time.monotonic():.3f} {text}{last}\n")
            sys.stderr.flush()


def _dial(path: str) -> Channel | None:
    """Connect and ask for the features; None where nobody is there who answers."""
    sock = socket.socket(socket.AF_UNIX)
    channel = Channel(sock)
    try:
        sock.connect(path)
        channel.send(Message(GET_FEATURES))
        answer = _receive(channel, ANSWER_S_MAX)
    except (OSError, Left, Malformed):
        channel.close()
        return None
    if answer is not None:
        close_all(answer.fds)
        if answer.is_reply(GET_FEATURES):
            return channel
    channel.close()
    return None


def _has_left(channel: Channel) -> bool:
    poll = select.poll()
    poll.register(channel, 0)
    return bool(poll.poll(0))


def _receive(channel: Channel, limit_s: float) -> Message | None:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    end_s = time.monotonic() + limit_s
    while (left_s := end_s - time.monotonic()) > 0:
        poll.poll(left_s * 1000)
        message = channel.receive()
        if message is not None:
            return message
    return None


class Session:
    """One VMM at one storage daemon; `carry` until one of them leaves or misbehaves."""

    def __init__(self, vmm: Channel, backend: Channel, cache: WriteCache) -> None:
        self.vmm = vmm
        self.backend = backend
        self._rewriter = Rewriter(cache)
        self._prelude = Prelude()

    @property
    def outlives_its_backend(self) -> bool:
        """Tell whether only the storage daemon has left, at a time when another can follow."""
        return self.backend.has_left and not self.vmm.has_left and self._prelude.is_all

    def resume(self, backend: Channel) -> None:
        """Go on with another storage daemon: tell it what the last one was told."""
        self.backend.close()
        self.backend = backend
        for message in self._prelude.again():
            backend.send(message)

    def carry(self) -> None:
        """Copy messages both ways; ends by Left or Malformed."""
        vmm, backend, poll = self.vmm, self.backend, select.poll()
        while True:
            # What one side does not take is not read from the other: nothing piles up here.
            poll.register(vmm, _interest(vmm, backend))
            poll.register(backend, _interest(backend, vmm))
            ready = dict(poll.poll(_timeout_ms(vmm, backend)))
            if _readable(backend, ready.get(backend.fileno(), 0)):
                self._from_backend()
            if _readable(vmm, ready.get(vmm.fileno(), 0)):
                self._from_vmm()

    def _from_backend(self) -> None:
        message = self.backend.receive()
        if message is not None:
            self._prelude.answered(message)
            self.vmm.send(self._rewriter.to_vmm(message))

    def _from_vmm(self) -> None:
        message = self.vmm.receive()
        if message is not None:
            told = self._rewriter.to_backend(message)
            for each in told:
                self._prelude.said(each)
            for each in told:
                self.backend.send(each)


def _readable(channel: Channel, events: int) -> bool:
    """Send what waits; tell whether there is something to read, the end included."""
    if events & select.POLLOUT:
        channel.flush()
    if events & select.POLLIN:
        return True
    if events & (select.POLLHUP | select.POLLERR | select.POLLNVAL):
        channel.has_left = True
        raise Left("closed")  # and nothing is read from it now, since the other does not take it
    return False


def _interest(channel: Channel, other: Channel) -> int:
    reading = 0 if other.is_blocked else select.POLLIN
    return reading | (select.POLLOUT if channel.is_blocked else 0)


def _timeout_ms(*channels: Channel) -> float | None:
    patience = [left_s for each in channels if (left_s := each.patience_s()) is not None]
    if not patience:
        return None
    if min(patience) == 0:
        raise Malformed(f"half a message for {HALF_MESSAGE_S_MAX:g} s")
    return min(patience) * 1000 + 1
