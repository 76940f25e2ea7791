"""Small disks of a test's own: a tmpfs that fills up, an ext4 image that can be photographed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

UMOUNT_TIMEOUT_S = 10.0


@contextmanager
def mounted(directory: Path, *arguments: str) -> Iterator[Path]:
    """Mount something on `directory`, which is made, and unmount it at the end."""
    directory.mkdir(exist_ok=True)
    subprocess.run(["mount", *arguments, str(directory)], check=True)
    try:
        yield directory
    finally:
        _unmount(directory)


def _unmount(directory: Path) -> None:
    deadline = time.monotonic() + UMOUNT_TIMEOUT_S
    while subprocess.run(["umount", str(directory)], capture_output=True, check=False).returncode:
        assert time.monotonic() < deadline, f"{directory} stays mounted"
        time.sleep(0.05)


@contextmanager
def small_tmpfs(directory: Path, size_mib: int) -> Iterator[Path]:
    """A disk of a few MiB in memory."""
    options = f"size={size_mib}m,mode=0755"
    with mounted(directory, "-t", "tmpfs", "-o", options, "chv-test") as disk:
        yield disk


def make_ext4(image: Path, size_mib: int) -> None:
    """Make a sparse image file with an ext4 file system that has a journal."""
    with image.open("wb") as file:
        file.truncate(size_mib << 20)
    now = "lazy_itable_init=0,lazy_journal_init=0"
    subprocess.run(["mkfs.ext4", "-q", "-F", "-E", now, str(image)], check=True)


def fill(disk: Path) -> Path:
    """Take all the space that is left, to the last block; return the file that holds it."""
    ballast = disk / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size_bytes in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size_bytes)
                    os.fsync(file.fileno())  # with delayed allocation, the write alone may succeed
    return ballast
