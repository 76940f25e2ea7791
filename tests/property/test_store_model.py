"""The store against a dict: any sequence of writes, failures and reopenings gives the same."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import anyio.from_thread
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from chv.common.errors import Conflict
from chv.common.store import Connection, Store

MIGRATIONS = ["CREATE TABLE item (key TEXT PRIMARY KEY, value BLOB NOT NULL) STRICT"]
MORE = [*MIGRATIONS, "CREATE TABLE more (x INTEGER) STRICT"]
KEYS = st.sampled_from(["a", "b", "c", "'; DROP TABLE item --", "\u00e9\n\0x"])
VALUES = st.binary(max_size=5000)


class Undone(Exception):
    """What a function raises half way."""


class StoreMachine(RuleBasedStateMachine):
    """Rules are what a daemon does to its store; the model is a dict."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = Path(tempfile.mkdtemp(prefix="chv-store-"))
        self._model: dict[str, bytes] = {}
        self._migrations = MIGRATIONS
        self._portal_context = anyio.from_thread.start_blocking_portal()
        self._portal = self._portal_context.__enter__()

    @initialize()
    def _start(self) -> None:
        self._open()

    def _open(self) -> None:
        opening = Store.open(self._directory / "a.db", self._migrations, reserve_bytes=4096)
        self._context = self._portal.wrap_async_context_manager(opening)
        self._store = self._context.__enter__()

    def teardown(self) -> None:
        self._context.__exit__(None, None, None)
        self._portal_context.__exit__(None, None, None)
        shutil.rmtree(self._directory)

    @rule(key=KEYS, value=VALUES)
    def insert(self, key: str, value: bytes) -> None:
        try:
            self._write("INSERT INTO item VALUES (?, ?)", key, value)
        except Conflict:
            assert key in self._model
        else:
            assert key not in self._model
            self._model[key] = value

    @rule(key=KEYS, value=VALUES)
    def replace(self, key: str, value: bytes) -> None:
        self._write("INSERT OR REPLACE INTO item VALUES (?, ?)", key, value)
        self._model[key] = value

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self._write("DELETE FROM item WHERE key = ?", key)
        self._model.pop(key, None)

    @rule(key=KEYS, value=VALUES)
    def fail_half_way(self, key: str, value: bytes) -> None:
        def half(db: Connection) -> None:
            db.execute("DELETE FROM item")
            db.execute("INSERT INTO item VALUES (?, ?)", (key, value))
            raise Undone

        try:
            self._portal.call(self._store.write, half)
        except Undone:
            return
        raise AssertionError("the exception was swallowed")

    @rule(items=st.dictionaries(KEYS, VALUES))
    def replace_all_in_one(self, items: dict[str, bytes]) -> None:
        def every(db: Connection) -> None:
            db.execute("DELETE FROM item")
            db.executemany("INSERT INTO item VALUES (?, ?)", items.items())

        self._portal.call(self._store.write, every)
        self._model = dict(items)

    @rule()
    def reopen(self) -> None:
        self._context.__exit__(None, None, None)
        self._open()

    @rule()
    def migrate(self) -> None:
        self._migrations = MORE
        self.reopen()

    @rule()
    def lose_the_process(self) -> None:
        """Take the files as a kill would leave them, and go on with those."""
        copy = Path(tempfile.mkdtemp(prefix="chv-store-"))
        shutil.copytree(self._directory, copy, dirs_exist_ok=True)
        self._context.__exit__(None, None, None)
        shutil.rmtree(self._directory)
        self._directory = copy
        self._open()

    @invariant()
    def the_store_holds_what_the_model_holds(self) -> None:
        rows = self._portal.call(
            self._store.read, lambda db: db.execute("SELECT key, value FROM item").fetchall()
        )
        assert {row["key"]: row["value"] for row in rows} == self._model

    def _write(self, sql: str, *values: object) -> None:
        self._portal.call(self._store.write, lambda db: db.execute(sql, values))


StoreMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestStoreAgainstADict = StoreMachine.TestCase
