"""The thread that writes recordings and the holder's log: a hung disk holds up nobody else.

What waits to be written is bounded, of each VM and of all. Where there is no room, a line waits a
moment, once, for a disk that is only slow; after that output is dropped until half of what waits
is written, and the recording says how much is missing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import anyio

from chv.agent.console.recording import MARK_HOLDER_LOST, Recording, was_held
from chv.common import logs

log = logs.get("chv.console")
SPOOL_BYTES_MAX = 128 << 10  # waiting, of one VM
SPOOLS_BYTES_MAX = 4 << 20  # and of all
ITEM_BYTES = 512  # what the smallest thing that waits takes in memory
PATIENCE_S, POLL_S = 0.2, 0.01
STOP_S_MAX = 2.0

Action = Callable[[Recording], None]


class Drains(Protocol):
    """What the thread can be given."""

    def drain(self) -> None:
        """Do what is there to do; on the thread, and it may block."""


class Disk:
    """The thread. As a context manager: leaving it writes what waits, for STOP_S_MAX at most."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # over all that the thread and the event loop both touch
        self.waiting_bytes = 0
        self.spools: dict[str, Spool] = {}
        self.wrote: Callable[[int], None] = _nobody
        self._ready: SimpleQueue[Drains | None] = SimpleQueue()
        # A daemon: a write that never returns must not keep the holder from ending.
        self._thread = threading.Thread(target=self._run, name="disk", daemon=True)

    def __enter__(self) -> Disk:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ready.put(None)
        self._thread.join(STOP_S_MAX)

    def ready(self, work: Drains) -> None:
        """Have `work.drain` called on the thread."""
        self._ready.put(work)

    def open(self, vm_id: str, directory: Path) -> Spool:
        """Return the way to a VM's recording; each `open` wants one `release`."""
        with self.lock:
            spool = self.spools.get(vm_id)
            if spool is None:
                spool = self.spools[vm_id] = Spool(self, vm_id, directory)
            spool.users += 1
        return spool

    def _run(self) -> None:
        while True:
            work = self._ready.get()
            if work is not None:
                guarded(work.drain)
            elif self._ready.empty():
                return
            else:
                self._ready.put(None)


class Spool:
    """What waits to be written of one VM's line. `drain` is the thread's, the rest the loop's."""

    def __init__(self, disk: Disk, vm_id: str, directory: Path) -> None:
        self.users = 0
        self._disk = disk
        self._vm_id = vm_id
        bound = log.bind(vm_id=vm_id)
        self._recording = Recording(
            directory,
            lambda error: bound.error("console.recording_failed", error=error),
            lambda count: disk.wrote(count),
        )
        self._directory = directory
        self._items: deque[tuple[int, Action]] = deque()
        self._waiting_bytes = 0
        self._lost_bytes = 0
        self._overrun = False
        self._scheduled = False

    def mark(self, text: str) -> None:
        """Write a line of our own."""
        when = datetime.now(UTC)
        if not self._put(len(text), lambda recording: recording.mark(text, when)):
            self._lose(len(text))

    def mark_if_held(self, serial: Path) -> None:
        """Say that something is lost where another holder recorded this line."""

        def look(recording: Recording) -> None:
            if was_held(self._directory, serial):
                recording.mark(MARK_HOLDER_LOST)

        self._put(0, look)

    async def write(self, data: bytes) -> None:
        """Take what the guest said; waits PATIENCE_S for room at most, and then drops it."""
        taken = self._offer(data)
        try:
            if not taken and not self._overrun:
                with anyio.move_on_after(PATIENCE_S):
                    while not taken:
                        await anyio.sleep(POLL_S)
                        taken = self._offer(data)
        finally:
            if not taken:
                self._lose(len(data))

    def release(self) -> None:
        """The line has ended: the last to say so has the recording closed."""
        with self._disk.lock:
            self.users -= 1
            self._schedule()

    def _offer(self, data: bytes) -> bool:
        when = datetime.now(UTC)
        return self._put(len(data), lambda recording: recording.write(data, when))

    def _put(self, size: int, action: Action) -> bool:
        size += ITEM_BYTES
        with self._disk.lock:
            if self._overrun or not self._has_room(size):
                return False
            if self._lost_bytes:
                self._items.append((0, _gap(self._lost_bytes)))
                self._lost_bytes = 0
            self._items.append((size, action))
            self._waiting_bytes += size
            self._disk.waiting_bytes += size
            self._schedule()
        return True

    def _has_room(self, size: int) -> bool:
        return (
            self._waiting_bytes + size <= SPOOL_BYTES_MAX
            and self._disk.waiting_bytes + size <= SPOOLS_BYTES_MAX
        )

    def _lose(self, count: int) -> None:
        with self._disk.lock:
            self._lost_bytes += count
            self._overrun = True  # until some of what waits is written
            self._schedule()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._disk.ready(self)

    def drain(self) -> None:
        """Write what waits now, so that every VM has its turn."""
        with self._disk.lock:
            items, self._items = self._items, deque()
        for size, action in items:
            guarded(lambda action=action: action(self._recording))  # type: ignore[misc]
            with self._disk.lock:
                self._waiting_bytes -= size
                self._disk.waiting_bytes -= size
                if self._waiting_bytes <= SPOOL_BYTES_MAX // 2:
                    self._overrun = False
        self._settle()

    def _settle(self) -> None:
        with self._disk.lock:
            lost, done = self._lost_bytes, False
            if self._items:
                self._disk.ready(self)
                return
            self._lost_bytes, self._overrun = 0, False
            self._scheduled = False
            if self.users == 0:
                done = self._disk.spools.pop(self._vm_id, None) is self
        if lost:
            guarded(lambda: _gap(lost)(self._recording))
        if done:
            guarded(self._recording.close)


def _gap(count: int) -> Action:
    return lambda recording: recording.mark(f"[chv: {count} bytes were not recorded]")


def guarded(work: Callable[[], None]) -> None:
    """Run on the thread: a bug in one recording must not end all of them."""
    try:
        work()
    except Exception as error:
        log.exception("console.disk_bug", error)  # noqa: TRY401


def _nobody(count: int) -> None:
    """Nobody counts."""
