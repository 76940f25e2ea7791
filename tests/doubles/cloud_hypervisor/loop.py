"""One thread that waits for descriptors and timers, and does one thing at a time."""

from __future__ import annotations

import heapq
import itertools
import select
import time
from collections.abc import Callable

Handler = Callable[[], None]


class Loop:
    """`after_each` runs when everything that was ready has been served."""

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._handlers: dict[int, Handler] = {}
        self._timers: list[tuple[float, int, Handler]] = []
        self._order = itertools.count()
        self.after_each: list[Handler] = []
        self.exit_code: int | None = None

    def watch(self, fd: int, handler: Handler) -> None:
        self._poll.register(fd, select.EPOLLIN | select.EPOLLRDHUP)
        self._handlers[fd] = handler

    def forget(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)

    def later(self, delay_s: float, handler: Handler) -> None:
        heapq.heappush(self._timers, (time.monotonic() + delay_s, next(self._order), handler))

    def run(self) -> int:
        """Return the exit code that somebody has set."""
        while self.exit_code is None:
            self._once()
            for handler in self.after_each:
                handler()
        return self.exit_code

    def _once(self) -> None:
        for fd, _ in self._poll.poll(self._wait_s()):
            handler = self._handlers.get(fd)
            if handler is not None and self.exit_code is None:
                handler()
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now and self.exit_code is None:
            heapq.heappop(self._timers)[2]()

    def _wait_s(self) -> float | None:
        if not self._timers:
            return None
        return max(0.0, self._timers[0][0] - time.monotonic())
