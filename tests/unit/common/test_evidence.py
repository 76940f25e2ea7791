"""What tells one thing from another before it is removed, and how it is removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chv.common import evidence
from chv.common.errors import Conflict, FailedPrecondition, InUse, NotFound
from chv.common.process import FoundWorker, procfs
from chv.common.removal import remove_path, unescaped
from chv.common.wire.types import CensusItem, ReapUnexplained


def item(path: Path, *, known: bool = False, data: bool = False) -> CensusItem:
    return evidence.path_item("file", path, owner="uid", known=known, data=data)


def request(of: CensusItem, *, data: bool = False) -> ReapUnexplained:
    return ReapUnexplained(kind=of.kind, name=of.name, identity=of.identity, data=data)


def test_a_file_written_anew_is_another_thing_and_a_directory_that_is_filled_is_not(
    tmp_path: Path,
) -> None:
    file, directory = tmp_path / "f", tmp_path / "d"
    file.write_text("1")
    directory.mkdir()
    before = evidence.path_identity(file), evidence.path_identity(directory)
    other = tmp_path / "g"
    other.write_text("2")
    other.rename(file)
    (directory / "new").write_text("x")
    assert evidence.path_identity(file) != before[0]
    assert evidence.path_identity(directory) == before[1]
    assert evidence.path_identity(tmp_path / "missing") == ""


def test_evidence_of_a_directory_has_the_size_of_all_that_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "disk").write_bytes(os.urandom(1 << 16))
    shown = evidence.of_path(tmp_path / "a")
    assert int(shown["size_bytes"]) >= 1 << 16
    assert shown["mode"].startswith("d")
    assert evidence.of_path(tmp_path / "missing") == {}


def test_evidence_of_a_process_names_its_command_line_and_when_it_began() -> None:
    stat = procfs.stat(os.getpid())
    assert stat is not None
    found = FoundWorker(
        worker_id="chv:abcdef:vmm:0123456789:00000000", pid=os.getpid(),
        start_time=stat.start_time, boot_id=procfs.boot_id(), executable="/x", uid=0,
    )  # fmt: skip
    shown = evidence.of_process(found)
    assert "python" in shown["cmdline"] or "pytest" in shown["cmdline"]
    assert shown["started"].endswith("Z")
    assert f"start {stat.start_time}" in evidence.process_identity(found)


def test_only_the_same_thing_that_is_still_unexplained_may_go(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("1")
    seen = item(path)
    assert evidence.require_unexplained([seen], request(seen)) == seen
    with pytest.raises(NotFound):
        evidence.require_unexplained([], request(seen))
    with pytest.raises(Conflict, match="a record explains it"):
        evidence.require_unexplained([seen, item(path, known=True)], request(seen))
    (tmp_path / "y").write_text("2")
    (tmp_path / "y").rename(path)
    with pytest.raises(Conflict, match="another thing"):
        evidence.require_unexplained([item(path)], request(seen))


def test_what_may_be_a_tenants_data_goes_only_when_that_is_said(tmp_path: Path) -> None:
    seen = item(tmp_path, data=True)
    with pytest.raises(FailedPrecondition, match="tenant's data"):
        evidence.require_unexplained([seen], request(seen))
    assert evidence.require_unexplained([seen], request(seen, data=True)) == seen


def test_a_thing_without_identity_never_goes() -> None:
    seen = CensusItem(kind="file", name="/x", known=False)
    with pytest.raises(Conflict):
        evidence.require_unexplained([seen], request(seen))


def test_nothing_is_removed_where_something_is_mounted(tmp_path: Path) -> None:
    directory, outside = tmp_path / "a b", tmp_path / "outside"
    (directory / "c").mkdir(parents=True)
    outside.write_text("kept")
    (directory / "link").symlink_to(outside)
    text = f"30 1 0:5 / {tmp_path}/a\\040b/c rw - tmpfs none rw\n"
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(text)
    with pytest.raises(InUse, match="mounted"):
        remove_path(directory, mountinfo)
    assert (directory / "c").exists()
    mountinfo.write_text("")
    remove_path(directory, mountinfo)
    remove_path(directory, mountinfo)  # gone already
    assert not directory.exists()
    assert outside.read_text() == "kept"


def test_blanks_of_mountinfo_are_read() -> None:
    assert unescaped("/a\\040b\\134c") == Path("/a b\\c")
