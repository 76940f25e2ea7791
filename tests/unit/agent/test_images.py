"""The image store as the engine uses it: what a file is declared to be, it has to be."""

from __future__ import annotations

from pathlib import Path

import pytest

from chv.agent.images import Images
from chv.common.errors import InvalidArgument


@pytest.mark.parametrize("declared", ["kernel", "initramfs", "qcow2"])
async def test_random_bytes_are_no_kernel_initramfs_or_qcow2(tmp_path: Path, declared: str) -> None:
    images = Images(tmp_path / "images", tmp_path / "cache")
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\xa5" * 8192)
    with pytest.raises(InvalidArgument) as caught:
        await images.import_file(str(garbage), "", declared)
    assert caught.value.field == "format"
    assert not [path for path in (tmp_path / "images").rglob("*") if path.is_file()]


async def test_a_kernel_is_stored_as_a_kernel(tmp_path: Path) -> None:
    images = Images(tmp_path / "images", tmp_path / "cache")
    kernel = tmp_path / "vmlinux"
    kernel.write_bytes(b"\x7fELF" + bytes(8192))
    stored = await images.import_file(str(kernel), "", "kernel")
    assert stored.format == "kernel"
    assert Path(stored.path).read_bytes() == kernel.read_bytes()
