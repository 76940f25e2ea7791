"""Events and sightings in SQLite: their tables, and what is written to and read from them.

All functions run inside a transaction of `chv.agent.store_sqlite` and fail as SQLite does.
"""

from __future__ import annotations

import msgspec

from chv.agent.events_record import EventPage, PutEvents, Sighting, refuse_gap
from chv.common.store import Connection
from chv.common.wire.agent_events import Event, WatchEvents

# AUTOINCREMENT keeps the last number over the deletion of every row. The log's id tells a store
# from one that was made anew.
MIGRATION = (
    """CREATE TABLE events (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, type TEXT NOT NULL, kind TEXT NOT NULL,
        namespace TEXT NOT NULL, name TEXT NOT NULL, operation_id TEXT NOT NULL, at TEXT NOT NULL,
        body TEXT NOT NULL) STRICT""",
    """CREATE TABLE event_log (
        one INTEGER PRIMARY KEY CHECK (one = 1), id TEXT NOT NULL) STRICT""",
    "INSERT INTO event_log VALUES (1, lower(hex(randomblob(8))))",
    "CREATE TABLE sightings (key TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT",
)
_WANTED = """(?1 = '' OR kind = ?1) AND (?2 = '' OR namespace = ?2) AND (?3 = '' OR name = ?3)
    AND (?4 = '' OR type = ?4) AND (?5 = '' OR operation_id = ?5) AND at >= ?6"""


def put(db: Connection, change: PutEvents) -> None:
    """Keep events, and drop the oldest."""
    if not change.events:
        return
    refuse_gap(last_seq(db), change)
    rows = [
        (
            event.seq,
            event.type.value,
            event.kind,
            event.namespace,
            event.name,
            event.operation_id,
            event.at,
            msgspec.json.encode(event).decode(),
        )
        for event in change.events
    ]
    db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
    newest = change.events[-1].seq
    db.execute("DELETE FROM events WHERE seq <= ?", (newest - change.kept_max,))


def last_seq(db: Connection) -> int:
    """Return the last number that was given."""
    row = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'events'").fetchone()
    return 0 if row is None else int(row["seq"])


def put_sighting(db: Connection, sighting: Sighting) -> None:
    """Remember how something is, or forget it."""
    if not sighting.state:
        db.execute("DELETE FROM sightings WHERE key = ?", (sighting.key,))
        return
    body = msgspec.json.encode(sighting).decode()
    db.execute("INSERT OR REPLACE INTO sightings VALUES (?, ?)", (sighting.key, body))


def removed(db: Connection, uid: str) -> None:
    """Forget what was seen of an object that is gone."""
    db.execute("DELETE FROM sightings WHERE json_extract(body, '$.uid') = ?", (uid,))


def sightings(db: Connection) -> tuple[Sighting, ...]:
    """Return all that is remembered."""
    rows = db.execute("SELECT body FROM sightings ORDER BY key")
    return tuple(msgspec.json.decode(row["body"], type=Sighting) for row in rows)


def page(db: Connection, after_seq: int, wanted: WatchEvents, limit: int) -> EventPage:
    """Return the first wanted events after a number; the page is empty where it is too old."""
    head = _head(db)
    if after_seq + 1 < head.oldest_seq:
        return msgspec.structs.replace(head, last_seq=after_seq)
    query = f"SELECT seq, body FROM events WHERE seq > ?7 AND {_WANTED} ORDER BY seq LIMIT ?8"  # noqa: S608
    rows = db.execute(query, (*_values(wanted), after_seq, limit)).fetchall()
    full = len(rows) == limit
    last = rows[-1]["seq"] if full else max(after_seq, head.newest_seq)
    return msgspec.structs.replace(head, last_seq=last, events=_decoded([r["body"] for r in rows]))


def newest(db: Connection, wanted: WatchEvents, limit: int) -> EventPage:
    """Return the newest wanted events, in order."""
    query = f"SELECT body FROM events WHERE {_WANTED} ORDER BY seq DESC LIMIT ?7"  # noqa: S608
    rows = db.execute(query, (*_values(wanted), limit)).fetchall()
    return msgspec.structs.replace(_head(db), events=_decoded([r["body"] for r in rows][::-1]))


def _values(wanted: WatchEvents) -> tuple[str, ...]:
    return (
        wanted.kind,
        wanted.namespace,
        wanted.name,
        wanted.type,
        wanted.operation_id,
        wanted.since,
    )


def _decoded(bodies: list[str]) -> tuple[Event, ...]:
    return tuple(msgspec.json.decode(body, type=Event) for body in bodies)


def _head(db: Connection) -> EventPage:
    last = last_seq(db)
    oldest = db.execute("SELECT min(seq) AS seq FROM events").fetchone()["seq"]
    log = db.execute("SELECT id FROM event_log").fetchone()["id"]
    kept_from = last + 1 if oldest is None else oldest
    return EventPage(log=log, last_seq=last, oldest_seq=kept_from, newest_seq=last)
