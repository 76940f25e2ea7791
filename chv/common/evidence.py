"""What can be said of a process or a path that no record explains, and what tells it from another.

An identity is compared before something is removed: a number or a name may belong to another
thing by then. Reads only. A thing that is gone meanwhile has no identity, and is nobody's leak.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from chv.common.clock import timestamp
from chv.common.errors import Conflict, FailedPrecondition, NotFound
from chv.common.process import FoundWorker, procfs
from chv.common.wire.types import CensusItem, ReapUnexplained

CMDLINE_MAX = 400
ENTRIES_MAX = 100_000


def process_identity(found: FoundWorker) -> str:
    """Return what no other process has, ever."""
    return f"pid {found.pid} start {found.start_time} boot {found.boot_id}"


def command(pid: int) -> str:
    """Return the command line of a process in one line, cut to CMDLINE_MAX characters."""
    return " ".join(procfs.cmdline(pid)).strip()[:CMDLINE_MAX]


def of_process(found: FoundWorker) -> dict[str, str]:
    """Return pid, owner, program, command line and since when it runs."""
    return {
        "pid": str(found.pid),
        "uid": str(found.uid),
        "executable": found.executable,
        "cmdline": command(found.pid),
        "started": _stamp(_booted_s() + found.start_time / os.sysconf("SC_CLK_TCK")),
        **({"cgroup": found.cgroup} if found.cgroup else {}),
    }


def _booted_s() -> float:
    lines = Path("/proc/stat").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("btime ")))


def _stamp(seconds: float) -> str:
    return timestamp(datetime.fromtimestamp(seconds, UTC))


def path_identity(path: Path) -> str:
    """Return what another file under that name has not; empty: there is none."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return ""
    # What is in a directory changes its times; an inode of a file may be used again.
    moment = "" if stat.S_ISDIR(status.st_mode) else f" changed {status.st_ctime_ns}"
    return f"inode {status.st_dev:x}:{status.st_ino}{moment}"


def of_path(path: Path) -> dict[str, str]:
    """Return path, size in bytes of all that is in it, owner, mode and last change."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return {
        "path": str(path),
        "size_bytes": str(_size_bytes(path, status)),
        "uid": str(status.st_uid),
        "mode": stat.filemode(status.st_mode),
        "modified": _stamp(status.st_mtime),
        "inode": str(status.st_ino),
    }


def _size_bytes(path: Path, status: os.stat_result) -> int:
    """Return what it takes of the file system, of a directory with all below it."""
    taken = status.st_blocks * 512
    if not stat.S_ISDIR(status.st_mode):
        return taken
    for number, (directory, _, names) in enumerate(os.walk(path)):
        if number > ENTRIES_MAX:
            break
        for name in names:
            try:
                taken += (Path(directory) / name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue
    return taken


def path_item(
    kind: str, path: Path, *, owner: str = "", known: bool, data: bool = False
) -> CensusItem:
    """Return a file, directory or socket for a census; evidence where nothing explains it."""
    if known:
        return CensusItem(kind=kind, name=str(path), owner=owner)
    return CensusItem(
        kind=kind,
        name=str(path),
        owner=owner,
        known=False,
        identity=path_identity(path),
        evidence=of_path(path),
        data=data,
    )


def process_item(found: FoundWorker, *, owner: str = "", known: bool) -> CensusItem:
    """Return a process for a census, under its worker id."""
    return CensusItem(
        kind="process",
        name=found.worker_id,
        owner=owner,
        known=known,
        detail=f"pid {found.pid} uid {found.uid} {found.executable}",
        identity="" if known else process_identity(found),
        evidence={} if known else of_process(found),
    )


def require_unexplained(items: Iterable[CensusItem], request: ReapUnexplained) -> CensusItem:
    """Return the thing that is to be removed, if it is there, the same, and still unexplained.

    NotFound where it is gone, Conflict where another has its name or a record explains it now,
    FailedPrecondition where it may be a tenant's data and that was not said.
    """
    named = [each for each in items if (each.kind, each.name) == (request.kind, request.name)]
    resource = f"{request.kind} {request.name}"
    if not named:
        raise NotFound("it is gone already", resource=resource)
    same = [each for each in named if each.identity == request.identity and each.identity]
    if not same:
        raise Conflict("another thing has its name by now", resource=resource)
    if any(each.known for each in named):
        raise Conflict("a record explains it by now: it is no leak", resource=resource)
    if same[0].data and not request.data:
        raise FailedPrecondition(
            "it may be a tenant's data",
            resource=resource,
            hint="say so with --data, if it is to go",
        )
    return same[0]


def children(directory: Path) -> list[Path]:
    """Return what is in a directory, in order; nothing where there is none."""
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_socket(path: Path) -> bool:
    """Tell whether a path is a socket; one that is gone is none."""
    try:
        return stat.S_ISSOCK(path.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
