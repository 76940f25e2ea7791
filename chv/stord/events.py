"""StorageEvents to whoever watches. A watcher too slow for its queue is cut off, never skipped.

The watcher subscribes again and gets every loss that is still open first, so nothing is missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from chv.common.wire.stord import StorageEvent

QUEUE_EVENTS_MAX = 256


class Events:
    """Fan-out of events to any number of watchers."""

    def __init__(self) -> None:
        self._watchers: set[MemoryObjectSendStream[StorageEvent]] = set()

    def publish(self, event: StorageEvent) -> None:
        """Hand the event to every watcher that keeps up; cut off the others."""
        for watcher in list(self._watchers):
            try:
                watcher.send_nowait(event)
            except (anyio.WouldBlock, anyio.BrokenResourceError):
                self._watchers.discard(watcher)
                watcher.close()

    @contextmanager
    def subscribe(self) -> Iterator[MemoryObjectReceiveStream[StorageEvent]]:
        """Yield a stream that ends when this watcher was too slow."""
        send, receive = anyio.create_memory_object_stream[StorageEvent](QUEUE_EVENTS_MAX)
        self._watchers.add(send)
        try:
            with receive:
                yield receive
        finally:
            self._watchers.discard(send)
            send.close()
