"""The one SQLite module: a durable store in which each transaction is one function.

`await store.write(lambda db: db.execute(...))` runs BEGIN IMMEDIATE, the function and COMMIT in
one hop to the store's thread; it is on the disk when it returns (WAL, synchronous=FULL). The
function may run twice (see `Reserve`), so it must have no effect but on `db`. Cancellation waits
for the end of the hop: a transaction is never left open and its result never lost.

Fails with ResourceExhausted (disk full; nothing changed; works again when there is space),
Conflict (a constraint), Unavailable (locked by another process), DataLoss (corrupt file, I/O or
fsync error: the store refuses everything from then on and the daemon must exit), Internal (our
SQL is wrong). Migrations and reserve space live in `chv.common.store_file`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import aiosqlite
import anyio
import anyio.lowlevel

from chv.common.errors import ChvError, DataLoss, Internal, ResourceExhausted
from chv.common.failpoint import failpoint_sync
from chv.common.store_file import (
    RESERVE_BYTES,
    Migrations,
    Reserve,
    open_database,
    translated,
)

__all__ = ["Connection", "Migrations", "Row", "Store"]

Connection = sqlite3.Connection
Row = sqlite3.Row
T = TypeVar("T")

CLOSE_TIMEOUT_S = 30.0


class _Runner(Protocol):
    """Runs a function where the connection lives."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


class Store:
    """One database file, one connection. Made by `open`, or in simulations by `open_inline`."""

    def __init__(self, path: Path, db: Connection, reserve: Reserve, runner: _Runner) -> None:
        self.path = path
        self._db = db
        self._reserve = reserve
        self._runner = runner
        self._failure: DataLoss | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        path: Path,
        migrations: Sequence[str | Sequence[str]],
        *,
        reserve_bytes: int = RESERVE_BYTES,
    ) -> AsyncIterator[Store]:
        """Open or make the database, migrate it, and close it with its thread at the end."""
        opener = _Opener(path, migrations, reserve_bytes)
        connection = aiosqlite.Connection(opener.connect, iter_chunk_size=64)
        try:
            with anyio.CancelScope(shield=True):
                await connection
            db, reserve = opener.result()
            # aiosqlite has no public way to run one function in its thread; `_execute` is what
            # each of its own methods uses.
            yield cls(path, db, reserve, runner=connection._execute)
        finally:
            with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await connection.close()

    @classmethod
    @asynccontextmanager
    async def open_inline(
        cls, path: Path, migrations: Sequence[str | Sequence[str]]
    ) -> AsyncIterator[Store]:
        """Open the same store without a thread, for virtual time; it blocks the loop."""
        db, reserve = open_database(path, migrations, 0)
        try:
            yield cls(path, db, reserve, runner=_run_here)
        finally:
            db.close()

    @property
    def is_short_of_space(self) -> bool:
        """True after a full disk, until the reserve could be made again: admit nothing new."""
        return not self._reserve.is_held

    async def read(self, function: Callable[[Connection], T]) -> T:
        """Run a function that only reads, and return what it returns."""
        self._refuse_after_failure()
        return await self._runner(partial(self._read, function))

    async def write(self, function: Callable[[Connection], T]) -> T:
        """Run a function as one transaction; what it returns is durable, or it raised."""
        self._refuse_after_failure()
        await anyio.lowlevel.checkpoint_if_cancelled()
        with anyio.CancelScope(shield=True):
            result = await self._runner(partial(self._write, function))
        return result  # noqa: RET504  a scope may swallow, says mypy: no return from inside

    async def note(self, function: Callable[[Connection], T]) -> T:
        """Run a function as one transaction that outlives this process, but waits for no disk.

        A loss of power may undo it, never without undoing what was written after it: for what
        says only how far things of this boot have come.
        """
        self._refuse_after_failure()
        await anyio.lowlevel.checkpoint_if_cancelled()
        with anyio.CancelScope(shield=True):
            result = await self._runner(partial(self._note, function))
        return result  # noqa: RET504  a scope may swallow, says mypy: no return from inside

    def _refuse_after_failure(self) -> None:
        if self._failure is not None:
            raise DataLoss(
                f"the store failed before: {self._failure.message}", hint=self._failure.hint
            )

    def _read(self, function: Callable[[Connection], T]) -> T:
        """In the store's thread."""
        with translated(self.path, self._remember):
            self._db.execute("PRAGMA query_only = ON")
            try:
                return _detached(function(self._db))
            finally:
                self._db.execute("PRAGMA query_only = OFF")

    def _note(self, function: Callable[[Connection], T]) -> T:
        """In the store's thread: the log is synced with the next write that lasts."""
        self._db.execute("PRAGMA synchronous = NORMAL")
        try:
            return self._write(function)
        finally:
            self._db.execute("PRAGMA synchronous = FULL")

    def _write(self, function: Callable[[Connection], T]) -> T:
        """In the store's thread: a full disk gives up the reserve and tries once more."""
        try:
            result = self._transact(function)
        except ResourceExhausted:
            if not self._reserve.release():
                raise
            result = self._transact(function)
        self._reserve.restore()
        return result

    def _transact(self, function: Callable[[Connection], T]) -> T:
        with translated(self.path, self._remember):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                result = _detached(function(self._db))
                self._commit()
            except BaseException:
                if self._db.in_transaction:  # SQLite has rolled back itself after some errors
                    self._db.execute("ROLLBACK")
                raise
        failpoint_sync("common.store.commit.after")
        return result

    def _commit(self) -> None:
        if not self._db.in_transaction:
            raise Internal("a store function ended its own transaction")
        failpoint_sync("common.store.commit.before")
        self._db.execute("COMMIT")

    def _remember(self, error: ChvError) -> None:
        if isinstance(error, DataLoss):
            self._failure = error


class _Opener:
    """Opens the database in aiosqlite's thread, without failing there.

    After a failed connect aiosqlite would not wait for the end of its thread; after a successful
    one it does. So it gets an empty database instead, and the error is raised by `result`.
    """

    def __init__(self, path: Path, migrations: Migrations, reserve_bytes: int) -> None:
        self._arguments = (path, migrations, reserve_bytes)
        self._opened: tuple[Connection, Reserve] | None = None
        self._error: Exception | None = None

    def connect(self) -> Connection:
        """In the store's thread."""
        try:
            self._opened = open_database(*self._arguments)
        except Exception as error:  # noqa: BLE001  kept and raised by `result`
            self._error = error
            return sqlite3.connect(":memory:")
        return self._opened[0]

    def result(self) -> tuple[Connection, Reserve]:
        """Return what was opened, or raise what went wrong."""
        if self._error is not None:
            raise self._error
        assert self._opened is not None
        return self._opened


def _detached(result: T) -> T:
    """Close a cursor that a function returned: it must not outlive its hop to the thread."""
    if isinstance(result, sqlite3.Cursor):
        result.close()
    return result


async def _run_here(function: Callable[[], T], /) -> T:
    await anyio.lowlevel.checkpoint()
    return function()
