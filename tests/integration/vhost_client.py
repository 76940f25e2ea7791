"""A tiny vhost-user-blk master: one queue of 8, one request at a time, real data.

The guest's side of an export for tests; blocks, with a deadline on every wait.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
from pathlib import Path
from types import TracebackType

HEADER = struct.Struct("<III")
QUEUE_SIZE = 8
MEMORY_BYTES = 1 << 20
USER_BASE = 0x7000_0000
DESCRIPTORS, AVAILABLE, USED, REQUEST, STATUS, DATA = (
    0x1000,
    0x2000,
    0x3000,
    0x4000,
    0x5000,
    0x10000,
)
DATA_BYTES_MAX = MEMORY_BYTES - DATA
NEXT, DEVICE_WRITES = 1, 2
SET_FEATURES, SET_OWNER, SET_MEM_TABLE = 2, 3, 5
SET_VRING_NUM, SET_VRING_ADDR, SET_VRING_BASE = 8, 9, 10
SET_VRING_KICK, SET_VRING_CALL, SET_VRING_ENABLE = 12, 13, 18
GET_FEATURES, GET_PROTOCOL_FEATURES, SET_PROTOCOL_FEATURES, GET_CONFIG = 1, 15, 16, 24
SET_BACKEND_REQUEST_FD, CONFIG_CHANGED = 21, 2
PROTOCOL_BACKEND_REQUEST, PROTOCOL_CONFIG = 1 << 5, 1 << 9
VERSION_1, PROTOCOL_FEATURES, FLUSH, READ_ONLY = 1 << 32, 1 << 30, 1 << 9, 1 << 5
READ, WRITE, FLUSH_REQUEST = 0, 1, 4
SECTOR_BYTES = 512
TIMEOUT_S = 5.0


class VhostDisk:
    """One connection to an export. `channel`: it hands one over, to be told of a new size."""

    def __init__(self, path: Path, *, channel: bool = False) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(TIMEOUT_S)
        self._sock.connect(str(path))
        self._memory_fd = os.memfd_create("guest")
        os.ftruncate(self._memory_fd, MEMORY_BYTES)
        self._memory = mmap.mmap(self._memory_fd, MEMORY_BYTES)
        # Indices that the other side reads or writes at any moment: never half.
        self._words = memoryview(self._memory).cast("H")
        self._kick = os.eventfd(0)
        self._call = os.eventfd(0)
        self._count = 0
        self._news = list(socket.socketpair()) if channel else []
        self.features = self._negotiate()
        self.config = self._read_config()
        self._start_queue()

    def __enter__(self) -> VhostDisk:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        for each in (self._sock, *self._news):
            each.close()
        self._words.release()
        self._memory.close()
        for fd in (self._memory_fd, self._kick, self._call):
            os.close(fd)

    @property
    def size_bytes(self) -> int:
        return int(struct.unpack_from("<Q", self.config)[0]) * SECTOR_BYTES

    @property
    def write_back(self) -> bool:
        return self.config[32] == 1

    @property
    def read_only(self) -> bool:
        return bool(self.features & READ_ONLY)

    def read(self, sector: int, size_bytes: int) -> bytes:
        assert self._request(READ, sector, size_bytes) == 0
        return self._memory[DATA : DATA + size_bytes]

    def write(self, sector: int, data: bytes) -> int:
        """Return the status byte: 0 is OK."""
        self._memory[DATA : DATA + len(data)] = data
        return self._request(WRITE, sector, len(data))

    def flush(self) -> None:
        assert self._request(FLUSH_REQUEST, 0, 0) == 0

    def closed_by_peer(self) -> bool:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN | select.POLLHUP)
        return bool(poll.poll(0))

    def await_news(self) -> None:
        """Wait until the export says that the config has changed, and read it."""
        self._news[0].settimeout(TIMEOUT_S)
        request, _flags, _size = HEADER.unpack(self._news[0].recv(HEADER.size))
        assert request == CONFIG_CHANGED
        self.config = self._read_config()

    # --- messages
    def _send(self, request: int, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        message = HEADER.pack(request, 1, len(payload)) + payload
        socket.send_fds(self._sock, [message], fds)

    def _ask(self, request: int, payload: bytes = b"") -> bytes:
        self._send(request, payload)
        answered, _flags, size = HEADER.unpack(self._receive(HEADER.size))
        assert answered == request
        return self._receive(size)

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._sock.recv(size - len(data))
            assert part, "the export closed the connection"
            data += part
        return data

    def _negotiate(self) -> int:
        self._send(SET_OWNER)
        (features,) = struct.unpack("<Q", self._ask(GET_FEATURES))
        self._ask(GET_PROTOCOL_FEATURES)
        protocol = PROTOCOL_CONFIG | (PROTOCOL_BACKEND_REQUEST if self._news else 0)
        self._send(SET_PROTOCOL_FEATURES, struct.pack("<Q", protocol))
        if self._news:
            self._send(SET_BACKEND_REQUEST_FD, fds=(self._news[1].fileno(),))
        accepted = features & (VERSION_1 | PROTOCOL_FEATURES | FLUSH | READ_ONLY)
        self._send(SET_FEATURES, struct.pack("<Q", accepted))
        return int(features)

    def _read_config(self) -> bytes:
        return self._ask(GET_CONFIG, struct.pack("<III", 0, 36, 0) + bytes(36))[12:]

    def _start_queue(self) -> None:
        region = struct.pack("<IIQQQQ", 1, 0, 0, MEMORY_BYTES, USER_BASE, 0)
        self._send(SET_MEM_TABLE, region, (self._memory_fd,))
        self._send(SET_VRING_NUM, struct.pack("<II", 0, QUEUE_SIZE))
        self._send(SET_VRING_BASE, struct.pack("<II", 0, 0))
        addresses = (USER_BASE + DESCRIPTORS, USER_BASE + USED, USER_BASE + AVAILABLE, 0)
        self._send(SET_VRING_ADDR, struct.pack("<IIQQQQ", 0, 0, *addresses))
        self._send(SET_VRING_CALL, struct.pack("<Q", 0), (self._call,))
        self._send(SET_VRING_KICK, struct.pack("<Q", 0), (self._kick,))
        self._send(SET_VRING_ENABLE, struct.pack("<II", 0, 1))

    # --- one request
    def _request(self, kind: int, sector: int, size_bytes: int) -> int:
        assert size_bytes <= DATA_BYTES_MAX
        struct.pack_into("<IIQ", self._memory, REQUEST, kind, 0, sector)
        self._memory[STATUS] = 0xFF
        parts = [(REQUEST, 16, 0)]
        if size_bytes:
            parts.append((DATA, size_bytes, DEVICE_WRITES if kind == READ else 0))
        parts.append((STATUS, 1, DEVICE_WRITES))
        for index, (address, length, flags) in enumerate(parts):
            last = index == len(parts) - 1
            flags |= 0 if last else NEXT
            descriptor = DESCRIPTORS + 16 * index
            following = 0 if last else index + 1
            struct.pack_into("<QIHH", self._memory, descriptor, address, length, flags, following)
        self._submit()
        return self._memory[STATUS]

    def _submit(self) -> None:
        struct.pack_into("<H", self._memory, AVAILABLE + 4 + 2 * (self._count % QUEUE_SIZE), 0)
        self._count += 1
        self._words[AVAILABLE // 2 + 1] = self._count & 0xFFFF
        os.eventfd_write(self._kick, 1)
        while self._words[USED // 2 + 1] != self._count & 0xFFFF:
            ready, _, _ = select.select([self._call], [], [], TIMEOUT_S)
            assert ready, "the request never completed"
            os.eventfd_read(self._call)
