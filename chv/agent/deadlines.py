"""Deadlines of what is to pass: what stays for too long says so, in its condition and in `why`.

Every status that is published goes through `Deadlines.judged`, and `watch` looks at those that
nobody publishes meanwhile (a step that takes its time). What is counted is the monotonic clock;
for a phase it goes on over an end of the agent by `status.phaseSince`, for a reason it begins anew.
"""

from __future__ import annotations

from datetime import datetime

import msgspec

from chv.agent.condition_table import OVERDUE, TABLE, base_reason, passing_phase, passing_reason
from chv.agent.condition_words import Passing
from chv.agent.records import Status, StoredObject
from chv.common.clock import Clock, timestamp
from chv.common.quantity import parse_duration_s
from chv.common.wire.resources import Condition, ConditionStatus, VirtualMachine

EVERY_S = 5.0  # how late a deadline is noticed at the most, whatever a step takes


def passes(stored: StoredObject) -> bool:
    """Tell whether something of an object is to pass, so that a deadline may be due."""
    kind, status = stored.resource.kind, stored.resource.status
    if status is None:
        return False
    phase = str(status.phase)
    if passing_phase(kind, phase) is not None:
        return True
    return any(passing_reason(kind, phase, each.type, each.reason) for each in status.conditions)


class Deadlines:
    """Since when each object is in its phase, and each condition has its reason."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[tuple[str, str], tuple[object, float]] = {}

    def forget(self, uid: str) -> None:
        """The object is gone."""
        for key in [key for key in self._since if key[0] == uid]:
            del self._since[key]

    def judged(self, stored: StoredObject, status: Status) -> Status:
        """Return the status with the moment of its phase, and with what is overdue said."""
        status = self._stamped(stored, status)
        conditions = [self._judged(stored, str(status.phase), each) for each in status.conditions]
        rule = passing_phase(stored.resource.kind, str(status.phase))
        if rule is None:
            self._since.pop((stored.uid, ""), None)
        elif self._phase_is_over(stored, status, rule):
            leads = TABLE[stored.resource.kind].leads
            conditions = [
                _phase_overdue(each, stored, status, rule) if each.type == leads else each
                for each in conditions
            ]
        return msgspec.structs.replace(status, conditions=conditions)

    def _stamped(self, stored: StoredObject, status: Status) -> Status:
        before = stored.resource.status
        same = before is not None and before.phase == status.phase and before.phase_since
        since = before.phase_since if before is not None and same else timestamp(self._clock.now())
        return msgspec.structs.replace(status, phase_since=since)

    def _phase_is_over(self, stored: StoredObject, status: Status, rule: Passing) -> bool:
        mark = (str(status.phase), getattr(status, "progress", "") if rule.progress else "")
        known = self._since.get((stored.uid, ""))
        if known is None and not rule.progress:
            # It may have begun under an earlier agent.
            began = datetime.fromisoformat(status.phase_since)
            gone_s = max(0.0, (self._clock.now() - began).total_seconds())
            self._since[stored.uid, ""] = (mark, self._clock.monotonic() - gone_s)
        return self._age_s(stored.uid, "", mark) > _limit_s(rule, stored)

    def _judged(self, stored: StoredObject, phase: str, condition: Condition) -> Condition:
        reason = base_reason(condition.reason)
        rule = passing_reason(stored.resource.kind, phase, condition.type, reason)
        if rule is None:
            self._since.pop((stored.uid, condition.type), None)
            return condition
        if reason != condition.reason:  # judged before
            return condition
        mark = (reason, condition.status, condition.message if rule.progress else "")
        if self._age_s(stored.uid, condition.type, mark) <= rule.deadline_s:
            return condition
        return _overdue(condition, reason, f"for more than {rule.deadline_s:g} s")

    def _age_s(self, uid: str, what: str, mark: object) -> float:
        known, now = self._since.get((uid, what)), self._clock.monotonic()
        if known is None or known[0] != mark:
            known = self._since[uid, what] = (mark, now)
        return now - known[1]


def _limit_s(rule: Passing, stored: StoredObject) -> float:
    """Return how long the phase may take for this object."""
    if not rule.asks or not isinstance(stored.resource, VirtualMachine):
        return rule.deadline_s
    asked = stored.resource.spec.shutdown_timeout
    return rule.deadline_s + parse_duration_s(asked, field="spec.shutdownTimeout")


def _phase_overdue(
    condition: Condition, stored: StoredObject, status: Status, rule: Passing
) -> Condition:
    if condition.status is ConditionStatus.UNKNOWN:
        return condition  # that says more
    if condition.reason == f"{status.phase}{OVERDUE}":
        return condition  # judged before
    limit_s = _limit_s(rule, stored)
    words = f"{status.phase} since {status.phase_since}, more than {limit_s:g} s"
    return _overdue(condition, str(status.phase), words)


def _overdue(condition: Condition, state: str, words: str) -> Condition:
    reason, message = base_reason(condition.reason), condition.message
    said = ": ".join(filter(None, (reason if reason != state else "", message)))
    return msgspec.structs.replace(
        condition, reason=f"{state}{OVERDUE}", message=": ".join(filter(None, (words, said)))
    )
