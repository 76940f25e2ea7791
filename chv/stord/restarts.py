"""How often the storage daemon of a VM may die under it, and how long a restart may take. Pure.

Storage daemon and proxies are one unit: the death of one is expected to take the other along, so
both within a moment count once. Counts are forgotten with stord; what is durable is `losses`.
"""

from __future__ import annotations

import msgspec

from chv.stord.records import Backend, BackendPhase

DEATHS_MAX = 3
WINDOW_S = 300.0
TOGETHER_S = 1.0
# A VMM gives a disk up after a minute; the VM is reset long before.
RESTART_S_MAX = 10.0
RETRY_S = 0.2
UNDER_WAY = "being restarted under the VM"


class Deaths:
    """Recent deaths of each VM's workers."""

    def __init__(self) -> None:
        self._recent: dict[str, list[tuple[float, str]]] = {}

    def note(self, vm_id: str, what: str, now_s: float) -> bool:
        """Count one; False when they have become too many."""
        recent = [each for each in self._recent.get(vm_id, []) if now_s - each[0] < WINDOW_S]
        if not any(now_s - at < TOGETHER_S and other != what for at, other in recent):
            recent.append((now_s, what))
        self._recent[vm_id] = recent[-DEATHS_MAX - 1 :]
        return len(recent) <= DEATHS_MAX

    def forget(self, vm_id: str) -> None:
        """Start anew: the VM was reset or is gone."""
        self._recent.pop(vm_id, None)


def begun(backend: Backend, now: str) -> Backend:
    """Return the row of a storage daemon that is restarted under its VM."""
    return msgspec.structs.replace(
        backend,
        phase=BackendPhase.RESTARTING,
        losses=backend.losses + 1,
        last_loss=f"{now}: the storage daemon ended; {UNDER_WAY}",
    )


def finished(backend: Backend, now: str) -> Backend:
    """Return the row of one that serves again."""
    text = backend.last_loss.replace(UNDER_WAY, f"restarted under the VM, served again {now}")
    return msgspec.structs.replace(
        backend, phase=BackendPhase.SERVING, message="", lost_at="", last_loss=text
    )
