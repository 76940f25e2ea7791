"""The node's side of the conversation: sessions, what is refused, and the flush of reports.

Two tasks: one keeps a session, one sends what waits, in the order of the numbers and one batch at
a time. A batch is forgotten only after it was taken; an agent that dies in between sends it again,
with the same numbers and operation ids. With the embedded control plane neither has work.
"""

from __future__ import annotations

import heapq

import anyio
import msgspec

from chv.agent.actors import Workers
from chv.agent.context import Context
from chv.agent.mutations import Mutations
from chv.agent.node import Node
from chv.agent.records import Change
from chv.agent.upstream.intake import Intake, Parts
from chv.agent.upstream.link import Link
from chv.agent.upstream.outbox import status_report, with_reports
from chv.agent.upstream.records import DropReports, PutReport
from chv.agent.upstream.rules import not_listed
from chv.common import logs
from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    OutcomeUnknown,
    StaleGeneration,
    Unavailable,
)
from chv.common.wire.agent import NodeCondition
from chv.common.wire.resources import APPLY_ORDER
from chv.common.wire.upstream import NodeView, Report, ReportKind, Wanted

log = logs.get(__name__)

_TRIED_AGAIN = (Unavailable, DeadlineExceeded, OutcomeUnknown)  # says nothing of the object
BATCH_MAX = 100
RETRY_S, RETRY_S_MAX = 1.0, 30.0
AGAIN_S = 5.0  # what was refused is tried again


class _Kind(msgspec.Struct):
    kind: str


class _Session:
    """One connection; its first word is the list of all that is wanted."""

    def __init__(self, desk: UpstreamDesk) -> None:
        self._desk = desk
        self.number = 0

    async def relist(self, objects: tuple[Wanted, ...]) -> None:
        self.number = self.number or self._desk.opened()
        self.contact()
        await self._desk.relisted(self.number, objects)

    async def change(self, wanted: Wanted) -> None:
        if not self.number:
            raise Unavailable("a session begins with the list of all that is wanted")
        self.contact()
        await self._desk.take(self.number, wanted)

    def contact(self) -> None:
        self._desk.heard(self.number)


class UpstreamDesk:
    """See the module. One per engine."""

    def __init__(self, context: Context, workers: Workers, mutations: Mutations) -> None:
        world = context.world
        self._context = context
        self._upstream = world.upstream
        self.link = world.link or Link(world.clock, embedded=world.upstream.embedded)
        self._intake = Intake(Parts(context, workers, mutations, self.link))
        self._refused: dict[str, Wanted] = {}  # the newest of each uid, to be tried again
        self._told: dict[str, tuple[int, str]] = {}  # which refusals were reported
        self._due = anyio.Event()
        self._node: NodeView | None = None
        self._unlisted, self._unlisted_since = 0, ""
        if not world.upstream.embedded:
            context.ledger.derive = lambda tables, changes: with_reports(
                tables, changes, context.now()
            )

    async def run(self) -> None:
        """Keep a session and send what waits, until cancelled."""
        if self._upstream.embedded:
            return
        async with anyio.create_task_group() as group:
            group.start_soon(self._keep_a_session)
            group.start_soon(self._flush)
            group.start_soon(self._try_again)

    def tell_node(self, view: NodeView) -> None:
        """Report how the node is; the newest word counts."""
        if not self._upstream.embedded:
            self._node = view
            self._due.set()

    def conditions(self) -> list[NodeCondition]:
        """Return what the node's status says of its control plane."""
        outbox = self._context.ledger.tables.outbox
        found = [self.link.condition(len(outbox))]
        lost = outbox.get(ReportKind.LOST.value)
        if lost is not None and lost.count:
            found.append(
                NodeCondition(
                    type="ReportsComplete",
                    status="False",
                    reason="OutboxFull",
                    message=f"outcomes of operations that nobody was told: {lost.count}",
                    since=lost.since,
                )
            )
        if self._unlisted:
            found.append(
                NodeCondition(
                    type="UpstreamAgrees",
                    status="False",
                    reason="NotListed",
                    message=f"objects that the control plane no longer lists, and that are "
                    f"kept: {self._unlisted}",
                    since=self._unlisted_since,
                )
            )
        return found

    # --- sessions

    async def _keep_a_session(self) -> None:
        delay_s = RETRY_S
        while True:
            session = _Session(self)
            why = "the connection was closed"
            try:
                await self._upstream.follow(session)
            except ChvError as error:
                why = str(error)
            except Exception as error:  # noqa: BLE001  firewall: a bug of a port ends no agent
                why = self._bug(error)
            if session.number:
                delay_s = RETRY_S
            self.link.closed(why)
            log.info("upstream.lost", why=why)
            await self._context.world.clock.sleep(
                delay_s * self._context.world.ids.jitter(0.8, 1.2)
            )
            delay_s = min(delay_s * 2, RETRY_S_MAX)

    def _bug(self, error: Exception) -> str:
        log.exception("upstream.bug", error)
        self._context.bugs.append(f"upstream: {error!r}")
        return f"a bug of the port: {error!r}"

    def opened(self) -> int:
        """Begin a session."""
        number = self.link.opened()
        self._due.set()
        log.info("upstream.seen", session=number)
        return number

    def heard(self, number: int) -> None:
        """Note a word of a session that has not ended."""
        if number and number == self.link.session:
            self.link.heard()

    async def relisted(self, session: int, objects: tuple[Wanted, ...]) -> None:
        """Take all that is wanted, what others refer to first; what is refused hinders nobody."""
        listed = {each.uid for each in objects}
        self._refused = {uid: each for uid, each in self._refused.items() if uid in listed}
        for wanted in sorted(objects, key=_rank):
            await self.take(session, wanted)
        missing = not_listed(self._context.ledger.tables, [each.uid for each in objects])
        if bool(missing) is not bool(self._unlisted):
            self._unlisted_since = self._context.now()
        self._unlisted = len(missing)
        if missing:
            log.warning("upstream.not_listed", uids=missing[:20], count=len(missing))
        await self._look_up_statuses()

    async def take(self, session: int, wanted: Wanted) -> None:
        """Take one object; a refusal is reported, and repeated while it is wanted."""
        try:
            await self._intake.take(session, wanted)
        except StaleGeneration as error:
            # An older word after a newer one, or of what was deleted on the spot: for good.
            self._settled(wanted)
            await self._tell_refusal(session, wanted, error)
        except ChvError as error:
            waiting = self._refused.get(wanted.uid)
            if waiting is None or waiting.generation <= wanted.generation:
                self._refused[wanted.uid] = wanted
                await self._tell_refusal(session, wanted, error)
        else:
            self._settled(wanted)
            self._told.pop(wanted.uid, None)

    def _settled(self, wanted: Wanted) -> None:
        waiting = self._refused.get(wanted.uid)
        if waiting is not None and waiting.generation <= wanted.generation:
            del self._refused[wanted.uid]

    async def _tell_refusal(self, session: int, wanted: Wanted, error: ChvError) -> None:
        if session != self.link.session or isinstance(error, _TRIED_AGAIN):
            return
        said = (wanted.generation, str(error))
        if self._told.get(wanted.uid) == said:
            return
        report = Report(
            kind=ReportKind.REFUSED,
            uid=wanted.uid,
            generation=wanted.generation,
            error=error.data(),
        )
        try:
            await self._context.ledger.commit(PutReport(report=report))
        except ChvError as failure:  # it is tried again, and so is this
            log.warning("upstream.refusal_untold", uid=wanted.uid, error=str(failure))
        else:
            self._told[wanted.uid] = said

    async def _try_again(self) -> None:
        while True:
            await self._context.world.clock.sleep(AGAIN_S)
            session = self.link.session
            if not session or not self.link.connected:
                continue
            for wanted in sorted(self._refused.values(), key=_rank):
                await self.take(session, wanted)

    async def _look_up_statuses(self) -> None:
        """Let all statuses wait again where some had to go."""
        tables = self._context.ledger.tables
        if ReportKind.LOST.value not in tables.outbox:
            return
        statuses = [
            PutReport(report=status_report(assignment, status))
            for uid, assignment in tables.assignments.items()
            if (status := tables.objects[uid].resource.status) is not None
        ]
        try:
            await self._context.ledger.commit(*statuses)
        except ChvError as error:  # the next list does it
            log.warning("upstream.statuses_not_looked_up", error=str(error))

    # --- reports

    def committed(self, changes: tuple[Change, ...]) -> None:
        """Look whether there is something to send."""
        if any(isinstance(change, PutReport) for change in changes):
            self._due.set()

    def look(self) -> None:
        """Memory was read anew: there may be something to send."""
        self._due.set()

    async def _flush(self) -> None:
        delay_s = RETRY_S
        while True:
            self._due = anyio.Event()
            idle: bool | None
            try:
                idle = await self._send()
            except ChvError as error:
                idle, why = None, str(error)
            except Exception as error:  # noqa: BLE001  as above
                idle, why = None, self._bug(error)
            if idle is None:
                log.info("upstream.not_reported", error=why)
                await self._context.world.clock.sleep(delay_s)
                delay_s = min(delay_s * 2, RETRY_S_MAX)
                continue
            delay_s = RETRY_S
            if idle:
                await self._due.wait()

    async def _send(self) -> bool:
        """Send the oldest reports and forget them; tell whether there was nothing to do."""
        await self._note_node()
        session = self.link.session
        batch = heapq.nsmallest(
            BATCH_MAX, self._context.ledger.tables.outbox.values(), key=lambda each: each.seq
        )
        if not batch or not session:
            return True
        await self._upstream.report(tuple(batch))
        self.heard(session)
        await self._context.ledger.commit(DropReports(seqs=tuple(each.seq for each in batch)))
        return False

    async def _note_node(self) -> None:
        view = self._node
        if view is None:
            return
        report = Report(kind=ReportKind.NODE, node=view)
        await self._context.ledger.commit(PutReport(report=report))
        if self._node is view:
            self._node = None


def view_of(node: Node) -> NodeView:
    """Return how the node is, for its control plane."""
    return NodeView(
        state=node.state.value, since=node.since, why=node.why, conditions=node.conditions()
    )


def _rank(wanted: Wanted) -> tuple[int, str]:
    """What others refer to comes first; what is to go, in reverse."""
    kind = _kind_of(wanted)
    order = APPLY_ORDER.index(kind) if kind in APPLY_ORDER else len(APPLY_ORDER)
    return (-order if wanted.deleting else order), wanted.uid


def _kind_of(wanted: Wanted) -> str:
    try:
        return msgspec.json.decode(wanted.object, type=_Kind).kind
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return ""  # it is refused when it is taken
