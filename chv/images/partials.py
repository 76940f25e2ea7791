"""What is there of a download that is not complete: `<root>/partial/<key>.data` and `.json`.

The key is of URL and expected sum, so one file never mixes two of them. The record says how many
bytes are known to be on the disk, and only from there a later attempt goes on: what a kill or a
power loss left beyond is cut off. Blocking; for worker threads. Out of space is
ResourceExhausted, and the partial file is gone then, for it holds what others need.
"""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import msgspec

from chv.common.errors import ResourceExhausted
from chv.common.files import atomic_write, free_bytes, fsync, remove_temporaries

CHECKPOINT_BYTES = 32 << 20
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class PartialRecord(msgspec.Struct, frozen=True):
    """What is kept beside the data. `etag` is a strong one or empty."""

    url: str
    sha256: str
    etag: str = ""
    total_bytes: int = 0  # 0: the server did not say
    synced_bytes: int = 0


class Partial:
    """One download's file. `open` before anything else, `close` at the end, whatever happens."""

    def __init__(self, directory: Path, url: str, sha256: str) -> None:
        key = hashlib.sha256(f"{url}\n{sha256}".encode()).hexdigest()[:40]
        self._directory = directory
        self._record_path = directory / f"{key}.json"
        self._record = PartialRecord(url=url, sha256=sha256)
        self._fd = -1
        self.path = directory / f"{key}.data"
        self.offset = 0

    @property
    def etag(self) -> str:
        """The validator of the bytes that are there; empty: none."""
        return self._record.etag

    @property
    def resumable(self) -> bool:
        """Whether a mix of two versions of the file would be noticed."""
        return bool(self._record.etag or self._record.sha256)

    @property
    def total_bytes(self) -> int:
        """How much it will be in the end; 0: unknown."""
        return self._record.total_bytes

    def open(self) -> None:
        """Open what is there, cut to what is surely on the disk."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(self.path, flags, 0o600)
        known = self._read_record()
        if known is not None and known.synced_bytes <= os.fstat(self._fd).st_size:
            self._record = known
        self.offset = self._record.synced_bytes
        os.ftruncate(self._fd, self.offset)

    def _read_record(self) -> PartialRecord | None:
        try:
            found = msgspec.json.decode(self._record_path.read_bytes(), type=PartialRecord)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None  # without a record nothing is known about the data
        same = (found.url, found.sha256) == (self._record.url, self._record.sha256)
        return found if same else None

    def begin(self, etag: str, total_bytes: int) -> None:
        """Start from nothing, as what the server has now."""
        self._record_path.unlink(missing_ok=True)
        os.ftruncate(self._fd, 0)
        self.offset = 0
        self._record = msgspec.structs.replace(
            self._record, etag=etag, total_bytes=total_bytes, synced_bytes=0
        )
        self.require_space(total_bytes)

    def require_space(self, needed_bytes: int) -> None:
        """Raise where the file system cannot hold so much more."""
        available_bytes = free_bytes(self._directory)
        if needed_bytes > available_bytes:
            raise ResourceExhausted(
                f"the download needs {needed_bytes} bytes, "
                f"{self._directory} has {available_bytes} free",
                hint="remove unused images with `chv image rm` and `chv image gc`, or make room",
            )

    def write(self, block: bytes) -> None:
        """Append; once in a while make it durable."""
        view = memoryview(block)
        try:
            while view:
                written = os.pwrite(self._fd, view, self.offset)
                view = view[written:]
                self.offset += written
            if self.offset - self._record.synced_bytes >= CHECKPOINT_BYTES:
                self.checkpoint()
        except (OSError, ResourceExhausted) as error:
            if isinstance(error, OSError) and error.errno not in NO_SPACE:
                raise
            self.remove()
            raise ResourceExhausted(
                f"no space for the download after {self.offset} bytes below {self._directory}",
                hint="make room there, then try again",
            ) from error

    def checkpoint(self) -> None:
        """Make what is there the point from which a later attempt goes on."""
        if self.offset == self._record.synced_bytes:
            return
        fsync(self._fd, self.path)
        self._record = msgspec.structs.replace(self._record, synced_bytes=self.offset)
        atomic_write(self._record_path, msgspec.json.encode(self._record))

    def reopen(self) -> None:
        """Begin with an empty file after `remove`."""
        self.close()
        self._record = PartialRecord(url=self._record.url, sha256=self._record.sha256)
        self.open()

    def close(self) -> None:
        """Give the descriptor back; the files stay."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def remove(self) -> None:
        """Remove both files."""
        self.path.unlink(missing_ok=True)
        self._record_path.unlink(missing_ok=True)


def collect_partials(directory: Path, older_than: float, *, dry_run: bool) -> list[tuple[str, int]]:
    """Remove partial files last written before a moment (Unix time); return names and sizes."""
    if not directory.is_dir():
        return []
    if not dry_run:
        remove_temporaries(directory)
    removed: list[tuple[str, int]] = []
    for data in sorted(directory.glob("*.data")):
        status = data.stat()
        if status.st_mtime >= older_than:
            continue
        removed.append((f"partial/{data.name}", status.st_blocks * 512))
        if not dry_run:
            data.unlink(missing_ok=True)
            data.with_suffix(".json").unlink(missing_ok=True)
    return removed
