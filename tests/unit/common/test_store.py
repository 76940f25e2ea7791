"""The store: transactions that are whole, migrations that can be undone, disks that fill up."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
import pytest

from chv.common import failpoint, virtual_time
from chv.common.errors import (
    Conflict,
    DataLoss,
    FailedPrecondition,
    Internal,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from chv.common.store import Connection, Store
from tests.disks import fill, small_tmpfs
from tests.helpers import wait_until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

FIRST = "CREATE TABLE item (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT"
SECOND = [
    "CREATE TABLE part (item TEXT NOT NULL REFERENCES item (key)) STRICT -- a comment at the end",
    "CREATE TRIGGER gone AFTER DELETE ON item BEGIN SELECT 1; SELECT 2; END",
]


@pytest.fixture(autouse=True)
def _failpoints_off() -> Iterator[None]:
    yield
    failpoint.reset()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", size_mib=2) as disk:
        yield disk


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


def store_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "_connection_worker" in thread.name]


async def test_what_was_written_is_there_after_reopening(path: Path) -> None:
    async with open_store(path) as store:
        await store.write(lambda db: put(db, "a", b"\0\xff"))
    async with open_store(path) as store:
        row = await store.read(lambda db: db.execute("SELECT * FROM item").fetchone())
    assert (row["key"], row["value"]) == ("a", b"\0\xff")


async def test_write_returns_what_the_function_returns(path: Path) -> None:
    async with open_store(path) as store:
        cursor = await store.write(lambda db: db.execute("INSERT INTO item VALUES ('a', x'00')"))
        assert cursor.rowcount == 1
        assert await store.write(lambda db: 42) == 42


async def test_the_settings_are_the_durable_ones(path: Path) -> None:
    async with open_store(path) as store:
        for pragma, value in (("journal_mode", "wal"), ("synchronous", 2), ("foreign_keys", 1)):
            assert await store.read(partial(setting, pragma)) == value


async def test_no_file_of_the_store_is_readable_by_others(path: Path) -> None:
    old = os.umask(0)
    try:
        async with open_store(path) as store:
            await store.write(lambda db: put(db, "a"))
            files = list(path.parent.iterdir())
    finally:
        os.umask(old)
    assert {file.name for file in files} == {
        f"agent.db{end}" for end in ("", "-wal", "-shm", ".reserve")
    }
    async with open_store(path, FIRST, SECOND):
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


async def test_a_function_that_raises_changes_nothing(path: Path) -> None:
    def half(db: Connection) -> None:
        put(db, "a")
        raise NotFound("the other half")

    async with open_store(path) as store:
        with pytest.raises(NotFound):
            await store.write(half)
        assert await store.read(keys) == []
        await store.write(lambda db: put(db, "b"))
        assert await store.read(keys) == ["b"]


async def test_a_broken_constraint_is_a_conflict_and_changes_nothing(path: Path) -> None:
    def twice(db: Connection) -> None:
        put(db, "b")
        put(db, "a")

    async with open_store(path, FIRST, SECOND) as store:
        await store.write(lambda db: put(db, "a"))
        with pytest.raises(Conflict, match="UNIQUE"):
            await store.write(twice)
        with pytest.raises(Conflict, match="FOREIGN KEY"):
            await store.write(lambda db: db.execute("INSERT INTO part VALUES ('x')"))
        assert await store.read(keys) == ["a"]


async def test_a_reader_cannot_write(path: Path) -> None:
    async with open_store(path) as store:
        with pytest.raises(Internal, match="readonly"):
            await store.read(lambda db: put(db, "a"))
        await store.write(lambda db: put(db, "b"))
        assert await store.read(keys) == ["b"]


async def test_a_function_cannot_end_its_own_transaction(path: Path) -> None:
    async with open_store(path) as store:
        with pytest.raises(Internal, match="own transaction"):
            await store.write(lambda db: db.commit())
        await store.write(lambda db: put(db, "a"))


async def test_wrong_sql_is_our_bug(path: Path) -> None:
    async with open_store(path) as store:
        with pytest.raises(Internal, match="no such table"):
            await store.read(lambda db: db.execute("SELECT * FROM missing"))


async def test_writers_at_once_are_one_after_the_other(path: Path) -> None:
    def increment(db: Connection) -> None:
        row = db.execute("SELECT value FROM item WHERE key = 'n'").fetchone()
        count = int(row["value"]) if row else 0
        db.execute("INSERT OR REPLACE INTO item VALUES ('n', ?)", (str(count + 1).encode(),))

    async with open_store(path) as store:
        async with anyio.create_task_group() as group:
            for _ in range(50):
                group.start_soon(store.write, increment)
        row = await store.read(lambda db: db.execute("SELECT value FROM item").fetchone())
    assert int(row["value"]) == 50


async def test_cancelling_in_a_transaction_waits_for_its_end(path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()
    returned: list[str] = []

    def slow(db: Connection) -> str:
        put(db, "a")
        inside.set()
        assert go_on.wait(10)
        put(db, "b")
        return "done"

    async def writer(store: Store) -> None:
        returned.append(await store.write(slow))

    async with open_store(path) as store:
        async with anyio.create_task_group() as group:
            group.start_soon(writer, store)
            await wait_until(inside.is_set)
            group.cancel_scope.cancel()
            go_on.set()
        assert returned == ["done"], "the outcome is known, not lost"
        assert await store.read(keys) == ["a", "b"]
        await store.write(lambda db: put(db, "c"))


async def test_a_cancelled_caller_starts_no_transaction(path: Path) -> None:
    async with open_store(path) as store:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await store.write(lambda db: put(db, "a"))
        assert scope.cancelled_caught
        assert await store.read(keys) == []


async def test_the_thread_ends_with_the_store(path: Path) -> None:
    before = len(store_threads())
    async with open_store(path):
        assert len(store_threads()) == before + 1
    await wait_until(lambda: len(store_threads()) == before)


async def test_the_thread_ends_when_opening_fails_or_is_cancelled(path: Path) -> None:
    before = len(store_threads())
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(DataLoss):
        async with open_store(path):
            pass
    with anyio.CancelScope() as scope:
        scope.cancel()
        async with open_store(path.with_name("other.db")):
            await anyio.sleep(10)
    await wait_until(lambda: len(store_threads()) == before)


def test_a_process_whose_store_owner_fails_still_ends(path: Path) -> None:
    code = f"""
import anyio
from pathlib import Path
from chv.common.store import Store
async def main():
    async with Store.open(Path({str(path)!r}), [{FIRST!r}]) as store:
        raise KeyError("owner")
anyio.run(main)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert "KeyError" in done.stderr


@pytest.mark.parametrize(("point", "kept"), [("before", []), ("after", ["a"])])
async def test_a_kill_at_commit_leaves_all_or_nothing(
    path: Path, point: str, kept: list[str]
) -> None:
    code = f"""
import anyio
from pathlib import Path
from chv.common.store import Store
async def main():
    async with Store.open(Path({str(path)!r}), [{FIRST!r}]) as store:
        await store.write(lambda db: db.execute("INSERT INTO item VALUES ('a', x'00')"))
anyio.run(main)
"""
    terms = f"common.store.commit.{point}=kill"
    environ = os.environ | {"CHV_TEST_BUILD": "1", "CHV_FAILPOINTS": terms}
    done = subprocess.run([sys.executable, "-c", code], env=environ, timeout=20, check=False)
    assert done.returncode == -9
    async with open_store(path) as store:
        assert await store.read(keys) == kept


async def test_an_old_database_is_migrated_with_a_copy_beside_it(path: Path) -> None:
    async with open_store(path) as store:
        await store.write(lambda db: put(db, "a"))
        assert not path.with_name("agent.db.before-1").exists(), "nothing to copy in a new one"
    async with open_store(path, FIRST, SECOND) as store:
        await store.write(lambda db: db.execute("INSERT INTO part VALUES ('a')"))
    copy = path.with_name("agent.db.before-2")
    path.unlink()
    copy.rename(path)
    async with open_store(path) as store:
        assert await store.read(keys) == ["a"]
    assert not [file for file in path.parent.iterdir() if "tmp" in file.name]


async def test_a_migration_that_fails_changes_nothing(path: Path) -> None:
    async with open_store(path) as store:
        await store.write(lambda db: put(db, "a"))
    for bad in (
        ["CREATE TABLE x (y) STRICT"],
        ["CREATE TABLE z (y)", "INSERT INTO missing VALUES (1)"],
    ):
        with pytest.raises(Internal):
            async with open_store(path, FIRST, SECOND, bad):
                pass
    async with open_store(path) as store:
        assert await store.read(keys) == ["a"]


async def test_a_kill_in_a_migration_changes_nothing(path: Path) -> None:
    async with open_store(path) as store:
        await store.write(lambda db: put(db, "a"))
    failpoint.configure("common.store.migrate.before_commit=error(EIO)")
    with pytest.raises(OSError, match="migrate"):
        async with open_store(path, FIRST, SECOND):
            pass
    failpoint.reset()
    async with open_store(path) as store:
        assert await store.read(keys) == ["a"]


async def test_a_migration_can_rebuild_a_table_that_others_refer_to(path: Path) -> None:
    rebuild = """
        CREATE TABLE wider (key TEXT PRIMARY KEY, value BLOB NOT NULL, note TEXT) STRICT;
        INSERT INTO wider (key, value) SELECT key, value FROM item;
        DROP TABLE item;
        ALTER TABLE wider RENAME TO item;
    """
    async with open_store(path, FIRST, SECOND) as store:
        await store.write(lambda db: put(db, "a"))
        await store.write(lambda db: db.execute("INSERT INTO part VALUES ('a')"))
    async with open_store(path, FIRST, SECOND, rebuild) as store:
        await store.write(lambda db: db.execute("UPDATE item SET note = 'n'"))
        with pytest.raises(Conflict):
            await store.write(lambda db: db.execute("INSERT INTO part VALUES ('x')"))
    with pytest.raises(Internal, match="broken references"):
        async with open_store(path, FIRST, SECOND, rebuild, "DELETE FROM item"):
            pass


async def test_a_newer_database_names_both_versions(path: Path) -> None:
    async with open_store(path, FIRST, SECOND):
        pass
    with pytest.raises(FailedPrecondition, match=r"version 2.*up to 1.*before-2"):
        async with open_store(path):
            pass
    async with open_store(path, FIRST, SECOND):
        pass


async def test_somebody_elses_database_is_left_alone(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE theirs (x)")
    other.close()
    before = path.read_bytes()
    with pytest.raises(FailedPrecondition, match="not one of ours"):
        async with open_store(path):
            pass
    assert path.read_bytes() == before


@pytest.mark.parametrize("damage", ["header", "middle", "short", "empty"])
async def test_a_damaged_file_is_data_loss_that_names_file_and_remedy(
    path: Path, damage: str
) -> None:
    async with open_store(path) as store:
        for number in range(50):
            await store.write(partial(put, key=str(number), value=b"x" * 2000))
    size = path.stat().st_size
    with path.open("r+b") as file:
        if damage in ("short", "empty"):
            file.truncate(size // 2 if damage == "short" else 0)
        else:
            file.seek(0 if damage == "header" else 4096)
            file.write(b"\xa5" * 8192)
    with pytest.raises(DataLoss) as caught:
        async with open_store(path):
            pass
    assert str(path) in caught.value.message
    assert "agent.db.before-" in caught.value.hint


async def test_a_file_locked_by_another_process_is_unavailable(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chv.common.store_file.BUSY_TIMEOUT_S", 0.05)
    async with open_store(path) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(Unavailable, match="locked"):
            await store.write(lambda db: put(db, "a"))
        other.close()
        await store.write(lambda db: put(db, "a"))


def is_short(store: Store) -> bool:
    return store.is_short_of_space


@needs_root
@pytest.mark.root
async def test_on_a_full_disk_the_reserve_lets_records_go_on(small_disk: Path) -> None:
    async with open_store(small_disk / "a.db") as store:
        await store.write(lambda db: put(db, "a", b"x" * 1000))
        assert not is_short(store)
        fill(small_disk)
        await store.write(lambda db: put(db, "b", b"x" * 20_000))
        assert is_short(store)
        await store.write(lambda db: db.execute("DELETE FROM item WHERE key = 'a'"))
        assert await store.read(keys) == ["b"]


@needs_root
@pytest.mark.root
async def test_a_full_disk_refuses_leaves_the_store_intact_and_heals(small_disk: Path) -> None:
    path = small_disk / "a.db"
    async with open_store(path) as store:
        await store.write(lambda db: put(db, "a"))
        ballast = fill(small_disk)
        with pytest.raises(ResourceExhausted, match="no space") as caught:
            await store.write(lambda db: put(db, "huge", b"x" * (1 << 20)))
        assert caught.value.retriable
        fill(small_disk)  # what was the reserve
        with pytest.raises(ResourceExhausted):
            for number in range(1000):
                await store.write(partial(put, key=f"n{number}", value=b"x" * 1000))
        assert (await store.read(keys))[0] == "a"
        before = await store.read(keys)
        ballast.unlink()
        await store.write(lambda db: put(db, "z", b"x" * 1000))
        assert not is_short(store)
        assert (small_disk / "a.db.reserve").stat().st_blocks * 512 >= 64 << 10
    async with open_store(path) as store:
        assert await store.read(keys) == [*before, "z"]


@needs_root
@pytest.mark.root
async def test_opening_and_migrating_on_a_full_disk_is_refused_and_heals(small_disk: Path) -> None:
    path = small_disk / "a.db"
    async with open_store(path) as store:
        await store.write(lambda db: put(db, "a", b"x" * 50_000))
    ballast = fill(small_disk)
    with pytest.raises(ResourceExhausted):
        async with open_store(path, FIRST, SECOND):
            pass
    with pytest.raises(ResourceExhausted):
        async with open_store(small_disk / "new.db"):
            pass
    ballast.unlink()
    assert not [file for file in small_disk.iterdir() if "tmp" in file.name]
    async with open_store(path, FIRST, SECOND) as store:
        assert await store.read(keys) == ["a"]
    async with open_store(small_disk / "new.db") as store:
        assert await store.read(keys) == []


async def test_after_an_io_error_the_store_refuses_everything(path: Path) -> None:
    def broken(db: Connection) -> None:
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_FSYNC
        error.sqlite_errorname = "SQLITE_IOERR_FSYNC"
        raise error

    async with open_store(path) as store:
        await store.write(lambda db: put(db, "a"))
        with pytest.raises(DataLoss, match="IOERR_FSYNC"):
            await store.write(broken)
        for call in (store.read(keys), store.write(keys)):
            with pytest.raises(DataLoss, match="failed before"):
                await call
    async with open_store(path) as store:
        assert await store.read(keys) == ["a"]


async def test_reads_do_not_wait_for_the_disk_of_a_failed_reserve(path: Path) -> None:
    async with Store.open(path, [FIRST], reserve_bytes=1 << 60) as store:
        assert is_short(store)
        await store.write(lambda db: put(db, "a"))
        assert await store.read(keys) == ["a"]


def test_inline_the_store_runs_in_virtual_time_without_a_thread(path: Path) -> None:
    async def main() -> list[str]:
        async with Store.open_inline(path, [FIRST]) as store:
            assert not is_short(store)
            await store.write(lambda db: put(db, "a"))
            await anyio.sleep(3600)
            with pytest.raises(Conflict):
                await store.write(lambda db: put(db, "a"))
            assert not store_threads()
            return await store.read(keys)

    for _ in range(2):
        assert virtual_time.run(main) == ["a"]
        path.unlink()
