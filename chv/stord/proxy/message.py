"""vhost-user messages as bytes and descriptors: the framing, without any I/O.

A message is `<request, flags, payload size>`, then the payload; descriptors come with its bytes.
A `Reader` never asks for more bytes than the message under way still has, so descriptors that
arrive belong to that message. It owns what it was fed until the message is taken; `drop` gives
back the descriptors of a half one. Malformed input raises `Malformed` and ends the reader's use.
"""

from __future__ import annotations

from struct import Struct

HEADER = Struct("<III")
U64 = Struct("<Q")
CONFIG_HEADER = Struct("<III")  # offset, size, flags
VERSION, REPLY = 0x1, 0x4
GET_FEATURES, GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES = 1, 15, 16
GET_CONFIG, SET_CONFIG = 24, 25
# The longest message in use is a page (a list of memory regions is 264 bytes).
PAYLOAD_BYTES_MAX = 4096
# Eight memory regions in one message are the protocol's own limit.
FDS_MAX = 8


class Malformed(Exception):
    """What came is no vhost-user message."""


class Message:
    """One message. Its descriptors belong to whoever holds it."""

    __slots__ = ("fds", "flags", "payload", "request")

    def __init__(
        self, request: int, payload: bytes = b"", fds: tuple[int, ...] = (), flags: int = VERSION
    ) -> None:
        self.request = request
        self.flags = flags
        self.payload = payload
        self.fds = fds

    def encode(self) -> bytes:
        """Return the bytes on the wire."""
        return HEADER.pack(self.request, self.flags, len(self.payload)) + self.payload

    def is_reply(self, request: int) -> bool:
        """Tell whether this is the answer to `request`."""
        return self.request == request and bool(self.flags & REPLY)


class Reader:
    """Takes bytes and descriptors, gives messages."""

    def __init__(self) -> None:
        self._data = b""
        self._fds: tuple[int, ...] = ()

    @property
    def wants(self) -> int:
        """How many bytes may be fed next; never 0."""
        return self._size() - len(self._data)

    def feed(self, data: bytes, fds: tuple[int, ...] = ()) -> Message | None:
        """Take what was received, at most `wants` bytes; return the message that it completed."""
        self._fds += fds
        assert len(data) <= self.wants
        if len(self._fds) > FDS_MAX:
            raise Malformed(f"more than {FDS_MAX} descriptors in a message")
        self._data += data
        if len(self._data) < self._size():
            return None
        return self._take()

    def drop(self) -> tuple[int, ...]:
        """Forget a half message; return its descriptors, which are the caller's to close."""
        fds = self._fds
        self._data, self._fds = b"", ()
        return fds

    def _size(self) -> int:
        if len(self._data) < HEADER.size:
            return HEADER.size
        size = HEADER.unpack_from(self._data)[2]
        if size > PAYLOAD_BYTES_MAX:
            raise Malformed(f"a payload of {size} bytes")
        return HEADER.size + int(size)

    def _take(self) -> Message:
        request, flags, _size = HEADER.unpack_from(self._data)
        message = Message(request, self._data[HEADER.size :], self._fds, flags)
        self._data, self._fds = b"", ()
        return message
