"""Builds the built-in image `tiny`: Debian's cloud kernel, our initramfs, a small data disk.

`build_tiny` is for one caller at a time per directory (chv.images.builtin holds the lock). Every
artifact appears under its final name only when complete, the manifest last: a directory without a
matching manifest is an unfinished build, and the next one starts over. The same packages give the
same bytes. Heavy work runs in a worker thread.

Use: python -m chv.guest.tiny --out DIR --cache DIR [--json]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from chv.common.errors import ChvError, FailedPrecondition
from chv.common.files import (
    atomic_write,
    fsync,
    remove_temporaries,
    sha256_file,
    sync_directory,
)
from chv.guest import apt
from chv.guest.apt import Progress
from chv.guest.data_disk import make_data_disk
from chv.guest.debs import Deb
from chv.guest.initramfs import initramfs
from chv.guest.modules import kernel_image

# reboot=t: a triple fault works on every VMM. panic=-1: a broken guest restarts at once, visibly.
# no_timer_check: the kernel's timer test can fail on a loaded host without KVM, and then panics.
# cryptomgr.notests: the self-tests cost 0.4 of 3 s of an emulated boot.
KERNEL_CMDLINE = "console=ttyS0 quiet panic=-1 reboot=t no_timer_check cryptomgr.notests"
MANIFEST = "manifest.json"
KERNEL_FILE, INITRAMFS_FILE, DISK_FILE = "kernel", "initramfs", "disk.raw"
FORMATS = {KERNEL_FILE: "kernel", INITRAMFS_FILE: "initramfs", DISK_FILE: "raw"}
WORK_PREFIX = ".build-"
RECIPE_MODULES = ("apt.py", "cpio.py", "data_disk.py", "initramfs.py", "modules.py")


class BuiltArtifact(msgspec.Struct, frozen=True):
    """One file of the image."""

    sha256: str
    size_bytes: int


class TinyManifest(msgspec.Struct, frozen=True):
    """`manifest.json`: what is in the directory, and from what it was built."""

    recipe: str
    artifacts: dict[str, BuiltArtifact]
    built_from: dict[str, str]


class TinyImage(msgspec.Struct, frozen=True):
    """A finished build: the directory and its manifest."""

    directory: Path
    manifest: TinyManifest

    def path(self, artifact: str) -> Path:
        """Return the file of `kernel`, `initramfs` or `disk.raw`."""
        return self.directory / artifact


def recipe() -> str:
    """Return a digest of everything of ours that decides the bytes of the image."""
    digest = hashlib.sha256()
    package = resources.files("chv.guest")
    entries = [package.joinpath(name) for name in RECIPE_MODULES]
    entries += sorted(package.joinpath("data").iterdir(), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_file():
            digest.update(entry.name.encode() + b"\0" + entry.read_bytes())
    return digest.hexdigest()


def load_tiny(out: Path) -> TinyImage | None:
    """Return the finished build in `out` if today's recipe made it. Cheap: reads no artifact."""
    try:
        manifest = msgspec.json.decode((out / MANIFEST).read_bytes(), type=TinyManifest)
        sizes = {name: (out / name).stat().st_size for name in FORMATS}
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    if manifest.recipe != recipe() or set(manifest.artifacts) != set(FORMATS):
        return None
    if any(sizes[name] != built.size_bytes for name, built in manifest.artifacts.items()):
        return None
    return TinyImage(directory=out, manifest=manifest)


async def build_tiny(out: Path, cache: Path, *, progress: Progress) -> TinyImage:
    """Build the image into `out` from packages kept in `cache`; replaces what `out` holds."""
    if os.uname().machine != "x86_64":
        raise FailedPrecondition("the tiny image is built for x86_64 only")
    out.mkdir(parents=True, exist_ok=True)
    cache.mkdir(parents=True, exist_ok=True)
    _sweep(out)
    debs = await apt.packages(cache, progress)
    work = Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=out))
    try:
        progress("extracting the kernel and assembling the initramfs")
        await anyio.to_thread.run_sync(_assemble, debs, work)
        progress("making the data disk")
        await make_data_disk(work / DISK_FILE)
        manifest = await anyio.to_thread.run_sync(_publish, debs, work, out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return TinyImage(directory=out, manifest=manifest)


def _assemble(debs: dict[str, Path], work: Path) -> None:
    with ExitStack() as stack:
        opened = {
            name: stack.enter_context(Deb(path, work))
            for name, path in debs.items()
            if name != apt.ROOTS[0]
        }
        kernel = [deb for name, deb in opened.items() if apt.VERSIONED_KERNEL.match(name)]
        (work / KERNEL_FILE).write_bytes(kernel_image(kernel))
        (work / INITRAMFS_FILE).write_bytes(initramfs(opened, kernel))


def _publish(debs: dict[str, Path], work: Path, out: Path) -> TinyManifest:
    """Move the artifacts to their names; while they change, no manifest vouches for them."""
    artifacts = {name: _artifact(work / name) for name in FORMATS}
    built_from = {path.name: sha256_file(path) for path in sorted(debs.values())}
    manifest = TinyManifest(recipe=recipe(), artifacts=artifacts, built_from=built_from)
    (out / MANIFEST).unlink(missing_ok=True)
    sync_directory(out)
    for name in FORMATS:
        with (work / name).open("rb") as file:
            fsync(file.fileno(), work / name)
        (work / name).chmod(0o444)
        (work / name).replace(out / name)
    sync_directory(out)
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    atomic_write(out / MANIFEST, text, mode=0o644)
    return manifest


def _artifact(path: Path) -> BuiltArtifact:
    return BuiltArtifact(sha256=sha256_file(path), size_bytes=path.stat().st_size)


def _sweep(out: Path) -> None:
    """Remove what a killed build left."""
    for debris in out.glob(f"{WORK_PREFIX}*"):
        shutil.rmtree(debris, ignore_errors=True)
    remove_temporaries(out)


def main(argv: Sequence[str] | None = None) -> int:
    """Build from the command line; errors go to stderr with their hint."""
    parser = argparse.ArgumentParser(prog="python -m chv.guest.tiny", description="Build `tiny`.")
    parser.add_argument("--out", type=Path, required=True, help="directory of the artifacts")
    parser.add_argument("--cache", type=Path, required=True, help="directory of the .debs")
    parser.add_argument("--json", action="store_true", help="print the manifest")
    options = parser.parse_args(argv)
    started = time.monotonic()

    def progress(message: str) -> None:
        sys.stderr.write(f"{time.monotonic() - started:6.1f} s  {message}\n")

    async def build() -> TinyImage:
        return await build_tiny(options.out, options.cache, progress=progress)

    try:
        image = anyio.run(build)
    except ChvError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    progress(f"built {options.out}")
    if options.json:
        sys.stdout.write(msgspec.json.encode(image.manifest).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
