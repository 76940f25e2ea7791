"""What the agent keeps: the durable records, the changes that make up a transaction, the port.

Pure types. A record says what is wanted, what was intended before each effect and what cannot be
asked of the world again; everything else is observed. `AgentStore` has an SQLite and an in-memory
implementation that pass the same contract tests.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from chv.agent.events_record import EventStore, PutEvents, PutSighting, Sighting
from chv.agent.generations import DELETED_MAX, Author, HistoryStore, PutGeneration
from chv.agent.moments import Moment
from chv.agent.node_record import NodeRecord, PutNode
from chv.agent.operation_filter import EVERY, OperationFilter
from chv.agent.ports import VmmSelection
from chv.agent.rebuild_record import Rebuild
from chv.agent.side_verbs import CHORE_VERBS
from chv.agent.upstream.records import Assignment, DropReports, PutAssignment, PutReport
from chv.common.process.records import WorkerRecord
from chv.common.wire.agent import Operation, OperationState, OperationStep, VolumeVerb
from chv.common.wire.resources import (
    ExposureStatus,
    ImageStatus,
    NetworkStatus,
    Resource,
    RunStrategy,
    SecurityGroupStatus,
    VirtualMachineSnapshotStatus,
    VirtualMachineSpec,
    VirtualMachineStatus,
    VolumeSnapshotStatus,
    VolumeStatus,
)
from chv.common.wire.types import FrozenMeta
from chv.common.wire.upstream import Report
from chv.vmm.driver import VmmConfig

Status = (
    VirtualMachineStatus
    | VolumeStatus
    | VolumeSnapshotStatus
    | VirtualMachineSnapshotStatus
    | NetworkStatus
    | SecurityGroupStatus
    | ExposureStatus
    | ImageStatus
)
STATUS_TYPES: dict[str, type[Status]] = {
    "VirtualMachine": VirtualMachineStatus,
    "Volume": VolumeStatus,
    "VolumeSnapshot": VolumeSnapshotStatus,
    "VirtualMachineSnapshot": VirtualMachineSnapshotStatus,
    "Network": NetworkStatus,
    "SecurityGroup": SecurityGroupStatus,
    "Exposure": ExposureStatus,
    "Image": ImageStatus,
}
FINAL_STATES = frozenset(
    {
        OperationState.SUCCEEDED,
        OperationState.FAILED,
        OperationState.CANCELLED,
        OperationState.SUPERSEDED,
    }
)


class Record(msgspec.Struct, metaclass=FrozenMeta):
    """Base of the durable records: frozen, older files may lack newer fields."""


class RestoreRequest(Record):
    """A restore that was asked for, until the VM runs again or it has failed.

    `disks_touched`: from here on the disks may be those of the snapshot. `resuming`: the VMM
    (its worker id) that has the memory and may have let the guest run.
    """

    operation_id: str
    snapshot_uid: str
    disks_touched: bool = False
    resuming: str = ""


class VmFacts(Record):
    """What is true of a VM beyond its spec. Requests are cleared when they are fulfilled."""

    slot: int
    nic_generation: int = 1  # generation in which the interfaces were last changed
    selection: VmmSelection | None = None  # chosen once, never changes under the VM
    last_strategy: RunStrategy = RunStrategy.RERUN_ON_FAILURE  # what `start` restores
    started: bool = False  # runStrategy Manual: between `start` and `stop`
    stop_reason: str = ""  # who stopped it and why, for `lastStop`
    force_stop: bool = False  # the question to the guest is to be skipped
    replace_worker: str = ""  # `restart`: this incarnation has to go
    reset_request: str = ""  # `reset`: the operation that asked
    paused: bool = False  # by `pause`, until `resume` or the end of the VMM
    storage_request: str = ""  # `restart_storage`: the operation that asked
    restore: RestoreRequest | None = None
    lent: str = ""  # the snapshot whose files its VMM may read
    saving: str = ""  # the snapshot for which it stands still, until that is decided
    rebuild: Rebuild | None = None
    rebuilds: int = 0  # so many times its root disk was made anew
    given_up: str = ""  # why the node no longer restarts it
    files_made: bool = False  # directories or seed may exist
    seed_path: str = ""
    host_key: str = ""
    last_stop: str = ""
    restarts: int = 0
    crashes: tuple[Moment, ...] = ()  # within the restart window, oldest first
    backoff_s: float = 0.0  # from the last of them until it may start again


class BackupPart(Record):
    """A volume of a VM's backup, and where it goes."""

    volume_uid: str
    target: str


class VolumeRequest(Record):
    """A verb on a volume that is under way; cleared when it has ended.

    `parts`: it is the backup of a VM, and every one of these volumes has this very request.
    """

    operation_id: str
    verb: str  # of `VolumeVerb`
    snapshot: str = ""
    target: str = ""
    incremental: bool = False
    bps_max: int = 0
    cancelling: bool = False
    vm_uid: str = ""
    parts: tuple[BackupPart, ...] = ()


class VolumeMove(Record):
    """A move that was begun; recorded before stord hears of it.

    `target`: the place in words, to tell it from another. `failed`: why it will not be tried
    again before the spec changes. `cancelling`: the spec goes back to where the volume is.
    """

    job_id: str
    generation: int
    target: str
    failed: str = ""
    cancelling: bool = False


class VolumeFacts(Record):
    """What is true of a volume beyond its spec."""

    request: VolumeRequest | None = None
    move: VolumeMove | None = None


class SnapshotPart(Record):
    """A volume of a snapshot, chosen before the snapshot is taken."""

    volume_uid: str
    volume: str  # its name


class SaveStage(StrEnum):
    """How far a VM is saved. While it is not `NONE` the VM stands still for it."""

    NONE = ""
    SAVING = "saving"  # memory and devices are being written
    SAVED = "saved"  # they are whole, and the disks are due


class SavedVm(Record):
    """The VM as it was saved, and the VMM that did it."""

    vm_uid: str
    name: str
    driver: str
    version: str
    sha256: str
    config: VmmConfig
    spec: VirtualMachineSpec
    created_at: str
    size_bytes: int = 0
    storage_resets: int = 0  # that the VM had been through


class SnapshotFacts(Record):
    """What became of a snapshot. `taken` is for ever: it is never taken a second time.

    `stage` and `saved` belong to a VirtualMachineSnapshot.
    """

    parts: tuple[SnapshotPart, ...] = ()
    taken: bool = False
    consistency: str = ""
    failed: str = ""  # why it was not taken; final
    failed_code: str = ""  # the code of that error; '' in records of before
    cancelling: bool = False  # the deletion is to be taken back
    stage: SaveStage = SaveStage.NONE
    saved: SavedVm | None = None


class SentFacts(Record):
    """What nwd was last asked to make of a group or an exposure, recorded before it is asked.

    Names in a spec lead to other uids when what they name is deleted and made again, without a
    change of the spec: so nwd gets generations of their own, each for one content.
    """

    generation: int = 0
    digest: str = ""


Facts = VmFacts | VolumeFacts | SnapshotFacts | SentFacts
FACTS_TYPES: dict[str, type[Facts]] = {
    "VirtualMachine": VmFacts,
    "Volume": VolumeFacts,
    "VolumeSnapshot": SnapshotFacts,
    "VirtualMachineSnapshot": SnapshotFacts,
    "SecurityGroup": SentFacts,
    "Exposure": SentFacts,
}
_FACTS_FIELDS: dict[type[Facts], str] = {
    VmFacts: "facts",
    VolumeFacts: "volume_facts",
    SnapshotFacts: "snapshot_facts",
    SentFacts: "sent_facts",
}
# Verbs on volumes run beside the operation that makes the object as wanted.
SIDE_VERBS = frozenset(verb.value for verb in VolumeVerb)


class EndKind(StrEnum):
    """Why a VMM has ended or is being ended."""

    STOP = "stop"
    DRAIN = "drain"  # the node is drained; the VM is still wanted
    RESTART = "restart"
    DELETE = "delete"
    GUEST_SHUTDOWN = "guest-shutdown"
    CRASH = "crash"
    PANIC = "panic"
    START_TIMEOUT = "start-timeout"
    SPAWN_FAILED = "spawn-failed"
    STORAGE_LOST = "storage-lost"
    RESTORE = "restore"  # asked for: the VM is to go on from a snapshot
    REBUILD = "rebuild"  # asked for: the VM gets another root disk
    RESTORE_FAILED = "restore-failed"
    HOST_REBOOT = "host-reboot"  # the host booted meanwhile; nothing else is known


class Ending(Record):
    """Recorded before the VMM is asked or told to end, so that a later agent knows why it did."""

    kind: EndKind
    reason: str = ""
    rung: str = ""  # which rung of the stop ladder worked
    since: Moment | None = None  # from when on its deadline runs
    tried: str = ""  # the rung that was begun last


class WorkerRow(Record):
    """A VMM from its spawn intent until it is proven gone and forgotten. At most one per VM."""

    vm_uid: str
    worker_id: str
    driver: str
    config: VmmConfig
    generation: int  # of the VM, when the intent was recorded
    record: WorkerRecord | None = None  # None: intent; the process may or may not exist
    booted: bool = False
    recovering: bool = False  # a reset must come before its vCPUs run again
    ending: Ending | None = None
    spec: VirtualMachineSpec | None = None  # that it was started from
    frozen: bool = False  # the guest may be frozen: it is to be thawed before all else
    storage_resets: int = 0  # after a loss of its storage daemon
    boot_id: str = ""  # of the host, when the intent was recorded


class StoredObject(Record):
    """An object with metadata, spec and last status; VMs have facts, others may."""

    resource: Resource
    facts: VmFacts | None = None
    volume_facts: VolumeFacts | None = None
    snapshot_facts: SnapshotFacts | None = None
    sent_facts: SentFacts | None = None

    @property
    def uid(self) -> str:
        """Its uid."""
        return self.resource.metadata.uid

    @property
    def key(self) -> tuple[str, str, str]:
        """Kind, namespace, name: unique among live objects."""
        metadata = self.resource.metadata
        return (self.resource.kind, metadata.namespace, metadata.name)

    @property
    def deleting(self) -> bool:
        """Tell whether deletion was asked for."""
        return bool(self.resource.metadata.deletion_timestamp)

    @property
    def title(self) -> str:
        """The object as a person would say it."""
        kind, namespace, name = self.key
        return f"{kind} {namespace}/{name}"


class Tombstone(Record):
    """An object that is gone; its generations must never come back."""

    uid: str
    kind: str
    namespace: str
    name: str
    generation: int
    revision: int
    deleted_at: str


class RequestRow(Record):
    """The outcome recorded for an Idempotency-Key. `digest` tells another request apart."""

    key: str
    digest: str
    reply: bytes


# --- changes: a transaction is a sequence of these


class PutObject(Record):
    """Store an object whole. A lower generation than the stored one is refused.

    `author`: who made its generation, where no operation that begins with it says so.
    """

    object: StoredObject
    author: Author | None = None


class PutStatus(Record):
    """Store what was observed; touches neither spec nor revision. Gone: no effect."""

    uid: str
    status: Status


class PutFacts(Record):
    """Store the facts of an object whose kind has some. Gone: NotFound."""

    uid: str
    facts: Facts


class RemoveObject(Record):
    """Replace an object by its tombstone."""

    tombstone: Tombstone


class PutWorker(Record):
    """Store a worker row. Another worker id for the same VM is refused: forget that one first."""

    row: WorkerRow


class RemoveWorker(Record):
    """Forget a worker that is proven gone. `ending`: how it ended, where that is known."""

    vm_uid: str
    ending: Ending | None = None


class PutOperation(Record):
    """Store an operation without its steps. A final one never changes again."""

    operation: Operation


class PutStep(Record):
    """Journal one step of an operation."""

    operation_id: str
    index: int
    step: OperationStep


class PutRequest(Record):
    """Remember the outcome of an Idempotency-Key."""

    request: RequestRow


class Prune(Record):
    """Drop the oldest final operations, remembered requests, and histories of what is gone."""

    operations_max: int
    requests_max: int
    histories_max: int = DELETED_MAX


Change = (
    PutObject
    | PutStatus
    | PutFacts
    | RemoveObject
    | PutWorker
    | RemoveWorker
    | PutOperation
    | PutStep
    | PutRequest
    | PutGeneration
    | PutNode
    | PutAssignment
    | PutReport
    | DropReports
    | PutSighting
    | PutEvents
    | Prune
)


class Snapshot(Record):
    """Everything that the agent holds in memory: all but final operations."""

    revision: int = 0
    objects: tuple[StoredObject, ...] = ()
    workers: tuple[WorkerRow, ...] = ()
    operations: tuple[Operation, ...] = ()  # active ones, with their steps
    node: NodeRecord = NodeRecord()
    assignments: tuple[Assignment, ...] = ()
    outbox: tuple[Report, ...] = ()  # reports to the control plane that wait
    outbox_seq: int = 0  # the last number that a report was given
    sightings: tuple[Sighting, ...] = ()
    event_seq: int = 0  # the last number that an event was given


class AgentStore(HistoryStore, EventStore, Protocol):
    """The durable store. `commit` is one transaction: all or nothing, on disk when it returns."""

    async def load(self) -> Snapshot:
        """Return everything that is not history."""
        ...

    async def commit(self, changes: tuple[Change, ...]) -> None:
        """Apply all changes, or raise and apply none."""
        ...

    async def operation(self, operation_id: str) -> Operation | None:
        """Return one operation with its steps."""
        ...

    async def operations(
        self,
        *,
        kind: str = "",
        namespace: str = "",
        name: str = "",
        limit: int,
        others: OperationFilter = EVERY,
    ) -> list[Operation]:
        """Return operations without steps, newest first."""
        ...

    async def request(self, key: str) -> RequestRow | None:
        """Return what was recorded for an Idempotency-Key."""
        ...

    async def shortage(self) -> str:
        """Say where space lacks, so that nothing new may be stored; empty where there is some."""
        ...


def with_facts(stored: StoredObject, facts: Facts) -> StoredObject:
    """Return the object with other facts, which must be those of its kind."""
    return msgspec.structs.replace(stored, **{_FACTS_FIELDS[type(facts)]: facts})


def all_facts(stored: StoredObject) -> Facts | None:
    """Return the facts of the object, whatever its kind."""
    return stored.facts or stored.volume_facts or stored.snapshot_facts or stored.sent_facts


def is_side(operation: Operation) -> bool:
    """Tell whether an operation runs beside the one that makes its object as wanted."""
    if operation.verb in CHORE_VERBS:
        return True
    if operation.kind == "VirtualMachine":
        return operation.verb == VolumeVerb.BACKUP.value
    return operation.kind == "Volume" and operation.verb in SIDE_VERBS


def with_status(resource: Resource, status: Status) -> Resource:
    """Return the resource with another status."""
    return msgspec.structs.replace(resource, status=status)


def revision_of(stored: StoredObject) -> int:
    """Return the resource version as the number that it is."""
    return int(stored.resource.metadata.resource_version or "0")
