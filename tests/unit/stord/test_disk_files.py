"""What is told of a disk whose files go while it is looked at: another task may be removing it."""

from __future__ import annotations

from pathlib import Path

import pytest

from chv.common.wire.stord import VolumeBackend, VolumeClass, VolumeFormat
from chv.stord.backends import disk_files


@pytest.mark.parametrize("step", ["virtual_size_bytes", "described_bytes", "takes_direct"])
def test_a_disk_that_goes_while_it_is_looked_at_is_missing(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, original = tmp_path / "disk.raw", getattr(disk_files, step)
    disk.write_bytes(bytes(4096))

    def gone(*arguments: object, **more: object) -> object:
        disk.unlink()
        disk.stat()
        return original(*arguments, **more)

    spec = VolumeBackend(class_name=VolumeClass.FILE, format=VolumeFormat.RAW, size_bytes=4096)
    assert disk_files.inspect(disk, tmp_path, spec).state == "open"
    monkeypatch.setattr(disk_files, step, gone)
    found = disk_files.inspect(disk, tmp_path, spec)
    assert (found.state, str(disk) in found.problem) == ("missing", True)
