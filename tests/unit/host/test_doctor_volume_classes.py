"""The doctor names every class of volumes, whether it is usable, and its package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from chv.common.wire.storage import VolumeClass
from chv.host import doctor, storage_checks


def checks() -> dict[str, doctor.Check]:
    return {check.id: check for check in doctor.run_checks() if check.id.startswith("volumes-")}


def test_every_class_beyond_file_is_named() -> None:
    assert set(checks()) == {f"volumes-{each.value}" for each in VolumeClass} - {"volumes-file"}


def test_a_class_that_lacks_programs_names_them_and_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)

    lvm = checks()["volumes-lvm"]

    assert (lvm.status, "lvcreate" in lvm.message) == ("info", True)
    assert lvm.remedy.startswith("apt-get install lvm2")


@pytest.mark.parametrize("class_name", ["iscsi", "rbd"])
def test_a_module_that_qemu_lacks_is_told_with_its_package(
    class_name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(storage_checks, "MODULE_DIRECTORIES", (str(tmp_path / "*" / "qemu"),))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")

    without = checks()[f"volumes-{class_name}"]
    module = tmp_path / "x86_64-linux-gnu" / "qemu" / f"block-{class_name}.so"
    module.parent.mkdir(parents=True)
    module.touch()
    with_module = checks()[f"volumes-{class_name}"]

    assert (without.status, with_module.status) == ("info", "ok")
    assert "qemu-block-extra" in without.remedy


@pytest.mark.parametrize(
    ("misc", "status"), [("236 device-mapper\n 10 tun\n", "ok"), (" 10 tun\n", "info")]
)
def test_lvm_takes_the_kernels_device_mapper(
    misc: str, status: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "misc").write_text(misc)
    monkeypatch.setattr(storage_checks, "MISC_DEVICES", tmp_path / "misc")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")

    lvm = checks()["volumes-lvm"]

    assert lvm.status == status
    assert lvm.remedy == ("" if status == "ok" else "modprobe dm_mod dm_thin_pool")
