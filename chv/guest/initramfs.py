"""Assembles the tiny guest's root file system from open packages. Pure: packages in, bytes out.

Programs keep their Debian paths; libraries all go to /lib, which the loader searches anyway, so
that nothing depends on the directory names of a release.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from importlib import resources

from chv.guest.cpio import Cpio
from chv.guest.debs import Deb
from chv.guest.elf import closure, interpreter
from chv.guest.modules import KernelModules

# Before anything else: disks, network, the seed's file system, randomness for the host key.
EARLY_MODULES = ["virtio_pci", "virtio_blk", "virtio_net", "virtio_rng", "isofs", "nls_utf8"]
# After SSH is up: the power button, hot-plug niceties, file systems of attached disks.
LATE_MODULES = [
    "button", "evdev", "virtio_console", "virtio_balloon", "vfat", "nls_cp437", "nls_iso8859_1",
    "nls_ascii",
]  # fmt: skip
# Package, canonical path in it, path in the guest.
PROGRAMS = [
    ("busybox-static", "bin/busybox", "bin/busybox"),
    ("dropbear-bin", "sbin/dropbear", "usr/sbin/dropbear"),
    ("dropbear-bin", "bin/dropbearconvert", "usr/bin/dropbearconvert"),
    ("openssh-sftp-server", "lib/openssh/sftp-server", "usr/lib/openssh/sftp-server"),
]
LIBRARY_DIRS = ("lib/x86_64-linux-gnu", "lib64", "lib")
DIRECTORIES = {
    "bin": 0o755, "sbin": 0o755, "usr/bin": 0o755, "usr/sbin": 0o755, "lib": 0o755,
    "proc": 0o755, "sys": 0o755, "dev": 0o755, "run": 0o755, "mnt": 0o755, "data": 0o755,
    "tmp": 0o1777, "var/log": 0o755, "root": 0o700, "root/.ssh": 0o700, "etc/dropbear": 0o700,
    "etc/ssh": 0o755, "etc/chv": 0o700,
}  # fmt: skip
# No account has a password: `*` matches none.
FILES = {
    "etc/passwd": (0o644, "root:x:0:0:root:/root:/bin/sh\n"),
    "etc/group": (0o644, "root:x:0:\ntty:x:5:\n"),
    "etc/shadow": (0o600, "root:*:19000:0:99999:7:::\n"),
    "etc/shells": (0o644, "/bin/sh\n"),
    "etc/hosts": (0o644, "127.0.0.1 localhost\n"),
    "etc/nsswitch.conf": (0o644, "passwd: files\ngroup: files\nhosts: files dns\n"),
    "etc/os-release": (0o644, 'ID=chv-tiny\nNAME="CHV tiny guest"\n'),
}
SCRIPTS = {
    "init.sh": "init",
    "udhcpc.sh": "lib/chv/udhcpc.sh",
    "hotplug.sh": "lib/chv/hotplug.sh",
    "power.sh": "lib/chv/acpi/PWRF/00000080",
}


def script(name: str) -> bytes:
    """Return one of the guest's scripts, a data file of this package."""
    return resources.files("chv.guest").joinpath("data", name).read_bytes()


def initramfs(debs: Mapping[str, Deb], kernel: Iterable[Deb]) -> bytes:
    """Return the uncompressed cpio archive (an emulated CPU would have to unpack it)."""
    archive = Cpio()
    for path, mode in DIRECTORIES.items():
        archive.directory(path, mode)
    for path, (mode, text) in FILES.items():
        archive.file(path, text.encode(), mode)
    for name, path in SCRIPTS.items():
        archive.file(path, script(name), 0o755)
    _add_programs(archive, debs)
    _add_modules(archive, KernelModules(*kernel))
    return archive.finish()


def _add_programs(archive: Cpio, debs: Mapping[str, Deb]) -> None:
    programs = {guest: debs[deb].read(path) for deb, path, guest in PROGRAMS}
    for path, content in programs.items():
        archive.file(path, content, 0o755)
    # Where Debian's dropbear looks for it.
    archive.link("usr/lib/sftp-server", "openssh/sftp-server")
    dynamic = [content for content in programs.values() if interpreter(content)]
    libraries = closure(dynamic, lambda name: find_library(debs.values(), name))
    for name, library in libraries.items():
        archive.file(f"lib/{name}", library, 0o755)
    for loader in sorted({interpreter(content) or "" for content in dynamic}):
        # The C library needs its loader, so the closure has it.
        archive.link(loader.lstrip("/"), f"/lib/{posixpath.basename(loader)}")


def find_library(debs: Iterable[Deb], name: str) -> bytes | None:
    """Return the library called `name` from whichever package ships it."""
    for deb in debs:
        for directory in LIBRARY_DIRS:
            if f"{directory}/{name}" in deb:
                return deb.read(f"{directory}/{name}")
    return None


def _add_modules(archive: Cpio, modules: KernelModules) -> None:
    early = modules.ordered(EARLY_MODULES)
    late = modules.ordered(LATE_MODULES, early)
    for moment, names in (("early", early), ("late", late)):
        listing = "".join(f"{name}.ko\n" for name in names)
        archive.file(f"lib/chv/modules.{moment}", listing.encode())
        for name in names:
            archive.file(f"lib/chv/modules/{name}.ko", modules.content(name))
