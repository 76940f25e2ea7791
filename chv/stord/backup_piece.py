"""One volume of a backup: its target, its fleece, what of it is in a storage daemon.

A piece is made anew for every try. Of one that was cut short, `remove` and `clean` take away what
is left; nothing here decides whether that is so. Errors: FailedPrecondition with the remedy where
an incremental backup would not be true; those of the target and the monitor.
"""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import anyio.to_thread

from chv.common import logs
from chv.common.errors import ChvError, FailedPrecondition
from chv.stord import backup_target, bitmaps, fleece, luks
from chv.stord.backup_target import DirectoryTarget, NbdTarget, Plan
from chv.stord.bench import Bench, Benches
from chv.stord.offline import TARGET
from chv.stord.qsd import graph
from chv.stord.qsd.monitor import Monitor
from chv.stord.records import Volume, VolumeState
from chv.stord.work import Parts

log = logs.get(__name__)
USABLE = (VolumeState.OPEN, VolumeState.CLOSED)


class Piece:
    """One volume of one try at a backup."""

    bench: Bench  # from `open` on
    size_bytes: int
    _socket: Path
    _old = ""  # the bitmap of what changed

    def __init__(self, parts: Parts, plan: Plan, target: DirectoryTarget | NbdTarget) -> None:
        self._parts = parts
        self.plan = plan
        self.target = target

    @property
    def row(self) -> Volume:
        """The volume as it was when the try began."""
        return self.plan.row

    @property
    def recorded(self) -> bool:
        """Tell whether the volume's record has this very backup."""
        return self.row.backup_bitmap == self.plan.bitmap

    @property
    def fleeced(self) -> bool:
        """Tell whether something may write meanwhile."""
        return bool(self.bench.vm_id) and not self.bench.read_only

    @property
    def top(self) -> str:
        """Name of the node with the volume's present state."""
        return graph.format_node(self.row.volume_id, self.row.top.number)

    def check(self) -> None:
        """Refuse what cannot be backed up, not now, or not there."""
        row = self.row
        if row.state not in USABLE or row.change is not None:
            what = row.state.value if row.change is None else f"in a {row.change.kind.value}"
            raise FailedPrecondition(f"the volume is {what}", resource=row.volume_id)
        if self.plan.incremental:
            _check_incremental(row, self.target.name)
        self.target.check(self.plan)

    # --- before the instant
    async def open(self, benches: Benches, stack: AsyncExitStack) -> None:
        """Enter the storage daemon that has the volume; leave nothing of an earlier try in it."""
        self.bench = await stack.enter_async_context(benches.of(self.row))
        await self.clean(self.row.backup_bitmap)

    async def make(self, benches: Benches, stack: AsyncExitStack) -> None:
        """Make the target and have it served until the stack is left; make the fleece."""
        async with self.bench.monitor() as monitor:
            self.size_bytes = await bitmaps.size_bytes(monitor, self.row)
            if self.plan.incremental:
                self._old = await bitmaps.require(monitor, self.row)
        node = await self.target.make(self.plan, self.size_bytes)
        serving = benches.offline.serve(
            node, self.target.owns(), self.target.keys(self.plan), uid=self.bench.uid
        )
        self._socket = await stack.enter_async_context(serving)
        if self.fleeced:
            await self._make_fleece()

    async def connect(self, monitor: Monitor) -> None:
        """Open target and fleece in the storage daemon."""
        row = self.row
        await monitor.add_node(_client(row, self._socket))
        if not self.fleeced:
            return
        path = await anyio.to_thread.run_sync(self._fleece)
        node = backup_target.file_node(path, row) | {"node-name": fleece.fleece_node(row.volume_id)}
        keys = [row.key] if row.key else []
        async with luks.secrets(monitor, self._parts.layout, row.volume_id, keys):
            await monitor.add_node(node)

    # --- after it
    async def start(self, monitor: Monitor, bps_max: int) -> None:
        """Begin to copy what the volume was in the instant."""
        volume_id = self.row.volume_id
        source = fleece.access_node(volume_id) if self.fleeced else self.top
        options: graph.Node = {"sync": "full"}
        if self._old:
            name = self._old
            if self.fleeced:
                name = await fleece.share_bitmap(monitor, self.row, source, name)
            options = {"sync": "bitmap", "bitmap": name, "bitmap-mode": "never"}
        await monitor.call(
            "blockdev-backup",
            {
                **options,
                "job-id": fleece.job(volume_id),
                "device": source,
                "target": fleece.target_node(volume_id),
                "auto-dismiss": False,
                "speed": bps_max,
            },
        )

    async def close(self) -> None:
        """Close what `connect` opened: a target is whole once its own server has ended, too."""
        async with self.bench.monitor() as monitor:
            await fleece.remove(monitor, self.row)

    # --- the end
    async def clean(self, keep: str) -> None:
        """Leave nothing of a backup in the storage daemon but one bitmap."""
        async with self.bench.monitor() as monitor:
            await fleece.remove(monitor, self.row)
            if not self.bench.read_only:
                await bitmaps.remove_others(monitor, self.row, keep)

    async def try_to_clean(self, keep: str, after: str = "") -> None:
        """Clean where something else is told of; the next backup cleans up first."""
        try:
            await self.clean(keep)
        except ChvError as error:  # the daemon has ended, and all of the backup in it with it
            log.warning(
                "backup_not_cleaned", volume_id=self.row.volume_id, error=error, after=after
            )

    async def clean_finished(self, benches: Benches) -> None:
        """Clean up after a backup that was whole when its daemon was killed."""
        try:
            async with AsyncExitStack() as stack:
                self.bench = await stack.enter_async_context(benches.of(self.row))
                await self.clean(self.plan.bitmap)
        except ChvError as error:  # the next backup cleans up first
            log.warning("backup_not_cleaned", volume_id=self.row.volume_id, error=error)

    async def remove(self) -> None:
        """Remove the files of what is not listed."""
        await self.target.remove()
        path = await anyio.to_thread.run_sync(self._fleece)
        await anyio.to_thread.run_sync(partial(path.unlink, missing_ok=True))

    # --- the fleece
    def _fleece(self) -> Path:
        backend = self._parts.disks.backend(self.row.backend)
        return backend.directory(self.row.volume_id, self.row.backend) / fleece.FILE_NAME

    async def _make_fleece(self) -> None:
        """Make an empty file of the volume's size beside it, encrypted where the volume is."""
        path = await anyio.to_thread.run_sync(self._fleece)
        await backup_target.make_empty(self._parts, path, self.row, self.size_bytes)
        await anyio.to_thread.run_sync(os.chown, path, self.bench.uid, self.bench.uid)


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


def _check_incremental(row: Volume, target: str) -> None:
    if not row.backup_target:
        raise bitmaps.lost(row, "there is no backup before it")
    if not row.backup_bitmap:
        raise bitmaps.lost(row, "a change of the layers ended the record of what changed")
    if row.backup_target != target:
        raise bitmaps.lost(row, f"the last backup went to {row.backup_target!r}")
