"""The content-addressed store: `<root>/sha256/<64 hex>`, each file 0444 and never changed.

A file gets its final name only when complete, synced and proven to hash to that name; what a
killed import leaves is a temporary file that `recover` removes at the next start. Downloads that
are not complete stay in `<root>/partial` for a day. One process owns a root. Which Image uses
which artifact is the caller's knowledge. Blocking parts run in a worker thread.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import anyio.to_thread
import msgspec

from chv.common.clock import Clock, SystemClock
from chv.common.errors import ChvError, InUse, InvalidArgument, ResourceExhausted
from chv.common.files import free_bytes, no_space_is_exhausted, sync_directory
from chv.common.ids import Ids
from chv.common.names import check_sha256
from chv.images.copying import (
    ByteProgress,
    copy_hashed,
    hash_file,
    open_source,
    read_header,
    sync_file,
)
from chv.images.formats import HEADER_BYTES, check_format
from chv.images.partials import collect_partials

TEMPORARY_PREFIX = ".import-"
YOUNG_S = 60.0
PARTIAL_AGE_S_MAX = 86_400.0
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# Where a hard link cannot be: another file system, one without links, too many of them.
NO_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


class Artifact(msgspec.Struct, frozen=True):
    """One stored file. `format` is as declared; the store itself keeps only the bytes."""

    sha256: str
    size_bytes: int
    format: str


class StoredFile(msgspec.Struct, frozen=True):
    """What the store knows by itself: the name is the content's hash."""

    sha256: str
    size_bytes: int


class Collected(msgspec.Struct, frozen=True):
    """What a collection removed, or would."""

    names: list[str]
    freed_bytes: int


def no_progress(done_bytes: int, total_bytes: int) -> None:
    """Take progress and drop it."""


class ImageStore:
    """The artifacts below one root directory."""

    def __init__(self, root: Path, ids: Ids | None = None, clock: Clock | None = None) -> None:
        self._directory = root / "sha256"
        self.partials = root / "partial"
        self._ids = ids or Ids()
        self._clock = clock or SystemClock()
        self._asked_for: dict[str, float] = {}  # when an import last gave this sum

    def path(self, sha256: str) -> Path:
        """Return where the artifact is or would be."""
        return self._directory / check_sha256(sha256)

    def get(self, sha256: str) -> StoredFile | None:
        """Return the stored file, or None."""
        try:
            size_bytes = self.path(sha256).stat().st_size
        except FileNotFoundError:
            return None
        return StoredFile(sha256=sha256, size_bytes=size_bytes)

    def ls(self) -> list[StoredFile]:
        """Return every complete artifact, ordered by name."""
        if not self._directory.is_dir():
            return []
        return [
            StoredFile(sha256=entry.name, size_bytes=entry.stat().st_size)
            for entry in sorted(self._directory.iterdir())
            if not entry.name.startswith(TEMPORARY_PREFIX)
        ]

    def recover(self) -> int:
        """Make the directory; remove what killed imports left and return how much that was."""
        self._prepare()
        debris = list(self._directory.glob(f"{TEMPORARY_PREFIX}*"))
        for path in debris:
            path.unlink(missing_ok=True)
        return len(debris)

    def remove(self, sha256: str, users: Callable[[str], Iterable[str]]) -> bool:
        """Remove an artifact unless `users` names any; return whether it was there."""
        path = self.path(sha256)
        names = sorted(users(sha256))
        if names:
            shown = ", ".join(names[:5])
            raise InUse(f"artifact {sha256[:12]} is used by {shown}", hint="delete those first")
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        sync_directory(self._directory)
        return True

    async def import_file(
        self,
        path: Path,
        declared: str,
        expected_sha256: str | None = None,
        *,
        progress: ByteProgress = no_progress,
    ) -> Artifact:
        """Copy a local file in. What is hashed is what is stored, whatever the source does."""
        if expected_sha256 is not None:
            check_sha256(expected_sha256, field="source.sha256")
        return await anyio.to_thread.run_sync(
            self._import, path, declared, expected_sha256, progress
        )

    async def link_file(self, path: Path, declared: str, expected_sha256: str) -> Artifact:
        """Take a finished file of our own by hard link, or by copy from another file system.

        The file must never be written to again. Its content is verified all the same.
        """
        check_sha256(expected_sha256)
        return await anyio.to_thread.run_sync(self._link, path, declared, expected_sha256)

    async def take_file(self, path: Path, declared: str, expected_sha256: str | None) -> Artifact:
        """Make a complete file of ours an artifact; it lies below the root, and is moved.

        On any error it stays where it is.
        """
        return await anyio.to_thread.run_sync(self._take, path, declared, expected_sha256)

    def _take(self, path: Path, declared: str, expected: str | None) -> Artifact:
        self._prepare()
        with no_space_is_exhausted(path):
            digest, size_bytes = hash_file(path)
            return self._keep(path, Artifact(digest, size_bytes, declared), expected)

    def temporary(self) -> Path:
        """Return a name for a file that comes in; `recover` removes what keeps it."""
        self._prepare()
        return self._temporary()

    def known(self, declared: str, sha256: str) -> Artifact | None:
        """Return the artifact if it is here already and may be what it is declared to be."""
        return self._known(declared, sha256)

    def collect(self, keep: frozenset[str], *, dry_run: bool) -> Collected:
        """Remove artifacts outside of `keep`, and old partial downloads.

        What came or was asked for within the last minute stays: its Image is being defined.
        """
        self._forget_old()
        names, freed_bytes = [], 0
        for stored in self.ls():
            if stored.sha256 in keep or stored.sha256 in self._asked_for:
                continue
            path = self.path(stored.sha256)
            status = path.stat()
            names.append(stored.sha256)
            freed_bytes += status.st_blocks * 512 if status.st_nlink == 1 else 0
            if not dry_run:
                path.unlink(missing_ok=True)
        if names and not dry_run:
            sync_directory(self._directory)
        oldest = self._clock.now().timestamp() - PARTIAL_AGE_S_MAX
        for name, size_bytes in collect_partials(self.partials, oldest, dry_run=dry_run):
            names.append(name)
            freed_bytes += size_bytes
        return Collected(names, freed_bytes)

    def _forget_old(self) -> None:
        since = self._clock.monotonic() - YOUNG_S
        for sha256, asked_at in list(self._asked_for.items()):
            if asked_at < since:
                del self._asked_for[sha256]

    def _prepare(self) -> None:
        self._directory.mkdir(mode=0o711, parents=True, exist_ok=True)

    def _known(self, declared: str, expected: str | None) -> Artifact | None:
        """Return the artifact if it is here already; the source is then not needed."""
        known = self.get(expected) if expected is not None else None
        if known is None:
            return None
        check_format(declared, read_header(self.path(known.sha256), HEADER_BYTES))
        self._asked_for[known.sha256] = self._clock.monotonic()
        return Artifact(known.sha256, known.size_bytes, declared)

    def _import(
        self, path: Path, declared: str, expected: str | None, progress: ByteProgress
    ) -> Artifact:
        self._prepare()
        if known := self._known(declared, expected):
            return known
        with open_source(path) as source:
            check_format(declared, os.pread(source, HEADER_BYTES, 0))
            self._check_space(source)
            temporary = self._temporary()
            try:
                digest, size_bytes = copy_hashed(source, temporary, progress)
                return self._keep(temporary, Artifact(digest, size_bytes, declared), expected)
            except OSError as error:
                raise self._storage_error(error, path, source) from error
            finally:
                temporary.unlink(missing_ok=True)

    def _link(self, path: Path, declared: str, expected: str) -> Artifact:
        self._prepare()
        if known := self._known(declared, expected):
            return known
        temporary = self._temporary()
        try:
            temporary.hardlink_to(path)
            with temporary.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            artifact = Artifact(digest, temporary.stat().st_size, declared)
            return self._keep(temporary, artifact, expected)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
        finally:
            temporary.unlink(missing_ok=True)
        return self._import(path, declared, expected, no_progress)

    def _keep(self, temporary: Path, artifact: Artifact, expected: str | None) -> Artifact:
        """Give a complete temporary file its name, if its content has earned it."""
        if expected is not None and artifact.sha256 != expected:
            raise InvalidArgument(
                f"the file's sha256 is {artifact.sha256}, expected {expected}",
                field="source.sha256",
                hint="the file is not the one that was meant, or it is damaged",
            )
        # Again, from what was stored: a source can change after its header was read.
        check_format(artifact.format, read_header(temporary, HEADER_BYTES))
        temporary.chmod(0o444)
        sync_file(temporary)
        self._asked_for[artifact.sha256] = self._clock.monotonic()
        temporary.replace(self.path(artifact.sha256))
        sync_directory(self._directory)
        return artifact

    def _temporary(self) -> Path:
        return self._directory / f"{TEMPORARY_PREFIX}{os.getpid()}-{self._ids.nonce()}"

    def _check_space(self, source: int) -> None:
        needed_bytes, available_bytes = _occupied_bytes(source), free_bytes(self._directory)
        if needed_bytes > available_bytes:
            raise self._exhausted(needed_bytes, available_bytes)

    def _exhausted(self, needed_bytes: int, available_bytes: int) -> ResourceExhausted:
        return ResourceExhausted(
            f"the image needs {needed_bytes} bytes, {self._directory} has {available_bytes} free",
            hint="remove unused images with `chv image rm`, or make room",
        )

    def _storage_error(self, error: OSError, path: Path, source: int) -> ChvError:
        if error.errno in NO_SPACE:
            return self._exhausted(_occupied_bytes(source), free_bytes(self._directory))
        return InvalidArgument(f"{path}: {error.strerror}", field="source.path")


def _occupied_bytes(source: int) -> int:
    """Return what a copy takes: holes are kept."""
    status = os.fstat(source)
    return min(status.st_size, status.st_blocks * 512)
