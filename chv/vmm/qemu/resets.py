"""What QEMU announces of resets, and how many of them were reboots by the guest. Pure.

Firmware resets the machine once or a few times more after every reset, ours too, and QEMU announces
that as it does a reboot by the guest. The guest has not run in between. So announcements within
FIRMWARE_S of the last reboot, or of a reset of ours, belong to that: a guest that reboots more
often than that is counted less often than it does, never more.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRMWARE_S = 30.0  # firmware on emulated kernel code takes 20 s


@dataclass(slots=True)
class Resets:
    """What one connection was told; lost with it."""

    reboots: int = 0  # by the guest, at least
    announced: int = 0  # resets that were not ours, firmware's included
    at_s: float = 0.0  # of the last reset, since 1970; 0: none yet
    _begun_s: float = 0.0  # of the reboot, or the reset of ours, that later ones belong to

    def told(self, at_s: float, *, by_guest: bool) -> None:
        """Take in an announcement."""
        self.at_s = at_s
        if not by_guest:
            self._begun_s = at_s
            return
        self.announced += 1
        if not 0 <= at_s - self._begun_s < FIRMWARE_S:
            self.reboots += 1
            self._begun_s = at_s
