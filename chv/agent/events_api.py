"""`WatchEvents`: the log of events, from a number on, without a gap and without a double.

The store is the buffer: a listener holds one page of it, however far behind it is, and a change
waits for no listener. One that does not read is cut off, with the number up to which it was told;
what it has missed is read from there, as long as it is kept. Fails with FailedPrecondition where a
number is older than what is kept or of another store, ResourceExhausted for who does not read.
"""

from __future__ import annotations

import anyio
import msgspec

from chv.agent.events_record import PAGE, EventPage
from chv.agent.ledger import EVENTS, Ledger
from chv.common import logs
from chv.common.errors import FailedPrecondition, ResourceExhausted
from chv.common.rpc import CallContext, Server
from chv.common.wire.agent_events import (
    WATCH_EVENTS,
    EventChunk,
    EventsEnd,
    WatchEvents,
)

log = logs.get(__name__)

SLOW_S = 5.0  # that a listener may take for one chunk; the connection itself ends after 10
GATHER_S = 0.05  # events of one moment are read together, whatever the number of listeners
SILENT_MAX = 1000  # unwanted events after which a listener is told how far it is


class EventsApi:
    """See the module. `node`: the name under which events are told."""

    def __init__(self, ledger: Ledger, node: str) -> None:
        self._ledger = ledger
        self._node = node

    def register(self, server: Server) -> None:
        """Give the method its handler."""
        server.add(WATCH_EVENTS, self.watch)

    async def watch(self, request: WatchEvents, context: CallContext) -> EventsEnd:
        """Send what there is and, if asked, what comes."""
        page, told = await self._first(request), -1
        while True:
            if page.events or told < 0 or page.last_seq - told >= SILENT_MAX:
                await self._send(context, page)
                told = page.last_seq
            if page.last_seq >= page.newest_seq and not request.follow:
                return EventsEnd(last_seq=page.last_seq, oldest_seq=page.oldest_seq, log=page.log)
            page = await self._next(page.last_seq, request)

    async def _first(self, request: WatchEvents) -> EventPage:
        store = self._ledger.store
        if request.after_seq is None and request.tail:
            page = await store.last_events(request, request.tail)
        else:
            page = await store.events(request.after_seq or 0, request, PAGE)
        refuse_foreign(request, page)
        while request.after_seq is None and page.last_seq + 1 < page.oldest_seq:
            page = await store.events(page.oldest_seq - 1, request, PAGE)
        return page

    async def _next(self, seq: int, request: WatchEvents) -> EventPage:
        """Return what comes after a number; wait for it where there is nothing."""
        while True:
            changed = self._ledger.events.event(EVENTS)  # before looking: none is missed
            page = await self._after(seq, request)
            if page.last_seq > seq:
                return page
            await changed.wait()
            await anyio.sleep(GATHER_S)

    async def _after(self, seq: int, request: WatchEvents) -> EventPage:
        page = await self._ledger.store.events(seq, request, PAGE)
        refuse_lost(seq, page)
        return page

    async def _send(self, context: CallContext, page: EventPage) -> None:
        events = [msgspec.structs.replace(event, node=self._node) for event in page.events]
        with anyio.move_on_after(SLOW_S) as scope:
            await context.emit(EventChunk(last_seq=page.last_seq, log=page.log, events=events))
        if scope.cancelled_caught:
            last = events[0].seq - 1 if events else page.last_seq
            log.warning("events.listener_dropped", pid=context.peer_pid, last_seq=last)
            raise ResourceExhausted(
                f"the listener did not read for {SLOW_S:g} s; it was told up to event {last}",
                field="after_seq",
                hint=f"go on with --after {last}",
            )


def refuse_foreign(request: WatchEvents, page: EventPage) -> None:
    """Refuse to go on from a number that is not one of this store, or not kept any more."""
    if request.log and request.log != page.log:
        raise FailedPrecondition(
            f"event {request.after_seq} is of another store ({request.log}, this is {page.log}): "
            "the node was made anew",
            field="log",
            hint="list the objects anew and leave --after away",
        )
    if request.after_seq is None:
        return
    if request.after_seq > page.newest_seq:
        raise FailedPrecondition(
            f"event {request.after_seq} is of another store: the last one here is "
            f"{page.newest_seq}",
            field="after_seq",
            hint="list the objects anew and leave --after away",
        )
    refuse_lost(request.after_seq, page)


def refuse_lost(seq: int, page: EventPage) -> None:
    """Refuse to go on where events in between are not kept any more."""
    if seq + 1 < page.oldest_seq:
        raise FailedPrecondition(
            f"events {seq + 1} to {page.oldest_seq - 1} are not kept any more: the oldest kept "
            f"is {page.oldest_seq}",
            field="after_seq",
            hint=f"list the objects anew, then go on with --after {page.oldest_seq - 1}",
        )
