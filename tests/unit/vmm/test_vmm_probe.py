"""The try-boot of KVM, with stand-ins for QEMU that print what the probe would, or do not."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from chv.common.process import procfs
from chv.vmm import kvm, trial
from chv.vmm.driver import DiskConfig, DriverProbe, ProbeGuest, VmmConfig
from chv.vmm.kvm import KvmAccess
from chv.vmm.qemu import probe
from chv.vmm.qemu.driver import QemuDriver

UUID = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
NAMES = ("cpuid", "mov-cr", "lsl", "popcnt", "xsave", "clac", "iret")
BOOT = "echo '@0 boot protocol=1'"
DONE = "echo '@9 cpu-done ok=7 failed=0 absent=0'; exec sleep 600"
WORKS = f"{BOOT}; {DONE}"


@pytest.fixture
def guest(tmp_path: Path) -> ProbeGuest:
    (tmp_path / "probe.elf").write_bytes(b"ELF")
    return ProbeGuest(kernel=str(tmp_path / "probe.elf"), instructions=NAMES)


@pytest.fixture
def usable_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A KVM device that everybody may open."""
    monkeypatch.setattr(probe, "kvm_access", KvmAccess)
    monkeypatch.setattr(probe, "NOBODY", os.geteuid() or 65534)
    monkeypatch.setattr(trial, "SILENCE_S_MAX", 0.5)


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


def dying(*fatal: str) -> str:
    """A stand-in that ends at an instruction, as a KVM that cannot emulate it makes a VMM end."""
    tries = "\n".join(
        f"""if echo "$*" | grep -Eq "cpu=(all|[^ ]*{name})"; then
            echo '@1 cpu-try insn={name}'
            {"exit 0" if name in fatal else f"echo '@2 cpu insn={name} result=ok'"}
        fi"""
        for name in NAMES
    )
    return f"{BOOT}\n{tries}\n{DONE}"


def is_dead(directory: Path) -> bool:
    seen = procfs.stat(int((directory / "pid").read_text()))
    return seen is None or seen.dead


@pytest.mark.usefixtures("usable_device")
async def test_a_guest_that_executes_all_proves_kvm(directory: Path, guest: ProbeGuest) -> None:
    driver = QemuDriver(stand_in(directory, WORKS))
    seen = await driver.probe(guest)
    assert (seen.usable, seen.accelerator, seen.version) == (True, "kvm", "7.2.22")
    assert "all instructions that stock kernels need" in seen.reason
    assert is_dead(directory)


@pytest.mark.usefixtures("usable_device")
async def test_fatal_instructions_are_gone_round_and_named(
    directory: Path, guest: ProbeGuest
) -> None:
    seen = await QemuDriver(stand_in(directory, dying("popcnt", "lsl", "clac"))).probe(guest)
    assert (seen.accelerator, seen.missing) == ("tcg", ("lsl", "popcnt", "clac"))
    assert "usable for the probe only: 3 instructions" in seen.reason
    assert "lsl, popcnt, clac" in seen.reason
    assert is_dead(directory)


@pytest.mark.usefixtures("usable_device")
async def test_what_is_known_to_be_missing_is_not_tried(directory: Path, guest: ProbeGuest) -> None:
    known = ProbeGuest(kernel=guest.kernel, instructions=NAMES, missing=("lsl", "popcnt"))
    seen = await QemuDriver(stand_in(directory, dying("popcnt", "lsl"))).probe(known)
    assert seen.missing == ("lsl", "popcnt")
    assert "not all" not in seen.reason


@pytest.mark.usefixtures("usable_device")
async def test_an_instruction_that_faults_is_missing(directory: Path, guest: ProbeGuest) -> None:
    boot = f"{BOOT}; echo '@1 cpu-try insn=clac'; echo '@2 cpu insn=clac result=fault vector=6'"
    seen = await QemuDriver(stand_in(directory, f"{boot}; {DONE}")).probe(guest)
    assert (seen.accelerator, seen.missing) == ("tcg", ("clac",))


@pytest.mark.usefixtures("usable_device")
@pytest.mark.parametrize("then", ["exec sleep 600", "echo 'KVM internal error'; exec sleep 600"])
async def test_a_guest_that_falls_silent_names_the_culprit(
    directory: Path, guest: ProbeGuest, then: str
) -> None:
    silent = f"{BOOT}; echo '@1 cpu-try insn=xsave'; {then}"
    boot = f'echo "$*" | grep -Eq "cpu=(all|.*xsave)" && {{ {silent}; }}; {WORKS}'
    seen = await QemuDriver(stand_in(directory, boot)).probe(guest)
    assert seen.missing == ("xsave",)
    assert is_dead(directory)


@pytest.mark.usefixtures("usable_device")
async def test_a_qemu_that_refuses_kvm_is_told_with_its_words(
    directory: Path, guest: ProbeGuest
) -> None:
    seen = await QemuDriver(
        stand_in(directory, "echo 'failed to initialize kvm: Permission denied' >&2; exit 1")
    ).probe(guest)
    assert seen.accelerator == "tcg"
    assert "Permission denied" in seen.reason
    assert "ended (1)" in seen.reason


@pytest.mark.usefixtures("usable_device")
async def test_a_flood_of_output_is_cut_off(directory: Path, guest: ProbeGuest) -> None:
    seen = await QemuDriver(stand_in(directory, "exec yes")).probe(guest)
    assert seen.accelerator == "tcg"
    assert is_dead(directory)


@pytest.mark.usefixtures("usable_device")
async def test_a_cancelled_probe_leaves_no_process(
    directory: Path, guest: ProbeGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "SILENCE_S_MAX", 60.0)
    driver = QemuDriver(stand_in(directory, "exec sleep 600"))
    with anyio.move_on_after(0.4):
        await driver.probe(guest)
        pytest.fail("the probe ended by itself")
    assert is_dead(directory)


@pytest.mark.usefixtures("usable_device")
async def test_without_a_guest_kvm_is_not_tried(directory: Path) -> None:
    seen = await QemuDriver(stand_in(directory, WORKS)).probe(None)
    assert (seen.usable, seen.accelerator) == (True, "tcg")
    assert "not tried" in seen.reason


async def test_a_device_of_root_alone_is_given_to_a_vmm_as_a_node_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status = SimpleNamespace(st_mode=stat.S_IFCHR | 0o600, st_gid=0)
    device = SimpleNamespace(stat=lambda: status)
    assert kvm.kvm_access(device) == KvmAccess(private=True)  # type: ignore[arg-type]
    monkeypatch.setattr("chv.vmm.qemu.driver.kvm_access", lambda: KvmAccess(private=True))
    assert QemuDriver().launch(config("kvm")).private_kvm
    assert not QemuDriver().launch(config("tcg")).private_kvm


async def test_a_missing_device_is_named(
    monkeypatch: pytest.MonkeyPatch, directory: Path, guest: ProbeGuest
) -> None:
    monkeypatch.setattr(probe, "kvm_access", lambda: kvm.kvm_access(directory / "kvm"))
    seen = await QemuDriver(stand_in(directory, WORKS)).probe(guest)
    assert seen.accelerator == "tcg"
    assert f"no {directory}/kvm" in seen.reason


async def test_kvm_can_be_switched_off(directory: Path, guest: ProbeGuest) -> None:
    seen = await QemuDriver(stand_in(directory, WORKS), kvm="off").probe(guest)
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


def config(accelerator: str) -> VmmConfig:
    return VmmConfig(
        vm_id=UUID,
        uuid=UUID,
        name="hello",
        worker_id="chv:abc123:vmm:3f2504e04f:0000beef",
        cpus=1,
        memory_bytes=1 << 20,
        accelerator=accelerator,
        runtime_dir="/run/x",
        disks=(DiskConfig(id="root", kind="vhost-user-blk", path="/r.sock"),),
    )


def test_a_recalled_probe_decides_the_spelling_of_options() -> None:
    driver = QemuDriver()
    assert "reconnect=1" in " ".join(driver.launch(config("tcg")).argv)
    driver.recall(DriverProbe(driver="qemu", usable=True, version="10.0.3"))
    assert "reconnect-ms=100" in " ".join(driver.launch(config("tcg")).argv)
