"""Pages of events from tables in memory, as `events_sql` reads them. Pure."""

from __future__ import annotations

import msgspec

from chv.agent.events_record import EventPage, takes
from chv.agent.tables import Tables
from chv.common.wire.agent_events import WatchEvents

LOG = "memory"


def page(tables: Tables, after_seq: int, wanted: WatchEvents, limit: int) -> EventPage:
    """Return the first wanted events after a number; the page is empty where it is too old."""
    head = _head(tables)
    if after_seq + 1 < head.oldest_seq:
        return msgspec.structs.replace(head, last_seq=after_seq)
    later = (tables.events[seq] for seq in range(after_seq + 1, tables.event_seq + 1))
    found = [event for event in later if takes(wanted, event)][:limit]
    last = found[-1].seq if len(found) == limit else max(after_seq, head.newest_seq)
    return msgspec.structs.replace(head, last_seq=last, events=tuple(found))


def newest(tables: Tables, wanted: WatchEvents, limit: int) -> EventPage:
    """Return the newest wanted events, in order."""
    found = [event for event in tables.events.values() if takes(wanted, event)]
    return msgspec.structs.replace(_head(tables), events=tuple(found[-limit:]))


def _head(tables: Tables) -> EventPage:
    last = tables.event_seq
    oldest = next(iter(tables.events), last + 1)
    return EventPage(log=LOG, last_seq=last, oldest_seq=oldest, newest_seq=last)
