"""A directory of backups: where it may be, what its `backup.json` says, and whether that is true.

`<sequence>.qcow2` holds what changed since its parent, sequence 0 standing for nothing at all; no
file names another in its header, the order is in `backup.json` alone. What comes from there is
believed only after it was checked: another machine may have written it. Everything blocks. Errors:
PermissionDenied (no allowlist has the directory), InvalidArgument, NotFound, DataLoss (a file is
not what the manifest says).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from chv.common.errors import (
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from chv.common.files import atomic_write, ensure_dir, resolve_inside, sha256_file
from chv.common.wire.storage import KeyName
from chv.common.wire.types import Sha256, Uid
from chv.stord import qcow2
from chv.stord.tools import check_reachable

MANIFEST = "backup.json"
MANIFEST_BYTES_MAX = 4 << 20
ENTRIES_MAX = 10_000
FORMAT = 1
PASSABLE = 0o711
PARTIAL = ".part"
Number = Annotated[int, Meta(ge=1, le=10**6)]


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One backup. `parent` 0: it is whole. `bitmap` also names the job that made it."""

    sequence: Number
    parent: Annotated[int, Meta(ge=0, le=10**6)]
    size_bytes: Annotated[int, Meta(ge=512, le=2**60, multiple_of=512)]
    file_bytes: Annotated[int, Meta(ge=1, le=2**60)]
    sha256: Sha256
    created_at: Annotated[str, Meta(max_length=40)]
    bitmap: Annotated[str, Meta(max_length=64, pattern=r"^[a-z0-9-]{1,64}\Z")]
    key: KeyName | None = None  # the file is encrypted with it


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`backup.json`."""

    format: Annotated[int, Meta(ge=FORMAT, le=FORMAT)] = FORMAT
    volume_id: Uid
    backups: Annotated[list[Entry], Meta(max_length=ENTRIES_MAX)] = []

    @property
    def last(self) -> int:
        """Sequence of the newest backup; 0: there is none."""
        return self.backups[-1].sequence if self.backups else 0

    def find(self, sequence: int) -> Entry | None:
        """Return one backup."""
        return next((entry for entry in self.backups if entry.sequence == sequence), None)


def resolve_target(target: str, roots: Sequence[str]) -> Path:
    """Return the directory that `target` means; it lies below one of the roots."""
    if not target.isprintable():
        raise InvalidArgument(f"{target!r} holds control characters", field="target")
    given = Path(target)
    root = next((root for root in roots if given.is_relative_to(root)), None)
    if root is None or ".." in given.parts:
        raise PermissionDenied(
            f"{target!r} lies in no directory that backups may go to",
            field="target",
            hint="add one to storage.backup_paths; an empty list allows none",
        )
    if not Path(root).is_dir():
        raise FailedPrecondition(
            f"{root!r} of storage.backup_paths is not there",
            field="target",
            hint="mount it, or correct the configuration",
        )
    try:
        return resolve_inside(Path(root), str(given.relative_to(root)))
    except InvalidArgument as error:
        raise PermissionDenied(
            f"{target!r} is not a directory below {root!r}",
            field="target",
            hint=f"a directory of its own, such as {root}/NAME",
        ) from error


def prepare(directory: Path) -> None:
    """Make the directory; the storage uids can pass through it and see nothing."""
    check_makeable(directory)
    ensure_dir(directory, mode=PASSABLE)


def check_makeable(directory: Path) -> None:
    """Raise where the storage uids could not come to it, were it made."""
    made = directory
    while not made.parent.exists():
        made = made.parent
    check_reachable(made)


def load(directory: Path) -> Manifest | None:
    """Return what is in the directory, None where nothing is; checked but for the files."""
    path = directory / MANIFEST
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataLoss(f"{str(path)!r} cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DataLoss(f"{str(path)!r} is not a regular file")
        data = os.read(fd, MANIFEST_BYTES_MAX + 1)
    finally:
        os.close(fd)
    return parse(data, str(path))


def parse(data: bytes, name: str) -> Manifest:
    """Return the manifest that the text means."""
    if len(data) > MANIFEST_BYTES_MAX:
        raise DataLoss(f"{name!r} is larger than {MANIFEST_BYTES_MAX} bytes")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise DataLoss(f"{name!r} is not a list of backups: {error}") from error
    known = {0}
    for entry in manifest.backups:
        if entry.sequence <= max(known):
            raise DataLoss(f"{name!r}: backup {entry.sequence} is out of order")
        if entry.parent not in known:
            raise DataLoss(
                f"{name!r}: backup {entry.sequence} rests on {entry.parent}, which is not there"
            )
        known.add(entry.sequence)
    return manifest


def save(directory: Path, manifest: Manifest) -> None:
    """Replace `backup.json`."""
    atomic_write(directory / MANIFEST, msgspec.json.encode(manifest))


def added(manifest: Manifest, entry: Entry) -> Manifest:
    """Return the manifest with one backup more."""
    if len(manifest.backups) >= ENTRIES_MAX:
        raise FailedPrecondition(
            f"the directory holds {ENTRIES_MAX} backups", field="target", hint="begin another"
        )
    return msgspec.structs.replace(manifest, backups=[*manifest.backups, entry])


def without(manifest: Manifest, sequence: int) -> Manifest:
    """Return the manifest without one backup, on which no other rests."""
    left = [entry for entry in manifest.backups if entry.sequence != sequence]
    return msgspec.structs.replace(manifest, backups=left)


def chain(manifest: Manifest, sequence: int) -> list[Entry]:
    """Return the backups that a restoration needs, the whole one first; 0: up to the newest."""
    wanted = sequence or manifest.last
    entry = manifest.find(wanted)
    if entry is None:
        known = ", ".join(str(each.sequence) for each in manifest.backups[-20:]) or "none"
        raise NotFound(
            f"there is no backup {wanted}", field="backend.backup.sequence", hint=f"known: {known}"
        )
    found = [entry]
    while entry.parent:
        entry = manifest.find(entry.parent)
        assert entry is not None, "parse has seen every parent"
        found.append(entry)
    return found[::-1]


def file_of(directory: Path, sequence: int) -> Path:
    """Return the file of a backup."""
    return directory / f"{sequence}.qcow2"


def verify(directory: Path, entry: Entry) -> Path:
    """Return the file of a backup; DataLoss where it is not what the manifest says."""
    path = file_of(directory, entry.sequence)
    try:
        status = path.lstat()
    except FileNotFoundError as error:
        raise _spoilt(path, "it is not there") from error
    if not stat.S_ISREG(status.st_mode):
        raise _spoilt(path, "it is not a regular file")
    if status.st_size != entry.file_bytes:
        raise _spoilt(path, f"it has {status.st_size} bytes, not {entry.file_bytes}")
    try:
        header = qcow2.read_header(path)
    except InvalidArgument as error:
        raise _spoilt(path, error.message) from error
    if header.has_backing or header.has_external_data or header.corrupt:
        raise _spoilt(path, "its header names other files or says that it is corrupt")
    if header.size_bytes != entry.size_bytes:
        raise _spoilt(path, f"it is a disk of {header.size_bytes} bytes, not {entry.size_bytes}")
    if sha256_file(path) != entry.sha256:
        raise _spoilt(path, "its content has changed since it was written")
    return path


def _spoilt(path: Path, why: str) -> DataLoss:
    return DataLoss(
        f"the backup {str(path)!r} is of no use: {why}",
        hint="restore an earlier one, or put the file back from a copy",
    )
