"""Frames from a packet socket into a pcap stream, live. No more than that.

The header is written at once, so that a reader in a pipe knows the format before the first frame.
Ends with the count, the time, the interface, or the reader; what the kernel had no room for is
counted.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from dataclasses import dataclass
from typing import BinaryIO

FRAME_BYTES_MAX = 262_144
_MAGIC, _MAJOR, _MINOR, _ETHERNET = 0xA1B2C3D4, 2, 4, 1
_HEADER = struct.Struct("=IHHiIII")
_FRAME = struct.Struct("=IIII")
_TIMESTAMP = 35  # SO_TIMESTAMPNS, and the type of its message
_SOL_PACKET, _STATISTICS = 263, 6
_END = b""
_GONE = (errno.ENETDOWN, errno.ENXIO, errno.ENODEV)


def write_header(out: BinaryIO) -> None:
    """Begin a stream of Ethernet frames with microseconds."""
    out.write(_HEADER.pack(_MAGIC, _MAJOR, _MINOR, 0, 0, FRAME_BYTES_MAX, _ETHERNET))
    out.flush()


@dataclass(frozen=True, slots=True)
class Limits:
    """When it ends by itself; 0: it does not."""

    count_max: int = 0
    duration_s: float = 0.0


@dataclass
class Counter:
    """How many frames were written, also where it ends by an exception."""

    frames: int = 0


def copy(capture: socket.socket, out: BinaryIO, limits: Limits, counter: Counter) -> None:
    """Write frames until an end comes."""
    capture.setsockopt(socket.SOL_SOCKET, _TIMESTAMP, 1)
    capture.setblocking(False)
    deadline = time.monotonic() + limits.duration_s if limits.duration_s else None
    while not limits.count_max or counter.frames < limits.count_max:
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            break
        frame = _receive(capture)
        if frame == _END:
            break
        if frame is not None:
            out.write(frame)
            counter.frames += 1
            continue
        out.flush()
        if not _wait(capture, out, left_s):
            break
    out.flush()


def _wait(capture: socket.socket, out: BinaryIO, left_s: float | None) -> bool:
    """Wait for a frame or the time; False where the reader or the interface has gone."""
    poll = select.poll()
    poll.register(capture, select.POLLIN)
    poll.register(out, 0)  # errors alone: the other end of a pipe was closed
    for fd, event in poll.poll(None if left_s is None else max(1, int(left_s * 1000))):
        if fd != capture.fileno():
            return False
        if event & select.POLLERR:
            return capture.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in _GONE
    return True


def _receive(capture: socket.socket) -> bytes | None:
    """Return a frame as the stream has it; None while there is none, nothing at the end."""
    try:
        data, ancillary, _, _ = capture.recvmsg(FRAME_BYTES_MAX, 64)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno in _GONE:
            return _END
        raise
    seconds, nanoseconds = divmod(time.time_ns(), 1_000_000_000)
    for level, kind, stamp in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _TIMESTAMP) and len(stamp) == 16:
            seconds, nanoseconds = struct.unpack("=qq", stamp)
    head = _FRAME.pack(seconds & 0xFFFFFFFF, nanoseconds // 1000, len(data), len(data))
    return head + data


def lost(capture: socket.socket) -> int:
    """Return how many frames the kernel had no room for, since this was last asked."""
    try:
        data = capture.getsockopt(_SOL_PACKET, _STATISTICS, 8)
    except OSError:
        return 0
    return int(struct.unpack("=II", data)[1])


def is_terminal(out: BinaryIO) -> bool:
    """Tell whether somebody would see the bytes."""
    return os.isatty(out.fileno())
