"""Directories of tests, and what a test run that was killed left of them.

A run that is killed tears nothing down, so the next one does: every directory carries the pid of
the process that made it, and what belongs to a process that is gone is ended and removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from chv.common import config as configuration
from chv.common.errors import ChvError
from chv.common.process import CgroupProvider, choose_provider

PREFIX = "chv-test-"
PLACES = ("/run", tempfile.gettempdir())
_NAME = re.compile(rf"{PREFIX}([0-9]+)-\w+")


def scratch(where: str | None = None) -> Path:
    """Make a directory that a later run removes should this one be killed."""
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=where))


def sweep() -> list[str]:
    """Remove what runs that are gone have left; return the directories."""
    return [str(directory) for directory in _orphans() if _remove(directory)]


def _orphans() -> Iterator[Path]:
    for place in PLACES:
        for directory in sorted(Path(place).glob(f"{PREFIX}*")):
            match = _NAME.fullmatch(directory.name)
            if match and not Path("/proc", match[1]).exists():
                yield directory


def _remove(directory: Path) -> bool:
    if (directory / "node.toml").exists():
        _purge(directory)
    _kill_users(directory)
    for mount in reversed(_mounts_below(directory)):
        subprocess.run(["umount", mount], check=False)
    _retire(directory / "chv.toml")
    shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()


def _purge(directory: Path) -> None:
    """A development node: its own way out, then by force."""
    import anyio

    from chv.host import devnode

    if devnode.exists(directory):
        node = devnode.find(directory)
        anyio.run(devnode.stop, node)
        anyio.run(devnode.remove, node)


def _kill_users(directory: Path) -> None:
    """Kill every process that names the directory in its arguments."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{directory}/".encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def _mounts_below(directory: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line.split()[1] for line in lines if line.split()[1].startswith(f"{directory}/")]


def _retire(config: Path) -> None:
    """Remove the cgroups of the daemon that was configured there."""
    import anyio

    try:
        provider = choose_provider(configuration.resolve_layout(configuration.load(config)))
    except ChvError:
        return  # never written, or not whole: nothing was started with it
    if isinstance(provider, CgroupProvider):
        anyio.run(provider.retire)
