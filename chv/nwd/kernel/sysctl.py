"""Kernel settings below /proc/sys, which shows the network namespace of the reading thread.

Call these through `netns.inside`. A setting that this kernel does not have counts as right: the
feature that it switches is not there either.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from chv.nwd.kernel.errors import translated

_ROOT = Path("/proc/sys")


def _path(name: str) -> Path:
    return _ROOT / name.replace(".", "/")


def differing(wanted: Mapping[str, str]) -> dict[str, str]:
    """Return those of `wanted` that the kernel has otherwise."""
    found = {}
    for name, value in wanted.items():
        path = _path(name)
        if path.exists() and path.read_text().strip() != value:
            found[name] = value
    return found


def write(wanted: Mapping[str, str]) -> None:
    """Set them in the given order."""
    for name, value in wanted.items():
        with translated(f"setting {name} to {value}"):
            if _path(name).exists():
                _path(name).write_text(value)


def read(name: str) -> str:
    """Return one setting, empty where the kernel does not have it."""
    path = _path(name)
    return path.read_text().strip() if path.exists() else ""
