"""One connection to one VMM: a request at a time, descriptors along with it, nothing sent twice.

The VMM answers in order and works on one request at a time; who stops waiting does not stop it.
So a caller that is cancelled or runs out of time leaves its request where it is: the next caller
first takes in that answer, and gets DeadlineExceeded, with nothing of its own sent, where it does
not come. Raises Unavailable where nobody listens, OutcomeUnknown where a change may or may not
have been made; a reading request that is lost is Unavailable, one that is late DeadlineExceeded.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

import anyio

from chv.common import logs
from chv.common.errors import ChvError, DeadlineExceeded, OutcomeUnknown, Unavailable
from chv.vmm.cloud_hypervisor.http import Answers, ProtocolError, Response, request

READ_BYTES = 65536
FDS_MAX = 253  # that the VMM takes with one request

_log = logs.get("vmm.cloud-hypervisor")


class LineLost(OutcomeUnknown):
    """The connection ended between a change and its answer."""


class _Closed(Exception):
    """The other side hung up."""


class Line:
    """A connection to the API socket at `path`, made when it is needed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = anyio.Lock()
        self._socket: socket.socket | None = None
        self._answers = Answers()
        self._unsent = b""
        self._owed = ""  # the call whose answer is to come

    async def ask(self, name: str, *, limit_s: float) -> Response:
        """Send a request that changes nothing."""
        return await self._exchange(name, request("GET", name, None), (), (limit_s, False))

    async def tell(
        self, name: str, body: bytes | None, fds: Sequence[int], *, limit_s: float
    ) -> Response:
        """Send a request that changes something; copies of `fds` go with it."""
        return await self._exchange(name, request("PUT", name, body), fds, (limit_s, True))

    def close(self) -> None:
        """Hang up. A request that is under way goes on in the VMM."""
        connection, self._socket = self._socket, None
        self._answers, self._unsent, self._owed = Answers(), b"", ""
        if connection is not None:
            anyio.notify_closing(connection)
            connection.close()

    async def _exchange(
        self, name: str, data: bytes, fds: Sequence[int], terms: tuple[float, bool]
    ) -> Response:
        limit_s, changes = terms
        begun = False
        try:
            with anyio.fail_after(limit_s):
                async with self._lock:
                    await self._settle()
                    begun = await self._begin(name, data, fds)
                    return await self._finish()
        except TimeoutError as error:
            if not begun and not self._owed:
                raise DeadlineExceeded(f"{self.path}: {name} could not be sent") from error
            if not begun:
                raise DeadlineExceeded(
                    f"{self.path}: {name} was not sent, the VMM is busy with {self._owed}"
                ) from error
            late = OutcomeUnknown if changes else DeadlineExceeded
            raise late(f"{self.path}: no answer to {name} in {limit_s:g} s") from error
        except (OSError, _Closed, ProtocolError, anyio.ClosedResourceError) as error:
            self.close()
            lost: type[ChvError] = LineLost if begun and changes else Unavailable
            raise lost(f"{self.path}: connection lost during {name}: {error}") from error

    async def _settle(self) -> None:
        """Take in the answer to a request whose caller has left, and see who is there."""
        if self._owed:
            name = self._owed
            try:
                answer = await self._finish()
            except (OSError, _Closed, ProtocolError) as error:
                _log.warning("ch.abandoned", call=name, path=str(self.path), error=str(error))
                self.close()
            else:
                _log.info("ch.late_answer", call=name, path=str(self.path), status=answer.status)
        if self._socket is not None and self._hung_up():
            self.close()
        if self._socket is None:
            self._socket = self._connect()

    def _hung_up(self) -> bool:
        assert self._socket is not None
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return not self._answers.empty
        except OSError:
            return True
        return True  # closed, or an answer that nobody asked for

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(str(self.path))
        except OSError as error:  # BlockingIOError: its queue is full
            connection.close()
            raise Unavailable(f"{self.path}: {error.strerror}") from error
        return connection

    async def _begin(self, name: str, data: bytes, fds: Sequence[int]) -> bool:
        """Send the first part, the descriptors with it: from here on the VMM may act."""
        assert self._socket is not None
        while True:
            try:
                if fds:
                    sent = socket.send_fds(self._socket, [data], list(fds))
                else:
                    sent = self._socket.send(data)
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
            else:
                self._owed, self._unsent = name, data[sent:]
                return True

    async def _finish(self) -> Response:
        """Send what is left and take in the answer; may be cancelled and called again."""
        assert self._socket is not None
        while self._unsent:
            try:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
        while (answer := self._answers.next()) is None:
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
                continue
            if not data:
                raise _Closed("hung up")
            self._answers.feed(data)
        self._owed = ""
        if answer.ends_connection:
            self.close()
        return answer
