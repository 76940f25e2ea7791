"""The tiny image built from real packages, and booted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chv.guest import tiny
from chv.guest.tiny import FORMATS, MANIFEST, TinyImage, build_tiny, load_tiny
from chv.images import ImageStore, builtin, ensure_builtin
from tests.helpers import wait_until
from tests.integration.tiny_vm import MAC, SECRET, boot

CACHE = Path("/var/cache/chv")

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root: writes to /var/cache/chv"),
]


def quiet(message: str) -> None:
    """Take no notice."""


@pytest.fixture(scope="module")
async def image(tmp_path_factory: pytest.TempPathFactory) -> TinyImage:
    store = ImageStore(tmp_path_factory.mktemp("store"))
    await ensure_builtin("tiny", CACHE, store, quiet)
    found = load_tiny(CACHE / f"tiny-{builtin.codename()}")
    assert found is not None
    return found


def start(argv: list[str]) -> subprocess.Popen[bytes]:
    """Start a process that the test kills."""
    return subprocess.Popen(argv, stderr=subprocess.DEVNULL)


def output(*argv: str) -> bytes:
    """Return what a program prints; fail if it fails."""
    return subprocess.run(argv, capture_output=True, check=True).stdout


def debs(image: TinyImage) -> Path:
    return image.directory / "debs"


async def test_the_same_packages_give_the_same_bytes(image: TinyImage, tmp_path: Path) -> None:
    again = await build_tiny(tmp_path / "out", debs(image), progress=quiet)
    assert again.manifest == image.manifest
    for name in FORMATS:
        assert again.path(name).read_bytes() == image.path(name).read_bytes()


async def test_a_finished_build_is_found_at_once(image: TinyImage, tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images")
    await ensure_builtin("tiny", CACHE, store, quiet)
    started = time.perf_counter()
    await ensure_builtin("tiny", CACHE, store, quiet)
    assert time.perf_counter() - started < 0.5


async def test_a_killed_build_leaves_nothing_under_a_final_name(
    image: TinyImage, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    argv = [sys.executable, "-m", "chv.guest.tiny", "--out", str(out), "--cache", str(debs(image))]
    builder = start(argv)
    try:
        await wait_until(lambda: list(out.glob(f"{tiny.WORK_PREFIX}*/kernel")), timeout_s=60)
        builder.send_signal(signal.SIGKILL)
        builder.wait()
        final = {*FORMATS, MANIFEST}
        assert final.isdisjoint(entry.name for entry in out.iterdir())
        await build_tiny(out, debs(image), progress=quiet)
        assert {entry.name for entry in out.iterdir()} == final
    finally:
        builder.kill()
        builder.wait()


async def test_a_seeded_guest_is_reached_by_ssh_and_ends_at_the_power_button(
    image: TinyImage, tmp_path: Path
) -> None:
    async with boot(image, tmp_path, seeded=True) as vm:
        await vm.seen("chv-guest: ready")
        await vm.seen("chv-guest: net eth0 10.0.2.15/24")
        await vm.seen("chv-guest: net eth1 10.8.0.77/24")
        assert "chv-guest: seed" in vm.console
        code, text = await vm.ssh("uname -a; cat /sys/class/net/eth0/address /etc/resolv.conf")
        assert code == 0
        for expected in ("Linux hello", MAC, "search demo.chv", "search static.chv", "10.8.0.3"):
            assert expected in text
        code, text = await vm.ssh("true", known_hosts="wrong_known_hosts")
        assert code == 255
        assert "IDENTIFICATION HAS CHANGED" in text or "verification failed" in text
        code, text = await vm.ssh(
            '. /etc/chv/guest-env; printf "%s" "$TOKEN"; stat -c :%a:%u /etc/chv/guest-env'
        )
        assert text == f"{SECRET}:600:0\n"
        code, text = await vm.ssh("echo kept > /data/kept && sync && mount | grep ' /data '")
        assert (code, "ext4 (rw," in text) == (0, True)
        assert (await vm.ssh("exit 7"))[0] == 7
        pressed = time.perf_counter()
        await vm.qmp("system_powerdown")
        assert await vm.ended(timeout_s=15) == 0
        assert time.perf_counter() - pressed < 10
        assert "chv-guest: stopped" in vm.console
    disk = tmp_path / "disk"
    assert output("/sbin/e2fsck", "-fn", str(disk))
    assert output("/sbin/debugfs", "-R", "cat /kept", str(disk)) == b"kept\n"


async def test_a_guest_reboots_by_itself_and_comes_back(image: TinyImage, tmp_path: Path) -> None:
    async with boot(image, tmp_path, seeded=True) as vm:
        await vm.seen("chv-guest: ready")
        await vm.ssh("reboot")
        await vm.seen("chv-guest: stopping reboot")
        await vm.seen("chv-guest: ready", times=2)
        assert (await vm.ssh("hostname"))[1] == "hello\n"


async def test_an_interface_plugged_in_later_gets_an_address(
    image: TinyImage, tmp_path: Path
) -> None:
    async with boot(image, tmp_path, seeded=True) as vm:
        await vm.seen("chv-guest: ready")
        await vm.qmp("netdev_add", type="user", id="later", net="10.9.0.0/24")
        await vm.qmp("device_add", driver="virtio-net-pci", netdev="later", bus="spare")
        await vm.seen("chv-guest: net eth2 10.9.0.15/24")


async def test_a_guest_without_a_seed_says_so_and_opens_no_ssh(
    image: TinyImage, tmp_path: Path
) -> None:
    async with boot(image, tmp_path, seeded=False) as vm:
        await vm.seen("chv-guest: up")
        await vm.seen("chv-guest: no seed")
        await vm.seen("chv-guest: ready")
        assert "ssh" not in vm.console
        await vm.qmp("system_powerdown")
        assert await vm.ended(timeout_s=15) == 0
