"""Objects in SQLite: what is written to and read from their tables.

All functions run inside a transaction of `chv.agent.store_sqlite` and fail as SQLite does, and with
AlreadyExists, StaleGeneration, Conflict or NotFound where a rule of `chv.agent.tables` is broken.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from chv.agent import events_sql, generation_sql
from chv.agent.records import (
    FACTS_TYPES,
    STATUS_TYPES,
    Facts,
    StoredObject,
    Tombstone,
    VmFacts,
    all_facts,
    revision_of,
    with_facts,
    with_status,
)
from chv.agent.upstream import sql as upstream_sql
from chv.common.errors import AlreadyExists, Conflict, NotFound, StaleGeneration
from chv.common.store import Connection, Row
from chv.common.wire.resources import KINDS

T = TypeVar("T")


def put(db: Connection, stored: StoredObject) -> None:
    """Store an object whole; a taken name or slot and an older generation are refused."""
    metadata = stored.resource.metadata
    named = db.execute(
        "SELECT uid FROM objects WHERE kind = ? AND namespace = ? AND name = ?", stored.key
    ).fetchone()
    if named is not None and named["uid"] != stored.uid:
        raise AlreadyExists(f"the name is taken by {named['uid']}", resource=stored.title)
    known = db.execute("SELECT generation FROM objects WHERE uid = ?", (stored.uid,)).fetchone()
    gone = db.execute("SELECT 1 FROM tombstones WHERE uid = ?", (stored.uid,)).fetchone()
    if gone is not None or (known is not None and metadata.generation < known["generation"]):
        raise StaleGeneration(f"generation {metadata.generation} is not new", resource=stored.title)
    slot = None if stored.facts is None else stored.facts.slot
    taken = db.execute("SELECT uid FROM objects WHERE slot = ? AND uid <> ?", (slot, stored.uid))
    if taken.fetchone() is not None:
        raise Conflict(f"slot {slot} belongs to another VM", resource=stored.title)
    status, facts = stored.resource.status, all_facts(stored)
    values = {
        "uid": stored.uid,
        "kind": stored.key[0],
        "namespace": metadata.namespace,
        "name": metadata.name,
        "generation": metadata.generation,
        "revision": revision_of(stored),
        "resource": _encode(msgspec.structs.replace(stored.resource, status=None)),
        "status": None if status is None else _encode(status),
        "facts": None if facts is None else _encode(facts),
        "slot": slot,
        "deleting": int(stored.deleting),
    }
    db.execute(_UPSERT_OBJECT, values)


_OBJECT_COLUMNS = (
    "uid",
    "kind",
    "namespace",
    "name",
    "generation",
    "revision",
    "resource",
    "status",
    "facts",
    "slot",
    "deleting",
)
_UPSERT_OBJECT = (
    f"INSERT INTO objects ({', '.join(_OBJECT_COLUMNS)})"  # noqa: S608 - our own column names
    f" VALUES ({', '.join(f':{column}' for column in _OBJECT_COLUMNS)})"
    " ON CONFLICT (uid) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in _OBJECT_COLUMNS[3:])
)


def put_facts(db: Connection, uid: str, facts: Facts) -> None:
    """Store the facts of an object."""
    slot = facts.slot if isinstance(facts, VmFacts) else None
    values = (_encode(facts), slot, uid)
    if db.execute("UPDATE objects SET facts = ?, slot = ? WHERE uid = ?", values).rowcount == 0:
        raise NotFound("no such object", resource=uid)


def remove(db: Connection, tombstone: Tombstone) -> None:
    """Put a tombstone in the place of an object, and forget what belongs to it alone."""
    if db.execute("SELECT 1 FROM workers WHERE vm_uid = ?", (tombstone.uid,)).fetchone():
        raise Conflict("its VMM is not forgotten yet", resource=tombstone.uid)
    if db.execute("DELETE FROM objects WHERE uid = ?", (tombstone.uid,)).rowcount == 0:
        raise NotFound("no such object", resource=tombstone.uid)
    db.execute(
        "INSERT INTO tombstones (uid, revision, body) VALUES (?, ?, ?)",
        (tombstone.uid, tombstone.revision, _encode(tombstone)),
    )
    generation_sql.removed(db, tombstone.uid)
    events_sql.removed(db, tombstone.uid)
    upstream_sql.removed(db, tombstone.uid)


def one(row: Row) -> StoredObject:
    """Return the object of a row."""
    resource = _decode(row["resource"], KINDS[row["kind"]])
    if row["status"] is not None:
        resource = with_status(resource, _decode(row["status"], STATUS_TYPES[row["kind"]]))
    stored = StoredObject(resource=resource)
    if row["facts"] is None:
        return stored
    return with_facts(stored, _decode(row["facts"], FACTS_TYPES[row["kind"]]))


def _decode(text: str, kind: type[T]) -> T:
    return msgspec.json.decode(text, type=kind)


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()
