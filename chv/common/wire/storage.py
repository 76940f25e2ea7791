"""Types of chv-stord's API that describe a volume: class, place, format, limits, encryption.

Sizes are bytes, rates are per second. Types only; the methods are in `chv.common.wire.stord`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from chv.common.wire.types import (
    Message,
    NameOrEmpty,
    PathText,
    Port,
    Reply,
    Sha256,
    ShortText,
    SizeBytes,
    Uid,
)

BytesPerSecond = Annotated[int, Meta(ge=0, le=2**50)]
KeyName = Annotated[str, Meta(max_length=127, pattern=r"^[a-z0-9-]{1,63}/[a-z0-9-]{1,63}\Z")]
# Names that reach LVM, iSCSI, RBD and NBD; none of them can begin an option or hold a separator.
StorageName = Annotated[
    str, Meta(max_length=127, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.+-]*\Z", min_length=1)
]
StorageNameOrEmpty = Annotated[
    str, Meta(max_length=127, pattern=r"^([A-Za-z0-9_][A-Za-z0-9_.+-]*)?\Z")
]
# A host name or an address; IPv6 without brackets.
Host = Annotated[str, Meta(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9][A-Za-z0-9.:-]*\Z")]
HostOrEmpty = Annotated[str, Meta(max_length=253, pattern=r"^([A-Za-z0-9][A-Za-z0-9.:-]*)?\Z")]
IscsiName = Annotated[
    str, Meta(max_length=223, pattern=r"^((iqn|eui|naa)\.[A-Za-z0-9.:_-]{1,219})?\Z")
]


class VolumeFormat(StrEnum):
    """Declared, never probed."""

    RAW = "raw"
    QCOW2 = "qcow2"


class VolumeClass(StrEnum):
    """Where the bytes of a volume are."""

    FILE = "file"
    BLOCK = "block"
    LVM = "lvm"
    NBD = "nbd"
    ISCSI = "iscsi"
    RBD = "rbd"


class AccessMode(StrEnum):
    """`rwo`: one VM. `rox`: any number of VMs, all of them read only."""

    READ_WRITE_ONCE = "rwo"
    READ_ONLY_MANY = "rox"


class CrashClass(StrEnum):
    """What the loss of the storage daemon means for the VM."""

    KEEP_VM = "keep_vm"
    RESET_VM = "reset_vm"


class BackendState(StrEnum):
    """State of the storage daemon behind a VM's attachments."""

    SERVING = "serving"
    LOST = "lost"  # died under the VM; nothing is served until RecoverVmBackend
    RESTARTING = "restarting"  # died under a keep_vm VM; stord brings it back by itself
    ABSENT = "absent"


class SpacePolicy(StrEnum):
    """What happens at the critical threshold: the VM is paused, or an event is all."""

    STOP = "stop"
    REPORT = "report"


class SpaceLevel(StrEnum):
    """How much is left where the volume's bytes go."""

    OK = "ok"
    WARN = "warn"
    CRITICAL = "critical"
    UNKNOWN = "unknown"


class BlockDevice(Message, frozen=True, kw_only=True):
    """Class `block`: a device of the node, used whole. stord makes and wipes none."""

    device: PathText


class LvmPlace(Message, frozen=True, kw_only=True):
    """Class `lvm`: a logical volume that stord makes, thin where a pool is named."""

    volume_group: StorageName
    thin_pool: StorageNameOrEmpty = ""


class NbdPlace(Message, frozen=True, kw_only=True):
    """Class `nbd`: an export of a server, by TCP or, where `socket` is given, a Unix socket."""

    host: HostOrEmpty = ""
    port: Port = 10809
    socket: PathText = ""
    export: Annotated[str, Meta(max_length=255, pattern=r"^[\x20-\x7e]*\Z")] = ""


class IscsiPlace(Message, frozen=True, kw_only=True):
    """Class `iscsi`: a LUN of a target."""

    host: Host
    port: Port = 3260
    target: IscsiName
    lun: Annotated[int, Meta(ge=0, le=16383)] = 0
    initiator: IscsiName = ""


class RbdPlace(Message, frozen=True, kw_only=True):
    """Class `rbd`: an image in a pool, which stord makes. `conf` names the cluster."""

    pool: StorageName
    user: StorageNameOrEmpty = ""
    conf: PathText = "/etc/ceph/ceph.conf"


class Encryption(Message, frozen=True, kw_only=True):
    """LUKS; `key` is `<namespace>/<name>` of a key file of this node, never the key."""

    key: KeyName


class Rate(Message, frozen=True, kw_only=True):
    """`limit` 0: none. `burst` may be reached for `burst_s` seconds."""

    limit: BytesPerSecond = 0
    burst: BytesPerSecond = 0
    burst_s: Annotated[int, Meta(ge=1, le=3600)] = 1


class Limits(Message, frozen=True, kw_only=True):
    """Limits of one volume, in operations or bytes per second.

    A total goes with neither read nor write of its kind (QEMU refuses both). `iops_size_bytes`:
    a larger request counts as several; 0: one request is one operation.
    """

    iops_total: Rate = Rate()
    iops_read: Rate = Rate()
    iops_write: Rate = Rate()
    bps_total: Rate = Rate()
    bps_read: Rate = Rate()
    bps_write: Rate = Rate()
    iops_size_bytes: Annotated[int, Meta(ge=0, le=2**30)] = 0


class VolumeSource(Message, frozen=True, kw_only=True):
    """A content-addressed image file that the volume starts from."""

    path: PathText
    sha256: Sha256
    format: VolumeFormat


class CloneMode(StrEnum):
    """`linked`: an overlay that needs the snapshot. `full`: a copy that needs nothing."""

    LINKED = "linked"
    FULL = "full"


class SnapshotSource(Message, frozen=True, kw_only=True):
    """A snapshot of another volume that this one starts from."""

    volume_id: Uid
    snapshot_id: Uid
    mode: CloneMode = CloneMode.LINKED


class BackupSource(Message, frozen=True, kw_only=True):
    """A backup that the volume starts from: the directory, and up to which of its backups."""

    target: ShortText  # an absolute path below storage.backup_paths
    sequence: Annotated[int, Meta(ge=0, le=10**6)] = 0  # 0: the newest


class VolumeBackend(Message, frozen=True, kw_only=True):
    """What the volume is.

    Exactly the place that belongs to the class is given (`file`: none). At most one source.
    """

    class_name: VolumeClass
    format: VolumeFormat
    size_bytes: Annotated[int, Meta(ge=512, le=2**60, multiple_of=512)]
    pool: NameOrEmpty = ""  # class file: a directory named in storage.pools; empty: our own
    block: BlockDevice | None = None
    lvm: LvmPlace | None = None
    nbd: NbdPlace | None = None
    iscsi: IscsiPlace | None = None
    rbd: RbdPlace | None = None
    source: VolumeSource | None = None
    snapshot: SnapshotSource | None = None
    backup: BackupSource | None = None
    access: AccessMode = AccessMode.READ_WRITE_ONCE
    encryption: Encryption | None = None
    limits: Limits = Limits()
    space_policy: SpacePolicy = SpacePolicy.STOP


class SnapshotInfo(Reply, frozen=True, kw_only=True):
    """A frozen state of one volume. `used_by`: volumes that are linked clones of it."""

    snapshot_id: str
    volume_id: str
    created_at: str
    size_bytes: SizeBytes
    allocated_bytes: SizeBytes = 0  # what was written between this and the one before
    used_by: list[str] = []
    deleting: bool = False
