"""Waiting for a change of something named, without polling and without a queue to overflow."""

from __future__ import annotations

from weakref import WeakValueDictionary

import anyio


class Watch:
    """Waiters by key. A notification wakes those who wait now; it is not remembered.

    An event is there as long as somebody holds it: nothing is left of who has ceased to wait.
    """

    def __init__(self) -> None:
        self._events: WeakValueDictionary[str, anyio.Event] = WeakValueDictionary()

    def event(self, key: str) -> anyio.Event:
        """Return the event that the next notification sets; take it before looking."""
        return self._events.setdefault(key, anyio.Event())

    def notify(self, key: str) -> None:
        """Wake everybody who waits for this key."""
        event = self._events.pop(key, None)
        if event is not None:
            event.set()

    def notify_all(self) -> None:
        """Wake everybody."""
        for key in list(self._events):
            self.notify(key)
