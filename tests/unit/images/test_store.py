"""The store on a real file system: import, repeat, refusal, debris, removal."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import anyio
import pytest

from chv.common.errors import InUse, InvalidArgument, ResourceExhausted
from chv.images import Artifact, ImageStore
from chv.images import store as store_module

CONTENT = b"disk" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> ImageStore:
    made = ImageStore(tmp_path / "images")
    made.recover()
    return made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


def entries(tmp_path: Path) -> list[str]:
    return sorted(entry.name for entry in (tmp_path / "images" / "sha256").iterdir())


async def test_an_imported_file_is_stored_under_its_hash(
    store: ImageStore, source: Path, tmp_path: Path
) -> None:
    artifact = await store.import_file(source, "raw", DIGEST)
    assert artifact == Artifact(sha256=DIGEST, size_bytes=len(CONTENT), format="raw")
    assert store.path(DIGEST).read_bytes() == CONTENT
    assert store.path(DIGEST).stat().st_mode & 0o777 == 0o444
    assert [stored.sha256 for stored in store.ls()] == entries(tmp_path) == [DIGEST]


async def test_without_an_expected_hash_the_files_own_is_returned(
    store: ImageStore, source: Path
) -> None:
    assert (await store.import_file(source, "raw")).sha256 == DIGEST


async def test_a_wrong_hash_names_both_and_leaves_nothing(
    store: ImageStore, source: Path, tmp_path: Path
) -> None:
    expected = "0" * 64
    with pytest.raises(InvalidArgument) as caught:
        await store.import_file(source, "raw", expected)
    assert expected in caught.value.message
    assert DIGEST in caught.value.message
    assert entries(tmp_path) == []


async def test_the_second_import_changes_nothing(store: ImageStore, source: Path) -> None:
    await store.import_file(source, "raw")
    before = store.path(DIGEST).stat().st_mtime_ns
    assert (await store.import_file(source, "raw", DIGEST)).sha256 == DIGEST
    assert store.path(DIGEST).stat().st_mtime_ns == before


async def test_what_is_stored_is_not_read_from_the_source_again(
    store: ImageStore, source: Path
) -> None:
    await store.import_file(source, "raw", DIGEST)
    source.unlink()
    assert (await store.import_file(source, "raw", DIGEST)).size_bytes == len(CONTENT)


async def test_a_stored_file_is_not_taken_for_another_format(
    store: ImageStore, source: Path
) -> None:
    await store.import_file(source, "raw", DIGEST)
    with pytest.raises(InvalidArgument, match="qcow2"):
        await store.import_file(source, "qcow2", DIGEST)


async def test_a_raw_disk_that_is_qcow2_is_refused(
    store: ImageStore, source: Path, tmp_path: Path
) -> None:
    source.write_bytes(b"QFI\xfb" + bytes(600))
    with pytest.raises(InvalidArgument, match="qcow2"):
        await store.import_file(source, "raw")
    assert entries(tmp_path) == []


async def test_holes_stay_holes(store: ImageStore, tmp_path: Path) -> None:
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.seek(40 << 20)
        file.write(b"end")
    artifact = await store.import_file(path, "raw")
    stored = store.path(artifact.sha256)
    assert stored.stat().st_size == path.stat().st_size
    assert stored.stat().st_blocks * 512 < 4 << 20
    assert hashlib.sha256(stored.read_bytes()).hexdigest() == artifact.sha256


@pytest.mark.parametrize("kind", ["missing", "directory", "link", "fifo"])
async def test_a_source_that_is_no_regular_file_is_refused(
    store: ImageStore, source: Path, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / kind
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(source)
    elif kind == "fifo":
        os.mkfifo(path)
    with anyio.fail_after(5), pytest.raises(InvalidArgument) as caught:
        await store.import_file(path, "raw")
    assert str(path) in caught.value.message
    assert caught.value.field == "source.path"


@pytest.mark.parametrize("bad", ["", "abc", "G" * 64, "A" * 64, "../" + "a" * 61, "a" * 64 + "\n"])
async def test_what_is_no_hash_is_refused(store: ImageStore, source: Path, bad: str) -> None:
    with pytest.raises(InvalidArgument, match="not allowed"):
        await store.import_file(source, "raw", bad)
    with pytest.raises(InvalidArgument, match="not allowed"):
        store.path(bad)


async def test_too_little_space_is_told_before_anything_is_copied(
    store: ImageStore, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "free_bytes", lambda path: 1000)
    with pytest.raises(ResourceExhausted) as caught:
        await store.import_file(source, "raw")
    assert "1000 free" in caught.value.message
    assert str(len(CONTENT)) in caught.value.message or "4096" in caught.value.message
    assert entries(tmp_path) == []


async def test_a_cancelled_import_leaves_nothing(store: ImageStore, tmp_path: Path) -> None:
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate(3 << 30)
        file.write(b"start")
    with anyio.move_on_after(0.05) as scope:
        await store.import_file(path, "raw")
    assert scope.cancelled_caught
    assert entries(tmp_path) == []


def test_debris_of_a_killed_import_goes_at_the_next_start(
    store: ImageStore, tmp_path: Path
) -> None:
    directory = tmp_path / "images" / "sha256"
    (directory / f"{store_module.TEMPORARY_PREFIX}99-aa").write_bytes(b"half")
    assert store.ls() == []
    assert store.recover() == 1
    assert entries(tmp_path) == []
    assert store.recover() == 0


async def test_an_artifact_in_use_stays_and_the_user_is_named(
    store: ImageStore, source: Path
) -> None:
    await store.import_file(source, "raw")
    with pytest.raises(InUse, match="Image/tiny"):
        store.remove(DIGEST, lambda sha256: ["Image/tiny"])
    assert store.get(DIGEST) is not None


async def test_removal_is_idempotent(store: ImageStore, source: Path) -> None:
    await store.import_file(source, "raw")
    assert store.remove(DIGEST, lambda sha256: []) is True
    assert store.remove(DIGEST, lambda sha256: []) is False
    assert store.get(DIGEST) is None


async def test_a_file_of_ours_is_linked_not_copied(store: ImageStore, source: Path) -> None:
    await store.link_file(source, "raw", DIGEST)
    assert store.path(DIGEST).samefile(source)
    again = await store.link_file(source, "raw", DIGEST)
    assert again.size_bytes == len(CONTENT)


async def test_a_linked_file_with_other_content_is_refused(
    store: ImageStore, source: Path, tmp_path: Path
) -> None:
    source.write_bytes(b"changed")
    with pytest.raises(InvalidArgument, match="sha256"):
        await store.link_file(source, "raw", DIGEST)
    assert entries(tmp_path) == []


async def test_a_file_on_another_file_system_is_copied(
    store: ImageStore, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cross_device(self: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", cross_device)
    await store.link_file(source, "raw", DIGEST)
    assert store.path(DIGEST).read_bytes() == CONTENT
    assert not store.path(DIGEST).samefile(source)


async def test_two_imports_of_one_file_at_once_give_one_artifact(
    store: ImageStore, source: Path, tmp_path: Path
) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(store.import_file, source, "raw", DIGEST)
    assert entries(tmp_path) == [DIGEST]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("empty", "is empty"),
        ("/proc/version", "made up by the kernel"),
        ("/sys/kernel/mm/transparent_hugepage/enabled", "made up by the kernel"),
    ],
)
async def test_a_source_without_content_of_its_own_is_refused(
    store: ImageStore, tmp_path: Path, path: str, reason: str
) -> None:
    (tmp_path / "empty").touch()
    source = tmp_path / path
    if not source.exists():
        pytest.skip("this kernel has no such file")
    with pytest.raises(InvalidArgument, match=reason) as caught:
        await store.import_file(source, "raw")
    assert caught.value.field == "source.path"
    assert caught.value.hint
    assert entries(tmp_path) == []
