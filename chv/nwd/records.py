"""What nwd must remember: networks, NICs, dnsmasq workers, generations of what was deleted.

Every change is durable before it returns; the dictionaries in memory are a cache of the store,
filled once, and nobody else changes them. The schema itself refuses two owners of an address, a
MAC or an uplink slot. A NIC that was deleted leaves its address in `released`, so that the next
NIC gets the one that has been free longest.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import msgspec

from chv.common.process import WorkerRecord
from chv.common.store import Connection, Store
from chv.common.wire.nwd import Topology

TOMBSTONES_MAX = 20_000
RELEASED_MAX = 4096  # per network; beyond it the oldest counts as never used

MIGRATIONS = (
    (
        "CREATE TABLE networks (network_id TEXT PRIMARY KEY, uplink_slot INTEGER UNIQUE,"
        " doc BLOB NOT NULL) STRICT",
        "CREATE TABLE nics (nic_id TEXT PRIMARY KEY, network_id TEXT NOT NULL"
        " REFERENCES networks, address TEXT NOT NULL, mac TEXT NOT NULL, doc BLOB NOT NULL,"
        " UNIQUE (network_id, address), UNIQUE (network_id, mac)) STRICT",
        "CREATE TABLE workers (network_id TEXT PRIMARY KEY, doc BLOB NOT NULL) STRICT",
        "CREATE TABLE tombstones (number INTEGER PRIMARY KEY AUTOINCREMENT,"
        " uid TEXT NOT NULL UNIQUE, generation INTEGER NOT NULL) STRICT",
        "CREATE TABLE released (number INTEGER PRIMARY KEY AUTOINCREMENT,"
        " network_id TEXT NOT NULL, address TEXT NOT NULL, UNIQUE (network_id, address)) STRICT",
    ),
)
T = TypeVar("T", bound=msgspec.Struct)
Statement = tuple[str, tuple[str | int | bytes | None, ...]]


class Wanted(StrEnum):
    """What is meant to become of a recorded object."""

    PRESENT = "present"
    REMOVED = "removed"  # the row goes when nothing of the object is left


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """One network. `topology.gateway` is filled in; `uplink_slot` counts /31s of the pool.

    `boot_id`: the boot for which the caller asked for it; after another boot it is absent until
    asked for again.
    """

    topology: Topology
    generation: int
    boot_id: str
    uplink_slot: int | None = None
    wanted: Wanted = Wanted.PRESENT

    @property
    def network_id(self) -> str:
        """The uid."""
        return self.topology.network_id


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    """One NIC. `asked_mac` and `asked_address` are what the caller wrote, perhaps nothing."""

    nic_id: str
    network_id: str
    vm_id: str
    generation: int
    hostname: str
    mac: str
    address: str
    owner_uid: int
    guest_ports: list[int]
    boot_id: str
    asked_mac: str = ""
    asked_address: str = ""
    wanted: Wanted = Wanted.PRESENT


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """The dnsmasq of a network. `worker_id` is the intent, `process` what came of it.

    Its sockets are bound to the bridge that was there: another bridge needs another process.
    """

    network_id: str
    worker_id: str
    conf_digest: str
    bridge_index: int
    process: WorkerRecord | None = None


class Records:
    """All records. Make it by `load`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.networks: dict[str, Network] = {}
        self.nics: dict[str, Nic] = {}
        self.workers: dict[str, Worker] = {}
        self.tombstones: dict[str, int] = {}
        self._released: dict[str, list[str]] = {}

    @classmethod
    async def load(cls, store: Store) -> Records:
        """Read everything."""
        records = cls(store)
        networks = await store.read(lambda db: _documents(db, "networks", Network))
        nics = await store.read(lambda db: _documents(db, "nics", Nic))
        workers = await store.read(lambda db: _documents(db, "workers", Worker))
        records.networks = {row.network_id: row for row in networks}
        records.nics = {row.nic_id: row for row in nics}
        records.workers = {row.network_id: row for row in workers}
        records.tombstones = dict(await store.read(_tombstones))
        for network_id, address in await store.read(_released):
            records._released.setdefault(network_id, []).append(address)
        return records

    def nics_of(self, network_id: str) -> list[Nic]:
        """Return the NICs of a network, those on their way out included."""
        return [row for row in self.nics.values() if row.network_id == network_id]

    def released(self, network_id: str) -> tuple[str, ...]:
        """Return addresses that were used before, the longest free first."""
        return tuple(self._released.get(network_id, ()))

    async def put_network(self, row: Network) -> None:
        """Add or replace."""
        await self._run(
            (
                "INSERT INTO networks VALUES (?, ?, ?) ON CONFLICT (network_id) DO UPDATE"
                " SET uplink_slot = excluded.uplink_slot, doc = excluded.doc",
                (row.network_id, row.uplink_slot, _encode(row)),
            )
        )
        self.networks[row.network_id] = row

    async def put_nic(self, row: Nic) -> None:
        """Add or replace; the address counts as used."""
        await self._run(
            (
                "INSERT INTO nics VALUES (?, ?, ?, ?, ?) ON CONFLICT (nic_id) DO UPDATE"
                " SET address = excluded.address, mac = excluded.mac, doc = excluded.doc",
                (row.nic_id, row.network_id, row.address, row.mac, _encode(row)),
            ),
            (
                "DELETE FROM released WHERE network_id = ? AND address = ?",
                (row.network_id, row.address),
            ),
        )
        self.nics[row.nic_id] = row
        released = self._released.get(row.network_id, [])
        if row.address in released:
            released.remove(row.address)

    async def put_worker(self, row: Worker) -> None:
        """Add or replace."""
        await self._run(
            ("INSERT OR REPLACE INTO workers VALUES (?, ?)", (row.network_id, _encode(row)))
        )
        self.workers[row.network_id] = row

    async def drop_worker(self, network_id: str) -> None:
        """Forget a worker that is proven dead."""
        await self._run(("DELETE FROM workers WHERE network_id = ?", (network_id,)))
        self.workers.pop(network_id, None)

    async def drop_nic(self, row: Nic) -> None:
        """Forget a NIC of which nothing is left; keep its generation and free its address."""
        await self._run(
            ("DELETE FROM nics WHERE nic_id = ?", (row.nic_id,)),
            *_release(row.network_id, row.address),
            *_bury(row.nic_id, row.generation),
        )
        self.nics.pop(row.nic_id, None)
        released = self._released.setdefault(row.network_id, [])
        released.append(row.address)
        del released[:-RELEASED_MAX]
        self.tombstones[row.nic_id] = row.generation

    async def drop_network(self, row: Network) -> None:
        """Forget a network of which nothing is left; keep its generation."""
        await self._run(
            ("DELETE FROM workers WHERE network_id = ?", (row.network_id,)),
            ("DELETE FROM released WHERE network_id = ?", (row.network_id,)),
            ("DELETE FROM networks WHERE network_id = ?", (row.network_id,)),
            *_bury(row.network_id, row.generation),
        )
        self.networks.pop(row.network_id, None)
        self.workers.pop(row.network_id, None)
        self._released.pop(row.network_id, None)
        self.tombstones[row.network_id] = row.generation

    async def bury(self, uid: str, generation: int) -> None:
        """Remember that this generation of an object is deleted, though we never had it."""
        if self.tombstones.get(uid, -1) < generation:
            await self._run(*_bury(uid, generation))
            self.tombstones[uid] = generation

    async def _run(self, *statements: Statement) -> None:
        def transaction(db: Connection) -> None:
            for sql, values in statements:
                db.execute(sql, values)

        await self._store.write(transaction)


def _bury(uid: str, generation: int) -> tuple[Statement, ...]:
    return (
        ("INSERT OR REPLACE INTO tombstones (uid, generation) VALUES (?, ?)", (uid, generation)),
        (
            "DELETE FROM tombstones WHERE number <= (SELECT max(number) FROM tombstones) - ?",
            (TOMBSTONES_MAX,),
        ),
    )


def _release(network_id: str, address: str) -> tuple[Statement, ...]:
    return (
        (
            "INSERT OR REPLACE INTO released (network_id, address) VALUES (?, ?)",
            (network_id, address),
        ),
        (
            "DELETE FROM released WHERE number IN (SELECT number FROM released"
            " WHERE network_id = ? ORDER BY number DESC LIMIT -1 OFFSET ?)",
            (network_id, RELEASED_MAX),
        ),
    )


def _tombstones(db: Connection) -> list[tuple[str, int]]:
    return [tuple(row) for row in db.execute("SELECT uid, generation FROM tombstones")]


def _released(db: Connection) -> list[tuple[str, str]]:
    rows = db.execute("SELECT network_id, address FROM released ORDER BY number")
    return [tuple(row) for row in rows]


def _documents(db: Connection, table: str, kind: type[T]) -> list[T]:
    rows = db.execute(f"SELECT doc FROM {table}").fetchall()  # noqa: S608  our own table names
    return [msgspec.json.decode(row[0], type=kind) for row in rows]


def _encode(row: msgspec.Struct) -> bytes:
    return msgspec.json.encode(row)
