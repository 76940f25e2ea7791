"""Network namespaces by name, and running a function inside one.

A namespace cannot be entered by the thread of an event loop, and forking costs milliseconds and
duplicates every descriptor: `inside` sends a thread of the pool there and back, and `call_in` uses
one that lives for one call. Names are files in /run/netns, made as iproute2 makes them, so that
`ip netns` shows them. A file there that is no namespace is debris of a kill between making and
mounting it.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Generic, TypeVar, cast

import anyio.to_thread

from chv.common.failpoint import failpoint_sync
from chv.common.process import syscalls
from chv.nwd.kernel.errors import translated

ROOT = Path("/run/netns")
OWN = "/proc/self/ns/net"
THREAD = "/proc/thread-self/ns/net"
_NSFS_MAGIC = 0x6E736673
_MS_BIND, _MS_REC, _MS_SHARED = 4096, 16384, 1 << 20
_MNT_DETACH = 2
_STATFS_BYTES = 256

T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_char_p,
    ctypes.c_ulong,
    ctypes.c_char_p,
]


class Presence(enum.Enum):
    """What stands under a name in /run/netns."""

    ABSENT = "absent"
    DEBRIS = "debris"  # a file that is not a namespace
    PRESENT = "present"


@dataclass(slots=True)
class _Outcome(Generic[T]):
    value: T | None = None
    error: BaseException | None = None


def path_of(name: str) -> str:
    """Return the path by which a namespace is entered."""
    return f"{ROOT}/{name}"


def presence(name: str) -> Presence:
    """Return what stands under `name`."""
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.statfs(path_of(name).encode(), buffer) < 0:
        number = ctypes.get_errno()
        if number == errno.ENOENT:
            return Presence.ABSENT
        raise OSError(number, os.strerror(number), path_of(name))
    magic = ctypes.c_long.from_buffer(buffer).value
    return Presence.PRESENT if magic == _NSFS_MAGIC else Presence.DEBRIS


def inode(path: str) -> int:
    """Return what tells two namespaces apart as long as both exist."""
    return os.stat(path).st_ino  # noqa: PTH116


def names(prefix: str) -> list[str]:
    """Return the names that start with `prefix`, debris included."""
    if not ROOT.is_dir():
        return []
    return sorted(entry.name for entry in ROOT.iterdir() if entry.name.startswith(prefix))


def create(name: str) -> None:
    """Make a namespace and its name; debris under the name is replaced. Blocks."""
    with translated(f"making network namespace {name}"):
        if presence(name) is Presence.PRESENT:
            return
        _prepare_root()
        Path(path_of(name)).touch(mode=0o444)
        failpoint_sync("nwd.ensure.netns_file")
        _in_thread(lambda: _unshare_and_mount(name))


def remove(name: str) -> None:
    """Remove a name; the namespace ends with the last process and socket in it. Blocks."""
    path = Path(path_of(name))
    with translated(f"removing network namespace {name}"):
        while presence(name) is Presence.PRESENT:
            _check(_libc.umount2(os.fsencode(path), _MNT_DETACH))
            failpoint_sync("nwd.delete.netns_unmounted")
        path.unlink(missing_ok=True)


def call_in(path: str, function: Callable[[], T]) -> T:
    """Run a function in the namespace at `path`, in a thread of its own. Blocks."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def enter() -> T:
        syscalls.join_netns(fd)
        return function()

    try:
        return _in_thread(enter)
    finally:
        os.close(fd)


async def inside(path: str, function: Callable[[], T]) -> T:
    """Run a function in the namespace at `path` without holding up the event loop."""
    return await anyio.to_thread.run_sync(visit, path, function)


def visit(path: str, function: Callable[[], T]) -> T:
    """Run a function in the namespace at `path` and come back. Not for the first thread. Blocks.

    What the first thread is in counts as this process's own namespace.
    """
    home = _home()
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        syscalls.join_netns(fd)
    finally:
        os.close(fd)
    try:
        return function()
    finally:
        _return(home)


@cache
def _home() -> int:
    return os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)


def _return(home: int) -> None:
    try:
        syscalls.join_netns(home)
    except OSError:
        os.abort()  # whatever this thread did next would be done in a wrong namespace


def _in_thread(function: Callable[[], T]) -> T:
    outcome: _Outcome[T] = _Outcome()

    def body() -> None:
        try:
            outcome.value = function()
        except BaseException as error:  # noqa: BLE001, ASYNC103  raised again by the caller
            outcome.error = error

    thread = threading.Thread(target=body, name="netns")
    thread.start()
    thread.join()
    if outcome.error is not None:
        raise outcome.error
    return cast(T, outcome.value)


def _unshare_and_mount(name: str) -> None:
    _check(_libc.unshare(syscalls.CLONE_NEWNET))
    _mount("/proc/thread-self/ns/net", path_of(name), _MS_BIND)


def _prepare_root() -> None:
    """Make /run/netns a shared mount of its own: mounts in it then show in every mount space."""
    ROOT.mkdir(mode=0o755, exist_ok=True)
    try:
        _mount("", str(ROOT), _MS_SHARED | _MS_REC)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: not a mount point yet
            raise
        _mount(str(ROOT), str(ROOT), _MS_BIND | _MS_REC)
        _mount("", str(ROOT), _MS_SHARED | _MS_REC)


def _mount(source: str, target: str, flags: int) -> None:
    _check(_libc.mount(source.encode(), target.encode(), b"none", flags, None))


def _check(result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def processes_in(path: str) -> list[int]:
    """Return the pids of the processes in a namespace."""
    wanted, found = inode(path), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if inode(str(entry / "ns/net")) == wanted:
                    found.append(int(entry.name))
    return found
