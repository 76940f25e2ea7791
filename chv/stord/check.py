"""CheckVolume: qemu-img check of what is attached to nothing, and its repair. A job.

qcow2: every own layer, under the tools uid. Raw: the file is as long as it must be and can be
read to its end. Damage is a result of a check, not an error of it; a repair that leaves some is
DataLoss. Errors: FailedPrecondition while the volume is attached, those of the tools.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from chv.common.clock import timestamp
from chv.common.errors import DataLoss, FailedPrecondition, NotFound
from chv.common.failpoint import failpoint
from chv.common.wire.stord import CheckVolume, JobInfo, JobKind, VolumeFormat
from chv.stord import luks
from chv.stord.backends import disk_files
from chv.stord.backends.file import FileBackend
from chv.stord.cancelling import cancellable
from chv.stord.disks import Disks
from chv.stord.jobs import JobControl, Jobs
from chv.stord.overlays import read_keys
from chv.stord.qsd import graph
from chv.stord.records import Volume
from chv.stord.tools import Call, json_image
from chv.stord.work import Parts

READ_BYTES = 1 << 20
# qemu-img check: in order; could not check; damaged; clusters that nothing uses; not supported.
CLEAN, FAILED, DAMAGED, LEAKS = 0, 1, 2, 3


class Report(msgspec.Struct, kw_only=True):
    """What qemu-img says of one layer; absent numbers are zero."""

    check_errors: int = msgspec.field(name="check-errors", default=0)
    corruptions: int = 0
    corruptions_fixed: int = msgspec.field(name="corruptions-fixed", default=0)
    leaks: int = 0
    leaks_fixed: int = msgspec.field(name="leaks-fixed", default=0)


class Checks:
    """Checks of all volumes."""

    def __init__(self, parts: Parts, jobs: Jobs) -> None:
        self._parts = parts
        self._records = parts.records
        self._disks: Disks = parts.disks
        self._jobs = jobs

    async def begin(self, request: CheckVolume) -> JobInfo:
        """Begin a check or a repair; the volume's lock is held."""
        kind = JobKind.REPAIR if request.repair else JobKind.CHECK
        self._detached(request.volume_id)
        return await self._jobs.start(
            request.volume_id, kind, request.meta.operation_id, request, self.run
        )

    def _detached(self, volume_id: str) -> Volume:
        row = self._records.volumes.get(volume_id)
        if row is None:
            raise NotFound(f"there is no volume {volume_id}", resource=volume_id)
        held = self._records.holder(volume_id)
        if held is not None:
            raise FailedPrecondition(
                f"the volume is attached to VM {held.vm_id}; a check of it would not be true",
                resource=volume_id,
                hint="stop the VM first",
            )
        return row

    async def run(self, control: JobControl) -> dict[str, str]:
        """Check every own layer, the base first."""
        request = control.parameters(CheckVolume)
        row = self._detached(request.volume_id)
        total = Report()
        for index, layer in enumerate(row.layers):
            await control.progress(index, len(row.layers), f"layer {layer.number}")
            control.refuse_cancelled()
            found = await self._check_layer(control, row, layer.number, repair=request.repair)
            for name in found.__struct_fields__:
                setattr(total, name, getattr(total, name) + getattr(found, name))
            await failpoint("stord.check.after_layer")
        return await self._judge(row, total, repair=request.repair)

    async def _judge(self, row: Volume, total: Report, *, repair: bool) -> dict[str, str]:
        fixed = total.corruptions_fixed + total.leaks_fixed
        errors = total.corruptions + total.check_errors
        if errors == 0 or repair:
            await self._records.mark_clean(row.volume_id)
        await self._note(row.volume_id, "" if errors == 0 else f"{errors} errors in its layers")
        if repair and errors:
            raise DataLoss(
                f"{errors} errors of the volume could not be repaired",
                resource=row.volume_id,
                hint="restore a backup or a snapshot",
            )
        return {"errors": str(errors), "leaks": str(total.leaks), "fixed": str(fixed)}

    async def _note(self, volume_id: str, problem: str) -> None:
        row = self._records.volumes.get(volume_id)
        if row is not None and (problem or row.last_error):
            at = timestamp(self._parts.clock.now())
            await self._records.put_volume(
                msgspec.structs.replace(row, last_error=problem, last_error_at=at)
            )

    # --- one layer
    async def _check_layer(
        self, control: JobControl, row: Volume, number: int, *, repair: bool
    ) -> Report:
        path = await anyio.to_thread.run_sync(self._path, row, number)
        if path is None:
            return Report()  # a server's: it answers for its own bytes
        if number == row.base and row.backend.format is VolumeFormat.RAW:
            return await anyio.to_thread.run_sync(_read_through, path, row, control)
        layer = graph.LayerNode(
            number=number,
            format=VolumeFormat.QCOW2.value,
            protocol=disk_files.protocol(path, "threads"),
            key=row.key,
        )
        secrets = await read_keys(self._parts.layout, row.volume_id, [row.key] if row.key else [])
        node = graph.image_node(layer, graph.secret_id(row.volume_id, row.key))
        call = Call(
            owns=(path,),
            keys=secrets,
            volume_id=row.volume_id,
            accept=(CLEAN, FAILED, DAMAGED, LEAKS),
        )
        argv = ["check", "--output=json", *(["-r", "all"] if repair else [])]
        completed = await self._run(
            control, [*argv, json_image(node | {"backing": None})], call, row
        )
        return _report(completed, path, row)

    async def _run(self, control: JobControl, argv: list[str], call: Call, row: Volume) -> bytes:
        """Run it under the volume's lock until it ends or somebody wants it to."""

        async def work() -> bytes:
            with disk_files.exclusively(self._disks.lock_path(row.volume_id)):
                completed = await self._parts.tools.run(argv, call)
            return completed.stdout or completed.stderr

        return await cancellable(control, work)

    def _path(self, row: Volume, number: int) -> Path | None:
        """Return the file of a layer, without a look into it: it may be damaged."""
        if number != row.base:
            return self._disks.layer_path(row.volume_id, number)
        backend = self._disks.backend(row.backend)
        if isinstance(backend, FileBackend):
            return backend.disk_path(row.volume_id, row.backend)
        return next(iter(self._disks.paths(row.volume_id)), None)


def _report(output: bytes, path: Path, row: Volume) -> Report:
    try:
        return msgspec.json.decode(output, type=Report)
    except msgspec.DecodeError as error:
        text = output.decode(errors="replace").strip().splitlines()
        raise DataLoss(
            f"{str(path)!r} cannot be checked: {text[-1] if text else 'no message'}",
            resource=row.volume_id,
            hint="restore a backup or a snapshot",
        ) from error


def _read_through(path: Path, row: Volume, control: JobControl) -> Report:
    """Look whether a raw disk is whole and all of it readable."""
    encrypted = row.backend.encryption is not None
    wanted = row.size_bytes
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        size_bytes = os.lseek(fd, 0, os.SEEK_END)
        if encrypted:
            size_bytes -= luks.payload_offset_bytes(path)
        errors = 0 if size_bytes >= wanted else 1
        return Report(corruptions=errors + _unreadable(fd, control))
    finally:
        os.close(fd)


def _next_data(fd: int, offset: int, end: int) -> int:
    """Return where data is from an offset on; `end` where there is only a hole."""
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return end
        if error.errno == errno.EINVAL:  # a device knows of no holes
            return offset
        raise


def _unreadable(fd: int, control: JobControl) -> int:
    """Return how many pieces of an open file the disk does not give."""
    bad, end, offset = 0, os.lseek(fd, 0, os.SEEK_END), 0
    while offset < end and not control.cancelling.is_set():
        try:
            offset = _next_data(fd, offset, end)
            os.pread(fd, READ_BYTES, offset)
        except OSError:
            bad += 1
        offset += READ_BYTES
    return bad
