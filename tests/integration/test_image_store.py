"""Import onto a file system that is really full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chv.common.errors import ResourceExhausted
from chv.common.files import free_bytes
from chv.images import ImageStore

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount"),
]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"x" * (5 << 20))
    return path


@pytest.mark.parametrize("noticed", ["before the copy", "in the middle of it"])
async def test_a_full_disk_is_told_with_both_sizes_and_nothing_stays(
    small_disk: Path, source: Path, noticed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if noticed == "in the middle of it":
        monkeypatch.setattr(ImageStore, "_check_space", lambda self, source: None)
    store = ImageStore(small_disk)
    with pytest.raises(ResourceExhausted) as caught:
        await store.import_file(source, "raw")
    assert f"needs {5 << 20} bytes" in caught.value.message
    assert str(small_disk) in caught.value.message
    assert caught.value.retriable
    assert list((small_disk / "sha256").iterdir()) == []
    assert free_bytes(small_disk) > 1 << 20
