"""Newline framing without I/O: bytes in, frames out, the same frames however the bytes are cut.

No sockets, clocks or JSON here. Fails with `FrameTooLong` alone, after which the framer must not
be fed again: where the next frame would begin is no longer known.
"""

from __future__ import annotations

from collections.abc import Iterator

FRAME_BYTES_MAX = 1 << 20


class FrameTooLong(Exception):
    """The peer sent more than the limit without a newline."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"frame is longer than {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class LineFramer:
    """Cuts a byte stream at newlines; the work is linear in the bytes, however they arrive."""

    def __init__(self, limit_bytes: int = FRAME_BYTES_MAX) -> None:
        self._limit_bytes = limit_bytes
        self._partial = bytearray()

    @property
    def pending_bytes(self) -> int:
        """How much of an unfinished frame is held back."""
        return len(self._partial)

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the frames that `chunk` completes, in order. Exhaust it before the next call."""
        start = 0
        while (end := chunk.find(b"\n", start)) >= 0:
            yield self._complete(chunk[start:end])
            start = end + 1
        self._check(len(chunk) - start)
        self._partial += chunk[start:]

    def _complete(self, tail: bytes) -> bytes:
        self._check(len(tail))
        if not self._partial:
            return tail
        frame = bytes(self._partial + tail)
        self._partial.clear()
        return frame

    def _check(self, more_bytes: int) -> None:
        if len(self._partial) + more_bytes > self._limit_bytes:
            raise FrameTooLong(self._limit_bytes)
