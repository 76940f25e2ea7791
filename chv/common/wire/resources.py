"""The resources: VirtualMachine and Image as msgspec structs in camelCase, and all kinds together.

One schema for `chv apply`, the agent's API and, later, CRDs: nothing here goes beyond what a
CRD structural schema can say (no tagged unions, quantities are strings). Types only; parsing and
the rules that span fields live in `chv.common.wire.manifest`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from chv.common.wire.network_resources import (
    BalancingAlgorithm,
    BandwidthText,
    DnsRecordSpec,
    ExistingConnections,
    Exposure,
    ExposureProtocol,
    ExposureSpec,
    ExposureStatus,
    ExposureTarget,
    ExposureTargetStatus,
    HealthCheckProtocol,
    HealthCheckSpec,
    L2ModeSpec,
    Network,
    NetworkDns,
    NetworkSpec,
    NetworkStatus,
    RuleProtocol,
    SecurityGroup,
    SecurityGroupRule,
    SecurityGroupSpec,
    SecurityGroupStatus,
    UplinkModeSpec,
)
from chv.common.wire.resource_base import (
    Condition,
    ConditionStatus,
    Duration,
    ImageFormat,
    ObjectMeta,
    OwnerReference,
    Quantity,
    QuantityOrEmpty,
    Struct,
    always,
)
from chv.common.wire.storage import VolumeClass
from chv.common.wire.types import (
    API_VERSION,
    ConnectionsMax,
    Ipv4OrEmpty,
    Ipv6OrEmpty,
    MacOrEmpty,
    Name,
    PathText,
    Port,
    Sha256,
    UrlOrEmpty,
)
from chv.common.wire.volume_resources import (
    BandwidthLimit,
    BlockSpec,
    CloneModeName,
    EncryptionSpec,
    IopsLimit,
    IscsiSpec,
    LvmSpec,
    NbdSpec,
    RbdSpec,
    SnapshotPartStatus,
    SpacePolicyName,
    Volume,
    VolumeAccessMode,
    VolumeLimits,
    VolumeSnapshot,
    VolumeSnapshotPart,
    VolumeSnapshotSpec,
    VolumeSnapshotStatus,
    VolumeSourceSpec,
    VolumeSpec,
    VolumeStatus,
)

__all__ = [
    "APPLY_ORDER",
    "CONDITIONS",
    "DISKS_MAX",
    "INTERFACES_MAX",
    "KINDS",
    "KIND_ALIASES",
    "PHASES",
    "VM_CONDITIONS",
    "ArtifactStatus",
    "BalancingAlgorithm",
    "BandwidthLimit",
    "BlockSpec",
    "BootSpec",
    "CloneModeName",
    "CloudInitSpec",
    "Condition",
    "ConditionStatus",
    "DiskSpec",
    "DiskStatus",
    "DnsRecordSpec",
    "Duration",
    "EncryptionSpec",
    "ExistingConnections",
    "Exposure",
    "ExposureProtocol",
    "ExposureSpec",
    "ExposureStatus",
    "ExposureTarget",
    "ExposureTargetStatus",
    "HealthCheckProtocol",
    "HealthCheckSpec",
    "Image",
    "ImageDisk",
    "ImageFile",
    "ImageFormat",
    "ImageSpec",
    "ImageStatus",
    "InterfaceBandwidth",
    "InterfaceSpec",
    "InterfaceStatus",
    "IopsLimit",
    "IscsiSpec",
    "L2ModeSpec",
    "LvmSpec",
    "NbdSpec",
    "Network",
    "NetworkDns",
    "NetworkSpec",
    "NetworkStatus",
    "ObjectMeta",
    "OwnerReference",
    "Quantity",
    "QuantityOrEmpty",
    "RbdSpec",
    "Resource",
    "RuleProtocol",
    "RunStrategy",
    "SecurityGroup",
    "SecurityGroupRule",
    "SecurityGroupSpec",
    "SecurityGroupStatus",
    "SnapshotPartStatus",
    "SpacePolicyName",
    "Struct",
    "UplinkModeSpec",
    "VirtualMachine",
    "VirtualMachineSnapshot",
    "VirtualMachineSnapshotSpec",
    "VirtualMachineSnapshotStatus",
    "VirtualMachineSpec",
    "VirtualMachineStatus",
    "VmPhase",
    "VmmChoice",
    "VmmIdentity",
    "VmmStatus",
    "Volume",
    "VolumeAccessMode",
    "VolumeClass",
    "VolumeLimits",
    "VolumeSnapshot",
    "VolumeSnapshotPart",
    "VolumeSnapshotSpec",
    "VolumeSnapshotStatus",
    "VolumeSourceSpec",
    "VolumeSpec",
    "VolumeStatus",
]

DISKS_MAX = 16
INTERFACES_MAX = 8
SSH_KEYS_MAX = 32
GUEST_PORTS_MAX = 16
CPUS_MAX = 64
START_PRIORITY_MAX = 1000


# --- Image


class ImageFile(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A file pinned by its checksum: at a `path` of the node or a `url`, or, without either, one
    that was sent to the node before.
    """

    path: PathText = ""
    url: UrlOrEmpty = ""
    sha256: Sha256


class ImageDisk(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A disk image, as `ImageFile`, in a declared format."""

    path: PathText = ""
    url: UrlOrEmpty = ""
    sha256: Sha256
    format: ImageFormat


class ImageSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Either `builtin` or at least one of kernel, initramfs, disk."""

    builtin: Annotated[str, Meta(pattern=r"^(tiny|probe)?\Z")] = ""
    kernel: ImageFile | None = None
    initramfs: ImageFile | None = None
    disk: ImageDisk | None = None


class ArtifactStatus(Struct, kw_only=True, frozen=True):
    """One stored artifact."""

    sha256: str
    size_bytes: int
    format: str
    path: str = ""


class ImageStatus(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What is stored of the image."""

    observed_generation: int = 0
    phase: str = always("Pending")  # Pending | Importing | Ready | Failed | Deleting
    kernel: ArtifactStatus | None = None
    initramfs: ArtifactStatus | None = None
    disk: ArtifactStatus | None = None
    progress: str = ""  # of what is being fetched: `disk 40%`
    phase_since: str = ""  # when the phase began
    conditions: list[Condition] = []


# --- VirtualMachine


class RunStrategy(StrEnum):
    """When the VM runs (KubeVirt's names)."""

    ALWAYS = "Always"  # also after the guest's own power-off
    RERUN_ON_FAILURE = "RerunOnFailure"
    MANUAL = "Manual"  # only by start and stop
    HALTED = "Halted"


class VmmChoice(StrEnum):
    """Which VMM; `auto` is decided once per VM, stored, and never changes under it."""

    AUTO = "auto"
    CLOUD_HYPERVISOR = "cloud-hypervisor"
    QEMU = "qemu"


class BootSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Direct kernel boot from `image`; without it the first disk boots through the firmware."""

    image: Annotated[str, Meta(max_length=63)] = ""
    cmdline: Annotated[
        str, Meta(max_length=1024, pattern=r"^[\x20-\x7e]*\Z", description="appended")
    ] = ""


class DiskSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A volume of the same namespace as a virtio-blk disk."""

    name: Name
    volume: Name
    read_only: bool = False


class InterfaceBandwidth(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Rates as the guest sees them, such as `100Mbit`; empty: not limited."""

    ingress: BandwidthText = ""
    egress: BandwidthText = ""


class InterfaceSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A virtio-net NIC on a network of the same namespace; empty mac, addresses: chosen once.

    Without `securityGroups` the guest reaches what its network reaches and nothing reaches it;
    with them only what their rules allow, both ways. `maxConnections`: tracked ones, both ways; 0:
    the network's bound. `publicAddress`: one of the network's, the source of what it sends out.
    """

    name: Name
    network: Name
    mac: MacOrEmpty = ""
    address: Annotated[str, Meta(max_length=15)] = ""
    address6: Ipv6OrEmpty = ""
    security_groups: Annotated[list[Name], Meta(max_length=16)] = []
    queues: Annotated[int, Meta(ge=1, le=16)] = 1
    bandwidth: InterfaceBandwidth = InterfaceBandwidth()
    max_connections: ConnectionsMax = 0
    public_address: Ipv4OrEmpty = ""


class CloudInitSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What the guest learns from its seed disk (NoCloud). `hostname` empty: the VM's name."""

    hostname: Annotated[str, Meta(max_length=63)] = ""
    ssh_authorized_keys: Annotated[
        list[Annotated[str, Meta(max_length=8192)]], Meta(max_length=SSH_KEYS_MAX)
    ] = []
    user_data: Annotated[str, Meta(max_length=65536)] = ""


class VirtualMachineSpec(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Desired state of a VM. Memory is always shared with the storage daemon.

    When the node starts its VMs, those of the highest `startPriority` begin; the next lower ones
    follow when these run and `startDelay` has passed since. A drain stops them the other way
    round. On a running VM, `runStrategy`, `shutdownTimeout`, `startPriority`, `startDelay` and
    `guestPorts` change at once. `cpus`,
    `memory`, their maxima, `boot.cmdline` and `cloudInit` are stored and take effect at the next
    start; until then the condition `RestartRequired` is True and names them, and `status.vmm` shows
    what runs. Where `maxCpus` or `maxMemory` leaves room, `cpus` changes and `memory` grows in
    steps of 128Mi while the VM runs; without them (0, empty) they stay as at the start.
    (A guest's cloud-init applies much of `cloudInit` only at the first boot of a disk.) `disks`
    are plugged and unplugged, but for the one that the firmware booted, and so are `interfaces`,
    where the VMM can (QEMU does). One that stays changes its groups, bandwidth, connection bound
    and public address at once, the rest only while the VM is stopped, as does `boot.image`; on
    another network it is another interface. `vmm` never changes after the first start. A file that
    leaves `runStrategy` out does not start a VM that was stopped.

    An `ephemeral` VM is deleted, with all that names it as its owner, once its guest has run and
    ends for any reason: power-off, `chv stop`, crash, drain, reboot of the host. A restart and a
    reset are no end. It is fixed at creation, and excludes `runStrategy: Always`.
    """

    run_strategy: RunStrategy = RunStrategy.RERUN_ON_FAILURE
    vmm: VmmChoice = VmmChoice.AUTO
    cpus: Annotated[int, Meta(ge=1, le=CPUS_MAX)] = 1
    memory: Quantity = "256Mi"
    max_cpus: Annotated[int, Meta(ge=0, le=CPUS_MAX)] = 0
    max_memory: QuantityOrEmpty = ""
    boot: BootSpec = BootSpec()
    disks: Annotated[list[DiskSpec], Meta(max_length=DISKS_MAX)] = []
    interfaces: Annotated[list[InterfaceSpec], Meta(max_length=INTERFACES_MAX)] = []
    cloud_init: CloudInitSpec = CloudInitSpec()
    guest_ports: Annotated[list[Port], Meta(max_length=GUEST_PORTS_MAX)] = msgspec.field(
        default_factory=lambda: [22]
    )
    shutdown_timeout: Duration = "30s"
    ephemeral: bool = False
    start_priority: Annotated[int, Meta(ge=-START_PRIORITY_MAX, le=START_PRIORITY_MAX)] = 0
    start_delay: Duration = "0s"


class VmPhase(StrEnum):
    """A word for a table; the truth is in the conditions."""

    PENDING = "Pending"
    PREPARING = "Preparing"
    STARTING = "Starting"
    RUNNING = "Running"
    PAUSED = "Paused"
    STOPPING = "Stopping"
    STOPPED = "Stopped"
    FAILED = "Failed"
    DELETING = "Deleting"
    UNKNOWN = "Unknown"


class VmmStatus(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The VMM that was chosen for this VM, and why."""

    name: str = ""
    accelerator: str = ""
    version: str = ""
    reason: str = ""
    pid: int = 0
    started_at: str = ""
    cpus: int = 0  # of the running VMM, whatever the spec says by now
    memory: str = ""
    seccomp: str = ""  # filtered | unfiltered: THREADS | none; empty: not looked at yet
    guest_reboots: int = 0  # by the guest itself in this VMM; on QEMU at least so many
    guest_rebooted_at: str = ""  # when the last one was seen


class InterfaceStatus(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A NIC as nwd reports it. `maxConnections`: the bound in force."""

    name: str
    network: str
    mac: str
    address: str
    address6: str = ""
    tap: str = ""
    max_connections: int = 0


class DiskStatus(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """A disk as stord reports it. `export` is `vhost-user-blk:PATH`.

    `crashClass`: what the loss of the storage daemon would mean: keep_vm | reset_vm. `proxy`:
    the in-flight proxy is in its path. `limits`: as the storage daemon itself reports them.
    """

    name: str
    volume: str
    export: str = ""
    crash_class: str = ""
    proxy: bool = False
    read_only: bool = False
    limits: VolumeLimits = VolumeLimits()


class VirtualMachineStatus(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Observed state of a VM."""

    observed_generation: int = 0
    phase: VmPhase = always(VmPhase.PENDING)
    vmm: VmmStatus = VmmStatus()
    interfaces: list[InterfaceStatus] = []
    disks: list[DiskStatus] = []
    restarts: int = 0
    next_restart_at: str = ""  # while it waits for its restart after a crash
    crash_loop_since: str = ""  # the first crash, while there were several within the window
    last_stop: str = ""  # how and why the VM stopped last, with the rung of the stop ladder
    ssh_host_key: str = ""
    phase_since: str = ""  # when the phase began
    conditions: list[Condition] = []


# Types of VirtualMachine conditions in the order in which they become true.
VM_CONDITIONS = (
    "VolumesReady",
    "NetworkReady",
    "VMMRunning",
    "GuestBooted",
    "SSHReady",
    "Paused",
    "StorageLost",
    "RestartRequired",
)

# What can be waited for, by kind.
CONDITIONS: dict[str, tuple[str, ...]] = {
    "VirtualMachine": VM_CONDITIONS,
    "Volume": ("Ready", "SizeApplied", "SpaceAvailable"),
    "VolumeSnapshot": ("Ready",),
    "VirtualMachineSnapshot": ("Ready",),
    "Network": ("Ready",),
    "SecurityGroup": ("Ready",),
    "Exposure": ("Ready",),
    "Image": ("Ready",),
}
PHASES: dict[str, tuple[str, ...]] = {
    "VirtualMachine": tuple(phase.value for phase in VmPhase),
    "Volume": ("Pending", "Creating", "Ready", "Attached", "Failed", "Deleting"),
    "VolumeSnapshot": ("Pending", "Ready", "Failed", "Deleting"),
    "VirtualMachineSnapshot": ("Pending", "Saving", "Ready", "Failed", "Deleting"),
    "Network": ("Pending", "Ready", "Degraded", "Failed", "Deleting"),
    "SecurityGroup": ("Pending", "Ready", "Degraded", "Failed", "Deleting"),
    "Exposure": ("Pending", "Ready", "Degraded", "Failed", "Deleting"),
    "Image": ("Pending", "Importing", "Ready", "Failed", "Deleting"),
}


class VirtualMachine(Struct, kw_only=True, frozen=True):
    """`chv get vm`."""

    api_version: Annotated[str, Meta(pattern=rf"^{API_VERSION}\Z")] = API_VERSION
    kind: Annotated[str, Meta(pattern=r"^VirtualMachine\Z")] = "VirtualMachine"
    metadata: ObjectMeta
    spec: VirtualMachineSpec
    status: VirtualMachineStatus | None = None


# --- VirtualMachineSnapshot


class VirtualMachineSnapshotSpec(Struct, kw_only=True, frozen=True):
    """A running or paused VM as it is at one instant: memory, devices and all disks it writes.

    The VM stands still while it is taken. All of it is fixed at creation. Without memory it is
    a VolumeSnapshot of the VM that is wanted.
    """

    virtual_machine: Name
    memory: bool = True


class VmmIdentity(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The VMM that wrote the memory. Only that very file reads it back."""

    name: str = ""
    version: str = ""
    sha256: str = ""


class VirtualMachineSnapshotStatus(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """The snapshot as it is kept. `sizeBytes`: of memory and devices on the node's disk.

    `spec` is what the VM had been started from; restored, it runs with these CPUs and memory.
    """

    observed_generation: int = 0
    phase: str = always("Pending")  # Pending | Saving | Ready | Failed | Deleting
    created_at: str = ""
    vmm: VmmIdentity = VmmIdentity()
    cpus: int = 0
    memory: str = ""
    size_bytes: int = 0
    volumes: list[SnapshotPartStatus] = []
    spec: VirtualMachineSpec | None = None
    progress: str = ""
    phase_since: str = ""  # when the phase began
    conditions: list[Condition] = []


class VirtualMachineSnapshot(Struct, kw_only=True, frozen=True):
    """`chv get vmsnap`."""

    api_version: Annotated[str, Meta(pattern=rf"^{API_VERSION}\Z")] = API_VERSION
    kind: Annotated[str, Meta(pattern=r"^VirtualMachineSnapshot\Z")] = "VirtualMachineSnapshot"
    metadata: ObjectMeta
    spec: VirtualMachineSnapshotSpec
    status: VirtualMachineSnapshotStatus | None = None


class Image(Struct, kw_only=True, frozen=True):
    """`chv get image`."""

    api_version: Annotated[str, Meta(pattern=rf"^{API_VERSION}\Z")] = API_VERSION
    kind: Annotated[str, Meta(pattern=r"^Image\Z")] = "Image"
    metadata: ObjectMeta
    spec: ImageSpec
    status: ImageStatus | None = None


Resource = (
    VirtualMachine
    | VirtualMachineSnapshot
    | Volume
    | VolumeSnapshot
    | Network
    | SecurityGroup
    | Exposure
    | Image
)

KINDS: dict[str, type[Resource]] = {
    "VirtualMachine": VirtualMachine,
    "Volume": Volume,
    "VolumeSnapshot": VolumeSnapshot,
    "VirtualMachineSnapshot": VirtualMachineSnapshot,
    "Network": Network,
    "SecurityGroup": SecurityGroup,
    "Exposure": Exposure,
    "Image": Image,
}
# In this order manifests are applied and, reversed, deleted. A Volume may start from a snapshot
# and a snapshot is of a Volume; references may point forward, so the order is only of convenience.
APPLY_ORDER = (
    "Image",
    "SecurityGroup",
    "Network",
    "Volume",
    "VirtualMachine",
    "VolumeSnapshot",
    "VirtualMachineSnapshot",
    "Exposure",
)
KIND_ALIASES = {
    "vm": "VirtualMachine",
    "vms": "VirtualMachine",
    "virtualmachine": "VirtualMachine",
    "virtualmachines": "VirtualMachine",
    "vol": "Volume",
    "volume": "Volume",
    "volumes": "Volume",
    "snapshot": "VolumeSnapshot",
    "snapshots": "VolumeSnapshot",
    "snap": "VolumeSnapshot",
    "volumesnapshot": "VolumeSnapshot",
    "volumesnapshots": "VolumeSnapshot",
    "vmsnap": "VirtualMachineSnapshot",
    "vmsnaps": "VirtualMachineSnapshot",
    "vmsnapshot": "VirtualMachineSnapshot",
    "vmsnapshots": "VirtualMachineSnapshot",
    "virtualmachinesnapshot": "VirtualMachineSnapshot",
    "virtualmachinesnapshots": "VirtualMachineSnapshot",
    "net": "Network",
    "network": "Network",
    "networks": "Network",
    "sg": "SecurityGroup",
    "securitygroup": "SecurityGroup",
    "securitygroups": "SecurityGroup",
    "exp": "Exposure",
    "exposure": "Exposure",
    "exposures": "Exposure",
    "img": "Image",
    "image": "Image",
    "images": "Image",
}
