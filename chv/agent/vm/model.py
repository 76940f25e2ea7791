"""What the planner looks at: what is wanted of a VM and what is seen of it. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from chv.agent.records import EndKind
from chv.vmm.driver import VmmState


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredDisk:
    """A disk of the VM. `volume_uid` is empty where the Volume does not exist."""

    name: str
    volume: str
    volume_uid: str
    generation: int  # of the volume
    read_only: bool = False
    shared: bool = False  # other VMs may have it as well, all of them read only
    grow_now: str = ""  # the operation that wants it unplugged, grown and plugged again
    held: str = ""  # why it may not be attached now: a verb that needs it at rest
    failure: str = field(default="", compare=False)  # why the Volume has failed; words alone

    @property
    def disk_id(self) -> str:
        """Its id in the VMM."""
        return f"disk-{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredNic:
    """A NIC of the VM. `network_uid` is empty where the Network does not exist."""

    name: str
    nic_id: str
    network: str
    network_uid: str
    network_generation: int
    generation: int  # of the NIC
    groups: tuple[tuple[str, str], ...] = ()  # name and uid of each; uid '' where it is not there

    @property
    def group_uids(self) -> list[str]:
        """Its groups as nwd knows them."""
        return [uid for _, uid in self.groups]


class RebuildStage(Enum):
    """How far a VM is with its new root disk."""

    MAKING = "making"  # it is not there yet: the VM goes on as it is
    DUE = "due"  # it is there: the VM ends, and the disks are swapped
    OFF = "off"  # it will never be there, or is not wanted any more
    SWAPPED = "swapped"  # the VM has it; the former one goes once the VM has run


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredVm:
    """What is wanted, from the store alone."""

    uid: str
    running: bool
    held: str = ""  # it is to run, and this is why the node lets no VM run
    deleting: bool = False
    replace_worker: str = ""
    force_stop: bool = False
    reset_request: str = ""
    storage_request: str = ""
    paused: bool = False
    saving: str = ""  # the snapshot for which it is left alone
    restore: str = ""  # the snapshot that it is to go on from
    disks_restored: bool = False
    lent: str = ""  # the snapshot that was handed over for that
    rebuild: RebuildStage | None = None
    rebuild_force: bool = False  # the guest is not asked when it has to end for that
    cpus: int = 1
    memory_bytes: int = 0
    boot_image: str = ""
    disks: tuple[DesiredDisk, ...] = ()
    nics: tuple[DesiredNic, ...] = ()


# --- observed


class Life(Enum):
    """What is proven about a recorded process."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


class Backend(Enum):
    """The storage daemon behind the VM's attachments."""

    SERVING = "serving"
    LOST = "lost"
    RESTARTING = "restarting"  # by itself, under a VM that goes on
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedWorker:
    """The recorded VMM (or intent) against the process table and its monitor."""

    worker_id: str
    life: Life
    recorded: bool = True  # pid is in the store
    state: VmmState = VmmState.UNKNOWN
    booted: bool = False  # recorded: its vCPUs were let run
    recovering: bool = False
    ending: EndKind | None = None
    start_expired: bool = False  # alive, never booted, and out of time
    disks: dict[str, str] = field(default_factory=dict)  # recorded: disk id -> volume uid
    plugged: frozenset[str] | None = None  # disk ids; None: the VMM was not or cannot be asked
    nics: frozenset[str] = frozenset()  # recorded: NIC ids
    plugged_nics: frozenset[str] | None = None  # as `plugged`
    cpus: int = 1  # recorded: what it was given last, and how far it may go; 0: they stay
    cpus_max: int = 0
    memory_bytes: int = 0
    memory_max_bytes: int = 0
    frozen: bool = False  # the guest was perhaps frozen, and nobody is about to thaw it


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedVolume:
    """A volume as stord has it."""

    generation: int
    state: str  # open | missing | broken
    attached_to: str = ""
    pending: bool = False  # it has grown but for the guest
    full: bool = False  # no space is left for writes, and its VM is to stand still


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNic:
    """A NIC as nwd has it."""

    generation: int
    network_uid: str
    attached: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedVm:
    """What is seen. Missing keys mean: not there."""

    worker: ObservedWorker | None = None
    stranger: bool = False  # a live VMM with this VM's id that no record explains
    attached: frozenset[str] = frozenset()  # volume uids attached to this VM
    backend: Backend = Backend.ABSENT
    nics: dict[str, ObservedNic] = field(default_factory=dict)  # of this VM
    volumes: dict[str, ObservedVolume] = field(default_factory=dict)  # that it wants
    networks: dict[str, int] = field(default_factory=dict)  # ready ones: generation
    groups: frozenset[str] = frozenset()  # that nwd has
    storage_known: bool = True  # stord answered
    network_known: bool = True  # nwd answered
    image_ready: bool = True
    selected: bool = False
    files_made: bool = False
    console: bool = False
    recovery_failures: int = 0
    held: bool = False  # its vCPUs are to stand for a moment
    regrown: frozenset[str] = frozenset()  # operations that have had their disk unplugged
    backoff_s: float = 0.0  # not before that many seconds
