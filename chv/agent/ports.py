"""The ports through which the engine acts: everything that is outside of this process.

Only types live here: `World` bundles what a running agent, a test or the simulation hands to the
engine. Adapters implement the ports on RPC, processes and drivers. They raise typed `ChvError`s
only: `Unavailable` (nothing was done), `DeadlineExceeded` (ditto), `OutcomeUnknown` (perhaps it
was done: the engine observes before it decides), anything not retriable is final for the
generation. Every effect must be idempotent: after a crash the engine repeats it.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from chv.agent.moments import Moment
from chv.agent.node import NodeEvent
from chv.agent.node_record import NodeRecord
from chv.agent.resources.capacity import Capacity
from chv.agent.upstream.link import Link
from chv.agent.upstream.port import Embedded, Upstream
from chv.common.clock import Clock, boot_id
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process.records import AdoptVerdict, WorkerRecord
from chv.common.rpc import Method
from chv.common.wire.resources import VmmChoice
from chv.images.store import Collected
from chv.vmm.driver import DiskConfig, NicConfig, PluggedDisk, VmmConfig, VmmObservation

P = TypeVar("P", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)

WORKER_KIND = "vmm"  # the kind in a VMM's worker id
OnProgress = Callable[[int, int], Awaitable[None]]  # bytes done, bytes in all


class Caller(Protocol):
    """A daemon as the engine sees it: its wire methods and nothing else (stord, nwd)."""

    async def call(self, method: Method[P, R], params: P) -> R:
        """Call within `method.timeout_s`; raises typed errors, never hangs for longer."""
        ...


class VmHandle(msgspec.Struct, frozen=True, kw_only=True):
    """A VM as the ports need to know it. `driver` is empty until a VMM was chosen."""

    uid: str
    namespace: str
    name: str
    slot: int  # Layout.vmm_uid(slot), Layout.storage_uid(slot)
    driver: str = ""


class VmmSelection(msgspec.Struct, frozen=True, kw_only=True):
    """The VMM and accelerator for a VM, decided once, stored with it and shown."""

    name: str
    accelerator: str = ""
    version: str = ""
    reason: str = ""
    binary: str = ""  # absolute path
    sha256: str = ""  # of the binary, where it was looked at


class SpawnRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to spawn. `config.nics[].id` are NIC uids: the adapter opens their taps via nwd."""

    vm: VmHandle
    config: VmmConfig  # worker_id within; the intent is durable before the call


class VmmPort(Protocol):
    """Processes and monitors of VMMs. The engine decides when; the adapter knows how."""

    async def select(self, choice: VmmChoice) -> VmmSelection:
        """Choose by the node's probes; Unsupported with the reason where nothing fits."""
        ...

    async def prepare(self, vm: VmHandle) -> None:
        """Make the VM's runtime and state directories with owner and mode. Idempotent."""
        ...

    async def spawn(self, request: SpawnRequest) -> WorkerRecord:
        """Start the VMM process. Never called while an earlier one may live.

        On any error the engine calls `find` before it decides anything.
        """
        ...

    async def find(self, worker_id: str) -> WorkerRecord | None:
        """Scan the processes for exactly this worker id; None proves that there is none."""
        ...

    async def find_all(self) -> list[WorkerRecord]:
        """Scan for every VMM of this instance, known or not."""
        ...

    async def verify(self, record: WorkerRecord) -> AdoptVerdict:
        """Judge whether the recorded process still is that process."""
        ...

    async def observe(self, vm: VmHandle) -> VmmObservation:
        """Ask the monitor; Unavailable or DeadlineExceeded where it is silent."""
        ...

    async def create(self, vm: VmHandle, config: VmmConfig) -> None:
        """Make the VM in a VMM that was started without one. There already: no effect."""
        ...

    async def boot(self, vm: VmHandle) -> None:
        """Let the vCPUs of a created VM run. Already running: no effect."""
        ...

    async def pause(self, vm: VmHandle) -> None:
        """Stop the vCPUs and read back that they stand. Already paused: no effect."""
        ...

    async def halt(self, vm: VmHandle) -> None:
        """Let no vCPU run on, whatever its disks do; for a guest that is to be reset."""
        ...

    async def resume(self, vm: VmHandle) -> None:
        """Let paused vCPUs run and read back that they do."""
        ...

    async def reset(self, vm: VmHandle) -> None:
        """Hard reset in the same VMM; a paused VM stays paused."""
        ...

    async def power_button(self, vm: VmHandle) -> None:
        """Press the ACPI button once; success says nothing about the guest."""
        ...

    async def quit(self, vm: VmHandle) -> None:
        """Ask the VMM process to end at once."""
        ...

    async def await_disks(self, vm: VmHandle, disk_ids: tuple[str, ...]) -> None:
        """Return once the VMM is connected to these vhost-user disks again."""
        ...

    async def disks(self, vm: VmHandle) -> tuple[PluggedDisk, ...]:
        """Return the vhost-user disks that are plugged, one that is being let go of included."""
        ...

    async def add_disk(self, vm: VmHandle, disk: DiskConfig) -> None:
        """Plug a disk that stord serves. Plugged already: no effect."""
        ...

    async def remove_disk(self, vm: VmHandle, disk_id: str) -> None:
        """Unplug a disk; returns only when guest and VMM have let go. Not there: no effect.

        DeadlineExceeded: the guest has not let go yet and may do so later.
        """
        ...

    async def nics(self, vm: VmHandle) -> tuple[str, ...]:
        """Return the ids of the NICs that are plugged, one that is being let go of included."""
        ...

    async def add_nic(self, vm: VmHandle, nic: NicConfig) -> None:
        """Open the tap of a NIC that nwd has and plug it. Plugged already: no effect."""
        ...

    async def remove_nic(self, vm: VmHandle, nic_id: str) -> None:
        """Unplug a NIC as `remove_disk` does a disk, and let go of its tap."""
        ...

    async def set_cpus(self, vm: VmHandle, cpus: int) -> None:
        """Give the VM that many CPUs and read back. DeadlineExceeded: the guest keeps them."""
        ...

    async def set_memory(self, vm: VmHandle, memory_bytes: int) -> None:
        """Give the VM that much memory and read back."""
        ...

    def can_save(self, driver: str) -> bool:
        """Tell whether a VMM can write memory and devices to a directory and read them back."""
        ...

    async def save(self, vm: VmHandle, directory: str) -> None:
        """Write memory and devices of a paused VM to an empty directory; it stays paused."""
        ...

    async def identify(self, record: WorkerRecord) -> str:
        """Return the SHA-256 of the executable that the recorded process runs."""
        ...

    async def find_binary(self, driver: str, sha256: str, hint: str) -> str:
        """Return the path of the VMM with this SHA-256; `hint` is looked at first.

        FailedPrecondition where this node has none.
        """
        ...

    async def ping_guest(self, vm: VmHandle) -> None:
        """Return where the guest agent answers; Unavailable where not."""
        ...

    async def freeze_guest(self, vm: VmHandle) -> None:
        """Let the guest agent freeze the file systems. OutcomeUnknown: they may be frozen."""
        ...

    async def thaw_guest(self, vm: VmHandle) -> None:
        """Let the guest agent thaw them and read back that they are. Thawed: no effect."""
        ...

    async def unfiltered(self, vm: VmHandle, record: WorkerRecord) -> tuple[str, ...] | None:
        """Return the VMM's threads without their seccomp filter; None where it has none at all.

        NotFound where the process is gone.
        """
        ...

    async def signal(self, record: WorkerRecord, number: signal.Signals) -> None:
        """Signal exactly the recorded process. Gone: no effect."""
        ...

    async def wait_gone(self, record: WorkerRecord) -> None:
        """Return when the recorded process is proven dead; cancellable, no polling."""
        ...

    async def cleanup(self, vm: VmHandle, record: WorkerRecord | None) -> None:
        """Remove what a dead VMM left: its cgroup and its sockets. Idempotent."""
        ...

    async def remove(self, vm: VmHandle) -> None:
        """Remove the VM's directories, runtime and state, at delete. Idempotent."""
        ...

    async def attach_console(self, vm: VmHandle) -> None:
        """Let the console holder connect to the VM's serial line. Attached: no effect."""
        ...

    async def detach_console(self, vm: VmHandle) -> None:
        """Let go of the serial line and end the recording. Not attached: no effect."""
        ...

    def console_attached(self, vm: VmHandle) -> bool:
        """Tell from memory whether the console holder has this VM's serial line."""
        ...


class ArtifactInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A stored artifact; `path` is its content-addressed file."""

    sha256: str
    size_bytes: int
    format: str  # raw | qcow2 for disks, raw for kernel and initramfs
    path: str


class ImageArtifacts(msgspec.Struct, frozen=True, kw_only=True):
    """The artifacts of a builtin image, and the kernel command line that it boots with."""

    kernel: ArtifactInfo | None = None
    initramfs: ArtifactInfo | None = None
    disk: ArtifactInfo | None = None


class ImagePort(Protocol):
    """The content-addressed image store of the node."""

    async def ensure_builtin(self, name: str) -> ImageArtifacts:
        """Build or find the artifacts of a builtin image (`tiny`)."""
        ...

    async def import_file(
        self, path: str, sha256: str, format: str, on_progress: OnProgress | None = None
    ) -> ArtifactInfo:
        """Copy a file in. `sha256` empty: computed; else a mismatch is InvalidArgument.

        Already stored under that sum: no effect. Nothing half-made is left on any error.
        """
        ...

    async def fetch(
        self, url: str, sha256: str, format: str, on_progress: OnProgress | None = None
    ) -> ArtifactInfo:
        """Download a file; goes on where an earlier attempt was broken off or cancelled.

        Unavailable: the network or the server, try again. InvalidArgument: it will not do.
        """
        ...

    def open_upload(self, size_bytes_max: int) -> tuple[str, int]:
        """Begin an upload: its id, and the pipe end to write into, which is the caller's."""
        ...

    async def take_upload(
        self, upload_id: str, size_bytes: int, sha256: str, format: str
    ) -> ArtifactInfo:
        """Store a finished upload; NotFound where it was given up. It is gone afterwards."""
        ...

    async def find(self, sha256: str) -> ArtifactInfo | None:
        """Return what is stored under that sum, if it is whole."""
        ...

    async def remove(self, sha256: str) -> None:
        """Remove the artifact. The engine has made sure that nobody refers to it. Idempotent."""
        ...

    async def collect(self, keep: frozenset[str], *, dry_run: bool) -> Collected:
        """Remove artifacts outside of `keep` and old partial downloads; return which."""
        ...


class SeedNic(msgspec.Struct, frozen=True, kw_only=True):
    """A NIC as the seed disk describes it; addresses come by DHCP.

    `address6` is told all the same, for guests without a client for DHCPv6.
    """

    name: str
    mac: str
    address6: str = ""


class SeedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What goes onto a VM's seed disk. `instance`: another one is another machine to cloud-init."""

    hostname: str
    instance: int = 0
    ssh_authorized_keys: tuple[str, ...] = ()
    user_data: str = ""
    nics: tuple[SeedNic, ...] = ()


class SeedInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The seed disk's file and the public half of the host key that it delivers."""

    path: str
    host_key_public: str


class SeedPort(Protocol):
    """Seed disks and host keys, kept 0600 until the VM is deleted."""

    async def ensure(self, vm: VmHandle, request: SeedRequest) -> SeedInfo:
        """Make the seed disk so; the host key is made once per VM and kept. Idempotent."""
        ...

    async def remove(self, vm: VmHandle) -> None:
        """Remove seed disk and keys. Idempotent."""
        ...


class GuestPort(Protocol):
    """Evidence from inside a guest."""

    async def probe_ssh(self, nic_id: str, port: int) -> str:
        """Return the SSH banner read through nwd's OpenGuestConnection.

        Unavailable or DeadlineExceeded where the guest sent none, OutcomeUnknown where it could
        not be asked: that says nothing about the guest.
        """
        ...

    async def serial_evidence(self, vm: VmHandle, since_s: float = 0.0) -> str:
        """Return a serial line (with time) showing that the guest has booted, else ''.

        Only lines of the VMM incarnation that runs now count, and none from before `since_s`
        (since 1970; 0: all of them). Never raises.
        """
        ...


class SavePort(Protocol):
    """The files of saved VMs. Every effect is idempotent."""

    async def prepare(self, vm: VmHandle, snapshot_uid: str, size_bytes: int) -> str:
        """Make an empty directory that the VMM may write; ResourceExhausted without the room."""
        ...

    async def keep(self, vm: VmHandle, snapshot_uid: str) -> int:
        """Take what the VMM has written out of its reach; return the bytes that it takes."""
        ...

    async def remove(self, vm_uid: str, snapshot_uid: str) -> None:
        """Remove a snapshot's files, wherever they are by now."""
        ...

    async def is_kept(self, snapshot_uid: str) -> bool:
        """Tell whether all files of a snapshot were taken."""
        ...

    async def hand_over(self, vm: VmHandle, snapshot_uid: str) -> str:
        """Let the VM's VMM read a snapshot; return the directory. DataLoss: it is not whole."""
        ...

    async def withdraw(self, vm_uid: str, snapshot_uid: str) -> None:
        """Take back what was handed over."""
        ...


class Gate(Protocol):
    """The node's state as the engine needs it."""

    def check(self, verb: str, *, desired: bool = False, forced_by: str = "") -> None:
        """Raise FailedPrecondition where the node forbids the verb (`node_rules`).

        `desired`: what is desired has it already. `forced_by`: a named operator insists.
        """
        ...

    def starts_allowed(self) -> bool:
        """Tell whether VMs may be started now (TenantReady); asked before each start."""
        ...

    def allow(self, event: NodeEvent) -> None:
        """Raise FailedPrecondition where an operator's wish leads nowhere from this state."""
        ...

    def follow(self, record: NodeRecord) -> None:
        """Do what is recorded of the node by now; called after each change and each reading."""
        ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds from the configuration."""

    vms_max: int = 500
    parallel_starts: int = 4
    parallel_drains: int = 8  # VMs that are stopped at a time while the node is drained
    restarts_max: int = 5
    restart_window_s: float = 600.0
    resync_s: float = 30.0  # full comparison with the world, whatever events say
    monitor_s: float = 3.0  # how often a running VMM is asked for its state
    capacity: Capacity = field(default_factory=Capacity)


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything outside of the engine."""

    stord: Caller
    nwd: Caller
    vmm: VmmPort
    images: ImagePort
    seeds: SeedPort
    saves: SavePort
    guest: GuestPort
    gate: Gate
    clock: Clock
    ids: Ids
    layout: Layout
    limits: Limits = field(default_factory=Limits)
    # What would be chosen by what the probes have seen so far; None: not known yet.
    expect: Callable[[VmmChoice], VmmSelection | None] = lambda choice: None
    boot_id: str = field(default_factory=boot_id)
    upstream: Upstream = field(default_factory=Embedded)
    link: Link | None = None  # to the upstream; the gate looks at the same one

    def moment(self) -> Moment:
        """Return this moment, to be kept over every end of the agent."""
        wall_s = self.clock.now().timestamp()
        return Moment(boot_id=self.boot_id, monotonic_s=self.clock.monotonic(), wall_s=wall_s)
