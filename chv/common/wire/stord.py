"""The API of chv-stord: volumes, their attachments to VMs, health. Sizes are bytes.

stord knows volumes and the VM ids that they are attached to, nothing of a VM's life cycle.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from chv.common.rpc import Method
from chv.common.wire.types import (
    CENSUS,
    HELLO,
    CallMeta,
    Done,
    Empty,
    Feature,
    Generation,
    HostUid,
    Message,
    PathText,
    Reply,
    Sha256,
    ShortText,
    SizeBytes,
    Uid,
)


class VolumeFormat(StrEnum):
    """Declared, never probed."""

    RAW = "raw"
    QCOW2 = "qcow2"


class CrashClass(StrEnum):
    """What the loss of the storage daemon means for the VM."""

    KEEP_VM = "keep_vm"
    RESET_VM = "reset_vm"


class BackendState(StrEnum):
    """State of the storage daemon behind a VM's attachments."""

    SERVING = "serving"
    LOST = "lost"  # died under the VM; nothing is served until RecoverVmBackend
    ABSENT = "absent"


class VolumeSource(Message, frozen=True, kw_only=True):
    """A content-addressed image file that the volume starts from."""

    path: PathText
    sha256: Sha256
    format: VolumeFormat


class VolumeBackend(Message, frozen=True, kw_only=True):
    """What the volume is. `class_name` is `file` in this version."""

    class_name: Annotated[str, Meta(pattern=r"^file\Z")]
    format: VolumeFormat
    size_bytes: Annotated[int, Meta(ge=512, le=2**60, multiple_of=512)]
    source: VolumeSource | None = None


class OpenVolume(Message, frozen=True, kw_only=True):
    """Make the volume servable: created where it does not exist, found where it does."""

    meta: CallMeta
    volume_id: Uid
    backend: VolumeBackend


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
    state: str = "open"  # open | closed | missing | broken
    cache: str = ""  # direct | page cache (the file system refuses O_DIRECT)


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


class VmBackendInfo(Reply, frozen=True, kw_only=True):
    """The storage daemon of one VM."""

    vm_id: str
    backend: BackendState
    backend_pid: int = 0
    incarnation: str = ""
    attachments: list[AttachmentInfo] = []


class ListVolumesReply(Reply, frozen=True, kw_only=True):
    """Every volume with a record."""

    volumes: list[VolumeInfo] = []


class ListVolumeSessionsReply(Reply, frozen=True, kw_only=True):
    """Every VM with attachments."""

    sessions: list[VmBackendInfo] = []


class GetVolume(Message, frozen=True, kw_only=True):
    """One volume by id."""

    volume_id: Uid


class VolumeHealth(Reply, frozen=True, kw_only=True):
    """`status`: healthy | degraded | failed | unknown."""

    volume_id: str
    status: str
    backend: BackendState
    last_error: str = ""
    last_error_at: str = ""


class StordHealth(Reply, frozen=True, kw_only=True):
    """State of stord as a whole."""

    status: str  # healthy | degraded
    storage_daemon_version: str
    features: list[Feature] = []
    volumes: int = 0
    attachments: int = 0
    free_bytes: SizeBytes = 0
    last_error: str = ""


class StorageEvent(Reply, frozen=True, kw_only=True):
    """Something that the agent must act on. `kind`: backend_lost | backend_ready."""

    kind: str
    vm_id: str
    crash_class: CrashClass
    message: ShortText = ""
    at: str = ""


OPEN_VOLUME = Method("OpenVolume", OpenVolume, VolumeInfo, timeout_s=60.0)
CLOSE_VOLUME = Method("CloseVolume", VolumeRef, Done)
DELETE_VOLUME = Method("DeleteVolume", VolumeRef, Done, timeout_s=30.0)
ATTACH_VOLUME = Method("AttachVolumeToVm", AttachVolumeToVm, AttachmentInfo)
DETACH_VOLUME = Method("DetachVolumeFromVm", DetachVolumeFromVm, Done)
RECOVER_VM_BACKEND = Method("RecoverVmBackend", RecoverVmBackend, VmBackendInfo)
GET_VOLUME = Method("GetVolume", GetVolume, VolumeInfo, mutating=False)
GET_VOLUME_HEALTH = Method("GetVolumeHealth", GetVolume, VolumeHealth, mutating=False)
LIST_VOLUMES = Method("ListVolumes", Empty, ListVolumesReply, mutating=False)
LIST_SESSIONS = Method("ListVolumeSessions", Empty, ListVolumeSessionsReply, mutating=False)
STORD_HEALTH = Method("GetHealth", Empty, StordHealth, timeout_s=5.0, mutating=False)
# Sends StorageEvent notifications until the caller leaves; losses still open come first.
WATCH_STORAGE = Method(
    "WatchStorage", Empty, Done, timeout_s=float("inf"), mutating=False, events=StorageEvent
)

METHODS = (
    HELLO,
    CENSUS,
    OPEN_VOLUME,
    CLOSE_VOLUME,
    DELETE_VOLUME,
    ATTACH_VOLUME,
    DETACH_VOLUME,
    RECOVER_VM_BACKEND,
    GET_VOLUME,
    GET_VOLUME_HEALTH,
    LIST_VOLUMES,
    LIST_SESSIONS,
    STORD_HEALTH,
    WATCH_STORAGE,
)
