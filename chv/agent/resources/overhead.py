"""What a VM takes of the host's memory besides the guest's own: measured, as an upper bound. Pure.

`benchmarks/overhead.py` starts the real processes and counts what is theirs: proportional pages
outside of the guest's memory, and page tables (smaps, VmPTE). The constants are what was seen
after the work that makes a process largest, times the margins in docs/resources.md.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
# A page table entry of 8 bytes for each page of 4 KiB, and the upper levels.
PAGE_TABLE_SHARE = 500
KVM, TCG = "kvm", "tcg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a VM its overhead depends on.

    `driver` and `accelerator` are empty where they are not chosen yet: the dearest counts.
    `memory_bytes`: as much as may ever be mapped. `proxies`: disks behind an in-flight proxy.
    `cache_bytes`: of the storage daemon's tables of qcow2 (`qcow2_cache_bytes`).
    """

    driver: str = ""
    accelerator: str = ""
    vcpus: int = 1
    memory_bytes: int = 0
    disks: int = 0
    proxies: int = 0
    nics: int = 0
    cache_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of a VMM's process, without page tables."""

    base_bytes: int
    vcpu_bytes: int
    device_bytes: int  # each disk and NIC


COSTS: dict[tuple[str, str], Cost] = {
    # Not measured: no machine of ours runs a guest with it. Its code and devices are TCG's.
    ("qemu", KVM): Cost(base_bytes=72 * MIB, vcpu_bytes=2 * MIB, device_bytes=1 * MIB),
    # 64 MiB of it are the cache of translated code (tb-size).
    ("qemu", TCG): Cost(base_bytes=144 * MIB, vcpu_bytes=6 * MIB, device_bytes=1 * MIB),
    ("cloud-hypervisor", KVM): Cost(base_bytes=12 * MIB, vcpu_bytes=1 * MIB, device_bytes=1 * MIB),
    ("fake", ""): Cost(base_bytes=32 * MIB, vcpu_bytes=0, device_bytes=0),
}
STORAGE_BASE_BYTES = 8 * MIB
STORAGE_DISK_BYTES = 3 * MIB
PROXY_BYTES = 14 * MIB
QCOW2_CACHE_BYTES_MAX = 32 * MIB  # of one layer: the driver's own limit
QCOW2_CACHE_SHARE = 8192  # 8 bytes for each cluster of 64 KiB
LAYERS = 2  # an overlay and its image


def qcow2_cache_bytes(size_bytes: int) -> int:
    """Return what the tables of a qcow2 disk take while they are in memory."""
    return LAYERS * min(QCOW2_CACHE_BYTES_MAX, size_bytes // QCOW2_CACHE_SHARE + MIB)


def vmm_bytes(shape: Shape) -> int:
    """Return the bound of the VMM's process with its page tables and KVM's."""
    return max(_vmm_bytes(cost, shape) for cost in _costs(shape)) + _tables(shape, kernel=True)


def storage_bytes(shape: Shape) -> int:
    """Return the bound of the storage daemon, which maps the guest's memory; 0 without disks."""
    if not shape.disks:
        return 0
    own = STORAGE_BASE_BYTES + shape.disks * STORAGE_DISK_BYTES + shape.cache_bytes
    return own + _tables(shape, kernel=False)


def overhead_bytes(shape: Shape) -> int:
    """Return the bound of everything that a VM takes besides its guest's memory."""
    return vmm_bytes(shape) + storage_bytes(shape) + shape.proxies * PROXY_BYTES


def _costs(shape: Shape) -> list[Cost]:
    """Return those that it may come to: of a driver that is not chosen, of all but the fake."""
    if shape.driver == "fake":
        return [COSTS["fake", ""]]
    found = [
        cost
        for (driver, accelerator), cost in COSTS.items()
        if accelerator and shape.driver in ("", driver) and shape.accelerator in ("", accelerator)
    ]
    return found or list(COSTS.values())


def _vmm_bytes(cost: Cost, shape: Shape) -> int:
    devices = shape.disks + shape.nics
    return cost.base_bytes + shape.vcpus * cost.vcpu_bytes + devices * cost.device_bytes


def _tables(shape: Shape, *, kernel: bool) -> int:
    """Those of one process; `kernel`: also the second table by which KVM translates."""
    both = kernel and shape.accelerator in ("", KVM) and shape.driver != "fake"
    return shape.memory_bytes // PAGE_TABLE_SHARE * (2 if both else 1)
