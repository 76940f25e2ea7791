"""The storage daemon in which a job on a volume works, whichever that is.

Attached: the VM's own, whose monitor is taken for a moment under the VM's lock, so that the VM is
not held up by a job. Detached: one of our own that lives as long as the job. If the VM's is
replaced under a job, the job fails; it never goes on in a daemon that knows nothing of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio
import msgspec

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


class Followed(msgspec.Struct, frozen=True, kw_only=True):
    """A job of a storage daemon, and the volume that its errors name."""

    bench: Bench
    name: str
    volume_id: str


async def follow(bench: Bench, control: JobControl, name: str, *until: str) -> str:
    """Watch a job of the storage daemon until it has ended or its status is one of `until`.

    Cancelled and typed errors of the job come as such; it is dismissed in every case but `until`.
    """
    followed = Followed(bench=bench, name=name, volume_id=control.volume_id)
    while True:
        job = await _look(followed, control, *until)
        await control.progress(job.done, job.total)
        if job.status in (*until, block_jobs.CONCLUDED):
            return job.status
        await _pause(control)


async def follow_all(jobs: Sequence[Followed], control: JobControl) -> None:
    """Watch several jobs until all have ended; at the first that fails the others are left."""
    seen: dict[str, block_jobs.BlockJob] = {}
    while True:
        for followed in jobs:
            before = seen.get(followed.name)
            if before is None or before.status != block_jobs.CONCLUDED:
                seen[followed.name] = await _look(followed, control)
        done, total = (sum(counts) for counts in zip(*map(_progress, seen.values()), strict=True))
        await control.progress(done, total)
        if all(job.status == block_jobs.CONCLUDED for job in seen.values()):
            return
        await _pause(control)


def _progress(job: block_jobs.BlockJob) -> tuple[int, int]:
    return job.done, job.total


async def _look(followed: Followed, control: JobControl, *until: str) -> block_jobs.BlockJob:
    name = followed.name
    async with followed.bench.monitor() as monitor:
        job = await block_jobs.find(monitor, name)
        if job is None:
            raise Unavailable("the storage daemon knows nothing of the job any more")
        if job.status in until:
            return job
        if job.status == block_jobs.CONCLUDED:
            await block_jobs.dismiss(monitor, name)
            if job.error:
                raise block_jobs.failure(job, followed.volume_id)
        elif control.cancelling.is_set():
            await block_jobs.cancel(monitor, name)
            raise Cancelled("cancelled on request", resource=control.job_id)
        return job


async def _pause(control: JobControl) -> None:
    with anyio.move_on_after(POLL_S):
        await control.cancelling.wait()
