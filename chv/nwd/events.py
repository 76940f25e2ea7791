"""Says what has changed in what lists show, to whoever watches: hints, never the change itself.

A change of anything comes by a network's lock, and its release pokes; a moment later what lists
would show is compared with what was told last. A watcher too slow for its queue is cut off, never
skipped; it watches again, and is first told to look at everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from chv.common import logs
from chv.common.wire.nwd_policy import NetworkEvent

log = logs.get(__name__)
QUEUE_EVENTS_MAX = 4096
GATHER_S = 0.25
NODE = "node"
Shown = dict[tuple[str, str], Any]  # (kind, uid) to how it is shown


class Events:
    """Fan-out of events to any number of watchers. `run` lives as long as the daemon."""

    def __init__(self, shown: Callable[[], Shown]) -> None:
        self._shown = shown
        self._told: Shown = {}
        self._poked = anyio.Event()
        self._watchers: set[MemoryObjectSendStream[NetworkEvent]] = set()

    def poke(self) -> None:
        """Something may be shown in another way now."""
        self._poked.set()

    def addresses_changed(self) -> None:
        """The node has others: exposures of what it did not have may be right now."""
        self._publish(NetworkEvent(kind=NODE))
        self.poke()

    async def run(self) -> None:
        """Tell of what changes; what is there at the start is known to whoever asks."""
        self._told = self._shown()
        while True:
            await self._poked.wait()
            await anyio.sleep(GATHER_S)
            self._poked = anyio.Event()
            try:
                self._compare()
            except Exception as error:  # noqa: BLE001  hints must not end the daemon
                log.warning("changes_not_told", error=error)

    def _compare(self) -> None:
        if not self._watchers:
            return  # the next one is told to look at everything
        now = self._shown()
        before, self._told = self._told, now
        for kind, uid in {**before, **now}:
            if before.get((kind, uid)) != now.get((kind, uid)):
                self._publish(NetworkEvent(kind=kind, uid=uid))

    def _publish(self, event: NetworkEvent) -> None:
        for watcher in list(self._watchers):
            try:
                watcher.send_nowait(event)
            except (anyio.WouldBlock, anyio.BrokenResourceError):
                self._watchers.discard(watcher)
                watcher.close()

    @contextmanager
    def subscribe(self) -> Iterator[MemoryObjectReceiveStream[NetworkEvent]]:
        """Yield a stream that ends when this watcher was too slow."""
        send, receive = anyio.create_memory_object_stream[NetworkEvent](QUEUE_EVENTS_MAX)
        self._told = self._told if self._watchers else self._shown()
        self._watchers.add(send)
        send.send_nowait(NetworkEvent(kind=NODE))
        try:
            with receive:
                yield receive
        finally:
            self._watchers.discard(send)
            send.close()
