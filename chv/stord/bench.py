"""The storage daemon in which a job on a volume works, whichever that is.

Attached: the VM's own, whose monitor is taken for a moment under the VM's lock, so that the VM is
not held up by a job. Detached: one of our own that lives as long as the job. If the VM's is
replaced under a job, the job fails; it never goes on in a daemon that knows nothing of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio

from chv.common.errors import Cancelled, FailedPrecondition, Unavailable
from chv.stord.jobs import JobControl
from chv.stord.keeper import Keeper
from chv.stord.live import live_monitor
from chv.stord.offline import Offline
from chv.stord.qsd import block_jobs
from chv.stord.qsd.monitor import Monitor
from chv.stord.records import BackendPhase, Volume

POLL_S = 0.2


class Bench:
    """One storage daemon that has the volume open."""

    def __init__(
        self,
        uid: int,
        monitor: Callable[[], AbstractAsyncContextManager[Monitor]],
        *,
        vm_id: str,
        read_only: bool,
    ) -> None:
        self.uid = uid  # who must be able to open files
        self.monitor = monitor  # a block of work on it; keep it short
        self.vm_id = vm_id  # empty: the volume is detached
        self.read_only = read_only


class Benches:
    """Finds the bench of a volume."""

    def __init__(self, keeper: Keeper, offline: Offline) -> None:
        self._keeper = keeper
        self._parts = keeper.parts
        self.offline = offline

    @asynccontextmanager
    async def of(self, row: Volume) -> AsyncIterator[Bench]:
        """Yield the storage daemon that has the volume open, or one that opens it for this."""
        held = self._parts.records.holder(row.volume_id)
        if held is None:
            async with self.offline.open(row) as connection:

                @asynccontextmanager
                async def same() -> AsyncIterator[Monitor]:
                    yield connection

                yield Bench(self.offline.uid, same, vm_id="", read_only=False)
            return
        backend = self._parts.records.backends.get(held.vm_id)
        if backend is None or backend.phase is not BackendPhase.SERVING:
            raise FailedPrecondition(
                f"the storage daemon of VM {held.vm_id} does not serve",
                resource=row.volume_id,
                hint="wait until the VM has recovered",
            )
        yield Bench(
            backend.storage_uid,
            self._live(held.vm_id, backend.incarnation),
            vm_id=held.vm_id,
            read_only=held.read_only,
        )

    def _live(
        self, vm_id: str, incarnation: str
    ) -> Callable[[], AbstractAsyncContextManager[Monitor]]:
        @asynccontextmanager
        async def monitor() -> AsyncIterator[Monitor]:
            async with (
                self._keeper.locks.hold(vm_id),
                live_monitor(self._parts, vm_id, "job") as connection,
            ):
                backend = self._parts.records.backends.get(vm_id)
                if connection is None or backend is None or backend.incarnation != incarnation:
                    raise Unavailable(
                        "the storage daemon ended while the job ran in it",
                        resource=vm_id,
                        hint="begin it again",
                    )
                yield connection

        return monitor


async def follow(bench: Bench, control: JobControl, name: str, *until: str) -> str:
    """Watch a job of the storage daemon until it has ended or its status is one of `until`.

    Cancelled and typed errors of the job come as such; it is dismissed in every case but `until`.
    """
    while True:
        async with bench.monitor() as monitor:
            job = await block_jobs.find(monitor, name)
            if job is None:
                raise Unavailable("the storage daemon knows nothing of the job any more")
            await control.progress(job.done, job.total)
            if job.status in until:
                return job.status
            if job.status == block_jobs.CONCLUDED:
                await block_jobs.dismiss(monitor, name)
                if job.error:
                    raise block_jobs.failure(job, control.volume_id)
                return job.status
            if control.cancelling.is_set():
                await block_jobs.cancel(monitor, name)
                raise Cancelled("cancelled on request", resource=control.job_id)
        with anyio.move_on_after(POLL_S):
            await control.cancelling.wait()
