"""What is durable of events: their log, and what was last seen of things without a record.

Pure types and rules; no I/O. Both stores keep them. A `Sighting` is the last known state of what
is not desired and not an object (the node's state, a daemon, a leak): stored so that a change of it
is a change of the store like any other, and is told once, also over an end of the agent.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from chv.common.errors import Conflict
from chv.common.wire.agent_events import Event, EventType, WatchEvents
from chv.common.wire.types import FrozenMeta

# About 25 come with a VM's whole life: the last 400 of those, in at most some 5 MB.
EVENTS_MAX = 10_000
PAGE = 100  # events read at a time: whatever they say, they fit into one frame


class Sighting(msgspec.Struct, metaclass=FrozenMeta):
    """How something is by now. `state` empty: it is gone, and forgotten. Told where it differs.

    `reason`, `message`, `type`: of the event. `topic`: what of the thing is seen.
    """

    kind: str
    name: str
    state: str
    reason: str
    namespace: str = ""
    uid: str = ""
    topic: str = ""
    message: str = ""
    type: EventType = EventType.NORMAL
    at: str = ""  # when it was seen; empty: when it is stored

    @property
    def key(self) -> str:
        """What it is a sighting of."""
        return "/".join((self.kind, self.namespace, self.uid or self.name, self.topic))


class PutSighting(msgspec.Struct, metaclass=FrozenMeta):
    """Remember how something is."""

    sighting: Sighting


class PutEvents(msgspec.Struct, metaclass=FrozenMeta):
    """Keep events, whose numbers follow on the last one; and no more than `kept_max` in all."""

    events: tuple[Event, ...]
    kept_max: int = EVENTS_MAX


class EventPage(msgspec.Struct, metaclass=FrozenMeta):
    """Some events after a number. `last_seq`: everything up to it was looked at.

    `oldest_seq`, `newest_seq`: what is kept; the first is one more than the second where none is.
    """

    log: str
    last_seq: int
    oldest_seq: int
    newest_seq: int
    events: tuple[Event, ...] = ()


class EventStore(Protocol):
    """The part of the agent's store that holds the events."""

    async def events(self, after_seq: int, wanted: WatchEvents, limit: int) -> EventPage:
        """Return the first wanted events after a number; the page is empty where it is too old."""
        ...

    async def last_events(self, wanted: WatchEvents, limit: int) -> EventPage:
        """Return the newest wanted events, in order."""
        ...


def takes(wanted: WatchEvents, event: Event) -> bool:
    """Tell whether somebody wants this event."""
    return (
        wanted.kind in ("", event.kind)
        and wanted.namespace in ("", event.namespace)
        and wanted.name in ("", event.name)
        and wanted.type in ("", event.type.value)
        and wanted.operation_id in ("", event.operation_id)
        and wanted.since <= event.at
    )


def refuse_gap(last_seq: int, change: PutEvents) -> None:
    """Raise Conflict where the numbers do not follow on the last one: another has written."""
    found = [event.seq for event in change.events]
    if found != list(range(last_seq + 1, last_seq + 1 + len(found))):
        raise Conflict(f"events {found[:1]} do not follow on {last_seq}", resource="events")
