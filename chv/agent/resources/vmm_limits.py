"""The limits of a VMM's cgroup: what it may need at most, with a margin. Pure.

Memory is the guest's maximum and the bound of what is around it. Guest memory is charged to
whoever touches a page first, which may be the VM's storage daemon: that one has no limit of its
own on memory, since it could not be told from the guest's.
"""

from __future__ import annotations

from chv.agent.resources.overhead import MIB, Shape, vmm_bytes
from chv.common.process import Limits
from chv.vmm.driver import VmmConfig

OVERHEAD_MARGIN = 1.5  # over the bound: at a limit that is too tight the guest dies
ROOM_BYTES = 64 * MIB  # for the page cache of what it reads and writes
IO_CPUS = 1  # beside its vCPUs
WEIGHT_OF_CPU, WEIGHT_MAX = 100, 10_000
PIDS_BASE, PIDS_OF_CPU = 256, 4


def vmm_limits(driver: str, config: VmmConfig) -> Limits:
    """Return the limits of a VMM that is started so."""
    vcpus = max(config.cpus, config.cpus_max)
    guest_bytes = max(config.memory_bytes, config.memory_max_bytes)
    shape = Shape(
        driver=driver,
        accelerator=config.accelerator,
        vcpus=vcpus,
        memory_bytes=guest_bytes,
        disks=len(config.disks),
        nics=len(config.nics),
    )
    return Limits(
        memory_max_bytes=guest_bytes + int(vmm_bytes(shape) * OVERHEAD_MARGIN) + ROOM_BYTES,
        cpus_max=vcpus + IO_CPUS,
        cpu_weight=min(WEIGHT_MAX, vcpus * WEIGHT_OF_CPU),
        pids_max=PIDS_BASE + vcpus * PIDS_OF_CPU,
    )
