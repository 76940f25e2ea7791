"""A vhost-user-blk master whose requests outlive a connection: several in flight, one queue.

Rings, data and the in-flight region stay through `connect` after `connect`, as in a VMM, so the
next storage daemon finds what the last one left undone. `StampedWriter` writes blocks that say
which write they are, through any number of deaths, and reads back every acknowledged one.
"""

from __future__ import annotations

import mmap
import os
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from tests.integration import vhost_client as vhost

BLOCK_BYTES = 4096
QUEUE_SIZE = 128
DEPTH_MAX = 32
DESCRIPTORS, AVAILABLE, USED, REQUESTS, DATA = 0x1000, 0x2000, 0x3000, 0x4000, 0x10000
MEMORY_BYTES = DATA + DEPTH_MAX * BLOCK_BYTES
GET_INFLIGHT_FD, SET_INFLIGHT_FD = 31, 32
INFLIGHT = struct.Struct("<QQHHxxxx")
PROTOCOL_CONFIG, PROTOCOL_INFLIGHT = 1 << 9, 1 << 12
STATUS_OFFSET = 16  # in a slot's request area, behind the header
SLOT_BYTES = 32
# How long a master tries to come back, and how long a request may take at the end.
RECONNECT_S = 15.0
DRAIN_S = 15.0


class InflightDisk:
    """The master's side of one disk."""

    def __init__(self, path: Path, depth: int = 16) -> None:
        assert depth <= DEPTH_MAX
        self.path = path
        self.depth = depth
        self.connections = 0
        self.config = b""
        self._memory_fd = os.memfd_create("guest")
        os.ftruncate(self._memory_fd, MEMORY_BYTES)
        self._memory = mmap.mmap(self._memory_fd, MEMORY_BYTES)
        # Indices that the other side reads at any moment: never half written.
        self._words = memoryview(self._memory).cast("H")
        self._kick, self._call = os.eventfd(0), os.eventfd(0, os.EFD_NONBLOCK)
        self._inflight: tuple[int, bytes] | None = None
        self._sock: socket.socket | None = None
        self._submitted = self._seen = 0
        self._free = list(range(depth))

    def __enter__(self) -> InflightDisk:
        self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.disconnect()
        self._words.release()
        self._memory.close()
        for fd in (self._memory_fd, self._kick, self._call):
            os.close(fd)
        if self._inflight is not None:
            os.close(self._inflight[0])

    @property
    def write_back(self) -> bool:
        return self.config[32] == 1

    @property
    def in_flight(self) -> int:
        return self.depth - len(self._free)

    # --- connection
    def connect(self) -> None:
        """Connect and start the queue where it stands; OSError where the other side leaves."""
        self.disconnect()
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(vhost.TIMEOUT_S)
        self._sock.connect(str(self.path))
        self._negotiate()
        self._start_queue()
        self.connections += 1

    def disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def reconnect(self, limit_s: float = RECONNECT_S) -> None:
        """Connect until it works."""
        end = time.monotonic() + limit_s
        while True:
            try:
                self.connect()
                return
            except OSError:
                assert time.monotonic() < end, f"no connection for {limit_s:g} s"
                time.sleep(0.01)

    def _negotiate(self) -> None:
        self._send(vhost.SET_OWNER)
        (features,) = struct.unpack("<Q", self._ask(vhost.GET_FEATURES)[0])
        (protocol,) = struct.unpack("<Q", self._ask(vhost.GET_PROTOCOL_FEATURES)[0])
        assert protocol & PROTOCOL_INFLIGHT, "the in-flight feature is not offered"
        wanted = PROTOCOL_CONFIG | PROTOCOL_INFLIGHT
        self._send(vhost.SET_PROTOCOL_FEATURES, struct.pack("<Q", wanted))
        accepted = features & (vhost.VERSION_1 | vhost.PROTOCOL_FEATURES | vhost.FLUSH)
        self._send(vhost.SET_FEATURES, struct.pack("<Q", accepted))
        request = struct.pack("<III", 0, 36, 0) + bytes(36)
        self.config = self._ask(vhost.GET_CONFIG, request)[0][12:]
        if self._inflight is None:
            payload, fds = self._ask(GET_INFLIGHT_FD, INFLIGHT.pack(0, 0, 1, QUEUE_SIZE))
            self._inflight = fds[0], payload
        self._send(SET_INFLIGHT_FD, self._inflight[1], (self._inflight[0],))

    def _start_queue(self) -> None:
        region = struct.pack("<IIQQQQ", 1, 0, 0, MEMORY_BYTES, vhost.USER_BASE, 0)
        self._send(vhost.SET_MEM_TABLE, region, (self._memory_fd,))
        self._send(vhost.SET_VRING_NUM, struct.pack("<II", 0, QUEUE_SIZE))
        used = self._words[USED // 2 + 1]
        self._send(vhost.SET_VRING_BASE, struct.pack("<II", 0, used))
        places = (vhost.USER_BASE + each for each in (DESCRIPTORS, USED, AVAILABLE))
        self._send(vhost.SET_VRING_ADDR, struct.pack("<IIQQQQ", 0, 0, *places, 0))
        self._send(vhost.SET_VRING_CALL, struct.pack("<Q", 0), (self._call,))
        self._send(vhost.SET_VRING_KICK, struct.pack("<Q", 0), (self._kick,))
        self._send(vhost.SET_VRING_ENABLE, struct.pack("<II", 0, 1))

    def _send(self, request: int, payload: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        assert self._sock is not None
        message = vhost.HEADER.pack(request, 1, len(payload)) + payload
        socket.send_fds(self._sock, [message], fds)

    def _ask(self, request: int, payload: bytes = b"") -> tuple[bytes, list[int]]:
        self._send(request, payload)
        head, fds = self._receive(vhost.HEADER.size)
        answered, _flags, size = vhost.HEADER.unpack(head)
        assert answered == request
        data, more = self._receive(size)
        return data, fds + more

    def _receive(self, size: int) -> tuple[bytes, list[int]]:
        assert self._sock is not None
        data, fds = b"", list[int]()
        while len(data) < size:
            part, more, _, _ = socket.recv_fds(self._sock, size - len(data), 8)
            if not part:
                raise ConnectionResetError("the other side has left")
            data, fds = data + part, fds + more
        return data, fds

    # --- requests
    def submit(self, kind: int, block: int, data: bytes = b"") -> int:
        """Put one request of one block into the queue; return its slot."""
        slot = self._free.pop()
        head, request, place = 3 * slot, REQUESTS + slot * SLOT_BYTES, DATA + slot * BLOCK_BYTES
        sector = block * (BLOCK_BYTES // vhost.SECTOR_BYTES)
        struct.pack_into("<IIQ", self._memory, request, kind, 0, sector)
        self._memory[request + STATUS_OFFSET] = 0xFF
        if data:
            self._memory[place : place + BLOCK_BYTES] = data
        writes = vhost.DEVICE_WRITES
        payload = [] if kind == vhost.FLUSH_REQUEST else [(place, BLOCK_BYTES)]
        parts = [(request, 16, 0)]
        parts += [(*each, writes if kind == vhost.READ else 0) for each in payload]
        parts.append((request + STATUS_OFFSET, 1, writes))
        for index, (address, length, flags) in enumerate(parts):
            last = index == len(parts) - 1
            following = (flags, 0) if last else (flags | vhost.NEXT, head + index + 1)
            at = DESCRIPTORS + 16 * (head + index)
            struct.pack_into("<QIHH", self._memory, at, address, length, *following)
        at = AVAILABLE + 4 + 2 * (self._submitted % QUEUE_SIZE)
        struct.pack_into("<H", self._memory, at, head)
        self._submitted += 1
        self._words[AVAILABLE // 2 + 1] = self._submitted & 0xFFFF
        os.eventfd_write(self._kick, 1)
        return slot

    def completed(self) -> list[tuple[int, int]]:
        """Take what has completed since: slots and status bytes."""
        used = self._words[USED // 2 + 1]
        done = []
        while self._seen & 0xFFFF != used:
            (head,) = struct.unpack_from(
                "<I", self._memory, USED + 4 + 8 * (self._seen % QUEUE_SIZE)
            )
            self._seen += 1
            slot = head // 3
            assert slot not in self._free, "a request completed twice"
            done.append((slot, self._memory[REQUESTS + slot * SLOT_BYTES + STATUS_OFFSET]))
            self._free.append(slot)
        return done

    def data(self, slot: int) -> bytes:
        return self._memory[DATA + slot * BLOCK_BYTES : DATA + (slot + 1) * BLOCK_BYTES]

    def wait(self, limit_s: float) -> bool:
        """Wait for a completion; False: the other side has left."""
        poll = select.poll()
        poll.register(self._call, select.POLLIN)
        if self._sock is not None:
            poll.register(self._sock, select.POLLIN)
        ready = {fd for fd, _ in poll.poll(limit_s * 1000)}
        if self._call in ready:
            os.eventfd_read(self._call)
        return self._sock is None or self._sock.fileno() not in ready


class StampedWriter:
    """Writes random blocks at full depth and knows what was acknowledged."""

    def __init__(self, disk: InflightDisk, blocks: int, seed: int = 1) -> None:
        self.disk = disk
        self.acknowledged: dict[int, bytes] = {}
        self.errors = self.hung = self.bad = self.writes = 0
        self.longest_gap_s = 0.0
        self._blocks = blocks
        self._random = random.Random(seed)
        self._pending: dict[int, tuple[int, bytes]] = {}
        self._counter = 0
        self._last = time.monotonic()
        self._held = threading.Event()
        self._stands = threading.Event()

    @contextmanager
    def standing(self) -> Iterator[None]:
        """As a guest whose vCPUs stand: nothing new is submitted, and nothing is under way."""
        self._held.set()
        try:
            assert self._stands.wait(DRAIN_S), "requests do not end"
            yield
        finally:
            self._held.clear()
            self._stands.clear()

    def run(self, stop: Callable[[], bool]) -> None:
        """Write until told to stop, then wait for what is in flight."""
        self._last = time.monotonic()
        while not stop():
            if self._held.is_set() and not self.disk.in_flight:
                self._stands.set()
                time.sleep(0.001)
                continue
            while self.disk.in_flight < self.disk.depth and not self._held.is_set():
                self._submit()
            self._step()
        end = time.monotonic() + DRAIN_S
        while self.disk.in_flight and time.monotonic() < end:
            self._step()
        self.hung = self.disk.in_flight

    def _submit(self) -> None:
        busy = {block for block, _ in self._pending.values()}
        block = self._random.randrange(self._blocks)
        while block in busy:
            block = self._random.randrange(self._blocks)
        self._counter += 1
        data = stamp(block, self._counter)
        self._pending[self.disk.submit(vhost.WRITE, block, data)] = block, data

    def _step(self) -> None:
        if not self.disk.wait(0.1):
            self.disk.reconnect()
        for slot, status in self.disk.completed():
            now = time.monotonic()
            self.longest_gap_s = max(self.longest_gap_s, now - self._last)
            self._last = now
            block, data = self._pending.pop(slot)
            self.writes += 1
            if status == 0:
                self.acknowledged[block] = data
            else:
                self.errors += 1

    def verify(self) -> None:
        """Read every acknowledged block back; counts those that are something else."""
        for block, data in self.acknowledged.items():
            slot = self.disk.submit(vhost.READ, block)
            while not (done := self.disk.completed()):
                assert self.disk.wait(vhost.TIMEOUT_S), "the other side left during the check"
            assert done == [(slot, 0)]
            self.bad += self.disk.data(slot) != data


def stamp(block: int, counter: int) -> bytes:
    return struct.pack("<QQ", block, counter) * (BLOCK_BYTES // 16)
