"""What the agent keeps for a control plane: what was assigned to it, and reports that wait. Pure.

An object's own generation is the node's; the control plane's is in its assignment. So a stop on
the spot is a new generation of the object and none of the control plane.
"""

from __future__ import annotations

import msgspec

from chv.common.wire.types import FrozenMeta
from chv.common.wire.upstream import Report, ReportKind


class Assignment(msgspec.Struct, metaclass=FrozenMeta):
    """What the control plane wanted of an object last.

    `generation`: its. `taken_as`: the generation of the object that it became. `observed`: what
    had been observed of the control plane's before that. `spec`: as it was wanted, JSON.
    `override`: who of the node wants it otherwise, and why; until a newer generation.
    """

    uid: str
    generation: int
    taken_as: int
    spec: str
    observed: int = 0
    override: str = ""


class PutAssignment(msgspec.Struct, metaclass=FrozenMeta):
    """Keep an assignment; an older generation than the one kept is refused."""

    assignment: Assignment


class PutReport(msgspec.Struct, metaclass=FrozenMeta):
    """Let a report wait, in place of one of the same key. Number 0: it gets the next one."""

    report: Report


class DropReports(msgspec.Struct, metaclass=FrozenMeta):
    """Forget reports: they were taken, or there was no room."""

    seqs: tuple[int, ...]


def key_of(report: Report) -> str:
    """Return what a report is the newest of; of each key one waits at most."""
    match report.kind:
        case ReportKind.OPERATION:
            assert report.operation is not None
            return f"operation {report.operation.id}"
        case ReportKind.NODE | ReportKind.LOST:
            return report.kind.value
        case _:
            return f"{report.kind.value} {report.uid}"
