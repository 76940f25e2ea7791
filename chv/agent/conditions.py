"""Conditions: one fact each, with the moment of its last change. Pure."""

from __future__ import annotations

import msgspec

from chv.common.wire.resources import Condition, ConditionStatus


def condition(
    kind: str,
    value: bool | None,
    reason: str,
    message: str = "",
    evidence: str = "",
    *,
    at: str = "",
) -> Condition:
    """Return a condition; None is Unknown. `merge` adds times and generation.

    `at`: when the evidence was seen, where that is not now.
    """
    status = {True: ConditionStatus.TRUE, False: ConditionStatus.FALSE}.get(
        value,  # type: ignore[arg-type]
        ConditionStatus.UNKNOWN,
    )
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message,
        evidence=evidence,
        last_probe_time=at,
    )


def merge(
    before: list[Condition], now: list[Condition], generation: int, moment: str
) -> list[Condition]:
    """Stamp the new conditions, keeping the moment since when each has had its status."""
    earlier = {old.type: old for old in before}
    return [_stamped(earlier.get(new.type), new, generation, moment) for new in now]


def _stamped(old: Condition | None, new: Condition, generation: int, moment: str) -> Condition:
    same = old is not None and old.status is new.status
    since = old.last_transition_time if old is not None and same else moment
    return msgspec.structs.replace(
        new,
        observed_generation=generation,
        last_transition_time=since,
        last_probe_time=new.last_probe_time or moment,  # of evidence that was heard: its own
    )


def holds(conditions: list[Condition], kind: str, status: str) -> bool:
    """Tell whether the condition is there with this status."""
    return any(found.type == kind and found.status.value == status for found in conditions)
