"""Reboots by the guest itself: how many, when the last, and whether this boot is another.

A reset that somebody asked for is none of them. Seen by the monitor's answers, so a moment late.
"""

from __future__ import annotations

from dataclasses import dataclass

from chv.common.wire.resources import VmmStatus
from chv.vmm.driver import VmmObservation


@dataclass(slots=True)
class Reboots:
    """What one agent knows of the VMM that runs now."""

    count: int = 0
    at: str = ""  # when the last was seen; what an earlier agent saw, it has shown
    reset_at_s: float = 0.0  # when the boot that runs now began, where the monitor has told
    _worker: str = ""
    _base: int = 0  # seen by earlier agents, where the monitor has forgotten them
    _resets: int = 0

    def see(self, worker_id: str, seen: VmmObservation, shown: VmmStatus | None, now: str) -> bool:
        """Take in an answer; True where the guest boots anew since the last one.

        `shown`: what is shown of this very process, None where nothing was.
        """
        if self._worker != worker_id:
            self._begin(worker_id, seen, shown)
        if seen.resets < self._resets:  # on another connection
            self._base = self.count
        another = seen.resets > self._resets
        self._resets = seen.resets
        count = self._base + (seen.reboots or 0)
        if count > self.count:
            self.count, self.at = count, now
        if seen.reset_at_s:
            self.reset_at_s = seen.reset_at_s
        return another

    def _begin(self, worker_id: str, seen: VmmObservation, shown: VmmStatus | None) -> None:
        before = shown.guest_reboots if shown is not None else 0
        self._worker, self.count = worker_id, before
        self.at = shown.guest_rebooted_at if shown is not None else ""
        self._base = 0 if seen.remembers else before
        # A monitor that remembers tells of what happened while no agent was there.
        self._resets, self.reset_at_s = (before if seen.remembers else 0), 0.0

    def is_news(self, seen: VmmObservation) -> bool:
        """Tell whether an answer tells of a reset that was not taken in yet."""
        return seen.resets > self._resets
