"""The store: transactions that are whole, whoever cancels, fails or is killed."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

from chv.common import failpoint, virtual_time
from chv.common.errors import Conflict, DataLoss, Internal, NotFound, Unavailable
from chv.common.store import Connection, Store
from tests.helpers import wait_until
from tests.unit.common.store_sample import FIRST, SECOND, is_short, keys, open_store, put, setting

NORMAL, FULL = 1, 2


@pytest.fixture(autouse=True)
def _failpoints_off() -> Iterator[None]:
    yield
    failpoint.reset()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "agent.db"


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


def put_half(db: Connection) -> None:
    """Write something, then what is there already."""
    put(db, "half", b"")
    put(db, "noted", b"")


async def test_a_note_waits_for_no_disk_and_the_write_after_it_does(path: Path) -> None:
    seen = []

    def look(db: Connection) -> None:
        seen.append(setting("synchronous", db))

    async with open_store(path) as store:
        await store.note(lambda db: put(db, "noted", b""))
        await store.note(look)
        await store.write(look)
        with pytest.raises(Conflict):
            await store.note(put_half)
        await store.write(look)
        assert await store.read(keys) == ["noted"]
    assert seen == [NORMAL, FULL, FULL]
    async with open_store(path) as store:
        assert await store.read(keys) == ["noted"]


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
def test_a_kill_at_commit_leaves_all_or_nothing(path: Path, point: str, kept: list[str]) -> None:
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

    async def after() -> list[str]:
        async with open_store(path) as store:
            return await store.read(keys)

    assert anyio.run(after) == kept


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
    before = set(store_threads())

    async def main() -> list[str]:
        async with Store.open_inline(path, [FIRST]) as store:
            assert not is_short(store)
            await store.write(lambda db: put(db, "a"))
            await anyio.sleep(3600)
            with pytest.raises(Conflict):
                await store.write(lambda db: put(db, "a"))
            assert set(store_threads()) <= before
            return await store.read(keys)

    for _ in range(2):
        assert virtual_time.run(main) == ["a"]
        path.unlink()
