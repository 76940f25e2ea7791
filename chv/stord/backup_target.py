"""Where one backup goes: a new file in a directory of backups, or the export of a server.

A file is `<sequence>.qcow2.part` until it is whole and on the disk; its entry in `backup.json`
comes last, so what is listed can be restored. Nobody but root can read it then. A server's export
gets the data as they are, and so is refused what is encrypted here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import anyio.lowlevel
import anyio.to_thread
import msgspec

from chv.common.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    OwnershipConflict,
    Unsupported,
)
from chv.common.failpoint import failpoint
from chv.common.files import fsync, sha256_file, sync_directory
from chv.common.wire.stord import NbdPlace
from chv.stord import allow, backup_files, overlays, qcow2
from chv.stord.backup_files import Entry, Manifest
from chv.stord.offline import Keys
from chv.stord.qsd import graph
from chv.stord.records import Volume
from chv.stord.work import Parts

NBD_SCHEME = "nbd"
NBD_PORT = 10809
CREATE_TIMEOUT_S = 60.0
FILE_MODE = 0o600


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What one backup is."""

    row: Volume
    bitmap: str  # that it begins
    incremental: bool
    created_at: str


class Target(Protocol):
    """A place for one backup."""

    name: str  # as it is recorded
    sequence: int

    def check(self, plan: Plan) -> None:
        """Refuse what cannot go there."""

    def done(self, plan: Plan) -> bool:
        """Tell whether this very backup is there already."""

    async def make(self, plan: Plan, size_bytes: int) -> graph.Node:
        """Make it, empty; return how it is opened."""

    def owns(self) -> Sequence[Path]:
        """Return the files that opening it needs."""

    def keys(self, plan: Plan) -> Keys:
        """Return the keys that opening it needs."""

    async def keep(self, plan: Plan, size_bytes: int) -> None:
        """Put what was written on the medium, under its name."""

    async def enter(self, plan: Plan) -> None:
        """Have it listed; what is kept but not listed since a kill as well."""

    async def take_back(self, plan: Plan) -> None:
        """Have it no longer listed."""

    async def told(self, plan: Plan) -> dict[str, str]:
        """Return what there is to know of a backup that is there."""

    async def remove(self) -> None:
        """Remove what is not whole."""


class DirectoryTarget:
    """A directory below storage.backup_paths."""

    def __init__(self, parts: Parts, directory: Path) -> None:
        self._parts = parts
        self.directory = directory
        self.name = str(directory)
        self._manifest = backup_files.load(directory)
        self.sequence = (self._manifest.last if self._manifest else 0) + 1
        self._entry: Entry | None = None  # of the file that was kept

    @property
    def _file(self) -> Path:
        return backup_files.file_of(self.directory, self.sequence)

    @property
    def _partial(self) -> Path:
        return self._file.with_name(self._file.name + backup_files.PARTIAL)

    def check(self, plan: Plan) -> None:
        """Refuse a directory of another volume, and one that no longer ends with our last."""
        backup_files.check_makeable(self.directory)
        there = self._manifest
        if there is not None and there.volume_id != plan.row.volume_id:
            raise OwnershipConflict(
                f"{self.name!r} holds backups of volume {there.volume_id}",
                field="target",
                hint="give each volume a directory of its own",
            )
        if plan.incremental:
            last = there.find(plan.row.backup_sequence) if there else None
            if last is None or last.bitmap != plan.row.backup_bitmap:
                raise FailedPrecondition(
                    f"{self.name!r} does not hold the last backup of the volume",
                    field="incremental",
                    hint="make a full backup",
                )

    def done(self, plan: Plan) -> bool:
        """See `Target`; then its number is the one that it has."""
        for entry in self._manifest.backups if self._manifest else []:
            if entry.bitmap == plan.bitmap:
                self.sequence = entry.sequence
                return True
        return False

    async def make(self, plan: Plan, size_bytes: int) -> graph.Node:
        """Make an empty file, encrypted with the volume's key if that is."""
        await anyio.to_thread.run_sync(backup_files.prepare, self.directory)
        await make_empty(self._parts, self._partial, plan.row, size_bytes)
        # Zeros must be written down: above its parent what is not written is the parent's.
        return file_node(self._partial, plan.row) | {"detect-zeroes": "unmap"}

    def owns(self) -> Sequence[Path]:
        """See `Target`."""
        return (self._partial,)

    def keys(self, plan: Plan) -> Keys:
        """See `Target`."""
        names = (plan.row.key,) if plan.row.key else ()
        return Keys(volume_id=plan.row.volume_id, names=names)

    async def keep(self, plan: Plan, size_bytes: int) -> None:
        """Put the file on the medium under its name."""
        measured = partial(self._measured, self._partial, plan, size_bytes)
        self._entry = await anyio.to_thread.run_sync(measured)
        await failpoint("stord.backup.after_checksum")
        await anyio.to_thread.run_sync(self._give_name)
        await failpoint("stord.backup.after_rename")

    async def enter(self, plan: Plan) -> None:
        """See `Target`."""
        if self.done(plan):
            return
        entry = self._entry
        if entry is None:
            entry = await anyio.to_thread.run_sync(self._found, plan)
        old = self._manifest or Manifest(volume_id=plan.row.volume_id)
        await self._save(backup_files.added(old, entry))

    async def take_back(self, plan: Plan) -> None:
        """See `Target`."""
        if self._manifest is not None and self.done(plan):
            await self._save(backup_files.without(self._manifest, self.sequence))

    async def _save(self, manifest: Manifest) -> None:
        await anyio.to_thread.run_sync(backup_files.save, self.directory, manifest)
        self._manifest = manifest

    async def told(self, plan: Plan) -> dict[str, str]:
        """See `Target`."""
        await anyio.lowlevel.checkpoint()
        entry = None if self._manifest is None else self._manifest.find(self.sequence)
        return {
            "path": str(self._file),
            "sequence": str(self.sequence),
            "bytes": str(entry.file_bytes if entry else 0),
        }

    def _found(self, plan: Plan) -> Entry:
        """Describe a file that a kill left kept and not listed."""
        path = self._file
        try:
            return self._measured(path, plan, qcow2.read_header(path).size_bytes)
        except FileNotFoundError as error:
            raise DataLoss(f"the backup {str(path)!r} is gone", hint="make another") from error

    def _measured(self, path: Path, plan: Plan, size_bytes: int) -> Entry:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise OwnershipConflict(f"{str(path)!r} was replaced while it was written")
        path.chmod(FILE_MODE)
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fsync(fd, path)
        finally:
            os.close(fd)
        return Entry(
            sequence=self.sequence,
            parent=plan.row.backup_sequence if plan.incremental else 0,
            size_bytes=size_bytes,
            file_bytes=status.st_size,
            sha256=sha256_file(path),
            created_at=plan.created_at,
            bitmap=plan.bitmap,
            key=plan.row.key or None,
        )

    def _give_name(self) -> None:
        self._partial.replace(self._file)
        sync_directory(self.directory)

    async def remove(self) -> None:
        """Remove the file unless it is listed."""
        await anyio.to_thread.run_sync(self._remove)

    def _remove(self) -> None:
        listed = self._manifest is not None and self._manifest.find(self.sequence) is not None
        self._partial.unlink(missing_ok=True)
        if not listed and self.directory.is_dir():
            self._file.unlink(missing_ok=True)
            sync_directory(self.directory)


class NbdTarget:
    """An export of a server that storage.remotes lists; it is overwritten."""

    def __init__(self, place: NbdPlace, name: str, row: Volume) -> None:
        self._place = place
        self._size_bytes = 0  # unknown
        self.name = name
        self.sequence = row.backup_sequence + 1 if row.backup_target == name else 1

    def check(self, plan: Plan) -> None:
        """Refuse to send away in the clear what is encrypted here."""
        if plan.row.key:
            raise Unsupported(
                "an encrypted volume would be readable on the server",
                resource=plan.row.volume_id,
                field="target",
                hint="back it up to a directory, where it stays encrypted",
            )

    def done(self, plan: Plan) -> bool:
        """See `Target`; only the record knows."""
        return False

    async def make(self, plan: Plan, size_bytes: int) -> graph.Node:
        """Describe the export, cut to the size of the volume."""
        await anyio.lowlevel.checkpoint()
        place = self._place
        return {
            "driver": "raw",
            "size": size_bytes,
            "file": {
                "driver": "nbd",
                "server": {"type": "inet", "host": place.host, "port": str(place.port)},
                "export": place.export,
            },
        }

    def owns(self) -> Sequence[Path]:
        """See `Target`."""
        return ()

    def keys(self, plan: Plan) -> Keys:
        """See `Target`."""
        return Keys(volume_id=plan.row.volume_id)

    async def keep(self, plan: Plan, size_bytes: int) -> None:
        """Nothing is left to do."""
        await anyio.lowlevel.checkpoint()
        self._size_bytes = size_bytes

    async def enter(self, plan: Plan) -> None:
        """The record is the list."""
        await anyio.lowlevel.checkpoint()

    async def take_back(self, plan: Plan) -> None:
        """See `enter`."""
        await anyio.lowlevel.checkpoint()

    async def told(self, plan: Plan) -> dict[str, str]:
        """See `Target`; its bytes are known to who wrote them."""
        await anyio.lowlevel.checkpoint()
        told = {"path": self.name, "sequence": str(self.sequence)}
        return told | ({"bytes": str(self._size_bytes)} if self._size_bytes else {})

    async def remove(self) -> None:
        """Leave it: what was there before is gone anyway."""
        await anyio.lowlevel.checkpoint()


async def make_empty(parts: Parts, path: Path, row: Volume, size_bytes: int) -> None:
    """Make an empty qcow2 file in place of whatever there is, encrypted if the volume is."""
    empty = overlays.Empty(path=path, size_bytes=size_bytes, timeout_s=CREATE_TIMEOUT_S)
    await overlays.make_empty(parts.tools, parts.layout, row, empty)


def file_node(path: Path, row: Volume) -> graph.Node:
    """Describe such a file as it is opened."""
    protocol = graph.Protocol(driver="file", options={"filename": str(path)}, direct=False)
    layer = graph.LayerNode(number=0, format="qcow2", protocol=protocol, key=row.key)
    secret = graph.secret_id(row.volume_id, row.key)
    return graph.image_node(layer, secret) | {"backing": None}


def find(target: str, row: Volume, parts: Parts) -> DirectoryTarget | NbdTarget:
    """Return the place that a request means; blocks."""
    if not target.startswith(f"{NBD_SCHEME}://"):
        directory = backup_files.resolve_target(target, parts.storage.backup_paths)
        return DirectoryTarget(parts, directory)
    place = parse_nbd(target)
    allow.check_remote(place, parts.storage.remotes)
    return NbdTarget(place, target, row)


def parse_nbd(text: str) -> NbdPlace:
    """Return the export that `nbd://host:port/name` means."""
    try:
        url = urlsplit(text)
        given = {
            "host": url.hostname or "",
            "port": url.port or NBD_PORT,
            "export": url.path.removeprefix("/"),
        }
        place = msgspec.convert(given, NbdPlace)
    except (ValueError, msgspec.ValidationError) as error:
        raise InvalidArgument(
            f"{text!r} is not an NBD export", field="target", hint="nbd://HOST:PORT/EXPORT"
        ) from error
    if not place.host or url.username or url.query or url.fragment:
        raise InvalidArgument(
            f"{text!r} is not an NBD export", field="target", hint="nbd://HOST:PORT/EXPORT"
        )
    return place
