"""The API of chv-stord: volumes, their attachments to VMs, health. Sizes are bytes.

stord knows volumes and the VM ids that they are attached to, nothing of a VM's life cycle.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from chv.common.errors import ErrorData
from chv.common.rpc import Method
from chv.common.wire.storage import (
    AccessMode,
    BackendState,
    BackupSource,
    BlockDevice,
    CloneMode,
    CrashClass,
    Encryption,
    IscsiPlace,
    Limits,
    LvmPlace,
    NbdPlace,
    Rate,
    RbdPlace,
    SnapshotInfo,
    SnapshotSource,
    SpaceLevel,
    SpacePolicy,
    VolumeBackend,
    VolumeClass,
    VolumeFormat,
    VolumeSource,
)
from chv.common.wire.stord_jobs import (
    BackupPart,
    BackupVm,
    BackupVolume,
    BeginMirror,
    CheckVolume,
    CreateSnapshot,
    JobInfo,
    JobKind,
    JobRef,
    JobsReply,
    JobState,
    MoveVolume,
    SnapshotRef,
    SnapshotsReply,
)
from chv.common.wire.stord_watch import (
    PlaceSpace,
    StorageEvent,
    StorageMetrics,
    StordHealth,
    VmStorageMetrics,
    VolumeHealth,
    VolumeMetrics,
)
from chv.common.wire.types import (
    CENSUS,
    HELLO,
    REAP_UNEXPLAINED,
    CallMeta,
    Done,
    Empty,
    Generation,
    HostUid,
    ListPage,
    Message,
    PageReply,
    Reply,
    ShortText,
    SizeBytes,
    Uid,
)

# Parts of the API that have files of their own are imported from here, too.
__all__ = [
    "AccessMode",
    "BackendState",
    "BackupPart",
    "BackupSource",
    "BackupVm",
    "BackupVolume",
    "BeginMirror",
    "BlockDevice",
    "CheckVolume",
    "CloneMode",
    "CrashClass",
    "CreateSnapshot",
    "Encryption",
    "IscsiPlace",
    "JobInfo",
    "JobKind",
    "JobRef",
    "JobState",
    "JobsReply",
    "Limits",
    "LvmPlace",
    "MoveVolume",
    "NbdPlace",
    "PlaceSpace",
    "Rate",
    "RbdPlace",
    "SnapshotInfo",
    "SnapshotRef",
    "SnapshotSource",
    "SnapshotsReply",
    "SpaceLevel",
    "SpacePolicy",
    "StorageEvent",
    "StorageMetrics",
    "StordHealth",
    "VmStorageMetrics",
    "VolumeBackend",
    "VolumeClass",
    "VolumeFormat",
    "VolumeHealth",
    "VolumeMetrics",
    "VolumeSource",
]


ATTACHED_MAX = 64  # volumes in one call


class VmmClient(StrEnum):
    """The VMM that the caller knows to be connected to the volume's export now."""

    NONE = ""
    QEMU = "qemu"
    CLOUD_HYPERVISOR = "cloud-hypervisor"


class OpenVolume(Message, frozen=True, kw_only=True):
    """Make the volume so: created where it does not exist, found and changed where it does.

    A newer generation changes size (grows), limits, key and policies. An attached volume grows
    at once where `client` can be told (`VolumeInfo.applied`), else when it is attached next.
    A long creation (full clone, restore of a backup) goes on in a job: state `creating`.
    """

    meta: CallMeta
    volume_id: Uid
    backend: VolumeBackend
    client: VmmClient = VmmClient.NONE


class VolumeInfo(Reply, frozen=True, kw_only=True):
    """A volume as it is on disk now."""

    volume_id: str
    generation: Generation
    format: VolumeFormat
    size_bytes: SizeBytes
    allocated_bytes: SizeBytes
    path: str
    created: bool = False  # by this very call
    attached_to: str = ""  # vm_id
    last_error: str = ""
    state: str = "open"  # open | creating | closed | missing | broken
    cache: str = ""  # direct | page cache (the file system refuses O_DIRECT)
    class_name: VolumeClass = VolumeClass.FILE
    pool: str = ""
    readers: list[str] = []  # vm_ids of read-only attachments beyond `attached_to`
    # The size asked for while the guest still sees `size_bytes`; 0: nothing is pending.
    pending_size_bytes: SizeBytes = 0
    applied: str = ""  # how the last growth took effect: online | on_next_start | detached
    limits: Limits = Limits()  # as the storage daemon reports them while attached
    limits_live: bool = False  # `limits` was read back from a storage daemon just now
    encryption_key: str = ""
    snapshots: list[SnapshotInfo] = []
    layers: int = 1
    parent: str = ""  # volume_id that a linked clone rests on
    space: SpaceLevel = SpaceLevel.UNKNOWN
    space_policy: SpacePolicy = SpacePolicy.STOP
    free_bytes: SizeBytes = 0  # where the volume's bytes go
    location: str = ""  # path, device or URI in words
    job: str = ""  # job_id of the job that is under way
    network: bool = False  # serving it takes the node's network
    # What it is now as far as its place goes (class, place, pool, format, source), from the record.
    backend: VolumeBackend | None = None
    # How old the rest is: a listing waits for no server that no VM uses. 0: as of now.
    seen_s: Annotated[int, Meta(ge=0)] = 0


class VolumeRef(Message, frozen=True, kw_only=True):
    """A volume, and the generation of it that the caller means."""

    meta: CallMeta
    volume_id: Uid


class AttachVolumeToVm(Message, frozen=True, kw_only=True):
    """Serve the volume to one VM on a vhost-user-blk socket.

    The first attachment of a VM starts its storage daemon under `storage_uid`; the socket is
    0660 storage_uid:vm_gid. A second VM is refused with IN_USE.
    """

    meta: CallMeta  # generation of the volume
    volume_id: Uid
    vm_id: Uid
    storage_uid: HostUid
    vm_gid: HostUid
    read_only: bool = False
    # Another volume of this VM, attached later, needs the node's network (`VolumeInfo.network`):
    # the storage daemon gets one at its start or never.
    network: bool = False


class AttachmentInfo(Reply, frozen=True, kw_only=True):
    """One attachment."""

    volume_id: str
    vm_id: str
    export_path: str
    read_only: bool
    crash_class: CrashClass
    backend: BackendState
    backend_pid: int = 0
    write_cache: str = "write back"
    proxy_pid: int = 0  # 0: no in-flight proxy


class VolumeToAttach(Message, frozen=True, kw_only=True):
    """One of the volumes that are attached together."""

    volume_id: Uid
    generation: Generation
    read_only: bool = False


class AttachVolumesToVm(Message, frozen=True, kw_only=True):
    """Serve several volumes to one VM, as AttachVolumeToVm does each of them.

    The storage daemon is started with all of them. What keeps one volume away is told as that
    volume's error; the others are served all the same. Calling again is fine.
    """

    meta: CallMeta  # the generation is ignored: each volume has its own
    vm_id: Uid
    storage_uid: HostUid
    vm_gid: HostUid
    volumes: Annotated[list[VolumeToAttach], Meta(min_length=1, max_length=ATTACHED_MAX)]
    network: bool = False  # as in AttachVolumeToVm, for volumes that are not named here


class AttachOutcome(Reply, frozen=True, kw_only=True):
    """What became of one volume: it is attached, or has an error."""

    volume_id: str
    attachment: AttachmentInfo | None = None
    error: ErrorData | None = None


class AttachVolumesReply(Reply, frozen=True, kw_only=True):
    """One outcome per volume, in the order of the request."""

    outcomes: list[AttachOutcome] = []


class DetachVolumeFromVm(Message, frozen=True, kw_only=True):
    """Stop serving. The caller has made sure that the VMM is gone or has let go of the disk."""

    meta: CallMeta
    volume_id: Uid
    vm_id: Uid


class RecoverVmBackend(Message, frozen=True, kw_only=True):
    """Start a new storage daemon behind the VM's attachments after a loss.

    Only call it while the VM's vCPUs do not run and a reset follows before they do: a guest
    that goes on would believe in writes that are gone.
    """

    meta: CallMeta  # generation is ignored: the attachments keep theirs
    vm_id: Uid


class RestartVmBackend(Message, frozen=True, kw_only=True):
    """Replace the VM's storage daemon under its running guest, for instance by a newer QEMU.

    Only where every disk has an in-flight proxy and nothing is held back in memory (`keep_vm`):
    FAILED_PRECONDITION names the disks for which that is not so. Only call it while the vCPUs
    run: a VMM whose vCPUs stand may never come back to its disks. Returns when every VMM that
    was connected is connected again. The same `meta.operation_id` restarts once.
    """

    meta: CallMeta  # generation is ignored: the attachments keep theirs
    vm_id: Uid


class VmBackendInfo(Reply, frozen=True, kw_only=True):
    """The storage daemon of one VM."""

    vm_id: str
    backend: BackendState
    backend_pid: int = 0
    incarnation: str = ""
    crash_class: CrashClass = CrashClass.RESET_VM  # the worst of its attachments
    losses: int = 0  # storage daemons lost under this VM since its first attachment
    last_loss: ShortText = ""  # when, why, and what was done
    version: str = ""  # of the storage daemon that runs; empty: it was not asked yet
    last_restart: ShortText = ""  # the last one that was asked for: when, what followed what
    attachments: list[AttachmentInfo] = []


class ListVolumesReply(PageReply, frozen=True, kw_only=True):
    """Every volume with a record."""

    volumes: list[VolumeInfo] = []


class ListVolumeSessionsReply(PageReply, frozen=True, kw_only=True):
    """Every VM with attachments."""

    sessions: list[VmBackendInfo] = []


class GetVolume(Message, frozen=True, kw_only=True):
    """One volume by id."""

    volume_id: Uid


OPEN_VOLUME = Method("OpenVolume", OpenVolume, VolumeInfo, timeout_s=60.0)
CLOSE_VOLUME = Method("CloseVolume", VolumeRef, Done)
DELETE_VOLUME = Method("DeleteVolume", VolumeRef, Done, timeout_s=30.0)
ATTACH_VOLUME = Method("AttachVolumeToVm", AttachVolumeToVm, AttachmentInfo)
ATTACH_VOLUMES = Method("AttachVolumesToVm", AttachVolumesToVm, AttachVolumesReply, timeout_s=60.0)
DETACH_VOLUME = Method("DetachVolumeFromVm", DetachVolumeFromVm, Done)
RECOVER_VM_BACKEND = Method("RecoverVmBackend", RecoverVmBackend, VmBackendInfo)
RESTART_VM_BACKEND = Method("RestartVmBackend", RestartVmBackend, VmBackendInfo, timeout_s=30.0)
GET_VOLUME = Method("GetVolume", GetVolume, VolumeInfo, mutating=False)
GET_VOLUME_HEALTH = Method("GetVolumeHealth", GetVolume, VolumeHealth, mutating=False)
LIST_VOLUMES = Method("ListVolumes", ListPage, ListVolumesReply, mutating=False)
LIST_SESSIONS = Method("ListVolumeSessions", ListPage, ListVolumeSessionsReply, mutating=False)
STORD_HEALTH = Method("GetHealth", Empty, StordHealth, timeout_s=5.0, mutating=False)
# Sends StorageEvent notifications until the caller leaves; losses still open come first.
WATCH_STORAGE = Method(
    "WatchStorage", Empty, Done, timeout_s=float("inf"), mutating=False, events=StorageEvent
)
CREATE_SNAPSHOT = Method("CreateSnapshot", CreateSnapshot, SnapshotsReply, timeout_s=20.0)
# Refused IN_USE while a linked clone rests on it; the job merges the layers.
DELETE_SNAPSHOT = Method("DeleteSnapshot", SnapshotRef, JobInfo, timeout_s=20.0)
# The volume is attached to nothing and has no later snapshot; what was written since is lost.
RESTORE_SNAPSHOT = Method("RestoreSnapshot", SnapshotRef, VolumeInfo, timeout_s=20.0)
LIST_SNAPSHOTS = Method("ListSnapshots", Empty, SnapshotsReply, mutating=False)
BACKUP_VOLUME = Method("BackupVolume", BackupVolume, JobInfo, timeout_s=20.0)
BACKUP_VM = Method("BackupVm", BackupVm, JobInfo, timeout_s=30.0)
CHECK_VOLUME = Method("CheckVolume", CheckVolume, JobInfo, timeout_s=20.0)
MOVE_VOLUME = Method("MoveVolume", MoveVolume, JobInfo, timeout_s=20.0)
GET_JOB = Method("GetJob", JobRef, JobInfo, mutating=False)
LIST_JOBS = Method("ListJobs", Empty, JobsReply, mutating=False)
CANCEL_JOB = Method("CancelJob", JobRef, JobInfo)
# Returns when the mirror of a move that waits notices every write; the job fails if that is later
# than the vCPUs stand.
BEGIN_MIRROR = Method("BeginMirror", BeginMirror, JobInfo, timeout_s=20.0)
GET_METRICS = Method("GetMetrics", Empty, StorageMetrics, mutating=False)

METHODS = (
    HELLO,
    CENSUS,
    REAP_UNEXPLAINED,
    OPEN_VOLUME,
    CLOSE_VOLUME,
    DELETE_VOLUME,
    ATTACH_VOLUME,
    ATTACH_VOLUMES,
    DETACH_VOLUME,
    RECOVER_VM_BACKEND,
    RESTART_VM_BACKEND,
    GET_VOLUME,
    GET_VOLUME_HEALTH,
    LIST_VOLUMES,
    LIST_SESSIONS,
    STORD_HEALTH,
    WATCH_STORAGE,
    CREATE_SNAPSHOT,
    DELETE_SNAPSHOT,
    RESTORE_SNAPSHOT,
    LIST_SNAPSHOTS,
    BACKUP_VOLUME,
    BACKUP_VM,
    CHECK_VOLUME,
    MOVE_VOLUME,
    GET_JOB,
    LIST_JOBS,
    CANCEL_JOB,
    BEGIN_MIRROR,
    GET_METRICS,
)
