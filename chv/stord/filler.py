"""The job that makes and fills a volume which takes time: begun, restarted, given up.

Its record is CREATING until it is done. The runner takes no lock of the volume: calls that would
disturb it are refused, or (a deletion) end it first. What a failed or cancelled one had made is
removed; the record stays, says why, and the next OpenVolume begins anew.
"""

from __future__ import annotations

import anyio
import anyio.to_thread
import msgspec

from chv.common.clock import timestamp
from chv.common.errors import ChvError, Conflict
from chv.common.failpoint import failpoint
from chv.common.wire.stord import JobKind, JobState, VolumeBackend
from chv.stord.filling import Fills, FillVolume
from chv.stord.jobs import JobControl, Jobs
from chv.stord.records import Volume, VolumeState
from chv.stord.work import Parts

END_TIMEOUT_S = 20.0
POLL_S = 0.05
UNDO_TIMEOUT_S = 30.0


class Filler:
    """Fills volumes."""

    def __init__(self, parts: Parts, jobs: Jobs, fills: Fills) -> None:
        self._parts = parts
        self._records = parts.records
        self._jobs = jobs
        self._fills = fills

    def check(self, spec: VolumeBackend) -> None:
        """Raise Unsupported where nothing on this node can fill such a volume."""
        self._fills.of(spec)

    async def check_source(self, spec: VolumeBackend) -> None:
        """Raise where the source of a volume that is to be made is of no use."""
        await anyio.to_thread.run_sync(self._fills.check_source, spec)

    def refuse_busy(self, volume_id: str) -> None:
        """Raise Conflict where a job is under way on a volume."""
        self._jobs.refuse_busy(volume_id)

    async def begin(self, row: Volume, job_id: str) -> None:
        """Begin the job unless it runs already."""
        if self._records.job_of(row.volume_id) is None:
            parameters = FillVolume(volume_id=row.volume_id)
            await self._jobs.start(row.volume_id, JobKind.CREATE, job_id, parameters, self.run)

    async def run(self, control: JobControl) -> dict[str, str]:
        """Make the volume anew and fill it; the runner of the job."""
        row = self._records.volumes[control.volume_id]
        if row.state is not VolumeState.CREATING:
            return {}
        backend = self._parts.disks.backend(row.backend)
        fill = self._fills.of(row.backend)
        assert fill is not None
        try:
            await backend.delete(row.volume_id, row.backend)  # what a kill had left
            await backend.create(row.volume_id, row.backend)
            await failpoint("stord.fill.after_create")
            if await self._fills.prepare(row):
                await fill(control, row)
            await failpoint("stord.fill.after_copy")
        except ChvError as error:
            with anyio.move_on_after(UNDO_TIMEOUT_S, shield=True):
                await backend.delete(row.volume_id, row.backend)
                await self._put(
                    row.volume_id,
                    last_error=str(error),
                    last_error_at=timestamp(self._parts.clock.now()),
                )
            raise
        done = {"state": VolumeState.OPEN, "begun": False, "last_error": "", "last_error_at": ""}
        await self._put(row.volume_id, **done)
        return {}

    async def abandon(self, row: Volume) -> None:
        """End the creation of a volume that is to be deleted; other jobs are not ended."""
        job = self._records.job_of(row.volume_id)
        if job is None:
            return
        if job.info.kind is not JobKind.CREATE:
            self._jobs.refuse_busy(row.volume_id)
        await self._jobs.cancel(job.info.job_id)
        with anyio.move_on_after(END_TIMEOUT_S):
            # Its end is durable before it is told; there is nothing else to wait on.
            while self._jobs.get(job.info.job_id).state is JobState.RUNNING:  # noqa: ASYNC110
                await anyio.sleep(POLL_S)
            return
        raise Conflict(
            f"the volume's creation, job {job.info.job_id}, does not end",
            resource=row.volume_id,
            hint="try again",
        )

    async def _put(self, volume_id: str, **changes: object) -> None:
        current = self._records.volumes[volume_id]
        await self._records.put_volume(msgspec.structs.replace(current, **changes))
