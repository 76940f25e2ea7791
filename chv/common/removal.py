"""Removes one file or directory that nobody needs. Blocks; a missing one is fine.

What is mounted at it or below it is somebody's: InUse, and nothing is removed. Links are not
followed.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from chv.common.errors import InUse

MOUNTINFO = Path("/proc/self/mountinfo")


def mounts(mountinfo: Path = MOUNTINFO) -> list[Path]:
    """Return where something is mounted."""
    lines = mountinfo.read_text().splitlines()
    return [unescaped(line.split()[4]) for line in lines]


def unescaped(field: str) -> Path:
    """Return the path of a field of mountinfo, in which blanks are octal numbers."""
    for code, character in (("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")):
        field = field.replace(f"\\{code}", character)
    return Path(field)


def remove_path(path: Path, mountinfo: Path = MOUNTINFO) -> None:
    """Remove it; see the module."""
    held = [mount for mount in mounts(mountinfo) if mount == path or path in mount.parents]
    if held:
        raise InUse(f"something is mounted at {held[0]}", resource=str(path))
    if path.is_dir() and not path.is_symlink():
        with suppress(FileNotFoundError):
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
