"""The file systems where new disks would go, and what must stay free there. Blocks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from chv.common.config import Config, StorageConfig
from chv.common.errors import InvalidArgument
from chv.common.layout import Layout

PERCENT = 100


@dataclass(frozen=True, slots=True)
class Place:
    """The file system of a pool. `free_bytes`: above what must stay free."""

    name: str
    free_bytes: int


def measured(config: Config, layout: Layout, pools: frozenset[str]) -> dict[str, Place]:
    """Return the places of pools by name, '' for the node's own; those of one disk are one."""
    known = {"": layout.state, **{n: Path(path) for n, path in config.storage.pools.items()}}
    for name in pools - known.keys():
        raise InvalidArgument(
            f"there is no pool {name!r}",
            field="disks.pool",
            hint=f"{_one_of(config.storage.pools)}leave it out",
        )
    by_device: dict[int, Place] = {}
    found: dict[str, Place] = {}
    for name, path in known.items():
        there = next((each for each in (path, *path.parents) if each.exists()), Path("/"))
        device = there.stat().st_dev
        if device not in by_device:
            by_device[device] = Place(str(path), _room_bytes(there, config.storage))
        found[name] = by_device[device]
    return found


def _one_of(pools: Mapping[str, str]) -> str:
    return f"one of {', '.join(pools)}, or " if pools else ""


def _room_bytes(path: Path, storage: StorageConfig) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize - floor_bytes(path, storage)


def floor_bytes(path: Path, storage: StorageConfig) -> int:
    """Return what must stay free there: with less the space is critical. stord's own rule."""
    status = os.statvfs(path)
    total = (status.f_blocks - status.f_bfree + status.f_bavail) * status.f_frsize
    share = total * (PERCENT - storage.space_critical_percent) // PERCENT
    return max(share, storage.space_critical_bytes)
