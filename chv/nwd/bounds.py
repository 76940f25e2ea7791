"""How many connections a NIC may have where nobody said: a share of what the host can track. Pure.

What guests of all networks send out is tracked in the host's one table too. A full table refuses
everybody's new connections, so no guest may fill it: one that says nothing gets a sixteenth, and
not more than costs nothing worth saying (see `docs/networking.md`).
"""

from __future__ import annotations

SHARES = 16
DEFAULT_MIN, DEFAULT_MAX = 256, 4096
HOST_MAX = 65536  # where the host does not say: the kernel's own default on a small machine


def connections_default(host_max: str) -> int:
    """Return the bound of a NIC, given what the host's setting says."""
    number = int(host_max) if host_max.isdigit() else 0
    return max(DEFAULT_MIN, min(DEFAULT_MAX, (number or HOST_MAX) // SHARES))
