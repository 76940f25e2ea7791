"""The agent's API for what the machine has and what fits on it. Sizes are bytes.

What cannot be read is null, or absent from a list, and never guessed.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from chv.common.rpc import Method
from chv.common.wire.agent import VmmProbe
from chv.common.wire.resources import CPUS_MAX, DISKS_MAX, INTERFACES_MAX, VmmChoice
from chv.common.wire.types import Feature, Message, Name, NameOrEmpty, Reply, ShortText, SizeBytes

GROUPS_MAX = 64
COUNT_MAX = 10_000


# --- inventory


class CpuInventory(Reply, frozen=True, kw_only=True):
    """`online`: as the kernel writes a set, `0-7`. `flags`: those of interest that are there.

    `nested`: the parameter of the KVM module, where it is loaded.
    """

    model: str = ""
    sockets: int | None = None
    cores: int | None = None
    threads: int | None = None
    online: str = ""
    flags: list[str] = []
    nested: str = ""


class NumaNode(Reply, frozen=True, kw_only=True):
    """One node of the machine's memory."""

    node: int
    cpus: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None


class HugePages(Reply, frozen=True, kw_only=True):
    """Pages of one size that were set aside."""

    page_bytes: int
    total: int | None = None
    free: int | None = None


class MemoryInventory(Reply, frozen=True, kw_only=True):
    """`limit_bytes`: of the container that the node is in, where that is less."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    limit_bytes: int | None = None
    hugepages: list[HugePages] = []


class BlockDevice(Reply, frozen=True, kw_only=True):
    """`mounted`: where it or a part of it is."""

    name: str
    size_bytes: int | None = None
    rotational: bool | None = None
    model: str = ""
    mounted: list[str] = []


class PlaceInventory(Reply, frozen=True, kw_only=True):
    """The file system of a directory that the node uses. `purpose`: state, run, images, pool X."""

    purpose: str
    path: str
    device: str = ""
    type: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None


class ProgramInventory(Reply, frozen=True, kw_only=True):
    """A program that the node runs; `path` is empty where it is not installed."""

    name: str
    path: str = ""
    version: str = ""
    sha256: str = ""


class CgroupInventory(Reply, frozen=True, kw_only=True):
    """`mode`: v2 | hybrid | v1 | none. `limits`: what is limited for each VM, or why nothing is."""

    mode: str
    hierarchy: str = ""
    controllers: list[str] = []
    limits: str = ""


class Commitment(Reply, frozen=True, kw_only=True):
    """What VMs that are wanted running are promised, and the most that they may be.

    `capacity_bytes` and `vcpus_max` are null where there is no limit. `overhead_bytes` of
    `memory_bytes` are around the guests.
    """

    vms: int
    memory_bytes: int
    overhead_bytes: int
    vcpus: int
    capacity_bytes: int | None = None
    reserve_bytes: int = 0
    hugepage_bytes: int = 0
    memory_overcommit: float = 1.0
    vcpus_max: int | None = None


class GetInventory(Message, frozen=True, kw_only=True):
    """`fresh`: look again, however young the last look is."""

    fresh: bool = False


class InventoryReply(Reply, frozen=True, kw_only=True):
    """What the machine has. `age_s`: since it was looked at; `commitment` is of this moment."""

    gathered_at: str
    age_s: float
    kernel: str = ""
    architecture: str = ""
    cpu: CpuInventory = CpuInventory()
    numa: list[NumaNode] = []
    memory: MemoryInventory = MemoryInventory()
    disks: list[BlockDevice] = []
    places: list[PlaceInventory] = []
    programs: list[ProgramInventory] = []
    vmms: list[VmmProbe] = []
    kvm: str = ""  # the verdict, in words
    cgroup: CgroupInventory
    features: list[Feature] = []
    commitment: Commitment


# --- fit


class FitDisk(Message, frozen=True, kw_only=True):
    """A new disk. `pool` as in a Volume: empty is the node's own place. `raw`: of that format."""

    size_bytes: SizeBytes
    pool: NameOrEmpty = ""
    raw: bool = False


class FitGroup(Message, frozen=True, kw_only=True):
    """So many VMs of one kind. `networks`: that a NIC of each is on; they may not be there yet.

    `kept_disks`: volumes that are there already, which take no more space.
    """

    count: Annotated[int, Meta(ge=1, le=COUNT_MAX)]
    cpus: Annotated[int, Meta(ge=1, le=CPUS_MAX)]
    memory_bytes: SizeBytes
    disks: Annotated[list[FitDisk], Meta(max_length=DISKS_MAX)] = []
    kept_disks: Annotated[int, Meta(ge=0, le=DISKS_MAX)] = 0
    networks: Annotated[list[Name], Meta(max_length=INTERFACES_MAX)] = []
    vmm: VmmChoice = VmmChoice.AUTO


class FitVms(Message, frozen=True, kw_only=True):
    """Ask how many of these fit beside what is committed, one group after the other."""

    groups: Annotated[list[FitGroup], Meta(min_length=1, max_length=GROUPS_MAX)]
    namespace: Name = "default"


class FitNeed(Reply, frozen=True, kw_only=True):
    """What a group needs of a resource, and what was left for it. `fits`: so many by it alone."""

    resource: ShortText  # memory | vcpus | vms | disk PLACE | ports of network NAME
    per_vm: int
    left: int
    fits: int

    @property
    def is_size(self) -> bool:
        """Tell whether the numbers are bytes."""
        return self.resource == "memory" or self.resource.startswith("disk ")


class FitResult(Reply, frozen=True, kw_only=True):
    """`binds`: the resource that is used up first, also where all fit; empty: none is limited.

    `lacking`: for each resource that lacks, how much more would be needed for all.
    """

    asked: int
    fits: int
    binds: str = ""
    needs: list[FitNeed] = []
    lacking: dict[str, int] = {}


class FitReply(Reply, frozen=True, kw_only=True):
    """A result for each group. `unlimited`: what nobody limits or knows, with the reason."""

    groups: list[FitResult]
    unlimited: dict[str, str] = {}


GET_INVENTORY = Method("GetInventory", GetInventory, InventoryReply, timeout_s=30.0, mutating=False)
FIT_VMS = Method("FitVms", FitVms, FitReply, mutating=False)

INVENTORY_METHODS = (GET_INVENTORY, FIT_VMS)
