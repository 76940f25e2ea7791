"""What stord must remember: volumes, attachments, and the storage daemon of each VM.

Every change is durable before it returns; the dictionaries in memory are a cache of the store,
filled once, and nobody else changes them. The primary key of `attachments` is the volume: a
second holder cannot even be recorded.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import msgspec

from chv.common.process import WorkerRecord
from chv.common.store import Connection, Store
from chv.common.wire.stord import VolumeBackend

MIGRATIONS = (
    (
        "CREATE TABLE volumes (volume_id TEXT PRIMARY KEY, doc BLOB NOT NULL) STRICT",
        "CREATE TABLE attachments (volume_id TEXT PRIMARY KEY, vm_id TEXT NOT NULL,"
        " doc BLOB NOT NULL) STRICT",
        "CREATE TABLE backends (vm_id TEXT PRIMARY KEY, doc BLOB NOT NULL) STRICT",
    ),
)
T = TypeVar("T", bound=msgspec.Struct)


class VolumeState(StrEnum):
    """How far the work on a volume's files has come."""

    CREATING = "creating"
    OPEN = "open"
    GROWING = "growing"
    CLOSED = "closed"
    DELETING = "deleting"


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """One volume. `backend.source` holds the resolved path of the image."""

    volume_id: str
    generation: int
    backend: VolumeBackend
    state: VolumeState
    last_error: str = ""
    last_error_at: str = ""


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """One volume at one VM. `published`: a VMM may have connected to it."""

    volume_id: str
    vm_id: str
    read_only: bool
    wanted: bool = True
    published: bool = False


class BackendPhase(StrEnum):
    """What the storage daemon of a VM is meant to be."""

    STARTING = "starting"  # the first attach: a new incarnation is allowed, no guest had one
    RECOVERING = "recovering"  # allowed as long as the call that asked for it lasts
    SERVING = "serving"
    LOST = "lost"
    ABSENT = "absent"  # the host has booted since: the attachments are void


class Backend(msgspec.Struct, frozen=True, kw_only=True):
    """The storage daemon of one VM. `worker_id` is the intent, `worker` what came of it."""

    vm_id: str
    storage_uid: int
    vm_gid: int
    boot_id: str
    phase: BackendPhase = BackendPhase.STARTING
    incarnation: str = ""
    worker_id: str = ""
    worker: WorkerRecord | None = None
    message: str = ""
    lost_at: str = ""


class Records:
    """All records. Make it by `load`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.volumes: dict[str, Volume] = {}
        self.attachments: dict[str, Attachment] = {}
        self.backends: dict[str, Backend] = {}

    @classmethod
    async def load(cls, store: Store) -> Records:
        """Read everything."""
        records = cls(store)
        volumes = await store.read(lambda db: _documents(db, "volumes", Volume))
        attachments = await store.read(lambda db: _documents(db, "attachments", Attachment))
        backends = await store.read(lambda db: _documents(db, "backends", Backend))
        records.volumes = {row.volume_id: row for row in volumes}
        records.attachments = {row.volume_id: row for row in attachments}
        records.backends = {row.vm_id: row for row in backends}
        return records

    def of_vm(self, vm_id: str) -> list[Attachment]:
        """Return the attachments of a VM, those on their way out included."""
        return [row for row in self.attachments.values() if row.vm_id == vm_id]

    def holder(self, volume_id: str) -> Attachment | None:
        """Return the attachment that keeps others away; a void one does not."""
        row = self.attachments.get(volume_id)
        if row is None:
            return None
        backend = self.backends.get(row.vm_id)
        void = backend is not None and backend.phase is BackendPhase.ABSENT
        return None if void else row

    async def put_volume(self, row: Volume) -> None:
        """Add or replace."""
        sql = "INSERT OR REPLACE INTO volumes VALUES (?, ?)"
        await self._run((sql, (row.volume_id, _encode(row))))
        self.volumes[row.volume_id] = row

    async def drop_volume(self, volume_id: str) -> None:
        """Forget the volume and a void attachment of it."""
        await self._run(
            ("DELETE FROM volumes WHERE volume_id = ?", (volume_id,)),
            ("DELETE FROM attachments WHERE volume_id = ?", (volume_id,)),
        )
        self.volumes.pop(volume_id, None)
        self.attachments.pop(volume_id, None)

    async def put_attachment(self, row: Attachment) -> None:
        """Add or replace."""
        await self.put_vm([row], None)

    async def drop_attachment(self, volume_id: str) -> None:
        """Forget an attachment."""
        await self._run(("DELETE FROM attachments WHERE volume_id = ?", (volume_id,)))
        self.attachments.pop(volume_id, None)

    async def put_backend(self, row: Backend) -> None:
        """Add or replace."""
        await self.put_vm([], row)

    async def put_vm(self, attachments: list[Attachment], backend: Backend | None) -> None:
        """Add or replace several rows of one VM in one transaction."""
        statements: list[tuple[str, tuple[str | bytes, ...]]] = [
            (
                "INSERT OR REPLACE INTO attachments VALUES (?, ?, ?)",
                (row.volume_id, row.vm_id, _encode(row)),
            )
            for row in attachments
        ]
        if backend is not None:
            sql = "INSERT OR REPLACE INTO backends VALUES (?, ?)"
            statements.append((sql, (backend.vm_id, _encode(backend))))
        await self._run(*statements)
        self.attachments |= {row.volume_id: row for row in attachments}
        if backend is not None:
            self.backends[backend.vm_id] = backend

    async def drop_backend(self, vm_id: str) -> None:
        """Forget a VM: its storage daemon and whatever was attached."""
        await self._run(
            ("DELETE FROM attachments WHERE vm_id = ?", (vm_id,)),
            ("DELETE FROM backends WHERE vm_id = ?", (vm_id,)),
        )
        self.backends.pop(vm_id, None)
        for row in self.of_vm(vm_id):
            del self.attachments[row.volume_id]

    async def _run(self, *statements: tuple[str, tuple[str | bytes, ...]]) -> None:
        def transaction(db: Connection) -> None:
            for sql, values in statements:
                db.execute(sql, values)

        await self._store.write(transaction)


def _documents(db: Connection, table: str, kind: type[T]) -> list[T]:
    rows = db.execute(f"SELECT doc FROM {table}").fetchall()  # noqa: S608  our own table names
    return [msgspec.json.decode(row[0], type=kind) for row in rows]


def _encode(row: msgspec.Struct) -> bytes:
    return msgspec.json.encode(row)
