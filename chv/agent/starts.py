"""The queue of starting VMs, and that of VMs which a drain stops: so many at a time. Pure."""

from __future__ import annotations

from collections.abc import Callable


class StartQueue:
    """First come, first served. `wake` is called for those who moved up."""

    def __init__(self, slots: int, wake: Callable[[str], None]) -> None:
        self._slots = slots
        self._wake = wake
        self._starting: list[str] = []  # the first `_slots` have a slot, the others wait

    def enter(self, uid: str) -> int:
        """Return 0 where `uid` may start now, else its position in the queue, from 1."""
        if uid not in self._starting:
            self._starting.append(uid)
        return max(0, self._starting.index(uid) - self._slots + 1)

    def leave(self, uid: str) -> None:
        """Give up the slot or the place in the queue. Not there: no effect."""
        if uid not in self._starting:
            return
        self._starting.remove(uid)
        for waiting in self._starting[max(0, self._slots - 1) :]:
            self._wake(waiting)

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return max(0, len(self._starting) - self._slots)
