"""What counts as a finished build; the build itself is in tests/integration."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from chv.guest import initramfs, tiny
from chv.guest.data_disk import make_data_disk
from chv.guest.tiny import BuiltArtifact, TinyManifest, load_tiny, recipe


@pytest.fixture
def build(tmp_path: Path) -> Path:
    for name in tiny.FORMATS:
        (tmp_path / name).write_bytes(b"content")
    write_manifest(tmp_path, recipe())
    return tmp_path


def write_manifest(directory: Path, made_by: str) -> None:
    artifacts = {name: BuiltArtifact(sha256="0" * 64, size_bytes=7) for name in tiny.FORMATS}
    manifest = TinyManifest(recipe=made_by, artifacts=artifacts, built_from={})
    (directory / tiny.MANIFEST).write_bytes(msgspec.json.encode(manifest))


def test_a_complete_build_of_todays_recipe_is_taken(build: Path) -> None:
    image = load_tiny(build)
    assert image is not None
    assert image.path("kernel") == build / "kernel"


@pytest.mark.parametrize("name", [*tiny.FORMATS, tiny.MANIFEST])
def test_a_build_without_one_of_its_files_is_unfinished(build: Path, name: str) -> None:
    (build / name).unlink()
    assert load_tiny(build) is None


def test_an_artifact_of_another_size_is_unfinished(build: Path) -> None:
    (build / "initramfs").write_bytes(b"half")
    assert load_tiny(build) is None


def test_a_build_of_another_recipe_is_made_again(build: Path) -> None:
    write_manifest(build, "0" * 64)
    assert load_tiny(build) is None


def test_a_manifest_that_is_no_manifest_is_unfinished(build: Path) -> None:
    (build / tiny.MANIFEST).write_bytes(b'{"artifacts": 3}')
    assert load_tiny(build) is None


@pytest.mark.parametrize("name", sorted(initramfs.SCRIPTS))
def test_guest_scripts_are_valid_shell(name: str) -> None:
    checked = subprocess.run(
        ["sh", "-n"], input=initramfs.script(name), capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr


def is_clean(path: Path) -> bool:
    check = subprocess.run(["/sbin/e2fsck", "-fn", path], capture_output=True, check=False)
    return check.returncode == 0


async def test_the_data_disk_has_the_same_bytes_wherever_it_is_made(tmp_path: Path) -> None:
    made = []
    for name in ("one", "another"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "disk"
        await make_data_disk(path)
        made.append(path.read_bytes())
        path.unlink()
        assert list((tmp_path / name).iterdir()) == []
    assert made[0] == made[1]


async def test_the_data_disk_is_a_clean_labelled_file_system(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    await make_data_disk(path)
    assert path.stat().st_size == 64 << 20
    assert path.stat().st_blocks * 512 < 8 << 20
    assert is_clean(path)
    assert path.read_bytes()[1024 + 120 : 1024 + 136].rstrip(b"\0") == b"chv-data"
