"""What the simulation says of events: none is missing, none is made up, none is told twice.

`told_wrongly` looks at each transaction with eyes of its own; a `Listener` lives as long as the
machine and goes on from its last number in each life of an agent.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio.lowlevel

from chv.agent.engine import Engine
from chv.agent.events_api import EventsApi
from chv.agent.events_record import PutEvents
from chv.agent.records import FINAL_STATES, Change, PutObject, PutOperation, PutStatus, Status
from chv.agent.tables import Tables
from chv.common.wire.agent_events import Event, EventChunk, WatchEvents

Transition = tuple[str, str, str, str]  # uid, type, from, to


def told_wrongly(tables: Tables, changes: tuple[Change, ...]) -> list[str]:
    """Say which transitions of conditions and ends of operations a transaction tells wrongly."""
    events = [each for c in changes if isinstance(c, PutEvents) for each in c.events]
    told = Counter(
        (each.uid, each.data["type"], each.data["from"], each.data["to"])
        for each in events
        if each.reason == "Condition" and each.data["from"] != each.data["to"]
    )
    found = []
    if told != Counter(_transitions(tables, changes)):
        found.append(f"events: conditions go {_transitions(tables, changes)}, told is {told}")
    ended = sorted(
        change.operation.id
        for change in changes
        if isinstance(change, PutOperation) and change.operation.state in FINAL_STATES
    )
    outcomes = ("Succeeded", "Failed", "Cancelled", "Superseded")
    reasons = [f"Operation{outcome}" for outcome in outcomes]
    said = sorted(each.operation_id for each in events if each.reason in reasons)
    if ended != said:
        found.append(f"events: operations {ended} end, told is {said}")
    return found


def _transitions(tables: Tables, changes: tuple[Change, ...]) -> list[Transition]:
    found = []
    shown: dict[str, dict[str, str]] = {}
    for change in changes:
        status: Status | None
        if isinstance(change, PutStatus):
            uid, status = change.uid, change.status
            if uid not in tables.objects and uid not in shown:
                continue
        elif isinstance(change, PutObject):
            uid, status = change.object.uid, change.object.resource.status
        else:
            continue
        stored = tables.objects.get(uid)
        before = shown.get(uid, _conditions(stored.resource.status if stored else None))
        shown[uid] = now = _conditions(status)
        for kind in before.keys() | now.keys():
            old, new = before.get(kind, "False"), now.get(kind, "False")
            if old != new:
                found.append((uid, kind, old, new))
    return found


def _conditions(status: Status | None) -> dict[str, str]:
    return {each.type: each.status.value for each in status.conditions} if status else {}


class Listener:
    """Somebody who follows all events, whatever becomes of the agent."""

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.last = 0

    async def follow(self, engine: Engine) -> None:
        """Go on from the last number that was told, as long as this agent lives."""
        request = WatchEvents(after_seq=self.last, follow=True)
        listener: Any = self
        await EventsApi(engine.ledger, "sim").watch(request, listener)

    async def emit(self, chunk: EventChunk) -> None:
        """Take what is told; the agent may be killed before or after."""
        await anyio.lowlevel.checkpoint()
        self.seen += chunk.events
        self.last = chunk.last_seq

    def problems(self, tables: Tables) -> list[str]:
        """Say what was not told exactly once and in order, at the end of everything."""
        kept = list(tables.events)
        found = []
        if kept and kept != list(range(kept[0], tables.event_seq + 1)):
            found.append(f"events: the log has holes: {kept}")
        heard = [event.seq for event in self.seen]
        if heard != list(range(1, len(heard) + 1)):
            found.append("events: a listener has heard one twice, or not at all")
        return found

    def missed(self, tables: Tables) -> list[str]:
        """Say what a listener has not heard of, once all is quiet."""
        if self.last == tables.event_seq:
            return []
        return [f"events: heard up to {self.last} of {tables.event_seq}"]
