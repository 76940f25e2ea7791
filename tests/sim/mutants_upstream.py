"""Planted bugs of the conversation with a control plane; see `mutants` and `partitions`."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from chv.agent import tables
from chv.agent.upstream import desk, outbox, records
from chv.agent.upstream.intake import Intake
from chv.agent.upstream.link import Link
from chv.agent.upstream.records import DropReports
from chv.common.wire.upstream import Report, ReportKind


@contextmanager
def reports_are_sent_newest_first() -> Iterator[None]:
    """One report at a time, and the last one first."""

    def newest(count: int, reports: Any, key: Any) -> list[Any]:
        return heapq.nlargest(1, reports, key=key)

    with patch("chv.agent.upstream.desk.heapq.nsmallest", newest):
        yield


@contextmanager
def an_outcome_takes_the_place_of_another() -> Iterator[None]:
    """Of each object the newest outcome waits alone, as if it were a status."""

    def key_of(report: Report) -> str:
        if report.kind is ReportKind.OPERATION:
            return f"operation {report.uid}"
        return records.key_of(report)

    with ExitStack() as patches:
        for module in (outbox, tables):
            patches.enter_context(patch.object(module, "key_of", key_of))
        yield


@contextmanager
def reports_are_forgotten_before_they_are_taken() -> Iterator[None]:
    """What was read to be sent counts as delivered."""

    async def send(self: Any) -> bool:
        session = self.link.session
        batch = sorted(self._context.ledger.tables.outbox.values(), key=lambda each: each.seq)
        if not batch or not session:
            return True
        await self._context.ledger.commit(DropReports(seqs=tuple(each.seq for each in batch)))
        await self._upstream.report(tuple(batch))
        self.heard(session)
        return False

    with patch.object(desk.UpstreamDesk, "_send", send):
        yield


@contextmanager
def a_node_never_notices_that_it_is_cut_off() -> Iterator[None]:
    """Once connected, always connected."""
    with patch.object(Link, "connected", property(lambda self: True)):
        yield


@contextmanager
def an_equal_generation_is_believed_again() -> Iterator[None]:
    """What is listed again is applied again, over what was done on the spot."""
    real = Intake._is_known

    def is_known(self: Any, wanted: Any) -> bool:
        return real(self, wanted) and wanted.deleting

    with patch.object(Intake, "_is_known", is_known):
        yield


UPSTREAM_MUTANTS = (
    reports_are_sent_newest_first,
    an_outcome_takes_the_place_of_another,
    reports_are_forgotten_before_they_are_taken,
    a_node_never_notices_that_it_is_cut_off,
    an_equal_generation_is_believed_again,
)
