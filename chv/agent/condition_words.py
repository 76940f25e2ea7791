"""The words that the table of conditions is written in. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

# A full look every 30 s (`Limits.resync_s`) whatever events say, and what it takes itself.
LOOK_S = 45.0


class Time(Enum):
    """Whose time `lastProbeTime` is."""

    LOOK = "the last look at the object"
    HEARD = "when it was heard"
    RECORD = "the last look; the fact itself is recorded"


@dataclass(frozen=True, slots=True)
class Passing:
    """A state that is to pass: by when, and what comes after.

    `progress`: the deadline counts from the last sign of progress. `asks`: the deadline is this
    much longer than the guest's own (`shutdownTimeout`).
    """

    deadline_s: float
    then: str
    progress: bool = False
    asks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionRule:
    """One type of condition. Reasons: those that stand, those that pass, those of Unknown."""

    type: str
    evidence: str
    time: Time = Time.LOOK
    stale_s: float = LOOK_S  # how old the evidence of a condition that is not Unknown may be
    standing: tuple[str, ...] = ()
    passing: Mapping[str, Passing] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)  # reason -> when

    @property
    def reasons(self) -> frozenset[str]:
        """All reasons that it may be shown with, but for those of deadlines."""
        return frozenset((*self.standing, *self.passing, *self.unknown))


@dataclass(frozen=True, slots=True, kw_only=True)
class KindRule:
    """A kind: `leads` is the condition that tells of a phase whose deadline has passed."""

    leads: str
    conditions: tuple[ConditionRule, ...]
    phases: Mapping[str, Passing]  # those that are to pass
    standing: tuple[str, ...]  # those that may stand
    rest: tuple[str, ...] = ()  # those of them in which nothing is to pass, whatever the reason
