"""The agent's local API, which the CLI and the executor speak.

Objects travel as JSON of `chv.common.wire.resources`. Durations are seconds.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from chv.common.errors import ErrorData
from chv.common.rpc import Method
from chv.common.wire.agent_node import DrainProgress, NodeHold
from chv.common.wire.agent_operations import OperationProgress, QueuePlace
from chv.common.wire.agent_watch import WATCH_METHODS
from chv.common.wire.stord import JobsReply, StorageMetrics
from chv.common.wire.types import (
    CENSUS,
    HELLO,
    Done,
    Empty,
    Feature,
    ListPage,
    Message,
    Name,
    NameOrEmpty,
    PageReply,
    PathText,
    Port,
    Reply,
    Sha256OrEmpty,
    ShortText,
)

OBJECTS_MAX = 200
LOG_LINES_MAX = 10_000
WAIT_S_MAX = 3600.0

Kind = Annotated[
    str,
    Meta(
        pattern=r"^(VirtualMachine|VirtualMachineSnapshot|Volume|VolumeSnapshot|Network"
        r"|SecurityGroup|Exposure|Image)\Z"
    ),
]


class Apply(Message, frozen=True, kw_only=True):
    """Make the objects so. All are checked before the first is stored."""

    objects: Annotated[list[msgspec.Raw], Meta(min_length=1, max_length=OBJECTS_MAX)]
    requester: ShortText
    reason: ShortText = ""
    dry_run: bool = False
    idempotency_key: ShortText = ""


class AppliedObject(Reply, frozen=True, kw_only=True):
    """`action`: created | configured | unchanged.

    `operation_id` where unchanged: the operation under way that makes it so, else empty.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    generation: int
    action: str
    operation_id: str = ""


class ApplyReply(Reply, frozen=True, kw_only=True):
    """In the order in which the objects were applied."""

    results: list[AppliedObject]


class ObjectRef(Message, frozen=True, kw_only=True):
    """One object by name."""

    kind: Kind
    name: Name
    namespace: Name = "default"


class ObjectReply(Reply, frozen=True, kw_only=True):
    """The object as JSON, with how old the observation behind its status is."""

    object: msgspec.Raw
    age_s: float = 0.0


class ListObjects(ListPage, frozen=True, kw_only=True):
    """Objects of a kind; namespace empty means all of them."""

    kind: Kind
    namespace: NameOrEmpty = ""


class ListReply(PageReply, frozen=True, kw_only=True):
    """Answered from memory; never waits for a VMM. `age_s`: of the oldest; `ages_s`: of each."""

    items: list[msgspec.Raw] = []
    age_s: float = 0.0
    ages_s: list[float] = []


class DeleteObject(Message, frozen=True, kw_only=True):
    """Delete from any state. An object in use is refused with IN_USE."""

    kind: Kind
    name: Name
    namespace: Name = "default"
    uid: str = ""  # where given, only this very object
    force: bool = False  # also where the node does not see its control plane
    requester: ShortText
    reason: ShortText = ""
    idempotency_key: ShortText = ""


class VmVerb(StrEnum):
    """`stop` asks the guest, then kills; `restart` is stop and start; `reset` is the button.

    `pause` holds the vCPUs until `resume`, or until the VM ends; `restart_storage` replaces the
    storage daemon of the VM's disks under the running guest; `restore` brings disks, memory and
    devices back to a VirtualMachineSnapshot, from which the guest runs on.
    """

    START = "start"
    STOP = "stop"
    RESTART = "restart"
    RESET = "reset"
    PAUSE = "pause"
    RESUME = "resume"
    RESTART_STORAGE = "restart_storage"
    RESTORE = "restore"


class ActOnVm(Message, frozen=True, kw_only=True):
    """A verb on a VM. `force` of stop and restart skips the question to the guest.

    `snapshot` belongs to restore; its `force` ends a VM that runs.
    """

    verb: VmVerb
    name: Name
    namespace: Name = "default"
    requester: ShortText
    reason: ShortText = ""
    force: bool = False
    snapshot: NameOrEmpty = ""
    idempotency_key: ShortText = ""


class VolumeVerb(StrEnum):
    """`grow_now` unplugs the disk of a running VM, lets it grow, and plugs it again."""

    CHECK = "check"
    REPAIR = "repair"
    BACKUP = "backup"
    RESTORE = "restore"
    GROW_NOW = "grow_now"


class ActOnVolume(Message, frozen=True, kw_only=True):
    """A verb on a Volume, done as one operation that shows progress and may be cancelled.

    `snapshot` belongs to restore: a VolumeSnapshot that has this volume. `target` and
    `incremental` belong to backup: a directory of the node below storage.backup_paths, or
    `nbd://host:port/export` of an allowed server.
    """

    verb: VolumeVerb
    name: Name
    namespace: Name = "default"
    requester: ShortText
    reason: ShortText = ""
    snapshot: NameOrEmpty = ""
    target: ShortText = ""
    incremental: bool = False
    bps_max: Annotated[int, Meta(ge=0, le=2**50)] = 0
    idempotency_key: ShortText = ""


class BackUpVm(Message, frozen=True, kw_only=True):
    """Back up all disks that a VM writes, as they were in one instant; each may be restored alone.

    `target`: as for a volume's backup, but each volume goes to `<target>/<its name>`. The
    operation is of the VM; `bps_max` is for all together.
    """

    name: Name
    namespace: Name = "default"
    requester: ShortText
    reason: ShortText = ""
    target: ShortText
    incremental: bool = False
    bps_max: Annotated[int, Meta(ge=0, le=2**50)] = 0
    idempotency_key: ShortText = ""


class OperationState(StrEnum):
    """Pending and Running are live; the others are final."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"
    SUPERSEDED = "Superseded"  # a newer generation or verb took over


class OperationStep(Reply, frozen=True, kw_only=True):
    """One step of an operation. Times are RFC 3339; `outcome`: running | done | failed."""

    name: str
    started_at: str
    ended_at: str = ""
    outcome: str = "running"
    message: str = ""


class Operation(Reply, frozen=True, kw_only=True):
    """Who asked for what, what was done, and how it ended.

    `request`: what was asked for beyond the verb, where that is needed to tell it from another.
    `result`: what came of it, for programs. `cancelled_by`: who asked for its end, and why.
    `progress` and `queue`: how far it is and what it waits for, where that is known.
    """

    id: str
    verb: str
    kind: str
    namespace: str
    name: str
    uid: str
    generation: int
    requester: str
    reason: str = ""
    state: OperationState = OperationState.PENDING
    created_at: str = ""
    started_at: str = ""
    ended_at: str = ""
    message: str = ""
    error: ErrorData | None = None
    steps: list[OperationStep] = []
    request: dict[str, str | int | bool | None] = {}
    result: dict[str, Any] = {}
    cancelled_by: str = ""
    progress: OperationProgress | None = None
    queue: QueuePlace | None = None


class OperationReply(Reply, frozen=True, kw_only=True):
    """`joined`: an identical request was already under way and this is it."""

    operation: Operation
    joined: bool = False


class OperationRef(Message, frozen=True, kw_only=True):
    """One operation."""

    operation_id: Annotated[str, Meta(min_length=1, max_length=64)]


class CancelOperation(Message, frozen=True, kw_only=True):
    """Cancel where that is safe: backup, move, check, deletion of a snapshot; else refused."""

    operation_id: ShortText
    requester: ShortText
    reason: ShortText = ""
    idempotency_key: ShortText = ""


class PutKey(Message, frozen=True, kw_only=True):
    """Store an encryption key of the node; `key` is base64, empty: one is made at random.

    A name is used once: ALREADY_EXISTS. The key can never be read back through the API.
    """

    name: Name
    namespace: Name = "default"
    key: Annotated[str, Meta(max_length=16384, pattern=r"^[A-Za-z0-9+/]*={0,2}\Z")] = ""
    requester: ShortText
    reason: ShortText = ""
    idempotency_key: ShortText = ""


class DeleteKey(Message, frozen=True, kw_only=True):
    """Destroy a key; IN_USE where a volume names it."""

    name: Name
    namespace: Name = "default"
    requester: ShortText
    reason: ShortText = ""
    idempotency_key: ShortText = ""


class KeyInfo(Reply, frozen=True, kw_only=True):
    """A key by name, and the volumes that name it."""

    name: str
    namespace: str
    created_at: str
    used_by: list[str] = []


class KeysReply(Reply, frozen=True, kw_only=True):
    """Every key, never its value."""

    keys: list[KeyInfo] = []


class ListOperations(Message, frozen=True, kw_only=True):
    """Newest first; filters where not empty. `since`: an RFC 3339 time of their beginning."""

    kind: str = ""
    namespace: str = ""
    name: str = ""
    verb: str = ""
    states: list[OperationState] = []
    since: ShortText = ""
    active_only: bool = False
    limit: Annotated[int, Meta(ge=1, le=1000)] = 50


class ListOperationsReply(Reply, frozen=True, kw_only=True):
    """Operations without their steps, requests and results."""

    operations: list[Operation] = []


class WaitOperation(Message, frozen=True, kw_only=True):
    """Answer when the operation is final, or with DEADLINE_EXCEEDED."""

    operation_id: Annotated[str, Meta(min_length=1, max_length=64)]
    timeout_s: Annotated[float, Meta(gt=0, le=WAIT_S_MAX)] = 60.0


class WaitCondition(Message, frozen=True, kw_only=True):
    """Answer when `condition` (a condition type, `phase=NAME`, or `deleted`) holds.

    Fails early with FAILED_PRECONDITION when the object can no longer get there by itself. What
    is not there is deleted: that answers at once, with `null` for the object.
    """

    kind: Kind
    name: Name
    namespace: Name = "default"
    condition: Annotated[str, Meta(min_length=1, max_length=128)]
    status: Annotated[str, Meta(pattern=r"^(True|False|Unknown)\Z")] = "True"
    timeout_s: Annotated[float, Meta(gt=0, le=WAIT_S_MAX)] = 60.0


class DaemonStatus(Reply, frozen=True, kw_only=True):
    """A daemon as the agent supervises it."""

    name: str
    # starting | recovering | ready | restarting (asked for) | hung | backoff | failed | stopped
    state: str
    pid: int = 0
    restarts: int = 0
    since: str = ""
    message: str = ""
    version: str = ""


class VmmProbe(Reply, frozen=True, kw_only=True):
    """What a try-boot of each VMM and accelerator showed on this host boot.

    `auto`: `vmm: auto` may take it. `missing`: instructions that stock kernels need and KVM does
    not run. `binary` and its `sha256`, where the driver tells them.
    """

    name: str
    usable: bool
    accelerator: str = ""
    version: str = ""
    reason: str = ""
    auto: bool = True
    missing: list[str] = []
    binary: str = ""
    sha256: str = ""


class NodeCondition(Reply, frozen=True, kw_only=True):
    """A predicate of the node. `since` it is so, `seen_at` that was looked at last."""

    type: str
    status: str
    reason: str
    message: str = ""
    since: str = ""
    seen_at: str = ""


class NodeStatusReply(Reply, frozen=True, kw_only=True):
    """`chv node status`.

    `hold`: who drains it or has it in Maintenance, and why. `drain`: how far that is, while it is
    under way. `scheduling_paused`: who keeps new VMs away.
    """

    name: str
    instance: str
    state: str
    since: str
    version: str
    pid: int
    boot_id: str
    run_dir: str
    state_dir: str
    daemons: list[DaemonStatus] = []
    vmms: list[VmmProbe] = []
    conditions: list[NodeCondition] = []
    features: list[Feature] = []
    counts: dict[str, int] = {}
    transitions: list[str] = []  # newest last, `TIME FROM -> TO: reason`
    hold: NodeHold | None = None
    drain: DrainProgress | None = None
    scheduling_paused: NodeHold | None = None


class ResetNode(Message, frozen=True, kw_only=True):
    """Leave Failed; daemons that were given up on get another chance."""

    requester: ShortText
    reason: ShortText = ""
    idempotency_key: ShortText = ""


class OpenGuest(Message, frozen=True, kw_only=True):
    """A TCP connection to a declared port of the guest; the socket comes back by SCM_RIGHTS."""

    name: Name
    namespace: Name = "default"
    port: Port = 22
    interface: NameOrEmpty = ""
    timeout_s: Annotated[float, Meta(gt=0, le=30)] = 5.0


class OpenGuestReply(Reply, frozen=True, kw_only=True):
    """Ends of the connection in the network's namespace."""

    local: str
    remote: str


class GuestAccessReply(Reply, frozen=True, kw_only=True):
    """How `chv ssh` gets in. `host_key` is one OpenSSH public key line."""

    user: str
    port: int
    address: str
    host_key: str
    identity_file: str


class ReadLogs(Message, frozen=True, kw_only=True):
    """Lines of `vm/NAME` (the serial console) or `daemon/NAME`, then new ones if `follow`.

    `since`: RFC 3339 in UTC, only from then on.
    """

    target: Annotated[str, Meta(pattern=r"^(vm|daemon)/[a-z0-9-]{1,63}\Z")]
    namespace: Name = "default"
    tail_lines: Annotated[int, Meta(ge=0, le=LOG_LINES_MAX)] = 200
    follow: bool = False
    since: Annotated[
        str, Meta(pattern=r"^([0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}(\.[0-9]{1,6})?Z)?\Z")
    ] = ""


class LogChunk(Reply, frozen=True, kw_only=True):
    """Text as it was written; bytes that are not UTF-8 are replaced."""

    text: str


class ImportImage(Message, frozen=True, kw_only=True):
    """Import one artifact of an image from a file on the node and (re)define the Image."""

    name: Name
    namespace: Name = "default"
    artifact: Annotated[str, Meta(pattern=r"^(kernel|initramfs|disk)\Z")] = "disk"
    path: Annotated[PathText, Meta(min_length=2)]
    format: Annotated[str, Meta(pattern=r"^(raw|qcow2)\Z")] = "raw"
    sha256: Sha256OrEmpty = ""  # empty: computed and pinned
    requester: ShortText
    reason: ShortText = ""
    idempotency_key: ShortText = ""


class FetchImage(Message, frozen=True, kw_only=True):
    """Import one artifact by URL; what was fetched before a break is used again."""

    name: Name
    namespace: Name = "default"
    artifact: Annotated[str, Meta(pattern=r"^(kernel|initramfs|disk)\Z")] = "disk"
    url: Annotated[str, Meta(max_length=2048, pattern=r"^https?://[\x21-\x7e]+\Z")]
    format: Annotated[str, Meta(pattern=r"^(raw|qcow2)\Z")] = "raw"
    sha256: Sha256OrEmpty = ""  # needed for http://
    requester: ShortText
    reason: ShortText = ""
    idempotency_key: ShortText = ""


class OpenUpload(Message, frozen=True, kw_only=True):
    """Begin an import of data that the caller sends: the reply carries the end of a pipe."""

    size_bytes_max: Annotated[int, Meta(ge=1, le=2**46)] = 2**40


class UploadReply(Reply, frozen=True, kw_only=True):
    """Write the data into the descriptor, close it, then call FinishUpload."""

    upload_id: str


class FinishUpload(Message, frozen=True, kw_only=True):
    """Take what was sent as an artifact and (re)define the Image.

    `size_bytes` is what the caller has sent: a shorter or longer upload is refused.
    """

    upload_id: ShortText
    size_bytes: Annotated[int, Meta(ge=0, le=2**46)]
    name: Name
    namespace: Name = "default"
    artifact: Annotated[str, Meta(pattern=r"^(kernel|initramfs|disk)\Z")] = "disk"
    format: Annotated[str, Meta(pattern=r"^(raw|qcow2)\Z")] = "raw"
    sha256: Sha256OrEmpty = ""
    requester: ShortText
    reason: ShortText = ""
    idempotency_key: ShortText = ""


class CollectImages(Message, frozen=True, kw_only=True):
    """Remove stored artifacts and partial downloads that nothing refers to."""

    dry_run: bool = False
    requester: ShortText
    reason: ShortText = ""
    idempotency_key: ShortText = ""


class CollectImagesReply(Reply, frozen=True, kw_only=True):
    """What was (or would be) removed."""

    removed: list[str] = []
    freed_bytes: int = 0


class ImportImageReply(Reply, frozen=True, kw_only=True):
    """What was stored."""

    sha256: str
    size_bytes: int
    operation_id: str = ""


class Progress(Reply, frozen=True, kw_only=True):
    """Progress of a long call; the operation goes on where its caller leaves."""

    step: str
    operation_id: str = ""
    done: int = 0
    total: int = 0


APPLY = Method("Apply", Apply, ApplyReply, timeout_s=30.0)
GET = Method("Get", ObjectRef, ObjectReply, timeout_s=5.0, mutating=False)
LIST = Method("List", ListObjects, ListReply, timeout_s=5.0, mutating=False)
DELETE = Method("Delete", DeleteObject, OperationReply)
ACT_ON_VM = Method("ActOnVm", ActOnVm, OperationReply)
GET_OPERATION = Method("GetOperation", OperationRef, OperationReply, mutating=False)
LIST_OPERATIONS = Method("ListOperations", ListOperations, ListOperationsReply, mutating=False)
WAIT_OPERATION = Method("WaitOperation", WaitOperation, OperationReply, 3610.0, mutating=False)
WAIT_CONDITION = Method("WaitCondition", WaitCondition, ObjectReply, 3610.0, mutating=False)
NODE_STATUS = Method("GetNodeStatus", Empty, NodeStatusReply, timeout_s=5.0, mutating=False)
RESET_NODE = Method("ResetNode", ResetNode, OperationReply)  # an operator's way out of Failed
OPEN_GUEST = Method("OpenGuestConnection", OpenGuest, OpenGuestReply, 35.0, mutating=False, fds=1)
GET_GUEST_ACCESS = Method("GetGuestAccess", ObjectRef, GuestAccessReply, mutating=False)
READ_LOGS = Method(
    "ReadLogs", ReadLogs, Done, timeout_s=float("inf"), mutating=False, events=LogChunk
)
IMPORT_IMAGE = Method("ImportImage", ImportImage, ImportImageReply, 3600.0, events=Progress)
FETCH_IMAGE = Method("FetchImage", FetchImage, ImportImageReply, 24 * 3600.0, events=Progress)
OPEN_UPLOAD = Method("OpenUpload", OpenUpload, UploadReply, fds=1)
FINISH_UPLOAD = Method("FinishUpload", FinishUpload, ImportImageReply, 3600.0, events=Progress)
COLLECT_IMAGES = Method("CollectImages", CollectImages, CollectImagesReply, 600.0)
ACT_ON_VOLUME = Method("ActOnVolume", ActOnVolume, OperationReply)
BACK_UP_VM = Method("BackUpVm", BackUpVm, OperationReply)
CANCEL_OPERATION = Method("CancelOperation", CancelOperation, OperationReply)
PUT_KEY = Method("PutKey", PutKey, KeyInfo)
DELETE_KEY = Method("DeleteKey", DeleteKey, Done)
LIST_KEYS = Method("ListKeys", Empty, KeysReply, mutating=False)
GET_STORAGE_METRICS = Method("GetStorageMetrics", Empty, StorageMetrics, mutating=False)
LIST_JOBS = Method("ListStorageJobs", Empty, JobsReply, mutating=False)

METHODS = (
    HELLO,
    CENSUS,
    APPLY,
    GET,
    LIST,
    DELETE,
    ACT_ON_VM,
    GET_OPERATION,
    LIST_OPERATIONS,
    WAIT_OPERATION,
    WAIT_CONDITION,
    NODE_STATUS,
    RESET_NODE,
    OPEN_GUEST,
    GET_GUEST_ACCESS,
    READ_LOGS,
    IMPORT_IMAGE,
    FETCH_IMAGE,
    OPEN_UPLOAD,
    FINISH_UPLOAD,
    COLLECT_IMAGES,
    ACT_ON_VOLUME,
    BACK_UP_VM,
    CANCEL_OPERATION,
    PUT_KEY,
    DELETE_KEY,
    LIST_KEYS,
    GET_STORAGE_METRICS,
    LIST_JOBS,
    *WATCH_METHODS,
)
