"""What metrics count of operations, told by the ledger after each commit. Pure but for memory."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from chv.agent.metrics_text import Family, Histogram
from chv.agent.records import FINAL_STATES, Change, PutOperation
from chv.agent.tables import Tables
from chv.common.wire.agent import Operation, OperationState

BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 1, 2, 5, 10, 30, 60, 120, 300)
TIMED_VERBS = frozenset({"create", "start", "stop", "restart", "delete"})


class OperationCounts:
    """Operations by verb and outcome since the agent's start, and how long their phases took."""

    def __init__(self) -> None:
        self._ended: Counter[tuple[str, str, str]] = Counter()
        self._phases = Histogram(BOUNDS_S)

    def committed(self, tables: Tables, changes: tuple[Change, ...]) -> None:
        """Count what this commit ended. A final operation is stored once: it never changes."""
        for change in changes:
            if isinstance(change, PutOperation) and change.operation.state in FINAL_STATES:
                known = tables.operations.get(change.operation.id)
                self._count(known or change.operation)

    def _count(self, operation: Operation) -> None:
        self._ended[(operation.kind, operation.verb, operation.state.value)] += 1
        timed = operation.kind == "VirtualMachine" and operation.verb in TIMED_VERBS
        if not timed or operation.state is not OperationState.SUCCEEDED:
            return
        phases = {"Begun": operation.started_at, "Done": operation.ended_at}
        for step in operation.steps:
            if step.outcome == "done":
                # A step's title may name a disk; its first word is one of a few dozen.
                phases[step.name.split(" ")[0]] = step.ended_at
        for phase, moment in phases.items():
            seconds = _between_s(operation.created_at, moment)
            if seconds is not None:
                self._phases.observe(seconds, verb=operation.verb, phase=phase)

    def families(self) -> list[Family]:
        """Return the counts."""
        ended = Family("chv_operations_total", "counter", "Operations that have ended.")
        for (kind, verb, outcome), count in sorted(self._ended.items()):
            ended.add(count, kind=kind, verb=verb, outcome=outcome)
        text = "From the acceptance of a VM's operation to the end of each phase, in seconds."
        return [ended, self._phases.family("chv_operation_phase_seconds", text)]


def _between_s(earlier: str, later: str) -> float | None:
    """Return the seconds between two stamps; None where one is missing or the clock went back."""
    if not earlier or not later:
        return None
    seconds = (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
    return seconds if seconds >= 0 else None
