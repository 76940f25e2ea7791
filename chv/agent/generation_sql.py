"""The desired-state history in SQLite: its table, and what is written to and read from it.

All functions run inside a transaction of `chv.agent.store_sqlite` and fail as SQLite does.
"""

from __future__ import annotations

import msgspec

from chv.agent.generations import (
    DELETED_GENERATIONS_MAX,
    GENERATIONS_MAX,
    Generation,
    GenerationRow,
)
from chv.common.store import Connection

# What is there already becomes the first row of each object, by the operation that made it.
MIGRATION = (
    """CREATE TABLE generations (
        uid TEXT NOT NULL, generation INTEGER NOT NULL, kind TEXT NOT NULL,
        namespace TEXT NOT NULL, name TEXT NOT NULL, body TEXT NOT NULL, labels TEXT NOT NULL,
        spec TEXT NOT NULL, PRIMARY KEY (uid, generation)) STRICT""",
    "CREATE INDEX generations_by_name ON generations (kind, namespace, name)",
    """INSERT INTO generations
        SELECT o.uid, o.generation, o.kind, o.namespace, o.name,
            json_object(
                'uid', o.uid, 'kind', o.kind, 'namespace', o.namespace, 'name', o.name,
                'generation', o.generation,
                'at', coalesce(json_extract(p.body, '$.created_at'), ''),
                'requester', coalesce(json_extract(p.body, '$.requester'), ''),
                'reason', coalesce(json_extract(p.body, '$.reason'), ''),
                'operation_id', coalesce(p.id, ''),
                'verb', coalesce(json_extract(p.body, '$.verb'), '')),
            coalesce(json_extract(o.resource, '$.metadata.labels'), '{}'),
            coalesce(json_extract(o.resource, '$.spec'), '{}')
        FROM objects o LEFT JOIN operations p ON p.seq = (
            SELECT min(seq) FROM operations q
            WHERE q.kind = o.kind AND q.namespace = o.namespace AND q.name = o.name
                AND json_extract(q.body, '$.uid') = o.uid
                AND json_extract(q.body, '$.generation') = o.generation)""",
)


def put(db: Connection, new: Generation) -> None:
    """Keep a generation, and no more than GENERATIONS_MAX of its object."""
    row = new.row
    values = (
        row.uid,
        row.generation,
        row.kind,
        row.namespace,
        row.name,
        msgspec.json.encode(row).decode(),
        msgspec.json.encode(new.labels).decode(),
        new.spec,
    )
    db.execute(
        """INSERT INTO generations VALUES (?, ?, ?, ?, ?, ?, ?, ?)
           ON CONFLICT (uid, generation) DO UPDATE SET labels = excluded.labels""",
        values,
    )
    keep(db, row.uid, GENERATIONS_MAX)


def keep(db: Connection, uid: str, rows_max: int) -> None:
    """Drop the oldest generations of an object beyond a number."""
    db.execute(
        """DELETE FROM generations WHERE uid = ?1 AND generation <
           (SELECT generation FROM generations WHERE uid = ?1
            ORDER BY generation DESC LIMIT 1 OFFSET ?2)""",
        (uid, rows_max - 1),
    )


def removed(db: Connection, uid: str) -> None:
    """Shorten the history of an object that is gone."""
    keep(db, uid, DELETED_GENERATIONS_MAX)


def prune(db: Connection, histories_max: int) -> None:
    """Drop the histories of objects that went before the newest so many."""
    db.execute(
        """DELETE FROM generations WHERE uid NOT IN (SELECT uid FROM objects) AND uid NOT IN
           (SELECT uid FROM tombstones ORDER BY revision DESC, rowid DESC LIMIT ?)""",
        (histories_max,),
    )


def uids(db: Connection, kind: str, namespace: str, name: str) -> list[str]:
    """Return the objects that have had a name, newest first."""
    rows = db.execute(
        """SELECT uid, max(rowid) AS newest FROM generations
           WHERE kind = ? AND namespace = ? AND name = ? GROUP BY uid ORDER BY newest DESC""",
        (kind, namespace, name),
    )
    return [row["uid"] for row in rows]


def rows(db: Connection, uid: str) -> list[GenerationRow]:
    """Return the rows of an object without its specs, newest first."""
    found = db.execute(
        "SELECT body FROM generations WHERE uid = ? ORDER BY generation DESC", (uid,)
    )
    return [msgspec.json.decode(row["body"], type=GenerationRow) for row in found]


def one(db: Connection, uid: str, generation: int) -> Generation | None:
    """Return one generation whole."""
    row = db.execute(
        "SELECT body, labels, spec FROM generations WHERE uid = ? AND generation = ?",
        (uid, generation),
    ).fetchone()
    if row is None:
        return None
    return Generation(
        row=msgspec.json.decode(row["body"], type=GenerationRow),
        labels=msgspec.json.decode(row["labels"], type=dict[str, str]),
        spec=row["spec"],
    )
