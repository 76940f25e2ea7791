"""The try-boot of KVM, with stand-ins for QEMU that print what a kernel would, or do not."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from chv.common.process import procfs
from chv.vmm.driver import DiskConfig, DriverProbe, ProbeGuest, VmmConfig
from chv.vmm.qemu import probe
from chv.vmm.qemu.driver import QemuDriver

UUID = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
GUEST = ProbeGuest(kernel="/k", initramfs="/i", cmdline="quiet x=y loglevel=3", work_dir="/tmp")
WORKS = "echo 'Linux version 6.1'; echo 'Run /init as init process'; exec sleep 600"


@pytest.fixture
def usable_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KVM device that everybody may open."""
    status = SimpleNamespace(st_mode=stat.S_IFCHR | 0o666, st_gid=0)
    monkeypatch.setattr(probe, "KVM_DEVICE", SimpleNamespace(stat=lambda: status))
    monkeypatch.setattr(probe, "NOBODY", os.geteuid() or 65534)
    monkeypatch.setattr(probe, "TRY_S_MAX", 1.0)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory that an unprivileged process may read; pytest's own are 0700."""
    path = Path("/tmp") / f"chv-probe-{os.getpid()}"
    path.mkdir(mode=0o755)
    yield path
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def stand_in(directory: Path, boot: str, version: str = "7.2.22") -> str:
    path = directory / "qemu"
    banner = f'[ "$1" = --version ] && {{ echo "QEMU emulator version {version}"; exit; }}'
    path.write_text(f'#!/bin/sh\n{banner}\necho "$$" > {directory}/pid\n{boot}\n')
    path.chmod(0o755)
    (directory / "pid").touch()
    (directory / "pid").chmod(0o666)
    return str(path)


def is_dead(directory: Path) -> bool:
    seen = procfs.stat(int((directory / "pid").read_text()))
    return seen is None or seen.dead


@pytest.mark.usefixtures("usable_device")
async def test_a_guest_that_reaches_user_space_proves_kvm(directory: Path) -> None:
    driver = QemuDriver(stand_in(directory, WORKS))
    seen = await driver.probe(GUEST)
    assert (seen.usable, seen.accelerator, seen.version) == (True, "kvm", "7.2.22")
    assert "as init process" in seen.reason
    assert is_dead(directory)


@pytest.mark.usefixtures("usable_device")
async def test_a_kernel_that_stops_after_its_first_line_does_not(directory: Path) -> None:
    seen = await QemuDriver(
        stand_in(directory, "echo 'Linux version 6.1'; echo 'int3 selftest'; exec sleep 600")
    ).probe(GUEST)
    assert seen.accelerator == "tcg"
    assert "int3 selftest" in seen.reason
    assert is_dead(directory)


@pytest.mark.usefixtures("usable_device")
async def test_a_qemu_that_refuses_kvm_is_told_with_its_words(directory: Path) -> None:
    seen = await QemuDriver(
        stand_in(directory, "echo 'failed to initialize kvm: Permission denied' >&2; exit 1")
    ).probe(GUEST)
    assert seen.accelerator == "tcg"
    assert "Permission denied" in seen.reason
    assert "ended (1)" in seen.reason


@pytest.mark.usefixtures("usable_device")
async def test_a_flood_of_output_is_cut_off(directory: Path) -> None:
    seen = await QemuDriver(stand_in(directory, "exec yes")).probe(GUEST)
    assert seen.accelerator == "tcg"
    assert is_dead(directory)


@pytest.mark.usefixtures("usable_device")
async def test_a_cancelled_probe_leaves_no_process(directory: Path) -> None:
    driver = QemuDriver(stand_in(directory, "exec sleep 600"))
    with anyio.move_on_after(0.4):
        await driver.probe(GUEST)
        pytest.fail("the probe ended by itself")
    assert is_dead(directory)


@pytest.mark.usefixtures("usable_device")
async def test_the_kernel_is_told_to_speak(directory: Path) -> None:
    heard = directory / "pid"
    await QemuDriver(stand_in(directory, f'printf "%s\\n" "$@" > {heard}; {WORKS}')).probe(GUEST)
    words = heard.read_text().split()
    assert "x=y" in words
    assert "earlyprintk=ttyS0" in words
    assert not {"quiet", "loglevel=3"} & set(words)


@pytest.mark.usefixtures("usable_device")
async def test_without_a_guest_kvm_is_not_tried(directory: Path) -> None:
    seen = await QemuDriver(stand_in(directory, WORKS)).probe(None)
    assert (seen.usable, seen.accelerator) == (True, "tcg")
    assert "not tried" in seen.reason


async def test_a_device_that_only_root_may_open_is_no_use(
    monkeypatch: pytest.MonkeyPatch, directory: Path
) -> None:
    status = SimpleNamespace(st_mode=stat.S_IFCHR | 0o600, st_gid=0)
    monkeypatch.setattr(probe, "KVM_DEVICE", SimpleNamespace(stat=lambda: status))
    seen = await QemuDriver(stand_in(directory, WORKS)).probe(GUEST)
    assert seen.accelerator == "tcg"
    assert "0600" in seen.reason


async def test_a_missing_device_is_named(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setattr(probe, "KVM_DEVICE", directory / "kvm")
    seen = await QemuDriver(stand_in(directory, WORKS)).probe(GUEST)
    assert seen.accelerator == "tcg"
    assert "no " in seen.reason
    assert "kvm" in seen.reason


async def test_kvm_can_be_switched_off(directory: Path) -> None:
    seen = await QemuDriver(stand_in(directory, WORKS), kvm="off").probe(GUEST)
    assert seen.accelerator == "tcg"
    assert "configuration" in seen.reason


async def test_no_qemu_is_not_usable_and_says_so() -> None:
    seen = await QemuDriver("qemu-system-nowhere").probe(None)
    assert not seen.usable
    assert "qemu-system-nowhere" in seen.reason


async def test_an_ancient_qemu_is_not_usable(directory: Path) -> None:
    seen = await QemuDriver(stand_in(directory, WORKS, version="5.2.0")).probe(None)
    assert not seen.usable
    assert "5.2.0" in seen.reason


def test_a_recalled_probe_decides_the_spelling_of_options() -> None:
    driver = QemuDriver()
    config = VmmConfig(
        vm_id=UUID,
        uuid=UUID,
        name="hello",
        worker_id="chv:abc123:vmm:3f2504e04f:0000beef",
        cpus=1,
        memory_bytes=1 << 20,
        accelerator="tcg",
        runtime_dir="/run/x",
        disks=(DiskConfig(id="root", kind="vhost-user-blk", path="/r.sock"),),
    )
    assert "reconnect=1" in " ".join(driver.launch(config).argv)
    driver.recall(DriverProbe(driver="qemu", usable=True, version="10.0.3"))
    assert "reconnect-ms=100" in " ".join(driver.launch(config).argv)
