"""Planted bugs of events; see `mutants`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from chv.agent import events_derive
from chv.agent.events_api import EventsApi
from chv.agent.events_record import EventPage
from chv.agent.events_words import Told, condition_events
from chv.agent.records import Status
from chv.common.wire.agent_events import WatchEvents


@contextmanager
def a_condition_that_becomes_false_is_not_told() -> Iterator[None]:
    """Only good news is told."""
    real = condition_events

    def told(before: Status | None, now: Status | None) -> Iterator[Told]:
        return (each for each in real(before, now) if each.data["to"] != "False")

    with patch.object(events_derive, "condition_events", told):
        yield


@contextmanager
def a_listener_hears_the_last_event_again() -> Iterator[None]:
    """Who goes on from a number is told of that one, too."""
    real = EventsApi._after

    async def after(self: EventsApi, seq: int, request: WatchEvents) -> EventPage:
        page = await real(self, max(0, seq - 1), request)
        return page if page.events and page.events[-1].seq > seq else await real(self, seq, request)

    with patch.object(EventsApi, "_after", after):
        yield


EVENT_MUTANTS = (
    a_condition_that_becomes_false_is_not_told,
    a_listener_hears_the_last_event_again,
)
