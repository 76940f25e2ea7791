"""What is shown in whole schedules with faults is what the table of conditions knows."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest

from chv.agent.condition_table import ERRORS, OVERDUE, TABLE, base_reason, rule_of
from chv.agent.deadlines import Deadlines
from chv.agent.records import Status, StoredObject
from chv.common.wire.resources import Condition, ConditionStatus
from tests.sampling import LONG
from tests.sim.schedule import run

SEEDS = range(200) if LONG else range(4)


def amiss(kind: str, status: Status) -> Iterator[str]:
    """Yield what is shown and not in the table."""
    rule = TABLE[kind]
    if str(status.phase) not in (*rule.phases, *rule.standing):
        yield f"{kind}: phase {status.phase}"
    for shown in status.conditions:
        yield from _amiss(kind, shown)


def _amiss(kind: str, shown: Condition) -> Iterator[str]:
    rule = rule_of(kind, shown.type)
    if rule is None:
        yield f"{kind}: condition {shown.type}"
        return
    reason = base_reason(shown.reason)
    known = {*rule.reasons, *ERRORS}
    if shown.reason.endswith(OVERDUE):
        known = {*rule.passing, *TABLE[kind].phases}
    if reason not in known:
        yield f"{kind}: {shown.type} {shown.status.value} with reason {shown.reason}"
    if (shown.status is ConditionStatus.UNKNOWN) != (reason in rule.unknown):
        yield f"{kind}: {shown.type} is {shown.status.value}, and says {shown.reason}"


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_shown_that_the_table_does_not_know(seed: int) -> None:
    found: set[str] = set()
    judged, shown = Deadlines.judged, 0

    def noted(self: Deadlines, stored: StoredObject, status: Status) -> Status:
        nonlocal shown
        after = judged(self, stored, status)
        shown += len(after.conditions)
        found.update(amiss(stored.resource.kind, after))
        return after

    with patch.object(Deadlines, "judged", noted):
        assert run(seed).problems == []
    assert found == set()
    assert shown
