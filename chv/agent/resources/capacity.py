"""How much of the machine VMs may be promised. Pure data, made once at the agent's start."""

from __future__ import annotations

from dataclasses import dataclass

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Of one node. What is not known or not limited is 0.

    `machine_bytes`: the machine's memory, or less where the node lives in a container with a
    limit. `hugepage_bytes`: set aside as huge pages, which no VM of ours uses.
    """

    machine_bytes: int = 0
    hugepage_bytes: int = 0
    reserve_bytes: int = 0
    memory_overcommit: float = 1.0
    cpus: int = 0
    vcpu_overcommit: float = 0.0

    @property
    def memory_bytes(self) -> int | None:
        """What all VMs together may have; None: nobody knows, so there is no limit."""
        if not self.machine_bytes:
            return None
        own = self.machine_bytes - self.hugepage_bytes - self.reserve_bytes
        return int(max(0, own) * self.memory_overcommit)

    @property
    def vcpus(self) -> int | None:
        """How many virtual CPUs all VMs together may have; None: as many as they like."""
        if not self.cpus or not self.vcpu_overcommit:
            return None
        return int(self.cpus * self.vcpu_overcommit)

    @property
    def words(self) -> str:
        """How the limit of memory comes about."""
        parts = [f"{about(self.machine_bytes)} of the machine"]
        if self.hugepage_bytes:
            parts.append(f"less {about(self.hugepage_bytes)} of huge pages")
        parts.append(f"less {about(self.reserve_bytes)} for the host")
        if self.memory_overcommit != 1.0:
            parts.append(f"times {self.memory_overcommit:g}")
        return ", ".join(parts)


def about(size_bytes: int) -> str:
    """Return a size for a person, in MiB below 10 GiB."""
    if size_bytes >= 10 * GIB:
        return f"{size_bytes / GIB:.1f} GiB"
    return f"{-(-size_bytes // MIB)} MiB"
