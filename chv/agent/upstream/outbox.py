"""Which reports a transaction leads to. Pure; run by the ledger inside the transaction.

Only what the control plane assigned is reported, and the node itself. Of statuses, refusals and
the node the newest waits alone; an outcome and a departure wait each for itself, whatever comes
after. A report that takes another's place goes to the end of the line, so a status never
overtakes what it rests on.

The bound: OUTBOX_MAX reports. Where there are more, the oldest statuses go first, since they are
looked up again after a reconnect; then the oldest outcomes of what the node did by itself; then
the oldest outcomes. Outcomes that go are counted in a report of their own, which is kept until it
is delivered. Departures and the node's view stay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from chv.agent.node_record import NODE_UID
from chv.agent.operations import SYSTEM
from chv.agent.records import (
    FINAL_STATES,
    Change,
    PutObject,
    PutOperation,
    PutStatus,
    RemoveObject,
    Status,
    StoredObject,
)
from chv.agent.tables import Tables
from chv.agent.upstream.records import (
    Assignment,
    DropReports,
    PutAssignment,
    PutReport,
    key_of,
)
from chv.common.wire.agent import Operation
from chv.common.wire.upstream import Report, ReportKind

OUTBOX_MAX = 10_000
WORDS_MAX = 256

_replace = msgspec.structs.replace


def with_reports(tables: Tables, changes: tuple[Change, ...], moment: str) -> tuple[Change, ...]:
    """Return a transaction with overrides and reports, the latter numbered and within the bound."""
    changes = (*changes, *_overrides(tables, changes))
    found = list(_reports(tables, changes))
    asked = [change.report for change in changes if isinstance(change, PutReport)]
    others = tuple(change for change in changes if not isinstance(change, PutReport))
    reports = _numbered(tables, [*found, *asked])
    if not reports:
        return others
    puts = tuple(PutReport(report=report) for report in reports)
    return (*others, *puts, *_bounded(tables, others, reports, moment))


def status_report(assignment: Assignment, status: Status) -> Report:
    """Return how an object is, in terms of the control plane's generation."""
    seen = status.observed_generation >= assignment.taken_as
    return Report(
        kind=ReportKind.STATUS,
        uid=assignment.uid,
        generation=assignment.generation if seen else assignment.observed,
        status=msgspec.Raw(msgspec.json.encode(status)),
        override=assignment.override,
    )


def spec_of(stored: StoredObject) -> str:
    """Return the spec in the form in which an assignment keeps it."""
    return msgspec.json.encode(stored.resource.spec).decode()


# --- who of the node wants it otherwise


def _overrides(tables: Tables, changes: Sequence[Change]) -> Iterable[PutAssignment]:
    """Whoever changes an assigned object on the spot overrides it, until a newer generation."""
    taken = {c.assignment.uid for c in changes if isinstance(c, PutAssignment)}
    for change in changes:
        if not isinstance(change, PutObject) or change.object.uid in taken:
            continue
        known = tables.assignments.get(change.object.uid)
        if known is None:
            continue
        as_wanted = spec_of(change.object) == known.spec
        words = "" if as_wanted else known.override or _who(changes, change)
        if words != known.override:
            yield PutAssignment(assignment=_replace(known, override=words))


def _who(changes: Sequence[Change], change: PutObject) -> str:
    if change.author is not None:
        return _words(change.author.requester, change.author.verb, change.author.reason)
    for other in changes:
        if isinstance(other, PutOperation) and _begins(other.operation, change.object.uid):
            operation = other.operation
            return _words(operation.requester, operation.verb, operation.reason)
    return _words(SYSTEM, "", "")


def _begins(operation: Operation, uid: str) -> bool:
    return operation.uid == uid and operation.state not in FINAL_STATES


def _words(requester: str, verb: str, reason: str) -> str:
    words = f"{verb} by {requester}".strip()
    return (f"{words}: {reason}" if reason else words)[:WORDS_MAX]


# --- reports


def _reports(tables: Tables, changes: Sequence[Change]) -> Iterable[Report]:
    assigned = dict(tables.assignments)
    assigned |= {c.assignment.uid: c.assignment for c in changes if isinstance(c, PutAssignment)}
    gone: list[Report] = []
    shown = {change.uid: change.status for change in changes if isinstance(change, PutStatus)}
    for uid in _touched(changes):
        stored = tables.objects.get(uid)
        before = stored.resource.status if stored is not None else None
        status = shown.get(uid, before)
        if uid in assigned and stored is not None and status is not None:
            yield status_report(assigned[uid], status)
    for change in changes:
        match change:
            case PutOperation(operation=operation) if operation.state in FINAL_STATES:
                if operation.uid in assigned or operation.uid == NODE_UID:
                    brief = _replace(operation, steps=[])
                    yield Report(kind=ReportKind.OPERATION, uid=operation.uid, operation=brief)
            case RemoveObject(tombstone=tombstone) if tombstone.uid in assigned:
                generation = assigned[tombstone.uid].generation
                gone.append(Report(kind=ReportKind.GONE, uid=tombstone.uid, generation=generation))
            case _:
                pass
    yield from gone  # last: what was done to it is told first


def _touched(changes: Sequence[Change]) -> list[str]:
    """Return whose status is to be told, each once and in the order of the transaction."""
    uids = [
        change.uid if isinstance(change, PutStatus) else change.assignment.uid
        for change in changes
        if isinstance(change, PutStatus | PutAssignment)
    ]
    gone = {change.tombstone.uid for change in changes if isinstance(change, RemoveObject)}
    return [uid for uid in dict.fromkeys(uids) if uid not in gone]


def _numbered(tables: Tables, reports: list[Report]) -> list[Report]:
    """Return the last report of each key with its number."""
    last = {key_of(report): report for report in reports}
    kept = [report for report in reports if last[key_of(report)] is report]
    return [_replace(each, seq=tables.outbox_seq + n) for n, each in enumerate(kept, start=1)]


# --- the bound


def _bounded(
    tables: Tables, others: Sequence[Change], reports: Sequence[Report], moment: str
) -> Sequence[Change]:
    """Return what has to go for the new reports, and the count of it."""
    dropped = {seq for change in others if isinstance(change, DropReports) for seq in change.seqs}
    after = {key: report for key, report in tables.outbox.items() if report.seq not in dropped}
    after |= {key_of(report): report for report in reports}
    removed = {report.uid for report in reports if report.kind is ReportKind.GONE}
    stale = [r for r in after.values() if r.uid in removed and r.kind in _OF_WHAT_IS_THERE]
    kept = sum(report.kind in _FEW for report in after.values())
    excess = len(after) - len(stale) - kept - OUTBOX_MAX
    victims = _victims(after.values(), excess) if excess > 0 else []
    seqs = tuple(report.seq for report in (*stale, *victims))
    if not seqs:
        return ()
    changes: list[Change] = [DropReports(seqs=seqs)]
    if victims:
        lost = sum(report.kind is ReportKind.OPERATION for report in victims)
        changes.append(PutReport(report=_tally(after, lost, moment, reports[-1].seq + 1)))
    return changes


_FEW = (ReportKind.NODE, ReportKind.LOST)  # one of each at most, beside the bound
_OF_WHAT_IS_THERE = (ReportKind.STATUS, ReportKind.REFUSED)


def _victims(reports: Iterable[Report], count: int) -> list[Report]:
    ranked = sorted((rank, report.seq) for report in reports if (rank := _rank(report)) >= 0)
    chosen = {seq for _, seq in ranked[:count]}
    return [report for report in reports if report.seq in chosen]


def _rank(report: Report) -> int:
    """Return who goes first: 0; -1 never goes."""
    match report.kind:
        case ReportKind.STATUS | ReportKind.REFUSED:
            return 0
        case ReportKind.OPERATION:
            assert report.operation is not None
            return 1 if report.operation.requester == SYSTEM else 2
        case _:
            return -1


def _tally(after: dict[str, Report], lost: int, moment: str, seq: int) -> Report:
    """Return the count of dropped outcomes; 0 says that only statuses are to be looked up again."""
    known = after.get(ReportKind.LOST.value)
    count, since = (known.count, known.since) if known is not None else (0, moment)
    return Report(kind=ReportKind.LOST, seq=seq, count=count + lost, since=since)
