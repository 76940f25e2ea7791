"""What a VM takes of the host's memory besides the guest's own: measured, as an upper bound. Pure.

The constants come from `benchmarks/overhead.py`, which starts the real processes, sums what is
theirs alone (smaps: private and proportional pages outside of the guest's memory, and VmPTE), and
reports model against measured. They are above what was seen by the margins in docs/resources.md.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20
# A page table entry of 8 bytes for each page of 4 KiB; the upper levels add a 512th of that.
PAGE_TABLE_SHARE = 500
# A second table of the same size where KVM translates.
KVM, TCG = "kvm", "tcg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What of a VM its overhead depends on.

    `driver` and `accelerator` are empty where they are not chosen yet: the dearest counts.
    `proxies`: disks behind an in-flight proxy.
    """

    driver: str = ""
    accelerator: str = ""
    vcpus: int = 1
    memory_bytes: int = 0
    disks: int = 0
    proxies: int = 0
    nics: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of a VMM's process, without page tables."""

    base_bytes: int
    vcpu_bytes: int
    device_bytes: int  # each disk and NIC


COSTS: dict[tuple[str, str], Cost] = {
    ("qemu", KVM): Cost(base_bytes=64 * MIB, vcpu_bytes=2 * MIB, device_bytes=1 * MIB),
    # With the cache of translated code (tb-size) and a translation buffer for each vCPU.
    ("qemu", TCG): Cost(base_bytes=136 * MIB, vcpu_bytes=6 * MIB, device_bytes=1 * MIB),
    ("cloud-hypervisor", KVM): Cost(base_bytes=24 * MIB, vcpu_bytes=1 * MIB, device_bytes=1 * MIB),
    ("fake", ""): Cost(base_bytes=32 * MIB, vcpu_bytes=0, device_bytes=0),
}
STORAGE_BASE_BYTES = 12 * MIB
STORAGE_DISK_BYTES = 4 * MIB
PROXY_BYTES = 24 * MIB


def vmm_bytes(shape: Shape) -> int:
    """Return the bound of the VMM's process with its page tables and KVM's."""
    return max(_vmm_bytes(cost, shape) for cost in _costs(shape)) + _tables(shape, kernel=True)


def storage_bytes(shape: Shape) -> int:
    """Return the bound of the storage daemon, which maps the guest's memory; 0 without disks."""
    if not shape.disks:
        return 0
    return STORAGE_BASE_BYTES + shape.disks * STORAGE_DISK_BYTES + _tables(shape, kernel=False)


def overhead_bytes(shape: Shape) -> int:
    """Return the bound of everything that a VM takes besides its guest's memory."""
    return vmm_bytes(shape) + storage_bytes(shape) + shape.proxies * PROXY_BYTES


def _costs(shape: Shape) -> list[Cost]:
    found = [
        cost
        for (driver, accelerator), cost in COSTS.items()
        if shape.driver in ("", driver)
        and (shape.accelerator == accelerator or not shape.accelerator or driver == "fake")
        and not (driver == "fake" and shape.driver != "fake")
    ]
    return found or list(COSTS.values())


def _vmm_bytes(cost: Cost, shape: Shape) -> int:
    devices = shape.disks + shape.nics
    return cost.base_bytes + shape.vcpus * cost.vcpu_bytes + devices * cost.device_bytes


def _tables(shape: Shape, *, kernel: bool) -> int:
    both = kernel and shape.accelerator in ("", KVM) and shape.driver != "fake"
    return shape.memory_bytes // PAGE_TABLE_SHARE * (2 if both else 1)
