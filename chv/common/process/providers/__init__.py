"""How detached workers are started and grouped: one Protocol, one provider chosen per node.

`choose_provider` prefers cgroup v2, where a writable unified hierarchy exists, over plain
processes. A provider that makes systemd transient units fits the same Protocol. Records name
their own cgroup, so a node that changes its provider still finds and ends its old workers.
"""

from __future__ import annotations

from typing import Protocol

from chv.common.layout import Layout
from chv.common.process.providers.cgroup import CgroupProvider, find_hierarchy
from chv.common.process.providers.plain import PlainProvider
from chv.common.process.records import Adoption, FoundWorker, WorkerRecord
from chv.common.process.spec import SpawnSpec


class Provider(Protocol):
    """Starts, finds, signals and clears away workers. Every method may be repeated."""

    @property
    def name(self) -> str:
        """Return `plain`, `cgroup` or another kind."""

    @property
    def layout(self) -> Layout:
        """Return the instance whose workers it handles."""

    @property
    def controllers(self) -> frozenset[str]:
        """Return whose limits in a `SpawnSpec` take effect: of memory, cpu, pids."""

    async def spawn(self, spec: SpawnSpec) -> WorkerRecord:
        """Start a worker; on an error nothing of it is left."""

    async def kill(self, record: WorkerRecord, number: int) -> bool:
        """Signal the worker, SIGKILL also its descendants; False when it was gone already."""

    def adopt(self, record: WorkerRecord) -> Adoption:
        """Judge a record."""

    def find(self, worker_prefix: str) -> list[FoundWorker]:
        """Return live workers whose id starts with the prefix."""

    async def cleanup(self, record: WorkerRecord) -> None:
        """Remove what is left of a dead worker; InUse while it lives."""

    async def sweep(self) -> list[str]:
        """Remove empty containers of starts that never got a record; return their names."""

    async def retire(self) -> None:
        """Remove what the provider made for the instance; InUse while workers live."""


def choose_provider(layout: Layout) -> Provider:
    """Return the best provider that works on this host."""
    hierarchy = find_hierarchy()
    if hierarchy is None:
        return PlainProvider(layout)
    return CgroupProvider(layout, hierarchy)


__all__ = ["CgroupProvider", "PlainProvider", "Provider", "choose_provider", "find_hierarchy"]
