"""A small store for tests: its two migrations, and a few functions to run in it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from chv.common.store import Connection, Store

FIRST = "CREATE TABLE item (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT"
SECOND = [
    "CREATE TABLE part (item TEXT NOT NULL REFERENCES item (key)) STRICT -- a comment at the end",
    "CREATE TRIGGER gone AFTER DELETE ON item BEGIN SELECT 1; SELECT 2; END",
]


@asynccontextmanager
async def open_store(path: Path, *migrations: str | list[str]) -> AsyncIterator[Store]:
    async with Store.open(path, migrations or (FIRST,), reserve_bytes=64 << 10) as store:
        yield store


def put(db: Connection, key: str, value: bytes = b"") -> None:
    db.execute("INSERT INTO item VALUES (?, ?)", (key, value))


def keys(db: Connection) -> list[str]:
    return [row["key"] for row in db.execute("SELECT key FROM item ORDER BY key")]


def setting(pragma: str, db: Connection) -> object:
    return db.execute(f"PRAGMA {pragma}").fetchone()[0]


def is_short(store: Store) -> bool:
    """Ask anew each time; a type checker takes a property for a constant."""
    return store.is_short_of_space
