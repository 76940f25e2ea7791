"""A guest with Debian's kernel that sees this machine's files: for tests of what our kernel lacks.

The host's root comes by virtiofs, below a memory overlay that takes all writes. QEMU emulates, so
what runs in it is an order of magnitude slower.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import anyio
import anyio.to_thread

from chv.guest import apt
from chv.guest.cpio import Cpio
from chv.guest.debs import Deb
from chv.guest.modules import KernelModules, kernel_image
from tests.helpers import wait_until

CACHE = Path("/var/cache/chv/tiny-bookworm/debs")
VIRTIOFSD = ("/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd")
BASE_MODULES = ["virtio_pci", "virtio_blk", "virtio_rng", "virtiofs", "overlay"]
DONE = "=== ended with"
BOX = "/bin/busybox"
INIT = f"""#!{BOX} sh
{BOX} mount -t proc proc /proc
{BOX} mount -t sysfs sys /sys
{BOX} mount -t devtmpfs dev /dev
for module in $({BOX} cat /modules.list); do {BOX} insmod /modules/$module.ko; done
{BOX} mount -t virtiofs -o ro root /host
{BOX} mount -t tmpfs tmp /over
{BOX} mkdir /over/up /over/work
{BOX} mount -t overlay -o lowerdir=/host,upperdir=/over/up,workdir=/over/work over /new
for each in proc sys dev; do {BOX} mount -o bind /$each /new/$each; done
for each in tmp run; do {BOX} mount -t tmpfs -o mode=0755 $each /new/$each; done
{BOX} mkdir -p /dev/shm
{BOX} mount -t tmpfs shm /dev/shm
{BOX} chroot /new /bin/sh /run-me
{BOX} echo "{DONE} $? ==="
{BOX} poweroff -f
"""


def virtiofsd() -> str:
    """Return the program that serves the host's files, empty where there is none."""
    return next((path for path in VIRTIOFSD if Path(path).exists()), "")


async def run_in_guest(
    argv: Sequence[str], *, modules: Sequence[str], disk_bytes: int, timeout_s: float
) -> tuple[int, str]:
    """Run a command in a new guest with an empty disk /dev/vda; return exit code and console."""
    with tempfile.TemporaryDirectory(prefix="chv-guest-") as name:
        directory = Path(name)
        debs = await apt.packages(CACHE, lambda _message: None)
        await anyio.to_thread.run_sync(_build, debs, directory, [*BASE_MODULES, *modules], argv)
        with (directory / "disk").open("wb") as disk:
            disk.truncate(disk_bytes)
        return await _boot(directory, timeout_s)


def _build(debs: dict[str, Path], directory: Path, modules: list[str], argv: Sequence[str]) -> None:
    archive = Cpio()
    for path in ("proc", "sys", "dev", "host", "over", "new"):
        archive.directory(path)
    paths = [path for name, path in debs.items() if apt.VERSIONED_KERNEL.match(name)]
    with ExitStack() as stack:
        kernel = [stack.enter_context(Deb(path, directory)) for path in paths]
        box = stack.enter_context(Deb(debs["busybox-static"], directory))
        (directory / "kernel").write_bytes(kernel_image(kernel))
        archive.file("bin/busybox", box.read("bin/busybox"), 0o755)
        known = KernelModules(*kernel)
        ordered = known.ordered(modules)
        archive.file("modules.list", "\n".join(ordered).encode())
        for name in ordered:
            archive.file(f"modules/{name}.ko", known.content(name))
    archive.file(
        "init", INIT.replace("/run-me", f"-c {shlex.quote(shlex.join(argv))}").encode(), 0o755
    )
    (directory / "initramfs").write_bytes(archive.finish())


async def _boot(directory: Path, timeout_s: float) -> tuple[int, str]:
    socket, console = directory / "fs.sock", directory / "console"
    console.touch()
    serve = [virtiofsd(), f"--socket-path={socket}", "-o", "source=/,sandbox=chroot,cache=always"]
    processes = [_started(serve)]
    try:
        await wait_until(socket.exists, what="virtiofsd")
        processes.append(_started(_argv(directory, socket, console)))
        qemu = processes[-1]
        await wait_until(lambda: qemu.poll() is not None, timeout_s=timeout_s, what="the guest")
    finally:
        for process in processes[::-1]:
            process.kill()
            process.wait()
    text = console.read_text(errors="replace")
    code = text.rpartition(DONE)[2].split()[:1]
    return (int(code[0]) if code and DONE in text else -1), text


def _argv(directory: Path, socket: Path, console: Path) -> list[str]:
    return [
        "qemu-system-x86_64", "-machine", "q35,accel=tcg,memory-backend=mem", "-cpu", "max",
        "-m", "1G", "-smp", "2", "-nodefaults", "-display", "none", "-no-reboot",
        "-object", "memory-backend-memfd,id=mem,size=1G,share=on",
        "-kernel", str(directory / "kernel"), "-initrd", str(directory / "initramfs"),
        "-append", "console=ttyS0 quiet panic=-1 no_timer_check cryptomgr.notests",
        "-serial", f"file:{console}", "-device", "virtio-rng-pci",
        "-chardev", f"socket,id=fs,path={socket}",
        "-device", "vhost-user-fs-pci,chardev=fs,tag=root",
        "-drive", f"if=virtio,format=raw,file={directory / 'disk'}",
    ]  # fmt: skip


def _started(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
