"""The port through which the agent drives a VMM, whichever it is.

A driver never spawns, kills or waits for a process: `launch` says what to start, the agent's
process provider starts it, and the driver then talks to its sockets. Every method raises
`Unavailable` where the monitor does not answer, `DeadlineExceeded` where it is too slow on a
read, `OutcomeUnknown` where a command may or may not have been applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec

# Drivers whose VMM takes up and lets go of disks and NICs while its guest runs.
HOT_PLUG = frozenset({"qemu", "cloud-hypervisor", "fake"})

# {device id: {counter: value}}; only what the VMM really counts.
Counters = dict[str, dict[str, int]]


class Feature(StrEnum):
    """What not every VMM, or not every version of it, can do."""

    GUEST_AGENT = "guest-agent"
    RESIZE_CPUS = "resize-cpus"
    RESIZE_MEMORY = "resize-memory"
    SNAPSHOT = "snapshot"  # memory and device state to a directory, and back
    MIGRATION = "migration"  # between two processes on one host
    COUNTERS = "counters"
    CORE_DUMP = "core-dump"


class VmmState(StrEnum):
    """What the VMM itself says about the guest."""

    EMPTY = "empty"  # VMM is up and has no VM yet: `create` is due
    CREATED = "created"  # VMM is up, vCPUs have never run in this boot
    RUNNING = "running"
    PAUSED = "paused"
    SHUTDOWN = "shutdown"  # the guest powered itself off; the VMM is still there
    PANICKED = "panicked"
    UNKNOWN = "unknown"


class DiskConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A disk. `kind`: `vhost-user-blk` (path is the socket) or `file` (a raw, read-only file)."""

    id: str
    kind: str
    path: str
    read_only: bool = False
    boot_index: int = 0  # 0: not bootable
    volume_id: str = ""  # what is behind it, for whoever reads the record; no driver does


class PluggedDisk(msgspec.Struct, frozen=True, kw_only=True):
    """A vhost-user disk that the VMM has now, and whether it is connected to its back end.

    `connected` is None where the VMM cannot tell.
    """

    id: str
    connected: bool | None


class NicConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A NIC whose tap comes as an open file descriptor for each of its queues.

    `on_port`: it sits where it can be unplugged. Not so one of a VM that an older version started.
    """

    id: str
    mac: str
    mtu: int = 1450
    queues: int = 1
    on_port: bool = False


class VmmConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a VMM is started with. Pure data, stored with the VM's worker record."""

    vm_id: str
    name: str
    worker_id: str  # must be found in the process's argv
    cpus: int
    memory_bytes: int
    accelerator: str = ""  # kvm | tcg, as the probe found it; empty where it has no meaning
    kernel: str = ""  # empty: firmware boot
    initramfs: str = ""
    cmdline: str = ""
    disks: tuple[DiskConfig, ...] = ()
    nics: tuple[NicConfig, ...] = ()
    runtime_dir: str  # 0700, the VM's uid: sockets that the VMM makes
    uuid: str  # SMBIOS system UUID: the VM's uid
    binary: str = ""  # the executable this VM was given; empty: the driver's own
    machine: str = ""  # of QEMU: q35 (also where empty) | microvm
    cpus_max: int = 0  # how far CPUs may grow while the VM runs; 0: they stay
    memory_max_bytes: int = 0  # the same of memory
    save_dir: str = ""  # the VMM's uid writes snapshots and dumps below it; empty: nowhere
    restore_dir: str = ""  # a snapshot to start from: the VM comes up PAUSED
    incoming: bool = False  # it is to `receive` a VM of these devices


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """What a VM has now. What the guest has taken into use is not known to the VMM."""

    cpus: int
    cpus_max: int
    memory_bytes: int
    memory_max_bytes: int


def nic_fds(nics: Sequence[NicConfig], first: int) -> dict[str, tuple[int, ...]]:
    """Return the descriptor numbers of NICs, from `first` on."""
    taken: dict[str, tuple[int, ...]] = {}
    for nic in nics:
        taken[nic.id] = tuple(range(first, first + nic.queues))
        first += nic.queues
    return taken


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """What to start. `nic_fds`: descriptor numbers in the child for each NIC id, one a queue.

    `listeners` and `appended` are files that root makes before the start, 0600, and hands over by
    descriptor number: a listening Unix socket, and a file that is only ever appended to.
    """

    argv: tuple[str, ...]
    environment: dict[str, str] = {}
    cwd: str = "/"
    nic_fds: dict[str, tuple[int, ...]] = {}
    listeners: dict[int, str] = {}
    appended: dict[int, str] = {}
    groups: tuple[int, ...] = ()  # supplementary groups (kvm), beyond the VM's own
    private_kvm: bool = False  # /dev/kvm is root's alone here: it gets a node of its own
    # True only for a program that runs no guest and could not read its own code as the VM's uid.
    keep_root: bool = False


class VmmObservation(msgspec.Struct, frozen=True, kw_only=True):
    """`reason` and `evidence` say where the state comes from, e.g. `query-status: shutdown`.

    `reboots`: by the guest itself; at least, where the VMM tells them not exactly. `resets`: how
    often it boots anew for another reason than a call of ours, `reset_at_s`: when it did last, for
    whatever reason. `remembers`: both are of this process, else of the present connection alone.
    """

    state: VmmState
    reason: str = ""
    evidence: str = ""
    version: str = ""
    reboots: int | None = None  # None: not counted
    resets: int = 0
    reset_at_s: float = 0.0  # since 1970; 0: not known
    remembers: bool = True


class DriverProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this driver can run a guest here. A device node that exists proves nothing."""

    driver: str
    usable: bool
    accelerator: str = ""
    version: str = ""
    reason: str = ""
    auto: bool = True  # False: usable, but a VM must ask for it (no stock kernel came up)
    binary: str = ""  # absolute path of what was probed
    sha256: str = ""  # of that file
    missing: tuple[str, ...] = ()  # instructions that stock kernels need and KVM does not run


class ProbeGuest(msgspec.Struct, frozen=True, kw_only=True):
    """The probe guest for a try-boot: its ELF, which must be readable for everybody.

    `instructions`: all that it knows, in its order. `missing`: those of which another VMM has shown
    that this KVM does not run them.
    """

    kernel: str
    initramfs: str = ""
    cmdline: str = ""
    work_dir: str = ""
    instructions: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


class VmmDriver(Protocol):
    """One VMM product. Stateless towards the VM except for cached connections."""

    name: str

    async def probe(self, guest: ProbeGuest | None) -> DriverProbe:
        """Try the VMM (and KVM, by a try-boot of `guest` with a deadline); never raises."""
        ...

    def recall(self, result: DriverProbe) -> None:
        """Take over what an earlier probe on this host boot found, in place of a new one."""
        ...

    def launch(self, config: VmmConfig) -> Launch:
        """Return what to start. Pure; raises Unsupported or InvalidArgument."""
        ...

    def features(self) -> frozenset[Feature]:
        """Return what the probed version can do; what is missing raises Unsupported."""
        ...

    def kept_files(self, runtime_dir: Path) -> tuple[Path, ...]:
        """Return what lies outside of `runtime_dir` and goes when the VMM is gone."""
        ...

    async def create(
        self, runtime_dir: Path, config: VmmConfig, nic_fds: Mapping[str, Sequence[int]]
    ) -> None:
        """Make the VM in an EMPTY VMM: CREATED after it, PAUSED where it restores a snapshot.

        `nic_fds`: the open taps of `config.nics`, which stay the caller's. Not EMPTY any more: no
        effect, but what an attempt that was cut short left is made anew. A VMM that was given its
        VM by `launch` is never EMPTY.
        """
        ...

    async def observe(self, runtime_dir: Path) -> VmmObservation:
        """Ask the monitor for the state."""
        ...

    async def boot(self, runtime_dir: Path) -> None:
        """Let the vCPUs of a created VM run. Already running: no effect.

        Like every change here, FailedPrecondition where the state does not allow it.
        """
        ...

    async def power_button(self, runtime_dir: Path) -> None:
        """Press the ACPI power button once; success says nothing about the guest.

        No effect where the guest is off already.
        """
        ...

    async def pause(self, runtime_dir: Path) -> None:
        """Stop the vCPUs and read back that they stand."""
        ...

    async def halt(self, runtime_dir: Path) -> None:
        """Let no vCPU run on, whatever its disks do: PAUSED, or CREATED where it is cut off.

        For a guest that is to be reset anyway: a pause waits for disks that may never answer.
        """
        ...

    async def resume(self, runtime_dir: Path) -> None:
        """Let the vCPUs of a paused or reset VM run and read back that they do."""
        ...

    async def reset(self, runtime_dir: Path) -> None:
        """Hard reset in the same VMM.

        Running vCPUs go on running. Where they stand (paused, shut down, panicked) they keep
        standing and the VM is CREATED again: nothing has run in the new boot.
        """
        ...

    async def quit(self, runtime_dir: Path) -> None:
        """Ask the VMM process to end at once; the caller watches the process."""
        ...

    async def await_disks(self, runtime_dir: Path, disk_ids: tuple[str, ...]) -> None:
        """Return once the VMM is connected to these vhost-user disks again."""
        ...

    async def disks(self, runtime_dir: Path) -> tuple[PluggedDisk, ...]:
        """Return the vhost-user disks that are plugged, one that is being let go of included."""
        ...

    async def add_disk(self, runtime_dir: Path, disk: DiskConfig) -> None:
        """Plug a vhost-user disk whose back end listens. Plugged already: no effect.

        Unavailable where nothing listens on its path: a VMM that waits for that stands still.
        """
        ...

    async def remove_disk(self, runtime_dir: Path, disk_id: str) -> None:
        """Unplug a disk; returns only when guest and VMM have let go of it. Not there: no effect.

        FailedPrecondition where no vCPU runs that could let go; DeadlineExceeded where the guest
        does not: it may still do so later, so look at `disks` before anything else.
        """
        ...

    async def nics(self, runtime_dir: Path) -> tuple[str, ...]:
        """Return the ids of the NICs that are plugged, one that is being let go of included."""
        ...

    async def add_nic(self, runtime_dir: Path, nic: NicConfig, fds: Sequence[int]) -> None:
        """Plug a NIC with the descriptors of its tap, which stay the caller's. Plugged: no effect.

        What an attempt that was cut short left is to be dropped by `drop_nic` before the tap is
        opened: a VMM that still holds it keeps others from opening it.
        """
        ...

    async def drop_nic(self, runtime_dir: Path, nic_id: str) -> None:
        """Let go of the tap of a NIC that is not plugged. Nothing held: no effect."""
        ...

    async def remove_nic(self, runtime_dir: Path, nic_id: str) -> None:
        """Unplug a NIC as `remove_disk` does a disk, and let go of its tap."""
        ...

    async def sizes(self, runtime_dir: Path) -> Sizes:
        """Ask for the numbers of CPUs and bytes of memory, and how far they may go."""
        ...

    async def set_cpus(self, runtime_dir: Path, cpus: int) -> None:
        """Give the VM that many CPUs, and read back. InvalidArgument beyond its maximum.

        Fewer: returns once the guest has let go of them; DeadlineExceeded where it does not.
        """
        ...

    async def set_memory(self, runtime_dir: Path, memory_bytes: int) -> None:
        """Give the VM that much memory, and read back; as `set_cpus`."""
        ...

    async def snapshot(self, runtime_dir: Path, directory: Path) -> None:
        """Write memory and devices of a paused VM to an empty directory; disks are not in it.

        The VM stays PAUSED. On any error the directory's content is worthless.
        """
        ...

    async def receive(
        self,
        runtime_dir: Path,
        config: VmmConfig,
        nic_fds: Mapping[str, Sequence[int]],
        socket: Path,
    ) -> None:
        """Wait on a Unix socket for a VM of this host; returns when it is here."""
        ...

    async def send(self, runtime_dir: Path, socket: Path) -> None:
        """Hand the running VM over; returns when it is there and this VMM has none any more."""
        ...

    async def counters(self, runtime_dir: Path) -> Counters:
        """Return what the VMM counts of its devices."""
        ...

    async def core_dump(self, runtime_dir: Path, path: Path) -> None:
        """Write the guest's memory as an ELF core to a file that does not exist yet."""
        ...

    async def nmi(self, runtime_dir: Path) -> None:
        """Inject an NMI; success says nothing about the guest."""
        ...

    async def ping_guest(self, runtime_dir: Path) -> None:
        """Return where the guest agent answers; Unavailable or DeadlineExceeded where not."""
        ...

    async def freeze_guest(self, runtime_dir: Path) -> None:
        """Let the guest agent freeze the file systems. Frozen already: no effect.

        Unavailable: it was not asked. OutcomeUnknown: they may be frozen.
        """
        ...

    async def thaw_guest(self, runtime_dir: Path) -> None:
        """Let the guest agent thaw them, and read back that they are. Thawed: no effect."""
        ...

    async def guest_frozen(self, runtime_dir: Path) -> bool:
        """Ask the guest agent whether file systems are frozen by it."""
        ...

    def unfiltered(self, pid: int) -> tuple[str, ...] | None:
        """Return the threads of a running VMM that no seccomp filter holds, though one should.

        None where this VMM has no filters to speak of. NotFound where the process is gone.
        """
        ...

    def serial_socket(self, runtime_dir: Path) -> Path:
        """Return the Unix socket on which the VMM serves the serial console."""
        ...

    async def close(self, runtime_dir: Path) -> None:
        """Drop a cached connection; the VM is not touched."""
        ...
