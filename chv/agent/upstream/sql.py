"""Assignments and waiting reports in SQLite: their tables, what is written and read.

All functions run inside a transaction of `chv.agent.store_sqlite` and fail as SQLite does.
"""

from __future__ import annotations

import msgspec

from chv.agent.upstream.records import Assignment, key_of
from chv.common.errors import NotFound, StaleGeneration
from chv.common.store import Connection
from chv.common.wire.upstream import Report

MIGRATION = (
    """CREATE TABLE assignments (
        uid TEXT PRIMARY KEY, generation INTEGER NOT NULL, body TEXT NOT NULL) STRICT""",
    """CREATE TABLE outbox (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE,
        body TEXT NOT NULL) STRICT""",
)


def assign(db: Connection, new: Assignment) -> None:
    """Keep an assignment of an object that is there."""
    if db.execute("SELECT 1 FROM objects WHERE uid = ?", (new.uid,)).fetchone() is None:
        raise NotFound("no such object", resource=new.uid)
    known = db.execute("SELECT generation FROM assignments WHERE uid = ?", (new.uid,)).fetchone()
    if known is not None and new.generation < known["generation"]:
        raise StaleGeneration(f"generation {new.generation} is not new", resource=new.uid)
    db.execute(
        "INSERT OR REPLACE INTO assignments VALUES (?, ?, ?)",
        (new.uid, new.generation, msgspec.json.encode(new).decode()),
    )


def removed(db: Connection, uid: str) -> None:
    """The object is gone."""
    db.execute("DELETE FROM assignments WHERE uid = ?", (uid,))


def put(db: Connection, report: Report) -> None:
    """Let a report wait under its number, in place of one of the same key."""
    db.execute("DELETE FROM outbox WHERE key = ?", (key_of(report),))
    body = msgspec.json.encode(report).decode()
    db.execute("INSERT INTO outbox VALUES (?, ?, ?)", (report.seq, key_of(report), body))


def drop(db: Connection, seqs: tuple[int, ...]) -> None:
    """Forget reports."""
    db.executemany("DELETE FROM outbox WHERE seq = ?", [(seq,) for seq in seqs])


def assignments(db: Connection) -> tuple[Assignment, ...]:
    """Return all assignments."""
    rows = db.execute("SELECT body FROM assignments ORDER BY rowid").fetchall()
    return tuple(msgspec.json.decode(row["body"], type=Assignment) for row in rows)


def outbox(db: Connection) -> tuple[tuple[Report, ...], int]:
    """Return the reports that wait, in their order, and the last number ever given."""
    rows = db.execute("SELECT body FROM outbox ORDER BY seq").fetchall()
    last = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'outbox'").fetchone()
    reports = tuple(msgspec.json.decode(row["body"], type=Report) for row in rows)
    return reports, 0 if last is None else last["seq"]
