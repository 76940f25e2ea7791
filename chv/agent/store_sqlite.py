"""The agent's store in SQLite: `agent.db`, one transaction a commit, through `chv.common.store`.

Structs are kept as JSON beside the columns that the rules need. The rules are those of
`chv.agent.tables`, in SQL; the contract tests hold both together. Fails like `chv.common.store`,
and with AlreadyExists, StaleGeneration, Conflict or NotFound where a rule is broken.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar, assert_never

import msgspec

from chv.agent import events_sql, generation_sql, object_sql
from chv.agent.events_record import EventPage, PutEvents, PutSighting
from chv.agent.generations import Generation, GenerationRow, PutGeneration
from chv.agent.node_record import NodeRecord, PutNode
from chv.agent.operation_filter import EVERY, OperationFilter
from chv.agent.records import (
    FINAL_STATES,
    Change,
    Prune,
    PutFacts,
    PutObject,
    PutOperation,
    PutRequest,
    PutStatus,
    PutStep,
    PutWorker,
    RemoveObject,
    RemoveWorker,
    RequestRow,
    Snapshot,
    WorkerRow,
)
from chv.agent.tables import TOMBSTONES_MAX
from chv.agent.upstream import sql as upstream_sql
from chv.agent.upstream.records import DropReports, PutAssignment, PutReport
from chv.common.errors import Conflict, NotFound
from chv.common.files import free_bytes
from chv.common.store import Connection, Store
from chv.common.wire.agent import Operation, OperationStep
from chv.common.wire.agent_events import WatchEvents

T = TypeVar("T")

MIGRATIONS = (
    (
        """CREATE TABLE objects (
            uid TEXT PRIMARY KEY, kind TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL,
            generation INTEGER NOT NULL, revision INTEGER NOT NULL, resource TEXT NOT NULL,
            status TEXT, facts TEXT, slot INTEGER UNIQUE, deleting INTEGER NOT NULL,
            UNIQUE (kind, namespace, name)) STRICT""",
        """CREATE TABLE tombstones (
            uid TEXT PRIMARY KEY, revision INTEGER NOT NULL, body TEXT NOT NULL) STRICT""",
        """CREATE TABLE workers (
            vm_uid TEXT PRIMARY KEY REFERENCES objects (uid), worker_id TEXT NOT NULL UNIQUE,
            body TEXT NOT NULL) STRICT""",
        """CREATE TABLE operations (
            seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
            namespace TEXT NOT NULL, name TEXT NOT NULL, final INTEGER NOT NULL,
            body TEXT NOT NULL) STRICT""",
        "CREATE INDEX operations_by_target ON operations (kind, namespace, name, seq)",
        "CREATE INDEX operations_active ON operations (final, seq)",
        """CREATE TABLE steps (
            operation_id TEXT NOT NULL REFERENCES operations (id) ON DELETE CASCADE,
            number INTEGER NOT NULL, body TEXT NOT NULL,
            PRIMARY KEY (operation_id, number)) STRICT""",
        """CREATE TABLE requests (
            seq INTEGER PRIMARY KEY AUTOINCREMENT, key TEXT NOT NULL UNIQUE,
            digest TEXT NOT NULL, reply BLOB NOT NULL) STRICT""",
    ),
    generation_sql.MIGRATION,
    (
        """CREATE TABLE node (
            one INTEGER PRIMARY KEY CHECK (one = 1), body TEXT NOT NULL) STRICT""",
    ),
    upstream_sql.MIGRATION,
    events_sql.MIGRATION,
)


class SqliteStore:
    """An `AgentStore` on a `Store`; several may follow each other, one at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def load(self) -> Snapshot:
        """Return everything that is not history."""
        return await self._store.read(_load)

    async def commit(self, changes: tuple[Change, ...]) -> None:
        """Apply all changes, or raise and apply none."""

        def transaction(db: Connection) -> None:
            for change in changes:
                _apply(db, change)

        await self._store.write(transaction)

    async def operation(self, operation_id: str) -> Operation | None:
        """Return one operation with its steps."""
        return await self._store.read(lambda db: _operation(db, operation_id))

    async def operations(
        self,
        *,
        kind: str = "",
        namespace: str = "",
        name: str = "",
        limit: int,
        others: OperationFilter = EVERY,
    ) -> list[Operation]:
        """Return operations without steps, newest first."""
        query = """SELECT body FROM operations WHERE (?1 = '' OR kind = ?1)
            AND (?2 = '' OR namespace = ?2) AND (?3 = '' OR name = ?3)
            AND (?5 = '' OR json_extract(body, '$.verb') = ?5)
            AND (?6 = '[]' OR json_extract(body, '$.state') IN (SELECT value FROM json_each(?6)))
            AND (?7 = '' OR json_extract(body, '$.created_at') >= ?7)
            ORDER BY seq DESC LIMIT ?4"""
        states = _encode(others.states)
        values = (kind, namespace, name, limit, others.verb, states, others.since)
        rows = await self._store.read(lambda db: db.execute(query, values).fetchall())
        return [_decode(row["body"], Operation) for row in rows]

    async def request(self, key: str) -> RequestRow | None:
        """Return what was recorded for an Idempotency-Key."""
        query = "SELECT key, digest, reply FROM requests WHERE key = ?"
        row = await self._store.read(lambda db: db.execute(query, (key,)).fetchone())
        return None if row is None else RequestRow(**dict(row))

    async def histories(self, kind: str, namespace: str, name: str) -> list[str]:
        """Return the uids that have had this name and have a history, newest first."""
        return await self._store.read(lambda db: generation_sql.uids(db, kind, namespace, name))

    async def history(self, uid: str) -> list[GenerationRow]:
        """Return what is known of an object's generations, newest first."""
        return await self._store.read(lambda db: generation_sql.rows(db, uid))

    async def generation(self, uid: str, generation: int) -> Generation | None:
        """Return one generation whole."""
        return await self._store.read(lambda db: generation_sql.one(db, uid, generation))

    async def events(self, after_seq: int, wanted: WatchEvents, limit: int) -> EventPage:
        """Return the first wanted events after a number."""
        return await self._store.read(lambda db: events_sql.page(db, after_seq, wanted, limit))

    async def last_events(self, wanted: WatchEvents, limit: int) -> EventPage:
        """Return the newest wanted events, in order."""
        return await self._store.read(lambda db: events_sql.newest(db, wanted, limit))

    async def shortage(self) -> str:
        """Say where space lacks, so that nothing new may be stored; empty where there is some."""
        if self._store.is_short_of_space:
            # A transaction of nothing: after each, the store tries to make its reserve again.
            await self._store.write(lambda db: None)
        if not self._store.is_short_of_space:
            return ""
        directory = self._store.path.parent
        return f"{directory} has {free_bytes(directory)} bytes free"


@asynccontextmanager
async def open_store(path: Path) -> AsyncIterator[SqliteStore]:
    """Open or make the database file; closed at the end of the block."""
    async with Store.open(path, MIGRATIONS) as store:
        yield SqliteStore(store)


def _decode(text: str, kind: type[T]) -> T:
    return msgspec.json.decode(text, type=kind)


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _load(db: Connection) -> Snapshot:
    revision = db.execute(
        """SELECT max(coalesce((SELECT max(revision) FROM objects), 0),
                      coalesce((SELECT max(revision) FROM tombstones), 0))"""
    ).fetchone()[0]
    active = db.execute("SELECT id FROM operations WHERE final = 0 ORDER BY seq").fetchall()
    operations = (_operation(db, row["id"]) for row in active)
    outbox, outbox_seq = upstream_sql.outbox(db)
    return Snapshot(
        revision=revision,
        objects=tuple(map(object_sql.one, db.execute("SELECT * FROM objects ORDER BY rowid"))),
        workers=tuple(
            _decode(row["body"], WorkerRow) for row in db.execute("SELECT body FROM workers")
        ),
        operations=tuple(operation for operation in operations if operation is not None),
        node=_node(db),
        assignments=upstream_sql.assignments(db),
        outbox=outbox,
        outbox_seq=outbox_seq,
        sightings=events_sql.sightings(db),
        event_seq=events_sql.last_seq(db),
    )


def _node(db: Connection) -> NodeRecord:
    row = db.execute("SELECT body FROM node").fetchone()
    return NodeRecord() if row is None else _decode(row["body"], NodeRecord)


def _operation(db: Connection, operation_id: str) -> Operation | None:
    row = db.execute("SELECT body FROM operations WHERE id = ?", (operation_id,)).fetchone()
    if row is None:
        return None
    query = "SELECT body FROM steps WHERE operation_id = ? ORDER BY number"
    steps = [_decode(step["body"], OperationStep) for step in db.execute(query, (operation_id,))]
    return msgspec.structs.replace(_decode(row["body"], Operation), steps=steps)


def _apply(db: Connection, change: Change) -> None:
    match change:
        case PutObject(object=stored):
            object_sql.put(db, stored)
        case PutStatus(uid=uid, status=status):
            db.execute("UPDATE objects SET status = ? WHERE uid = ?", (_encode(status), uid))
        case PutFacts(uid=uid, facts=facts):
            object_sql.put_facts(db, uid, facts)
        case RemoveObject(tombstone=tombstone):
            object_sql.remove(db, tombstone)
        case PutWorker(row=row):
            _put_worker(db, row)
        case RemoveWorker(vm_uid=vm_uid):
            db.execute("DELETE FROM workers WHERE vm_uid = ?", (vm_uid,))
        case PutOperation(operation=operation):
            _put_operation(db, operation)
        case PutStep():
            _put_step(db, change)
        case PutRequest(request=request):
            db.execute(
                "INSERT OR REPLACE INTO requests (key, digest, reply) VALUES (?, ?, ?)",
                (request.key, request.digest, request.reply),
            )
        case PutGeneration(generation=generation):
            generation_sql.put(db, generation)
        case PutNode(record=record):
            db.execute("INSERT OR REPLACE INTO node (one, body) VALUES (1, ?)", (_encode(record),))
        case PutAssignment(assignment=assignment):
            upstream_sql.assign(db, assignment)
        case PutReport(report=report):
            upstream_sql.put(db, report)
        case DropReports(seqs=seqs):
            upstream_sql.drop(db, seqs)
        case PutSighting(sighting=sighting):
            events_sql.put_sighting(db, sighting)
        case PutEvents():
            events_sql.put(db, change)
        case Prune():
            _prune(db, change)
        case _:
            assert_never(change)


def _put_worker(db: Connection, row: WorkerRow) -> None:
    query = "SELECT worker_id FROM workers WHERE vm_uid = ?"
    existing = db.execute(query, (row.vm_uid,)).fetchone()
    if existing is not None and existing["worker_id"] != row.worker_id:
        raise Conflict(f"worker {existing['worker_id']} is not forgotten yet", resource=row.vm_uid)
    if db.execute("SELECT 1 FROM objects WHERE uid = ?", (row.vm_uid,)).fetchone() is None:
        raise NotFound("no such object", resource=row.vm_uid)
    db.execute(
        """INSERT INTO workers (vm_uid, worker_id, body) VALUES (?, ?, ?)
           ON CONFLICT (vm_uid) DO UPDATE SET body = excluded.body""",
        (row.vm_uid, row.worker_id, _encode(row)),
    )


def _put_operation(db: Connection, operation: Operation) -> None:
    query = "SELECT final FROM operations WHERE id = ?"
    existing = db.execute(query, (operation.id,)).fetchone()
    if existing is not None and existing["final"]:
        raise Conflict("a final operation does not change", resource=operation.id)
    db.execute(
        """INSERT INTO operations (id, kind, namespace, name, final, body)
           VALUES (?, ?, ?, ?, ?, ?)
           ON CONFLICT (id) DO UPDATE SET final = excluded.final, body = excluded.body""",
        (
            operation.id,
            operation.kind,
            operation.namespace,
            operation.name,
            int(operation.state in FINAL_STATES),
            _encode(msgspec.structs.replace(operation, steps=[])),
        ),
    )


def _put_step(db: Connection, change: PutStep) -> None:
    query = "SELECT 1 FROM operations WHERE id = ?"
    if db.execute(query, (change.operation_id,)).fetchone() is None:
        raise NotFound("no such operation", resource=change.operation_id)
    db.execute(
        "INSERT OR REPLACE INTO steps (operation_id, number, body) VALUES (?, ?, ?)",
        (change.operation_id, change.index, _encode(change.step)),
    )


def _prune(db: Connection, change: Prune) -> None:
    db.execute(
        """DELETE FROM operations WHERE final = 1 AND seq NOT IN
           (SELECT seq FROM operations WHERE final = 1 ORDER BY seq DESC LIMIT ?)""",
        (change.operations_max,),
    )
    db.execute(
        """DELETE FROM requests WHERE seq NOT IN
           (SELECT seq FROM requests ORDER BY seq DESC LIMIT ?)""",
        (change.requests_max,),
    )
    db.execute(
        """DELETE FROM tombstones WHERE revision <=
           (SELECT revision FROM tombstones ORDER BY revision DESC LIMIT 1 OFFSET ?)""",
        (TOMBSTONES_MAX,),
    )
    generation_sql.prune(db, change.histories_max)
