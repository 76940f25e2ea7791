"""Directories of backups: what is allowed, what is believed, what a restoration needs."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from chv.common.errors import (
    ChvError,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
)
from chv.stord import backup_files
from chv.stord.backup_files import Entry, Manifest

VOLUME = "00000000-0000-4000-8000-000000000001"
MIB = 1 << 20
DIGEST = "0" * 64


def entry(sequence: int, parent: int = 0, **changes: object) -> Entry:
    values: dict[str, object] = {
        "sequence": sequence,
        "parent": parent,
        "size_bytes": MIB,
        "file_bytes": 1,
        "sha256": DIGEST,
        "created_at": "2026-01-01T00:00:00Z",
        "bitmap": f"chv-{sequence}",
    }
    return Entry(**(values | changes))  # type: ignore[arg-type]


def manifest(*entries: Entry) -> Manifest:
    return Manifest(volume_id=VOLUME, backups=list(entries))


# --- where
def test_a_target_below_an_allowed_directory_is_resolved(tmp_path: Path) -> None:
    found = backup_files.resolve_target(f"{tmp_path}/daily/web", [str(tmp_path)])
    assert found == tmp_path.resolve() / "daily" / "web"


def test_an_empty_list_allows_nothing(tmp_path: Path) -> None:
    with pytest.raises(PermissionDenied, match="backups may go to"):
        backup_files.resolve_target(str(tmp_path / "x"), [])


@pytest.mark.parametrize("target", ["/etc/x", "{root}", "{root}/../x", "{root}x/y", "relative/x"])
def test_a_target_outside_is_refused(tmp_path: Path, target: str) -> None:
    with pytest.raises(PermissionDenied):
        backup_files.resolve_target(target.format(root=tmp_path), [str(tmp_path)])


@pytest.mark.parametrize("name", ["two\nlines", "\x1b[2J", "nul\0"])
def test_a_target_that_would_spoil_a_log_or_a_terminal_is_refused(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(InvalidArgument, match="control characters"):
        backup_files.resolve_target(f"{tmp_path}/{name}", [str(tmp_path)])


def test_a_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionDenied, match="not a directory below"):
        backup_files.resolve_target(f"{root}/link/x", [str(root)])


def test_an_allowed_directory_that_is_not_mounted_is_not_made(tmp_path: Path) -> None:
    root = tmp_path / "absent"
    with pytest.raises(FailedPrecondition, match="is not there"):
        backup_files.resolve_target(f"{root}/x", [str(root)])
    assert not root.exists()


# --- what is said
def test_a_manifest_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    saved = manifest(entry(1), entry(2, 1), entry(3, 2, key="default/disk"))
    backup_files.save(tmp_path, saved)
    assert backup_files.load(tmp_path) == saved
    assert (tmp_path / "backup.json").stat().st_mode & 0o777 == 0o600


def test_an_empty_directory_has_no_manifest(tmp_path: Path) -> None:
    assert backup_files.load(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 10_000,
        json.dumps({"volume_id": VOLUME, "backups": [], "more": 1}).encode(),
        json.dumps({"volume_id": "../../etc", "backups": []}).encode(),
        json.dumps({"volume_id": VOLUME, "format": 2}).encode(),
    ],
)
def test_what_is_no_manifest_is_data_loss(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "backup.json").write_bytes(text)
    with pytest.raises(DataLoss):
        backup_files.load(tmp_path)


@pytest.mark.parametrize(
    "entries",
    [
        [entry(2), entry(1)],
        [entry(1), entry(1)],
        [entry(2, 1)],
        [entry(1, 1)],
        [entry(1), entry(2, 3), entry(3, 1)],
    ],
)
def test_an_order_that_cannot_be_is_data_loss(tmp_path: Path, entries: list[Entry]) -> None:
    backup_files.save(tmp_path, manifest(*entries))
    with pytest.raises(DataLoss, match=r"out of order|not there"):
        backup_files.load(tmp_path)


def test_a_manifest_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    backup_files.save(other, manifest(entry(1)))
    (tmp_path / "backup.json").symlink_to(other / "backup.json")
    with pytest.raises(DataLoss, match="cannot be read"):
        backup_files.load(tmp_path)


# --- the chain
def test_a_restoration_needs_everything_back_to_the_whole_backup() -> None:
    found = manifest(entry(1), entry(2, 1), entry(3), entry(4, 3), entry(5, 4))
    numbers = {n: [e.sequence for e in backup_files.chain(found, n)] for n in (0, 1, 2, 3, 4)}
    assert numbers == {0: [3, 4, 5], 1: [1], 2: [1, 2], 3: [3], 4: [3, 4]}


def test_a_backup_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(NotFound, match="no backup 7") as refused:
        backup_files.chain(manifest(entry(1), entry(2, 1)), 7)
    assert refused.value.hint == "known: 1, 2"
    with pytest.raises(NotFound):
        backup_files.chain(manifest(), 0)


# --- the files
def image(size_bytes: int = MIB, *, backing: int = 0, features: int = 0) -> bytes:
    head = struct.pack(">4sIQIIQ", b"QFI\xfb", 3, backing, 0, 16, size_bytes)
    return head.ljust(72, b"\0") + struct.pack(">Q", features) + bytes(1000)


def written(directory: Path, data: bytes) -> Entry:
    (directory / "1.qcow2").write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    return entry(1, file_bytes=len(data), sha256=digest)


def test_a_file_that_is_what_the_manifest_says_is_used(tmp_path: Path) -> None:
    assert backup_files.verify(tmp_path, written(tmp_path, image())) == tmp_path / "1.qcow2"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (image(backing=4096), "names other files"),
        (image(features=4), "names other files"),
        (image(features=2), "names other files"),
        (image(2 * MIB), "disk of"),
        (b"raw data" * 100, "not a qcow2"),
    ],
)
def test_a_file_that_is_something_else_is_data_loss(tmp_path: Path, data: bytes, why: str) -> None:
    with pytest.raises(DataLoss, match=why):
        backup_files.verify(tmp_path, written(tmp_path, data))


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(500)
        file.write(b"\x01")


def cut(path: Path) -> None:
    os.truncate(path, 200)


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize("spoil", [flip, cut, link, Path.unlink])
def test_a_file_that_was_changed_is_data_loss_that_names_it(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    told = written(tmp_path, image())
    spoil(tmp_path / "1.qcow2")
    with pytest.raises(DataLoss, match=r"1\.qcow2") as lost:
        backup_files.verify(tmp_path, told)
    assert "earlier" in lost.value.hint


def test_a_directory_full_of_backups_takes_no_more() -> None:
    full = manifest(*[entry(n) for n in range(1, backup_files.ENTRIES_MAX + 1)])
    with pytest.raises(ChvError, match="holds 10000"):
        backup_files.added(full, entry(backup_files.ENTRIES_MAX + 1))
