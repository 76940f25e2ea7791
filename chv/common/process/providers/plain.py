"""Workers as plain detached processes, for hosts without a writable cgroup v2 hierarchy.

Descendants of a worker are not grouped: what it starts, it must end.
"""

from __future__ import annotations

import msgspec

from chv.common.errors import InUse
from chv.common.layout import Layout
from chv.common.process import pidfd, procfs, records
from chv.common.process.launch import Started, prepared, start_detached
from chv.common.process.records import Adoption, FoundWorker, WorkerRecord
from chv.common.process.spec import SpawnSpec, check_spawn, resolve


class PlainProvider:
    """See `Provider`."""

    name = "plain"
    controllers: frozenset[str] = frozenset()

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    async def spawn(self, spec: SpawnSpec) -> WorkerRecord:
        """Start a worker."""
        check_spawn(spec)
        with prepared(spec, dies_with_parent=False) as launch:
            started = await start_detached(spec, launch)
        return make_record(spec, started, "")

    async def kill(self, record: WorkerRecord, number: int) -> bool:
        """Signal the worker."""
        return pidfd.send(record, number)

    def adopt(self, record: WorkerRecord) -> Adoption:
        """Judge a record."""
        return records.examine(record)

    def find(self, worker_prefix: str) -> list[FoundWorker]:
        """Return live workers whose id starts with the prefix."""
        found = records.scan(worker_prefix)
        return [msgspec.structs.replace(worker, cgroup="") for worker in found]

    async def cleanup(self, record: WorkerRecord) -> None:
        """Nothing is left of a dead plain worker."""
        require_dead(record)

    async def sweep(self) -> list[str]:
        """Nothing is made that could be left over."""
        return []

    async def retire(self) -> None:
        """Nothing is made for the instance; InUse while workers live, as with any provider."""
        if found := self.find(self.layout.worker_prefix):
            raise InUse(f"{len(found)} workers still run", resource=found[0].worker_id)


def make_record(spec: SpawnSpec, started: Started, cgroup: str) -> WorkerRecord:
    """Return the durable record of a worker that has just been started."""
    return WorkerRecord(
        worker_id=spec.worker_id,
        pid=started.pid,
        start_time=started.start_time,
        boot_id=procfs.boot_id(),
        executable=procfs.executable(started.pid) or resolve(spec),
        cgroup=cgroup,
    )


def require_dead(record: WorkerRecord) -> None:
    """Raise InUse unless the recorded process is proven dead."""
    adoption = records.examine(record)
    if not adoption.verdict.dead:
        raise InUse(f"worker is not gone: {adoption.reason}", resource=record.worker_id)
