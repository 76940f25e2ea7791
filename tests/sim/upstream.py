"""A control plane without chance or a wire, for simulations and contract tests.

It outlives the agents. What is wanted is changed by the test at any time; a node hears of it while
the two see each other. A report counts once it is here, whether or not its sender learns of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
import msgspec

from chv.agent.upstream.port import Session
from chv.common.errors import OutcomeUnknown, Unavailable
from chv.common.wire.upstream import Report, ReportKind, Wanted
from tests.sim.chaos import Chaos

BEAT_S = 5.0
SILENCE_S = 15.0  # after which a node gives a silent connection up


@dataclass
class Plane:
    """What is wanted, what was reported, and whether the two see each other."""

    wanted: dict[str, Wanted] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    newest: dict[str, int] = field(default_factory=dict)  # generation by uid
    said: list[Wanted] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)
    cut: bool = False
    lossy: bool = False  # reports arrive, and nobody learns of it
    news: dict[int, deque[Wanted]] = field(default_factory=dict)  # of each open session
    seqs: set[int] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    statuses: dict[str, Report] = field(default_factory=dict)
    outcomes: dict[str, Report] = field(default_factory=dict)  # operation id -> how it ended
    again: int = 0  # reports that had come before
    sessions: int = 0
    heard_s: float = 0.0  # when a node heard of it last, by `now`
    now: Callable[[], float] = anyio.current_time

    def wanted_as(
        self, uid: str, manifest: dict[str, Any], generation: int, *, deleting: bool = False
    ) -> None:
        """Let an object be wanted so from now on."""
        raw = msgspec.Raw(msgspec.json.encode(manifest))
        wanted = Wanted(uid=uid, generation=generation, object=raw, deleting=deleting)
        self.wanted[uid] = wanted
        self.newest[uid] = max(generation, self.newest.get(uid, 0))
        self.said.append(wanted)
        self.tell(wanted)

    def tell(self, wanted: Wanted) -> None:
        """Say something to every node that listens, true or not."""
        for news in self.news.values():
            news.append(wanted)

    def take(self, reports: tuple[Report, ...]) -> None:
        """Note reports, and what a correct node never sends."""
        for report in reports:
            self._take(report)

    def _take(self, report: Report) -> None:
        if report.seq not in self.seqs and report.seq < max(self.seqs, default=0):
            self.problems.append(f"report {report.seq} comes after {max(self.seqs)}")
        self.seqs.add(report.seq)
        self.reports.append(report)
        match report.kind:
            case ReportKind.STATUS:
                self._take_status(report)
            case ReportKind.OPERATION:
                self._take_outcome(report)
            case ReportKind.GONE:
                wanted = self.wanted.get(report.uid)
                self.gone.add(report.uid)
                if wanted is not None and wanted.deleting:
                    del self.wanted[report.uid]
            case _:
                pass

    def _take_status(self, report: Report) -> None:
        before = self.statuses.get(report.uid)
        if report.uid in self.gone:
            self.problems.append(f"a status of {report.uid} after it was gone")
        if before is not None and report.seq < before.seq:
            self.problems.append(f"the status of {report.uid} goes back: {before.seq} {report.seq}")
        if before is not None and report.generation < before.generation:
            self.problems.append(f"observed of {report.uid} goes back to {report.generation}")
        if before is not None and report.seq == before.seq:
            self.again += 1
        self.statuses[report.uid] = report

    def _take_outcome(self, report: Report) -> None:
        assert report.operation is not None
        before = self.outcomes.get(report.operation.id)
        if before is not None:
            self.again += 1
            if before.operation != report.operation:
                self.problems.append(f"{report.operation.id} has two outcomes")
        self.outcomes[report.operation.id] = report


class PlaneUpstream:
    """The port of one agent's life to a plane; where there is chaos, every report is a seam."""

    embedded = False

    def __init__(self, plane: Plane, chaos: Chaos | None = None) -> None:
        self._plane = plane
        self._chaos = chaos
        self._life = chaos.life if chaos is not None else 0

    async def follow(self, session: Session) -> None:
        """Hand over all that is wanted, then news, until the two are cut off."""
        plane = self._plane
        if plane.cut:
            await anyio.sleep(1.0)
            raise Unavailable("plane: not reachable")
        plane.sessions += 1
        number, news = plane.sessions, deque[Wanted]()
        plane.news[number] = news
        try:
            await self._serve(session, news)
        finally:
            plane.news.pop(number, None)

    async def _serve(self, session: Session, news: deque[Wanted]) -> None:
        plane, silent_s = self._plane, 0.0
        self._word()
        await session.relist(tuple(plane.wanted.values()))
        while silent_s < SILENCE_S:
            await anyio.sleep(0.25)
            if plane.cut:
                silent_s += 0.25
                continue
            silent_s = 0.0
            self._word()
            session.contact()
            while news and not plane.cut:
                self._word()
                await session.change(news.popleft())
        raise Unavailable("plane: silent")

    def _word(self) -> None:
        if self._chaos is not None:
            self._chaos.check(self._life)
        self._plane.heard_s = self._plane.now()

    async def report(self, reports: tuple[Report, ...]) -> None:
        """Deliver; cut off, it is not known whether it came."""
        if self._plane.cut:
            await anyio.sleep(2.0)
            raise OutcomeUnknown("plane: no answer")
        if self._chaos is None:
            self._plane.take(reports)
            if self._plane.lossy:
                raise OutcomeUnknown("plane: the answer was lost")
        else:
            name = "upstream.report"
            await self._chaos.seam(self._life, name, lambda: self._plane.take(reports))
            self._word()
