"""What nwd must remember: networks, NICs, workers, groups, exposures, deleted generations.

Every change is durable before it returns; the dictionaries in memory are a cache of the store,
filled once, and nobody else changes them. The schema itself refuses two owners of an address, a
MAC or an uplink slot. A NIC that was deleted leaves its address in `released`, so that the next
NIC gets the one that has been free longest.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from enum import StrEnum
from functools import partial
from typing import TypeVar

import msgspec

from chv.common.process import WorkerRecord
from chv.common.store import Connection, Store
from chv.common.wire.nwd import Shape, Topology, VmMetadata
from chv.common.wire.nwd_policy import Existing, Exposure, IpProtocol, SecurityGroup
from chv.nwd.graves import TOMBSTONES_MAX, Graves
from chv.nwd.members import Members

RELEASED_MAX = 8192  # per network, both families; beyond it the oldest counts as never used

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
    (
        "ALTER TABLE nics ADD COLUMN address6 TEXT",  # NULL: none, and any number may have none
        "CREATE UNIQUE INDEX nics_address6 ON nics (network_id, address6)",
        "CREATE TABLE security_groups (group_id TEXT PRIMARY KEY, doc BLOB NOT NULL) STRICT",
        "CREATE TABLE exposures (exposure_id TEXT PRIMARY KEY, network_id TEXT NOT NULL"
        " REFERENCES networks, doc BLOB NOT NULL) STRICT",
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
    """One NIC. `asked_…` are what the caller wrote, perhaps nothing.

    `unswept`: connections that its groups of now do not allow may still be tracked.
    """

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
    address6: str = ""
    asked_address6: str = ""
    queues: int = 1
    groups: list[str] = []
    shape: Shape = Shape()
    connections_max: int = 0
    public_address: str = ""
    metadata: VmMetadata | None = None
    unswept: bool = False
    wanted: Wanted = Wanted.PRESENT

    @property
    def addresses(self) -> tuple[str, ...]:
        """Every address that it has."""
        return tuple(each for each in (self.address, self.address6) if each)


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    """A security group. `pending`: networks in which this generation does not stand yet.

    `narrowed`: connections may stand there that it does not allow and one before it did.
    """

    group: SecurityGroup
    generation: int
    existing: Existing = Existing.DROP
    pending: list[str] = []
    narrowed: bool = True
    wanted: Wanted = Wanted.PRESENT


class Footprint(msgspec.Struct, frozen=True, kw_only=True):
    """What an exposure took in, before a change or after it: its connections are to be looked at.

    `addresses` as the namespace sees them, `host_addresses` as the host does. `drop`: end what is
    not allowed any more; else only what was never translated, or goes to nobody's target.
    """

    protocol: IpProtocol
    addresses: list[str]
    host_addresses: list[str]
    first: int
    last: int
    drop: bool


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """A target that was taken out and keeps its connections until `end_s`, monotonic in a boot."""

    nic_id: str
    addresses: list[str]
    boot_id: str
    end_s: float


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What the checks of a target have come to."""

    healthy: bool
    since: str
    message: str = ""


class ExposureRow(msgspec.Struct, frozen=True, kw_only=True):
    """An exposure. `host_addresses`: those of its addresses that are the node's own."""

    exposure: Exposure
    generation: int
    host_addresses: list[str] = []
    sweeps: list[Footprint] = []
    draining: list[Drain] = []
    health: dict[str, Health] = {}
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
        self.groups: dict[str, GroupRow] = {}
        self.exposures: dict[str, ExposureRow] = {}
        self.tombstones = Graves()
        self._released: dict[str, dict[str, None]] = {}
        self._members: dict[str, Members] = {}

    @classmethod
    async def load(cls, store: Store) -> Records:
        """Read everything."""
        records = cls(store)
        networks = await store.read(lambda db: _documents(db, "networks", Network))
        nics = await store.read(lambda db: _documents(db, "nics", Nic))
        workers = await store.read(lambda db: _documents(db, "workers", Worker))
        groups = await store.read(lambda db: _documents(db, "security_groups", GroupRow))
        exposures = await store.read(lambda db: _documents(db, "exposures", ExposureRow))
        records.networks = {row.network_id: row for row in networks}
        for row in nics:
            records._remember(row)
        records.workers = {row.network_id: row for row in workers}
        records.groups = {row.group.group_id: row for row in groups}
        records.exposures = {row.exposure.exposure_id: row for row in exposures}
        records.tombstones = Graves(await store.read(_tombstones))
        for network_id, address in await store.read(_released):
            records._released.setdefault(network_id, {})[address] = None
        return records

    def nics_of(self, network_id: str) -> list[Nic]:
        """Return the NICs of a network, those on their way out included."""
        return list(self.members(network_id).nics.values())

    def members(self, network_id: str) -> Members:
        """Return who has what in a network, of NICs on their way out as well."""
        found = self._members.get(network_id)
        return found if found is not None else Members()

    def _remember(self, row: Nic) -> None:
        self.nics[row.nic_id] = row
        self._members.setdefault(row.network_id, Members()).put(row)

    def exposures_of(self, network_id: str) -> list[ExposureRow]:
        """Return the exposures of a network, those on their way out included."""
        rows = self.exposures.values()
        return [row for row in rows if row.exposure.network_id == network_id]

    def released(self, network_id: str) -> Set[str]:
        """Return addresses of either family that were used before, the longest free first."""
        return self._released.get(network_id, {}).keys()

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
        """Add or replace; its addresses count as used."""
        sql = (
            "INSERT INTO nics (nic_id, network_id, address, address6, mac, doc)"
            " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (nic_id) DO UPDATE SET"
            " address = excluded.address, address6 = excluded.address6, mac = excluded.mac,"
            " doc = excluded.doc"
        )
        where = (row.nic_id, row.network_id, row.address, row.address6 or None, row.mac)
        free = "DELETE FROM released WHERE network_id = ? AND address = ?"
        await self._run(
            (sql, (*where, _encode(row))),
            *((free, (row.network_id, address)) for address in row.addresses),
        )
        self._remember(row)
        released = self._released.get(row.network_id, {})
        for address in row.addresses:
            released.pop(address, None)

    async def put_group(self, row: GroupRow) -> None:
        """Add or replace."""
        sql = "INSERT OR REPLACE INTO security_groups VALUES (?, ?)"
        await self._run((sql, (row.group.group_id, _encode(row))))
        self.groups[row.group.group_id] = row

    async def note_group(self, row: GroupRow) -> None:
        """Replace, where only `pending` changed: in which networks of this boot it stands.

        A loss of power takes the note and the networks alike, so it waits for no disk.
        """
        sql = "INSERT OR REPLACE INTO security_groups VALUES (?, ?)"
        await self._note((sql, (row.group.group_id, _encode(row))))
        self.groups[row.group.group_id] = row

    async def drop_group(self, row: GroupRow) -> None:
        """Forget a group that nothing names; keep its generation."""
        uid = row.group.group_id
        await self._run(
            ("DELETE FROM security_groups WHERE group_id = ?", (uid,)),
            *_bury(uid, row.generation),
        )
        self.groups.pop(uid, None)
        self.tombstones[uid] = row.generation

    async def put_exposure(self, row: ExposureRow) -> None:
        """Add or replace."""
        uid, network_id = row.exposure.exposure_id, row.exposure.network_id
        sql = "INSERT OR REPLACE INTO exposures VALUES (?, ?, ?)"
        await self._run((sql, (uid, network_id, _encode(row))))
        self.exposures[uid] = row

    async def note_exposure(self, row: ExposureRow) -> None:
        """Replace, where only `sweeps` and `draining` changed: what is done in this boot."""
        uid, network_id = row.exposure.exposure_id, row.exposure.network_id
        sql = "INSERT OR REPLACE INTO exposures VALUES (?, ?, ?)"
        await self._note((sql, (uid, network_id, _encode(row))))
        self.exposures[uid] = row

    async def drop_exposure(self, row: ExposureRow) -> None:
        """Forget an exposure of which nothing is left; keep its generation."""
        uid = row.exposure.exposure_id
        await self._run(
            ("DELETE FROM exposures WHERE exposure_id = ?", (uid,)),
            *_bury(uid, row.generation),
        )
        self.exposures.pop(uid, None)
        self.tombstones[uid] = row.generation

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
        """Forget a NIC of which nothing is left; keep its generation and free its addresses."""
        released_now = [_release(row.network_id, address) for address in row.addresses]
        await self._run(
            ("DELETE FROM nics WHERE nic_id = ?", (row.nic_id,)),
            *(statement for each in released_now for statement in each),
            *_bury(row.nic_id, row.generation),
        )
        self.nics.pop(row.nic_id, None)
        self.members(row.network_id).drop(row.nic_id)
        released = self._released.setdefault(row.network_id, {})
        for address in row.addresses:
            released.pop(address, None)
            released[address] = None
        while len(released) > RELEASED_MAX:
            del released[next(iter(released))]
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
        self._members.pop(row.network_id, None)
        self.tombstones[row.network_id] = row.generation

    async def bury(self, uid: str, generation: int) -> None:
        """Remember that this generation of an object is deleted, though we never had it."""
        if self.tombstones.get(uid, -1) < generation:
            await self._run(*_bury(uid, generation))
            self.tombstones[uid] = generation

    async def _run(self, *statements: Statement) -> None:
        await self._store.write(partial(_execute, statements))

    async def _note(self, *statements: Statement) -> None:
        await self._store.note(partial(_execute, statements))


def _execute(statements: Sequence[Statement], db: Connection) -> None:
    for sql, values in statements:
        db.execute(sql, values)


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
    return [
        tuple(row) for row in db.execute("SELECT uid, generation FROM tombstones ORDER BY number")
    ]


def _released(db: Connection) -> list[tuple[str, str]]:
    rows = db.execute("SELECT network_id, address FROM released ORDER BY number")
    return [tuple(row) for row in rows]


def _documents(db: Connection, table: str, kind: type[T]) -> list[T]:
    rows = db.execute(f"SELECT doc FROM {table}").fetchall()  # noqa: S608  our own table names
    return [msgspec.json.decode(row[0], type=kind) for row in rows]


def _encode(row: msgspec.Struct) -> bytes:
    return msgspec.json.encode(row)
