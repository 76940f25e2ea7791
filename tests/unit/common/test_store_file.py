"""The store's file: migrations that can be undone, damage that is told, disks that fill up."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from chv.common import failpoint
from chv.common.errors import (
    Conflict,
    DataLoss,
    FailedPrecondition,
    Internal,
    ResourceExhausted,
)
from tests.disks import fill, small_tmpfs
from tests.unit.common.store_sample import FIRST, SECOND, is_short, keys, open_store, put

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


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


async def test_a_file_whose_write_ahead_log_is_gone_is_not_taken_for_a_new_one(path: Path) -> None:
    async with open_store(path) as store:
        await store.write(partial(put, key="vm", value=b"wanted"))
        first_page_only = path.read_bytes()
    path.write_bytes(first_page_only)  # as a kill leaves it, and then the log is lost
    assert not path.with_name(f"{path.name}-wal").exists()
    with pytest.raises(DataLoss, match="holds nothing, but was in use"):
        async with open_store(path):
            pass


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
