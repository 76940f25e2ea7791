"""Which binary is taken, and which device node it would get at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chv.vmm.cloud_hypervisor import probe
from chv.vmm.cloud_hypervisor.probe import candidates
from chv.vmm.kvm import KvmAccess, kvm_access


def binary(path: Path, version: str) -> str:
    path.write_text(f"#!/bin/sh\necho 'cloud-hypervisor {version}'\n")
    path.chmod(0o755)
    return str(path)


def test_the_environment_comes_before_the_setting_and_that_before_path(tmp_path: Path) -> None:
    here = binary(tmp_path / "cloud-hypervisor", "v53.0.0")
    environment = {"CHV_CLOUD_HYPERVISOR": f"/a:{here}:/a"}
    assert candidates(["/b"], environment) == ("/a", here)
    assert candidates(["/b", "/c"], {"CHV_CLOUD_HYPERVISOR": ""}) == ("/b", "/c")


def test_path_is_the_last_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert candidates([]) == ("cloud-hypervisor",)
    here = binary(tmp_path / "cloud-hypervisor", "v53.0.0")
    assert candidates([]) == (here,)


@pytest.mark.parametrize(
    ("version", "taken"),
    [("v51.1.0", False), ("v51.2.0", False), ("v52.0.0", True), ("v53.0.0", True), ("", False)],
)
async def test_a_version_with_known_holes_is_refused(
    tmp_path: Path, version: str, taken: bool
) -> None:
    path = binary(tmp_path / "ch", version)
    seen = await probe.probe([path], "auto", None)
    if taken:
        assert seen.version == version.removeprefix("v")
        assert (seen.binary, len(seen.sha256)) == (path, 64)
    else:
        assert not seen.usable
        assert "52.0 is the oldest" in seen.reason
    assert not seen.auto


async def test_the_first_that_fits_is_taken_and_with_none_all_are_named(tmp_path: Path) -> None:
    old, new = binary(tmp_path / "old", "v50.0.0"), binary(tmp_path / "new", "v53.0.0")
    assert (await probe.probe([old, new], "off", None)).binary == new
    seen = await probe.probe([old, "/none"], "off", None)
    assert old in seen.reason
    assert "/none" in seen.reason


async def test_without_kvm_it_is_not_usable_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = binary(tmp_path / "ch", "v53.0.0")
    off = await probe.probe([path], "off", None)
    assert (off.usable, off.reason) == (False, "KVM is switched off by the configuration")
    monkeypatch.setattr(probe, "kvm_access", lambda: KvmAccess(refusal="no /dev/kvm"))
    assert (await probe.probe([path], "auto", None)).reason == "no /dev/kvm"


@pytest.mark.root
def test_the_device_decides_how_it_is_reached(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("makes device nodes")
    node = tmp_path / "kvm"
    assert "no " in kvm_access(node).refusal
    node.touch()
    assert "not a device" in kvm_access(node).refusal
    node.unlink()
    os.mknod(node, 0o020600, os.makedev(1, 3))
    for mode, gid, expected in (
        (0o600, 0, KvmAccess(private=True)),
        (0o660, 0, KvmAccess(private=True)),
        (0o660, 108, KvmAccess(groups=(108,))),
        (0o666, 0, KvmAccess()),
    ):
        os.chown(node, 0, gid)
        node.chmod(mode)
        assert kvm_access(node) == expected


async def test_a_binary_with_another_digest_than_the_pinned_is_not_even_run(
    tmp_path: Path,
) -> None:
    ran = tmp_path / "ran"
    path = tmp_path / "ch"
    path.write_text(f"#!/bin/sh\ntouch {ran}\necho 'cloud-hypervisor v53.0.0'\n")
    path.chmod(0o755)
    seen = await probe.probe([str(path)], "auto", None, ["0" * 64])
    assert not seen.usable
    assert "vmm.cloud_hypervisor_sha256 lacks" in seen.reason
    assert not ran.exists()
    assert (await probe.probe([str(path)], "off", None, [seen.sha256])).version == "53.0.0"
    assert ran.exists()
