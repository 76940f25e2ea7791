"""Volume and VolumeSnapshot as in a manifest. Types only; rules are in `manifest_rules`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from chv.common.wire.resource_base import (
    Condition,
    ImageFormat,
    ObjectMeta,
    Quantity,
    Struct,
    always,
)
from chv.common.wire.storage import HostOrEmpty, IscsiName, StorageNameOrEmpty, VolumeClass
from chv.common.wire.types import API_VERSION, Name, PathText, Port

# How long a guest may stand frozen: `5s`; empty: it is not frozen.
Freeze = Annotated[str, Meta(max_length=16, pattern=r"^([0-9]{1,6}(ms|s))?\Z")]


class VolumeAccessMode(StrEnum):
    """Kubernetes' names: one VM that writes, or many VMs that only read."""

    READ_WRITE_ONCE = "ReadWriteOnce"
    READ_ONLY_MANY = "ReadOnlyMany"


class SpacePolicyName(StrEnum):
    """What happens when the space below a volume becomes critical.

    `Stop`: its VM is paused before the guest sees an error, and resumed when there is space
    again. `Report`: an event and a condition, no more.
    """

    STOP = "Stop"
    REPORT = "Report"


class CloneModeName(StrEnum):
    """`Linked` is instant and needs its snapshot; `Full` copies and needs nothing afterwards."""

    LINKED = "Linked"
    FULL = "Full"


class VolumeSourceSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What the volume starts as; exactly one of the three.

    The disk of an Image, a VolumeSnapshot of one volume, or a backup directory of the node
    (`backupSequence` 0: its newest).
    """

    image: Annotated[str, Meta(max_length=63)] = ""
    snapshot: Annotated[str, Meta(max_length=63)] = ""
    # A snapshot of a whole VM has several volumes; this names which.
    snapshot_volume: Annotated[str, Meta(max_length=63)] = ""
    mode: CloneModeName = CloneModeName.LINKED
    backup: PathText = ""
    backup_sequence: Annotated[int, Meta(ge=0, le=10**6)] = 0


class BlockSpec(Struct, kw_only=True, frozen=True):
    """Class `block`: a whole device of the node, allowed by `storage.allowed_devices`."""

    device: PathText


class LvmSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Class `lvm`: a logical volume in an allowed group, thin where a pool is named."""

    volume_group: StorageNameOrEmpty
    thin_pool: StorageNameOrEmpty = ""


class NbdSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Class `nbd`: an export of an allowed server; by TCP, or by a Unix socket."""

    host: HostOrEmpty = ""
    port: Port = 10809
    socket: PathText = ""
    export: Annotated[str, Meta(max_length=255, pattern=r"^[\x20-\x7e]*\Z")] = ""


class IscsiSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Class `iscsi`: a LUN of an allowed target."""

    host: HostOrEmpty
    port: Port = 3260
    target: IscsiName
    lun: Annotated[int, Meta(ge=0, le=16383)] = 0
    initiator: IscsiName = ""


class RbdSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Class `rbd`: an image in an allowed pool."""

    pool: StorageNameOrEmpty
    user: StorageNameOrEmpty = ""
    conf: PathText = "/etc/ceph/ceph.conf"


class EncryptionSpec(Struct, kw_only=True, frozen=True):
    """LUKS with the key of that name (`chv key create`); another name rotates the key."""

    key: Name


class IopsLimit(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Operations per second; 0: no limit. `burst` holds for `burstSeconds`."""

    limit: Annotated[int, Meta(ge=0, le=10**9)] = 0
    burst: Annotated[int, Meta(ge=0, le=10**9)] = 0
    burst_seconds: Annotated[int, Meta(ge=1, le=3600)] = 1


class BandwidthLimit(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Bytes per second as a quantity (`10Mi`); empty: no limit."""

    limit: Annotated[str, Meta(max_length=32)] = ""
    burst: Annotated[str, Meta(max_length=32)] = ""
    burst_seconds: Annotated[int, Meta(ge=1, le=3600)] = 1


class VolumeLimits(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """I/O limits, changed at once also under a running VM. A total excludes read and write."""

    iops_total: IopsLimit = IopsLimit()
    iops_read: IopsLimit = IopsLimit()
    iops_write: IopsLimit = IopsLimit()
    bandwidth_total: BandwidthLimit = BandwidthLimit()
    bandwidth_read: BandwidthLimit = BandwidthLimit()
    bandwidth_write: BandwidthLimit = BandwidthLimit()
    # A request larger than this counts as several operations; empty: as one.
    iops_size: Annotated[str, Meta(max_length=32)] = ""


class VolumeSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A disk.

    `size` may only grow. `limits`, `spacePolicy` and the encryption key's name change at any
    time. Another `class`, `pool`, place or `format` moves the volume, also under a running VM.
    `source`, `accessMode` and whether it is encrypted are fixed at creation.
    """

    class_: Annotated[VolumeClass, Meta(description="storage class")] = msgspec.field(
        name="class", default=VolumeClass.FILE
    )
    format: ImageFormat = ImageFormat.QCOW2
    size: Quantity
    # Class `file`: a directory that the node's configuration names; empty: the node's own.
    pool: Annotated[str, Meta(max_length=63, pattern=r"^([a-z0-9]([a-z0-9-]*[a-z0-9])?)?\Z")] = ""
    block: BlockSpec | None = None
    lvm: LvmSpec | None = None
    nbd: NbdSpec | None = None
    iscsi: IscsiSpec | None = None
    rbd: RbdSpec | None = None
    source: VolumeSourceSpec | None = None
    access_mode: VolumeAccessMode = VolumeAccessMode.READ_WRITE_ONCE
    encryption: EncryptionSpec | None = None
    limits: VolumeLimits = VolumeLimits()
    space_policy: SpacePolicyName = SpacePolicyName.STOP


class VolumeSnapshotPart(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A snapshot of a volume as the volume's status shows it."""

    snapshot: str
    created_at: str
    size_bytes: int = 0
    allocated_bytes: int = 0
    used_by: list[str] = []


class VolumeStatus(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The volume as stord reports it.

    `pendingSizeBytes`: asked for and not yet seen by the guest; `sizeApplied` says when it will
    be, or how the last growth was applied. `limits` is what the storage daemon itself reports.
    """

    observed_generation: int = 0
    phase: str = always("Pending")  # Pending | Creating | Ready | Attached | Failed | Deleting
    size_bytes: int = 0
    allocated_bytes: int = 0
    pending_size_bytes: int = 0
    size_applied: str = ""  # Online | Detached | OnNextStart
    attached_to: str = ""  # namespace/name of the VM
    readers: list[str] = []  # VMs that have it read only
    location: str = ""
    cache: str = ""
    limits: VolumeLimits = VolumeLimits()
    encrypted: bool = False
    encryption_key: str = ""  # the key that opens it now
    layers: int = 0
    snapshots: list[VolumeSnapshotPart] = []
    free_bytes: int = 0
    space: str = ""  # ok | warn | critical | unknown
    progress: str = ""  # of the job under way: `backup 40%`
    last_error: str = ""
    phase_since: str = ""  # when the phase began
    conditions: list[Condition] = []


# --- VolumeSnapshot


class VolumeSnapshotSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Exactly one of `volume` and `virtualMachine`: all its writable disks in one instant.

    Crash-consistent. `freeze`: ask the guest agent to freeze its file systems for at most that
    long; where it cannot, the snapshot fails instead of being less than was asked for. All of it
    is fixed at creation.
    """

    volume: Annotated[str, Meta(max_length=63)] = ""
    virtual_machine: Annotated[str, Meta(max_length=63)] = ""
    freeze: Freeze = ""


class SnapshotPartStatus(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One volume of the snapshot."""

    volume: str
    size_bytes: int = 0
    allocated_bytes: int = 0
    used_by: list[str] = []  # names of volumes that are linked clones


class VolumeSnapshotStatus(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The snapshot as stord has it. `consistency`: Crash | FileSystem (the guest was frozen)."""

    observed_generation: int = 0
    phase: str = always("Pending")  # Pending | Ready | Failed | Deleting
    created_at: str = ""
    consistency: str = ""
    volumes: list[SnapshotPartStatus] = []
    progress: str = ""
    phase_since: str = ""  # when the phase began
    conditions: list[Condition] = []


class Volume(Struct, kw_only=True, frozen=True):
    """`chv get volume`."""

    api_version: Annotated[str, Meta(pattern=rf"^{API_VERSION}\Z")] = API_VERSION
    kind: Annotated[str, Meta(pattern=r"^Volume\Z")] = "Volume"
    metadata: ObjectMeta
    spec: VolumeSpec
    status: VolumeStatus | None = None


class VolumeSnapshot(Struct, kw_only=True, frozen=True):
    """`chv get snapshot`."""

    api_version: Annotated[str, Meta(pattern=rf"^{API_VERSION}\Z")] = API_VERSION
    kind: Annotated[str, Meta(pattern=r"^VolumeSnapshot\Z")] = "VolumeSnapshot"
    metadata: ObjectMeta
    spec: VolumeSnapshotSpec
    status: VolumeSnapshotStatus | None = None
