"""What a VM's ends leave behind: when it crashed, and how long it waits for its restart. Pure.

Durable facts of the VM, stored with the end that they belong to: an agent that comes later, also
after a reboot of the host, counts on where the last one stopped.
"""

from __future__ import annotations

import msgspec

from chv.agent.moments import Moment, age_s
from chv.agent.records import EndKind, VmFacts

ASKED_FOR = frozenset(
    {
        EndKind.STOP,
        EndKind.DRAIN,
        EndKind.RESTART,
        EndKind.RESTORE,
        EndKind.REBUILD,
        EndKind.DELETE,
    }
)
UNCOUNTED = ASKED_FOR | {EndKind.HOST_REBOOT}  # not the VM's own doing
KEPT_MIN = 8  # so many are kept at least: the back-off grows with them
LOOP_MIN = 2  # from so many within the window on it is a loop


def crashes_after(
    facts: VmFacts, kind: EndKind, now: Moment, window_s: float, restarts_max: int
) -> tuple[Moment, ...]:
    """Return the crashes within the window, this end among them where it is one; bounded."""
    recent = [each for each in facts.crashes if age_s(each, now) <= window_s]
    if kind not in UNCOUNTED:
        recent.append(now)
    return tuple(recent[-max(KEPT_MIN, restarts_max + 1) :])


def backoff_left_s(facts: VmFacts, now: Moment) -> float:
    """Return for how many more seconds the VM is not to be started."""
    if not facts.crashes or facts.backoff_s <= 0:
        return 0.0
    return max(0.0, facts.backoff_s - age_s(facts.crashes[-1], now))


def loop_since(facts: VmFacts, now: Moment, window_s: float) -> str:
    """Return the stamp of the first crash of a loop that goes on; empty where there is none."""
    recent = [each for each in facts.crashes if facts.given_up or age_s(each, now) <= window_s]
    return recent[0].stamp if len(recent) >= LOOP_MIN else ""


def next_restart(facts: VmFacts, now: Moment, shown: str) -> str:
    """Return when it starts again by the wall clock of now; `shown` while it says so within 1 s."""
    left_s = backoff_left_s(facts, now)
    if left_s <= 0:
        return ""
    at = msgspec.structs.replace(now, wall_s=round(now.wall_s + left_s))
    near = {msgspec.structs.replace(at, wall_s=at.wall_s + step).stamp for step in (-1, 0, 1)}
    return shown if shown in near else at.stamp


def forgiven(facts: VmFacts) -> VmFacts:
    """Return the facts once somebody wants something anew: no back-off is waited for.

    One that was given up is tried as if it had never crashed.
    """
    crashes = () if facts.given_up else facts.crashes
    return msgspec.structs.replace(facts, given_up="", backoff_s=0.0, crashes=crashes)
