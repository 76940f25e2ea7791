"""Composes how a storage daemon opens a volume, and gives it the files for that long.

Own layers come from the volume's record and its class's backend; those below them are an image,
or the layers of the volume that it is a linked clone of, down to that one's own image. The files
of a volume that one VM writes belong to the VM's storage uid while it is attached; what several
may read (layers of other volumes, ReadOnlyMany) gets a read entry for each uid instead. Errors:
DataLoss (a file that must be there is not), NotFound, and those of the backends.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from chv.common import logs
from chv.common.errors import ChvError, DataLoss, InUse, NotFound
from chv.common.wire.stord import AccessMode, CloneMode, VolumeBackend, VolumeFormat
from chv.stord import acl
from chv.stord.backends import disk_files
from chv.stord.backends.base import Backend, Inspection, Space
from chv.stord.backends.registry import Backends
from chv.stord.backends.remote import OnServer
from chv.stord.qsd import graph
from chv.stord.records import Records, Volume

log = logs.get(__name__)
ANCESTORS_MAX = 64
LOCAL_DRIVERS = ("file", "host_device")
ROOT_UID = 0


class Disks:
    """All volumes, seen as what a storage daemon opens."""

    def __init__(self, records: Records, backends: Backends, aio: str) -> None:
        self._records = records
        self._backends = backends
        self._aio = aio

    def backend(self, spec: VolumeBackend) -> Backend:
        """Return the backend of the spec's class."""
        return self._backends.of(spec)

    def described(self, volume_id: str) -> VolumeBackend | None:
        """Return what the volume's own directory says that it is; for one without a record."""
        try:
            data = (self._backends.file.home(volume_id) / "volume.json").read_bytes()
        except FileNotFoundError:
            return None
        return msgspec.json.decode(data, type=VolumeBackend)

    async def sweep(self) -> None:
        """Remove what creations cut short have left of volumes that no record has; at start."""
        await self._backends.sweep(self._records.volumes)

    def lock_path(self, volume_id: str) -> Path:
        """Return the file whose lock means use of the volume."""
        row = self._row(volume_id)
        return self.backend(row.backend).lock_path(volume_id)

    def layer_path(self, volume_id: str, number: int) -> Path:
        """Return the file of an overlay, whether it exists or not; 0 is not one."""
        row = self._row(volume_id)
        assert number > 0, "the first base is the backend's"
        directory = self.backend(row.backend).directory(volume_id, row.backend)
        return directory / f"layer-{number}.qcow2"

    def paths(self, volume_id: str) -> list[Path]:
        """Return the local files and devices of the volume's own layers, the base first."""
        return local_paths(self._own(self._row(volume_id)))

    def below_paths(self, volume_id: str) -> list[Path]:
        """Return those of the layers of other volumes that it rests on."""
        row = self._row(volume_id)
        return local_paths(self._parents(row, 0)) if _is_clone(row) else []

    # --- the graph
    def disk(self, volume_id: str, *, read_only: bool) -> graph.Disk:
        """Describe the volume from bottom to top."""
        row = self._row(volume_id)
        return graph.Disk(
            volume_id=volume_id,
            own=self._own(row),
            below=self._below(row, 0),
            limits=row.backend.limits,
            read_only=read_only,
        )

    def layer(self, volume_id: str, number: int) -> graph.LayerNode:
        """Describe one of the volume's own layers."""
        row, backend = self._row(volume_id), self._row(volume_id).backend
        if number == row.base:
            base = self.backend(backend).protocol(volume_id, backend)
            layer_format = backend.format.value
        else:
            base = self._overlay(volume_id, number)
            layer_format = VolumeFormat.QCOW2.value
        return graph.LayerNode(
            number=number,
            format=layer_format,
            protocol=base,
            key=row.key,
        )

    def _overlay(self, volume_id: str, number: int) -> graph.Protocol:
        path = self.layer_path(volume_id, number)
        try:
            disk_files.virtual_size_bytes(path, VolumeFormat.QCOW2)  # refuses a changed header
        except FileNotFoundError as error:
            raise _missing(volume_id, path) from error
        return disk_files.protocol(path, self._aio)

    def _own(self, row: Volume) -> tuple[graph.LayerNode, ...]:
        return tuple(self.layer(row.volume_id, layer.number) for layer in row.layers)

    def _below(self, row: Volume, depth: int) -> tuple[graph.LayerNode, ...]:
        if row.flat:
            return ()
        if _is_clone(row):
            return self._parents(row, depth)
        source = row.backend.source
        if source is None or row.backend.format is not VolumeFormat.QCOW2:
            return ()
        path = Path(source.path)
        if not path.exists():
            raise _missing(row.volume_id, path)
        node = graph.LayerNode(
            number=0, format=source.format.value, protocol=disk_files.protocol(path, self._aio)
        )
        return (node,)

    def _parents(self, row: Volume, depth: int) -> tuple[graph.LayerNode, ...]:
        """Return the layers of the parent up to the snapshot that this is a clone of."""
        source = row.backend.snapshot
        assert source is not None
        parent = self._records.volumes.get(source.volume_id)
        found = [] if parent is None else list(parent.snapshots)
        layer = next((s.layer for s in found if s.snapshot_id == source.snapshot_id), None)
        if parent is None or layer is None or depth > ANCESTORS_MAX:
            raise DataLoss(
                f"the snapshot {source.snapshot_id} of volume {source.volume_id},"
                " on which the volume rests, is gone",
                resource=row.volume_id,
                hint="restore a backup; the clone is of no use without it",
            )
        numbers = [each.number for each in parent.layers]
        upto = numbers[: numbers.index(layer) + 1]
        own = tuple(self.layer(parent.volume_id, number) for number in upto)
        return (*self._below(parent, depth + 1), *own)

    # --- what is on the disk
    async def inspect(self, volume_id: str) -> Inspection:
        """Look at the base and every overlay; size is what the guest sees, space that of all."""
        row = self._row(volume_id)
        base = await self._base(row)
        if base.state != "open" or len(row.layers) == 1:
            return base
        size_bytes, allocated_bytes = base.size_bytes, base.allocated_bytes
        for layer in row.layers[1:]:
            path = self.layer_path(volume_id, layer.number)
            try:
                size_bytes = disk_files.virtual_size_bytes(path, VolumeFormat.QCOW2)
                allocated_bytes += path.stat().st_blocks * disk_files.STAT_BLOCK_BYTES
            except FileNotFoundError:
                return _changed(base, "missing", _missing(volume_id, path).message)
            except ChvError as error:
                return _changed(base, "broken", error.message)
        return msgspec.structs.replace(base, size_bytes=size_bytes, allocated_bytes=allocated_bytes)

    async def _base(self, row: Volume) -> Inspection:
        backend = self.backend(row.backend)
        if isinstance(backend, OnServer) and self._records.holders(row.volume_id):
            return await backend.served(row.volume_id, row.backend)
        return await backend.inspect(row.volume_id, row.backend)

    async def overlay_space(self, volume_id: str) -> Space | None:
        """Return what is left where the volume's overlays go, whatever its class."""
        row = self._row(volume_id)
        return await self._backends.file.space(volume_id, row.backend)

    @contextlib.asynccontextmanager
    async def reach(self, *volume_ids: str) -> AsyncIterator[None]:
        """Let the tools uid reach what the volumes, and those below them, have on servers."""
        async with contextlib.AsyncExitStack() as reached:
            for volume_id in sorted({each for one in volume_ids for each in self._lineage(one)}):
                spec = self._row(volume_id).backend
                await reached.enter_async_context(self.backend(spec).reach(volume_id, spec))
            yield

    def _lineage(self, volume_id: str) -> Iterator[str]:
        """Yield a volume and those that it rests on."""
        for _ in range(ANCESTORS_MAX):
            yield volume_id
            row = self._row(volume_id)
            if not _is_clone(row) or row.backend.snapshot is None:
                return
            volume_id = row.backend.snapshot.volume_id

    # --- whose the files are
    def grant(self, volume_id: str, uid: int) -> None:
        """Let a storage uid open the volume; InUse where somebody else's process holds it."""
        row = self._row(volume_id)
        with disk_files.read_only_is_told(self.lock_path(volume_id)):
            self._grant(row, uid)

    def _grant(self, row: Volume, uid: int) -> None:
        volume_id = row.volume_id
        if row.backend.access is AccessMode.READ_ONLY_MANY:
            for path in self._shared(row):
                acl.allow_read(path, uid)
        else:
            self.backend(row.backend).grant(volume_id, row.backend, uid)
            self._give_overlays(row, uid)
        for path in self.below_paths(volume_id):
            acl.allow_read(path, uid)

    def revoke(self, volume_id: str, uid: int, *, still: tuple[str, ...] = ()) -> None:
        """Take back what `grant` gave, but for what the volumes `still` need of it.

        `still`: other volumes that the same uid serves. What is gone or held by somebody else
        is left alone.
        """
        row = self._row(volume_id)
        kept = {path for other in still for path in self._readable(other)}
        if row.backend.access is AccessMode.READ_ONLY_MANY:
            with contextlib.suppress(ChvError):
                self._forbid(self._shared(row), uid, kept)
        else:
            try:
                self.backend(row.backend).grant(volume_id, row.backend, ROOT_UID)
                self._give_overlays(row, ROOT_UID)
            except (NotFound, FileNotFoundError, InUse, DataLoss):
                pass  # gone, or somebody else's by now
            except OSError as error:  # read-only or dying: a detach does not wait for that
                log.warning("files_not_taken_back", volume_id=volume_id, error=error)
        with contextlib.suppress(ChvError):  # a parent that is gone has nothing to take back
            self._forbid(self.below_paths(volume_id), uid, kept)

    def _give_overlays(self, row: Volume, uid: int) -> None:
        for layer in row.layers[1:]:
            path = self.layer_path(row.volume_id, layer.number)
            try:
                os.chown(path, uid, uid, follow_symlinks=False)
            except FileNotFoundError as error:
                raise _missing(row.volume_id, path) from error

    def _shared(self, row: Volume) -> list[Path]:
        return [self.lock_path(row.volume_id), *self.paths(row.volume_id)]

    def _readable(self, volume_id: str) -> list[Path]:
        if volume_id not in self._records.volumes:
            return []
        with contextlib.suppress(ChvError):
            return [*self.paths(volume_id), *self.below_paths(volume_id)]
        return []

    @staticmethod
    def _forbid(paths: list[Path], uid: int, kept: set[Path]) -> None:
        for path in paths:
            if path not in kept:
                with contextlib.suppress(FileNotFoundError):
                    acl.forbid_read(path, uid)

    def _row(self, volume_id: str) -> Volume:
        row = self._records.volumes.get(volume_id)
        if row is None:
            raise NotFound(f"there is no volume {volume_id}", resource=volume_id)
        return row


def _is_clone(row: Volume) -> bool:
    source = row.backend.snapshot
    return source is not None and source.mode is CloneMode.LINKED and not row.flat


def local_paths(layers: tuple[graph.LayerNode, ...]) -> list[Path]:
    """Return the files and devices of this node that the layers are in."""
    names = (
        str(layer.protocol.options["filename"])
        for layer in layers
        if layer.protocol.driver in LOCAL_DRIVERS
    )
    # A device is named by a link; lists of access are on what it leads to.
    return [path.resolve() if path.is_relative_to("/dev") else path for path in map(Path, names)]


def _missing(volume_id: str, path: Path) -> DataLoss:
    return DataLoss(
        f"{str(path)!r}, which the volume needs, does not exist",
        resource=volume_id,
        hint="put the file back, or restore a backup",
    )


def _changed(base: Inspection, state: str, problem: str) -> Inspection:
    return msgspec.structs.replace(base, state=state, problem=problem)
