"""HTTP as Cloud Hypervisor speaks it: bytes in, bytes out, no I/O.

Its server leaves out the reason phrase, answers 204 with neither length nor type, never closes an
idle connection, and sends a status line of its own making when it has too many of them. Limits of
its parser are checked here, before anything is sent: beyond them it would read the rest of a body
as further requests. Fails with InvalidArgument for a request that does not fit, with ProtocolError
for an answer that is none; a connection is worth nothing after that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from chv.common.errors import InvalidArgument

ROOT = "/api/v1/"
BODY_BYTES_MAX = 51_200  # of a request, through v53
LINE_BYTES_MAX = 1024  # of a request line and of each header
HEAD_BYTES_MAX = 16 << 10  # of an answer
ANSWER_BYTES_MAX = 16 << 20
# Answers of the protocol layer, not of a handler, name this server.
PROTOCOL_SERVER = "Firecracker API"

_END_OF_HEAD = b"\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: .*)?")
_LENGTH = re.compile(r"[0-9]{1,10}")
_BODYLESS = (204, 304)


class ProtocolError(Exception):
    """The other side does not speak HTTP, or breaks off in the middle."""


@dataclass(frozen=True, slots=True)
class Response:
    """One answer. `server` tells a handler's from one of the protocol layer."""

    status: int
    server: str
    body: bytes

    @property
    def ends_connection(self) -> bool:
        """The server closes after it, or takes the bytes that follow for something else."""
        return self.status == 503 or (self.status == 400 and self.server == PROTOCOL_SERVER)


def request(method: str, name: str, body: bytes | None) -> bytes:
    """Return a request for `/api/v1/<name>`; without a body it carries no length either."""
    line = f"{method} {ROOT}{name} HTTP/1.1"
    if len(line) > LINE_BYTES_MAX or not re.fullmatch(r"[a-z-]+\.[a-z-]+", name):
        raise InvalidArgument(f"{name[:80]!r} is not a call of the API")
    head = f"{line}\r\nHost: localhost\r\nAccept: application/json\r\n"
    if body is None:
        return f"{head}\r\n".encode()
    if len(body) > BODY_BYTES_MAX:
        raise InvalidArgument(
            f"{name} takes {len(body)} bytes, the VMM reads {BODY_BYTES_MAX}",
            hint="a VM of fewer devices",
        )
    typed = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return typed.encode() + body


class Answers:
    """Takes bytes as they come and gives answers as they are complete."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._head: tuple[int, dict[str, str], int] | None = None

    @property
    def empty(self) -> bool:
        """Nothing of an answer has come that was not given out."""
        return not self._data and self._head is None

    def feed(self, data: bytes) -> None:
        """Take what was received."""
        self._data += data

    def next(self) -> Response | None:
        """Return the next complete answer, None where more must come."""
        if self._head is None:
            self._head = self._take_head()
        if self._head is None:
            return None
        status, headers, length = self._head
        if len(self._data) < length:
            return None
        body = bytes(self._data[:length])
        del self._data[:length]
        self._head = None
        return Response(status, headers.get("server", ""), body)

    def _take_head(self) -> tuple[int, dict[str, str], int] | None:
        end = self._data.find(_END_OF_HEAD)
        if end > HEAD_BYTES_MAX or (end < 0 and len(self._data) > HEAD_BYTES_MAX):
            raise ProtocolError(f"a head of more than {HEAD_BYTES_MAX} bytes")
        if end < 0:
            return None
        status_line, *lines = bytes(self._data[:end]).split(b"\r\n")
        del self._data[: end + len(_END_OF_HEAD)]
        match = _STATUS.fullmatch(status_line)
        if match is None:
            raise ProtocolError(f"not a status line: {status_line[:80]!r}")
        headers = dict(map(_header, lines))
        status = int(match[1])
        return status, headers, _length(status, headers)


def _header(line: bytes) -> tuple[str, str]:
    name, colon, value = line.partition(b":")
    if not colon:
        raise ProtocolError(f"not a header: {line[:80]!r}")
    return name.decode("latin-1").strip().lower(), value.decode("latin-1").strip()


def _length(status: int, headers: dict[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise ProtocolError("an answer in chunks")
    text = headers.get("content-length", "0")
    if status in _BODYLESS:
        return 0
    if not _LENGTH.fullmatch(text) or int(text) > ANSWER_BYTES_MAX:
        raise ProtocolError(f"a body of {text[:20]!r} bytes")
    return int(text)
