"""Backups: of what a guest writes meanwhile, of what is detached, whole or only what changed.

A job. The volume is read in its own storage daemon (`bench`), the target is opened in one of
ours, under the tools uid, so a VM's storage daemon never gets at a directory of backups. Recorded
last; whatever is cut short before that is taken back and made again, or left as if it had not
been. Errors: FailedPrecondition with the remedy where an incremental backup would not be true.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from chv.common import logs
from chv.common.clock import timestamp
from chv.common.errors import ChvError, FailedPrecondition, NotFound
from chv.common.failpoint import failpoint
from chv.common.wire.stord import BackupVolume, JobInfo, JobKind
from chv.stord import backup_target, bitmaps, fleece, luks
from chv.stord.backup_target import DirectoryTarget, NbdTarget, Plan
from chv.stord.bench import Bench, Benches, follow
from chv.stord.jobs import JobControl, Jobs
from chv.stord.locks import KeyedLocks
from chv.stord.offline import TARGET
from chv.stord.qsd import graph
from chv.stord.qsd.monitor import Monitor
from chv.stord.records import Volume, VolumeState
from chv.stord.work import Parts

log = logs.get(__name__)
CLEAN_TIMEOUT_S = 30.0
USABLE = (VolumeState.OPEN, VolumeState.CLOSED)


class Backups:
    """Backups of all volumes. `locks` are the volumes' own."""

    def __init__(self, parts: Parts, jobs: Jobs, locks: KeyedLocks, benches: Benches) -> None:
        self._parts = parts
        self._records = parts.records
        self._jobs = jobs
        self._locks = locks
        self._benches = benches

    # --- the call
    async def begin(self, request: BackupVolume) -> JobInfo:
        """Check what can be checked at once, then begin the job; the volume's lock is held."""
        job_id = request.meta.operation_id
        if job_id not in self._records.jobs:
            plan = self._plan(request, job_id)
            target = await self._target(request, plan.row)
            _check_row(plan, target.name)
            target.check(plan)
        return await self._jobs.start(request.volume_id, JobKind.BACKUP, job_id, request, self.run)

    def _plan(self, request: BackupVolume, job_id: str) -> Plan:
        row = self._records.volumes.get(request.volume_id)
        if row is None:
            raise NotFound(f"there is no volume {request.volume_id}", resource=request.volume_id)
        return Plan(
            row=row,
            bitmap=bitmaps.bitmap_name(job_id),
            incremental=request.incremental,
            created_at=timestamp(self._parts.clock.now()),
        )

    async def _target(self, request: BackupVolume, row: Volume) -> DirectoryTarget | NbdTarget:
        find = partial(backup_target.find, request.target, row, self._parts)
        return await anyio.to_thread.run_sync(find)

    # --- the job
    async def run(self, control: JobControl) -> dict[str, str]:
        """Make the backup, or find that it was made."""
        request = control.parameters(BackupVolume)
        plan = self._plan(request, control.job_id)
        target = await self._target(request, plan.row)
        recorded = plan.row.backup_bitmap == plan.bitmap
        if target.done(plan) or recorded:
            if recorded:
                target.sequence = plan.row.backup_sequence
            await self._record(plan, target)
            await self._clean_finished(plan)
            return await target.told(plan)
        _check_row(plan, target.name)
        target.check(plan)
        await target.remove()
        await self._remove_fleece(plan.row)
        try:
            async with self._benches.of(plan.row) as bench:
                await self._clean(bench, plan.row, plan.row.backup_bitmap)
                return await self._make(control, plan, target, bench)
        finally:
            with anyio.move_on_after(CLEAN_TIMEOUT_S, shield=True):
                await target.remove()
                await self._remove_fleece(plan.row)

    async def _clean_finished(self, plan: Plan) -> None:
        """Clean up after a backup that was whole when its daemon was killed."""
        await self._remove_fleece(plan.row)
        try:
            async with self._benches.of(plan.row) as bench:
                await self._clean(bench, plan.row, plan.bitmap)
        except ChvError as error:  # the next backup cleans up first
            log.warning("backup_not_cleaned", volume_id=plan.row.volume_id, error=error)

    async def _make(
        self, control: JobControl, plan: Plan, target: DirectoryTarget | NbdTarget, bench: Bench
    ) -> dict[str, str]:
        try:
            async with bench.monitor() as monitor:
                size_bytes = await bitmaps.size_bytes(monitor, plan.row)
                old = await bitmaps.require(monitor, plan.row) if plan.incremental else ""
            node = await target.make(plan, size_bytes)
            await failpoint("stord.backup.after_target")
            serving = self._benches.offline.serve(
                node, target.owns(), target.keys(plan), uid=bench.uid
            )
            async with serving as socket:
                await self._copy(control, plan, bench, socket, old)
            await control.progress(control.total_bytes, control.total_bytes, "checksum")
            result = await target.keep(plan, size_bytes)
            await failpoint("stord.backup.after_manifest")
            await self._record(plan, target)
            await failpoint("stord.backup.after_record")
        except BaseException as error:
            with anyio.move_on_after(CLEAN_TIMEOUT_S, shield=True):
                await self._clean_after(error, bench, plan.row)
            raise
        await self._clean(bench, plan.row, plan.bitmap)
        return result

    async def _copy(
        self, control: JobControl, plan: Plan, bench: Bench, socket: Path, old: str
    ) -> None:
        """Copy in the bench from one instant on; after an error the caller cleans up."""
        request = control.parameters(BackupVolume)
        fleeced = bool(bench.vm_id) and not bench.read_only
        if fleeced:
            await self._make_fleece(plan.row, bench)
        async with bench.monitor() as monitor:
            await monitor.add_node(_client(plan.row, socket))
            if fleeced:
                await self._open_fleece(monitor, plan.row)
            source = await self._freeze(monitor, plan, bench, fleeced=fleeced)
            await self._start(monitor, plan, source, old, request.bps_max)
        await failpoint("stord.backup.after_start")
        await follow(bench, control, fleece.job(plan.row.volume_id))
        await failpoint("stord.backup.after_copy")
        # The target is closed before its server ends, or it would not be whole.
        await self._close(bench, plan.row)

    async def _freeze(self, monitor: Monitor, plan: Plan, bench: Bench, *, fleeced: bool) -> str:
        """Begin the new bitmap, then the instant of the backup; return the node that shows it.

        A write between the two is in both, which costs a block in the next backup.
        """
        top = graph.format_node(plan.row.volume_id, plan.row.top.number)
        if not bench.read_only:
            action = bitmaps.begin_action(plan.row, plan.bitmap)
            await monitor.call("transaction", {"actions": [action]})
        return await fleece.insert(monitor, plan.row) if fleeced else top

    @staticmethod
    async def _start(monitor: Monitor, plan: Plan, source: str, old: str, bps_max: int) -> None:
        options: graph.Node = {"sync": "full"}
        if old:
            top = graph.format_node(plan.row.volume_id, plan.row.top.number)
            shared = source != top
            name = await fleece.share_bitmap(monitor, plan.row, source, old) if shared else old
            options = {"sync": "bitmap", "bitmap": name, "bitmap-mode": "never"}
        await monitor.call(
            "blockdev-backup",
            {
                **options,
                "job-id": fleece.job(plan.row.volume_id),
                "device": source,
                "target": fleece.target_node(plan.row.volume_id),
                "auto-dismiss": False,
                "speed": bps_max,
            },
        )

    # --- the fleece
    def _fleece(self, row: Volume) -> Path:
        backend = self._parts.disks.backend(row.backend)
        return backend.directory(row.volume_id, row.backend) / fleece.FILE_NAME

    async def _make_fleece(self, row: Volume, bench: Bench) -> None:
        """Make an empty file of the volume's size beside it, encrypted where the volume is."""
        path = await anyio.to_thread.run_sync(self._fleece, row)
        async with bench.monitor() as monitor:
            size_bytes = await bitmaps.size_bytes(monitor, row)
        await backup_target.make_empty(self._parts, path, row, size_bytes)
        await anyio.to_thread.run_sync(os.chown, path, bench.uid, bench.uid)

    async def _open_fleece(self, monitor: Monitor, row: Volume) -> None:
        path = await anyio.to_thread.run_sync(self._fleece, row)
        node = backup_target.file_node(path, row) | {"node-name": fleece.fleece_node(row.volume_id)}
        keys = [row.key] if row.key else []
        async with luks.secrets(monitor, self._parts.layout, row.volume_id, keys):
            await monitor.add_node(node)

    async def _remove_fleece(self, row: Volume) -> None:
        path = await anyio.to_thread.run_sync(self._fleece, row)
        await anyio.to_thread.run_sync(partial(path.unlink, missing_ok=True))

    # --- the end
    async def _close(self, bench: Bench, row: Volume) -> None:
        async with bench.monitor() as monitor:
            await fleece.remove(monitor, row)

    async def _clean(self, bench: Bench, row: Volume, keep: str) -> None:
        """Leave nothing of a backup in the storage daemon but the bitmap of the last one."""
        async with bench.monitor() as monitor:
            await fleece.remove(monitor, row)
            if not bench.read_only:
                await bitmaps.remove_others(monitor, row, keep)

    async def _clean_after(self, error: BaseException, bench: Bench, row: Volume) -> None:
        """Clean up after a failure, which is what the caller tells of."""
        try:
            await self._clean(bench, row, row.backup_bitmap)
        except ChvError as second:  # it has ended, and all of the backup in it with it
            log.warning(
                "backup_not_cleaned", volume_id=row.volume_id, error=second, after=str(error)
            )

    async def _record(self, plan: Plan, target: DirectoryTarget | NbdTarget) -> None:
        async with self._locks.hold(plan.row.volume_id):
            row = self._records.volumes.get(plan.row.volume_id)
            if row is None:
                raise NotFound("the volume is gone", resource=plan.row.volume_id)
            await self._records.put_volume(
                msgspec.structs.replace(
                    row,
                    backup_target=target.name,
                    backup_sequence=target.sequence,
                    backup_bitmap=plan.bitmap,
                )
            )


def _client(row: Volume, socket: Path) -> graph.Node:
    """Describe the target as the volume's storage daemon reaches it."""
    return {
        "driver": "nbd",
        "node-name": fleece.target_node(row.volume_id),
        "server": {"type": "unix", "path": str(socket)},
        "export": TARGET,
        "discard": "unmap",
        "detect-zeroes": "unmap",
    }


def _check_row(plan: Plan, target: str) -> None:
    row = plan.row
    if row.state not in USABLE or row.change is not None:
        what = row.state.value if row.change is None else f"in a {row.change.kind.value}"
        raise FailedPrecondition(f"the volume is {what}", resource=row.volume_id)
    if not plan.incremental:
        return
    if not row.backup_target:
        raise bitmaps.lost(row, "there is no backup before it")
    if not row.backup_bitmap:
        raise bitmaps.lost(row, "a change of the layers ended the record of what changed")
    if row.backup_target != target:
        raise bitmaps.lost(row, f"the last backup went to {row.backup_target!r}")
