"""What surrounds a database file of `chv.common.store`: opening, migrations, reserve, errors.

Nothing else imports this module. All of it runs in the store's thread. A migration is a text of
SQL statements (or a sequence of them); number n of the list leads to `user_version` n. All that
are due run in one transaction, after a copy of the database was put beside it as
`NAME.before-VERSION`, VERSION being the one it is migrated to.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from chv.common.errors import (
    ChvError,
    Conflict,
    DataLoss,
    FailedPrecondition,
    Internal,
    ResourceExhausted,
    Unavailable,
)
from chv.common.failpoint import failpoint_sync
from chv.common.files import (
    free_bytes,
    fsync,
    no_space_is_exhausted,
    sync_directory,
    temporary_beside,
)

Migrations = Sequence[str | Sequence[str]]

RESERVE_BYTES = 4 << 20
BUSY_TIMEOUT_S = 5.0
# Checking reads the whole file: 100 ms for this much; a larger one is checked as it is read.
CHECKED_BYTES_MAX = 64 << 20
# Below this a side file that cannot be made or grown is lack of space, whatever SQLite calls it.
SCARCE_BYTES = 64 << 10
_SIDE_FILE_CODES = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR_SHMOPEN,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_SHMMAP,
)
_PRAGMAS = (
    "PRAGMA journal_mode = WAL",
    "PRAGMA synchronous = FULL",
    "PRAGMA foreign_keys = ON",
    "PRAGMA temp_store = MEMORY",
)
_LOSS_HINT = (
    "stop the daemon, keep a copy of the file, and put back {name}.before-* or a backup; without "
    "one, remove {name}* to start anew: running VMs are found again by census"
)


def open_database(
    path: Path, migrations: Migrations, reserve_bytes: int
) -> tuple[sqlite3.Connection, Reserve]:
    """Open or make the database at its newest version, checked."""
    reserve = Reserve(path.with_name(f"{path.name}.reserve"), reserve_bytes)
    with no_space_is_exhausted(path), translated(path):
        _make_file(path, reserve)
        db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        try:
            db.row_factory = sqlite3.Row
            _refuse_emptied(db, path, reserve)
            _prepare(db, path, migrations)
        except BaseException:
            db.close()
            raise
    reserve.restore()
    return db, reserve


def _make_file(path: Path, reserve: Reserve) -> None:
    """Make the file 0600 before SQLite does with the umask; its side files inherit the mode."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        # SQLite would take a file cut to nothing for a new one, and every VM would be forgotten.
        if os.fstat(fd).st_size == 0 and reserve.path.exists():
            raise _lost(path, "is empty, but was in use")
    finally:
        os.close(fd)
    sync_directory(path.parent)


def _refuse_emptied(db: sqlite3.Connection, path: Path, reserve: Reserve) -> None:
    """A file without its write-ahead log can be back at its first page: valid, and forgetful."""
    tables = "SELECT count(*) FROM sqlite_master"
    if reserve.path.exists() and db.execute(tables).fetchone()[0] == 0:
        raise _lost(path, "holds nothing, but was in use")


def _prepare(db: sqlite3.Connection, path: Path, migrations: Migrations) -> None:
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    _check(db, path, version, len(migrations))
    for pragma in _PRAGMAS:
        db.execute(pragma).fetchall()
    if version < len(migrations):
        if version > 0:
            _copy_before(db, path, len(migrations))
        _migrate(db, migrations, version)


def _check(db: sqlite3.Connection, path: Path, version: int, known: int) -> None:
    if version > known:
        raise FailedPrecondition(
            f"{str(path)!r} has version {version}, this program knows up to {known}",
            hint=f"install the newer program again, or put back {path.name}.before-{version}",
        )
    if version == 0 and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise FailedPrecondition(
            f"{str(path)!r} is a database, but not one of ours", hint="move it out of the way"
        )
    if path.stat().st_size <= CHECKED_BYTES_MAX:
        verdict = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise _lost(path, f"is corrupt: {verdict}")


def _copy_before(db: sqlite3.Connection, path: Path, version: int) -> None:
    copy = path.with_name(f"{path.name}.before-{version}")
    with temporary_beside(copy, mode=0o600) as (fd, temporary):
        with closing(sqlite3.connect(temporary)) as target:
            db.backup(target)
        fsync(fd, copy)
        temporary.replace(copy)
        sync_directory(copy.parent)


def _migrate(db: sqlite3.Connection, migrations: Migrations, version: int) -> None:
    due = [text if isinstance(text, str) else "\n;\n".join(text) for text in migrations[version:]]
    db.execute("PRAGMA foreign_keys = OFF")  # so that a migration can rebuild a table
    try:
        # executescript ends an open transaction first, so the BEGIN is part of the script.
        db.executescript("\n;\n".join(["BEGIN IMMEDIATE", *due]))
        db.execute(f"PRAGMA user_version = {len(migrations)}")
        if broken := db.execute("PRAGMA foreign_key_check").fetchall():
            raise Internal(f"migration to {len(migrations)} leaves {len(broken)} broken references")
        failpoint_sync("common.store.migrate.before_commit")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    db.execute("PRAGMA foreign_keys = ON")


class Reserve:
    """Space set aside beside the database, given up when the disk is full.

    With it deletions and the records of running VMs still go through; it is made again after a
    write that finds twice as much space free.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self.path = path
        self._size_bytes = size_bytes
        self.is_held = size_bytes == 0

    def release(self) -> bool:
        """Give the space back to the disk; False where there was none to give."""
        if self._size_bytes == 0 or not self.is_held:
            return False
        self.path.unlink(missing_ok=True)
        sync_directory(self.path.parent)
        self.is_held = False
        return True

    def restore(self) -> None:
        """Set the space aside where that is possible; it never fails the write before it."""
        if self.is_held:
            return
        try:
            if self._is_there() or free_bytes(self.path.parent) >= 2 * self._size_bytes:
                self._allocate()
        except OSError:
            # Visible as `is_short_of_space`; a disk that is really ill fails the next write.
            self.path.unlink(missing_ok=True)

    def _is_there(self) -> bool:
        return self.path.exists() and self.path.stat().st_blocks * 512 >= self._size_bytes

    def _allocate(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.path, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, self._size_bytes)
            self.is_held = True
        finally:
            os.close(fd)


@contextmanager
def translated(
    path: Path, remember: Callable[[ChvError], None] = lambda error: None
) -> Iterator[None]:
    """Turn SQLite's errors into ours; `remember` is told each of them."""
    try:
        yield
    except (sqlite3.Error, DataLoss) as error:
        ours = error if isinstance(error, DataLoss) else translate(error, path)
        remember(ours)
        raise ours from error


def translate(error: sqlite3.Error, path: Path) -> ChvError:
    """Return our error for one of SQLite's, by its code and never by its text."""
    extended = getattr(error, "sqlite_errorcode", None)
    primary = None if extended is None else extended & 0xFF
    if isinstance(error, sqlite3.IntegrityError):
        return Conflict(str(error), hint="the object or one it refers to is not as expected")
    if primary == sqlite3.SQLITE_FULL or _is_scarce(extended, path):
        return ResourceExhausted(
            f"no space for the store {str(path)!r}", hint=f"free space below {path.parent}"
        )
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _lost(path, f"is corrupt: {error}")
    if primary == sqlite3.SQLITE_IOERR:
        name = getattr(error, "sqlite_errorname", "SQLITE_IOERR")
        return _lost(path, f"cannot be read or written: {error} ({name})")
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return Unavailable(f"the store {str(path)!r} is locked by another process")
    if primary in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return FailedPrecondition(f"the store {str(path)!r} cannot be opened: {error}")
    return Internal(f"the store {str(path)!r}: {error}")


def _is_scarce(extended: int | None, path: Path) -> bool:
    """Side files that cannot be made or grown on a full disk have codes of their own."""
    if extended not in _SIDE_FILE_CODES:
        return False
    try:
        return free_bytes(path.parent) < SCARCE_BYTES
    except OSError:
        return False


def _lost(path: Path, problem: str) -> DataLoss:
    return DataLoss(f"the store {str(path)!r} {problem}", hint=_LOSS_HINT.format(name=path.name))
