"""What stord must remember: volumes, attachments, and the storage daemon of each VM.

Every change is durable before it returns; the dictionaries in memory are a cache of the store,
filled once, and nobody else changes them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import msgspec

from chv.common.process import WorkerRecord
from chv.common.store import Connection, Store
from chv.common.wire.stord import CloneMode, JobInfo, JobState, VolumeBackend

MIGRATIONS = (
    (
        "CREATE TABLE volumes (volume_id TEXT PRIMARY KEY, doc BLOB NOT NULL) STRICT",
        "CREATE TABLE attachments (volume_id TEXT PRIMARY KEY, vm_id TEXT NOT NULL,"
        " doc BLOB NOT NULL) STRICT",
        "CREATE TABLE backends (vm_id TEXT PRIMARY KEY, doc BLOB NOT NULL) STRICT",
    ),
    (
        # Several VMs may read one volume; that only one writes is checked before it is recorded.
        "ALTER TABLE attachments RENAME TO attachments_v1",
        "CREATE TABLE attachments (volume_id TEXT NOT NULL, vm_id TEXT NOT NULL,"
        " doc BLOB NOT NULL, PRIMARY KEY (volume_id, vm_id)) STRICT",
        "INSERT INTO attachments SELECT volume_id, vm_id, doc FROM attachments_v1",
        "DROP TABLE attachments_v1",
        "CREATE TABLE jobs (job_id TEXT PRIMARY KEY, volume_id TEXT NOT NULL,"
        " doc BLOB NOT NULL) STRICT",
    ),
    (
        "CREATE TABLE tombstones (volume_id TEXT PRIMARY KEY, doc BLOB NOT NULL) STRICT",
        "CREATE TABLE unclean (volume_id TEXT PRIMARY KEY) STRICT",
    ),
)
T = TypeVar("T", bound=msgspec.Struct)
Statement = tuple[str, tuple[str | bytes, ...]]


class VolumeState(StrEnum):
    """How far the work on a volume's files has come."""

    CREATING = "creating"
    OPEN = "open"
    GROWING = "growing"
    CLOSED = "closed"
    DELETING = "deleting"


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer of a volume. Number 0 is the base, which the volume's class makes and opens.

    Every other one is a qcow2 overlay `layer-<number>.qcow2` beside the volume's lock; numbers
    are never used twice. `snapshots`: those that froze this layer; only the top layer, which has
    none, is written.
    """

    number: int
    snapshots: tuple[str, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one volume: the state at the end of layer `layer`."""

    snapshot_id: str
    layer: int
    created_at: str
    size_bytes: int
    deleting: bool = False


class ChangeKind(StrEnum):
    """A change of the layers that was begun; recorded before its first effect."""

    SNAPSHOT = "snapshot"  # layer `layer` is being put on top
    MERGE = "merge"  # layer `layer` goes into the one below; either chain is whole
    PIVOT = "pivot"  # `layer` was merged whole and nothing was written since: it must go
    MOVE = "move"  # a copy is being made at `target`; the old place is whole
    MOVE_PIVOT = "move_pivot"  # the copy is whole and nothing was written since: it is the volume


class LayerChange(msgspec.Struct, frozen=True, kw_only=True):
    """What was begun, so that a kill anywhere is finished or taken back."""

    kind: ChangeKind
    layer: int = 0
    snapshot_id: str = ""
    created_at: str = ""
    target: VolumeBackend | None = None


class Volume(msgspec.Struct, frozen=True, kw_only=True):
    """One volume. `backend.source` holds the resolved path of the image.

    `backend` is what is wanted, `made` what the base was made as: they differ in size while a
    growth waits for the next attachment (`applied`). `layers` goes from the base to the top.
    """

    volume_id: str
    generation: int
    backend: VolumeBackend
    state: VolumeState
    last_error: str = ""
    last_error_at: str = ""
    made_size_bytes: int = 0  # 0: as `backend` says
    applied: str = ""
    layers: tuple[Layer, ...] = (Layer(number=0),)
    next_layer: int = 1
    snapshots: tuple[Snapshot, ...] = ()
    change: LayerChange | None = None
    # It was moved: the base holds all data and needs nothing of what `backend` says it began as.
    flat: bool = False
    # For a volume that is a backup's source: target of the last backup, its number, and the bitmap
    # that holds what changed since then; empty: nobody knows.
    backup_target: str = ""
    backup_sequence: int = 0
    backup_bitmap: str = ""
    # The key that is being replaced by that of `backend`, and whether that one opens every layer.
    old_key: str = ""
    new_key_added: bool = False
    # While it is created: its bytes are somebody's device or server's, and may be written over.
    begun: bool = False

    @property
    def size_bytes(self) -> int:
        """What the guest has: what was made, which a growth that waits will change."""
        return self.made_size_bytes or self.backend.size_bytes

    @property
    def key(self) -> str:
        """Name of the key that opens every layer; empty: the volume is not encrypted."""
        if self.old_key and not self.new_key_added:
            return self.old_key
        return "" if self.backend.encryption is None else self.backend.encryption.key

    @property
    def base(self) -> int:
        """Number of the layer that the volume's class makes: 0 until the volume is moved."""
        return self.layers[0].number

    @property
    def top(self) -> Layer:
        """The layer that is written."""
        return self.layers[-1]


class Attachment(msgspec.Struct, frozen=True, kw_only=True):
    """One volume at one VM. `published`: a VMM may have connected to it."""

    volume_id: str
    vm_id: str
    read_only: bool
    wanted: bool = True
    published: bool = False
    # The in-flight proxy of this attachment: `proxy_id` is the intent, `proxy` what came of it.
    proxied: bool = False
    proxy_id: str = ""
    proxy: WorkerRecord | None = None


class BackendPhase(StrEnum):
    """What the storage daemon of a VM is meant to be."""

    STARTING = "starting"  # the first attach: a new incarnation is allowed, no guest had one
    RECOVERING = "recovering"  # allowed as long as the call that asked for it lasts
    SERVING = "serving"
    RESTARTING = "restarting"  # a keep_vm VM lost it: a new incarnation is allowed, unasked
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
    losses: int = 0
    last_loss: str = ""
    # Whether it sees the node's network: decided by the disks that the VM has at its start.
    network: bool = False
    # The last restart that was asked for and came to its end: by which operation, and in words.
    restart_id: str = ""
    last_restart: str = ""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Long work on one volume. `parameters` is the request that began it, as JSON."""

    info: JobInfo
    parameters: msgspec.Raw = msgspec.Raw(b"null")
    cancelling: bool = False


class Tombstone(msgspec.Struct, frozen=True, kw_only=True):
    """A deleted volume, so that a late call does not bring it back. `at`: a timestamp."""

    volume_id: str
    generation: int
    at: str


AttachmentKey = tuple[str, str]  # volume_id, vm_id


class Records:
    """All records. Make it by `load`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.volumes: dict[str, Volume] = {}
        self.attachments: dict[AttachmentKey, Attachment] = {}
        self.backends: dict[str, Backend] = {}
        self.jobs: dict[str, Job] = {}
        self.tombstones: dict[str, Tombstone] = {}
        # Volumes whose storage daemon ended uncleanly: checked before they are served again.
        self.unclean: set[str] = set()

    @classmethod
    async def load(cls, store: Store) -> Records:
        """Read everything."""
        records = cls(store)
        volumes = await store.read(lambda db: _documents(db, "volumes", Volume))
        attachments = await store.read(lambda db: _documents(db, "attachments", Attachment))
        backends = await store.read(lambda db: _documents(db, "backends", Backend))
        jobs = await store.read(lambda db: _documents(db, "jobs", Job))
        tombstones = await store.read(lambda db: _documents(db, "tombstones", Tombstone))
        unclean = await store.read(
            lambda db: db.execute("SELECT volume_id FROM unclean").fetchall()
        )
        records.tombstones = {row.volume_id: row for row in tombstones}
        records.unclean = {row[0] for row in unclean}
        records.volumes = {row.volume_id: row for row in volumes}
        records.attachments = {(row.volume_id, row.vm_id): row for row in attachments}
        records.backends = {row.vm_id: row for row in backends}
        records.jobs = {row.info.job_id: row for row in jobs}
        return records

    # --- questions
    def of_vm(self, vm_id: str) -> list[Attachment]:
        """Return the attachments of a VM, those on their way out included."""
        return [row for row in self.attachments.values() if row.vm_id == vm_id]

    def attachment(self, volume_id: str, vm_id: str) -> Attachment | None:
        """Return one attachment, void or not."""
        return self.attachments.get((volume_id, vm_id))

    def holders(self, volume_id: str) -> list[Attachment]:
        """Return the attachments of a volume that keep others away; a void one does not."""
        return [
            row
            for row in self.attachments.values()
            if row.volume_id == volume_id and not self._is_void(row)
        ]

    def holder(self, volume_id: str) -> Attachment | None:
        """Return one of the holders: the writer, where there is one."""
        holders = self.holders(volume_id)
        return min(holders, key=lambda row: row.read_only, default=None)

    def _is_void(self, row: Attachment) -> bool:
        backend = self.backends.get(row.vm_id)
        return backend is not None and backend.phase is BackendPhase.ABSENT

    def clones(self, volume_id: str, snapshot_id: str = "") -> list[str]:
        """Return the volumes that are linked clones of a volume (of one of its snapshots)."""
        return [
            row.volume_id
            for row in self.volumes.values()
            if row.backend.snapshot is not None
            and row.backend.snapshot.volume_id == volume_id
            and row.backend.snapshot.mode is CloneMode.LINKED
            and not row.flat
            and snapshot_id in ("", row.backend.snapshot.snapshot_id)
        ]

    def job_of(self, volume_id: str) -> Job | None:
        """Return the job under way on a volume."""
        for job in self.jobs.values():
            concerned = volume_id in (job.info.volume_id, *job.info.volume_ids)
            if concerned and job.info.state is JobState.RUNNING:
                return job
        return None

    # --- changes
    async def put_volume(self, row: Volume) -> None:
        """Add or replace."""
        await self.put_volumes([row])

    async def put_volumes(self, rows: list[Volume]) -> None:
        """Add or replace several in one transaction."""
        sql = "INSERT OR REPLACE INTO volumes VALUES (?, ?)"
        await self._run(*((sql, (row.volume_id, _encode(row))) for row in rows))
        self.volumes |= {row.volume_id: row for row in rows}

    async def drop_volume(self, volume_id: str, tombstone: Tombstone | None = None) -> None:
        """Forget the volume, its jobs and void attachments of it; keep its tombstone."""
        tables = ("volumes", "attachments", "jobs", "unclean")
        statements: list[Statement] = [
            (f"DELETE FROM {table} WHERE volume_id = ?", (volume_id,))  # noqa: S608  our names
            for table in tables
        ]
        if tombstone is not None:
            sql = "INSERT OR REPLACE INTO tombstones VALUES (?, ?)"
            statements.append((sql, (volume_id, _encode(tombstone))))
        await self._run(*statements)
        if tombstone is not None:
            self.tombstones[volume_id] = tombstone
        self.volumes.pop(volume_id, None)
        self.unclean.discard(volume_id)
        for key in [key for key in self.attachments if key[0] == volume_id]:
            del self.attachments[key]
        for job in [each for each in self.jobs.values() if each.info.volume_id == volume_id]:
            del self.jobs[job.info.job_id]

    async def drop_tombstones(self, volume_ids: list[str]) -> None:
        """Forget tombstones."""
        sql = "DELETE FROM tombstones WHERE volume_id = ?"
        await self._run(*((sql, (item,)) for item in volume_ids))
        for item in volume_ids:
            self.tombstones.pop(item, None)

    async def mark_unclean(self, volume_ids: list[str]) -> None:
        """Remember volumes that must be checked before they are served again."""
        sql = "INSERT OR REPLACE INTO unclean VALUES (?)"
        await self._run(*((sql, (item,)) for item in volume_ids))
        self.unclean.update(volume_ids)

    async def mark_clean(self, volume_id: str) -> None:
        """Forget that; a check found the volume in order, or a repair made it so."""
        await self._run(("DELETE FROM unclean WHERE volume_id = ?", (volume_id,)))
        self.unclean.discard(volume_id)

    async def put_attachment(self, row: Attachment) -> None:
        """Add or replace."""
        await self.put_vm([row], None)

    async def drop_attachment(self, volume_id: str, vm_id: str) -> None:
        """Forget an attachment."""
        sql = "DELETE FROM attachments WHERE volume_id = ? AND vm_id = ?"
        await self._run((sql, (volume_id, vm_id)))
        self.attachments.pop((volume_id, vm_id), None)

    async def put_backend(self, row: Backend) -> None:
        """Add or replace."""
        await self.put_vm([], row)

    async def put_vm(self, attachments: list[Attachment], backend: Backend | None) -> None:
        """Add or replace several rows of one VM in one transaction."""
        statements: list[Statement] = [
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
        self.attachments |= {(row.volume_id, row.vm_id): row for row in attachments}
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
            del self.attachments[(row.volume_id, vm_id)]

    async def put_job(self, job: Job, volume: Volume | None = None) -> None:
        """Add or replace a job, with its volume's row in the same transaction."""
        sql = "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?)"
        statements: list[Statement] = [(sql, (job.info.job_id, job.info.volume_id, _encode(job)))]
        if volume is not None:
            change = "INSERT OR REPLACE INTO volumes VALUES (?, ?)"
            statements.append((change, (volume.volume_id, _encode(volume))))
        await self._run(*statements)
        self.jobs[job.info.job_id] = job
        if volume is not None:
            self.volumes[volume.volume_id] = volume

    async def drop_jobs(self, job_ids: list[str]) -> None:
        """Forget final jobs."""
        await self._run(*(("DELETE FROM jobs WHERE job_id = ?", (item,)) for item in job_ids))
        for item in job_ids:
            self.jobs.pop(item, None)

    async def _run(self, *statements: Statement) -> None:
        def transaction(db: Connection) -> None:
            for sql, values in statements:
                db.execute(sql, values)

        await self._store.write(transaction)


def _documents(db: Connection, table: str, kind: type[T]) -> list[T]:
    rows = db.execute(f"SELECT doc FROM {table}").fetchall()  # noqa: S608  our own table names
    return [msgspec.json.decode(row[0], type=kind) for row in rows]


def _encode(row: msgspec.Struct) -> bytes:
    return msgspec.json.encode(row)
