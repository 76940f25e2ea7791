"""The files of saved VMs: written below the VM's state, kept by root, handed back to one VMM.

While a VM is saved, its VMM's uid owns one directory. What is in it afterwards is moved to where
only root gets, and is refused where it is anything but plain files. A restore lends these files
read-only to the VM's group, by hard links in a directory of that VM; they are root's again after.
Fails with ResourceExhausted where space lacks, DataLoss where a snapshot is not whole.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

import anyio

from chv.agent.ports import VmHandle
from chv.agent.resources.places import floor_bytes
from chv.common.config import StorageConfig
from chv.common.errors import DataLoss, PermissionDenied, ResourceExhausted
from chv.common.files import (
    atomic_write,
    copy_file,
    ensure_dir,
    free_bytes,
    no_space_is_exhausted,
    sync_directory,
)
from chv.common.layout import Layout

SPARE_BYTES = 64 << 20  # for device state, and so that the node's own store has room
COPIED_BYTES_MAX = 1 << 20  # a file that small is copied: a driver may rewrite it for a restore
FILES_MAX = 64
MARK = "whole"  # made last: without it the files are worth nothing


class Saves:
    """Implements `SavePort`."""

    def __init__(self, layout: Layout, storage: StorageConfig) -> None:
        self._layout = layout
        self._storage = storage

    async def prepare(self, vm: VmHandle, snapshot_uid: str, size_bytes: int) -> str:
        """Make an empty directory for the VMM, if there is room for so much."""
        return await anyio.to_thread.run_sync(self._prepare, vm, snapshot_uid, size_bytes)

    async def keep(self, vm: VmHandle, snapshot_uid: str) -> int:
        """Take what the VMM has written; return how much of the disk it takes."""
        return await anyio.to_thread.run_sync(self._keep, vm, snapshot_uid)

    async def remove(self, vm_uid: str, snapshot_uid: str) -> None:
        """Remove a snapshot's files, wherever they are by now."""
        await anyio.to_thread.run_sync(self._remove, vm_uid, snapshot_uid)

    async def is_kept(self, snapshot_uid: str) -> bool:
        """Tell whether all of its files were taken."""
        path = self._layout.vm_snapshot(snapshot_uid) / MARK
        return await anyio.to_thread.run_sync(path.exists)

    async def hand_over(self, vm: VmHandle, snapshot_uid: str) -> str:
        """Let the VMM of this VM read a snapshot; return the directory."""
        return await anyio.to_thread.run_sync(self._hand_over, vm, snapshot_uid)

    async def withdraw(self, vm_uid: str, snapshot_uid: str) -> None:
        """Take back what was handed over; what a VMM has open it keeps."""
        await anyio.to_thread.run_sync(self._withdraw, vm_uid, snapshot_uid)

    # --- saving

    def _prepare(self, vm: VmHandle, snapshot_uid: str, size_bytes: int) -> str:
        self._remove(vm.uid, snapshot_uid)
        room, needed = free_bytes(self._layout.state), size_bytes + SPARE_BYTES
        floor = floor_bytes(self._layout.state, self._storage)
        if room < needed + floor:
            raise ResourceExhausted(
                f"memory and devices may take {needed} bytes, {room} are free "
                f"in {self._layout.state}, and {floor} must stay free",
                resource=f"VirtualMachine {vm.namespace}/{vm.name}",
                hint="free space there, then take the snapshot again",
            )
        uid = self._layout.vmm_uid(vm.slot)
        path = self._layout.vm_save(vm.uid) / snapshot_uid
        ensure_dir(path, mode=0o700, uid=uid, gid=uid)
        return str(path)

    def _keep(self, vm: VmHandle, snapshot_uid: str) -> int:
        written, kept = self._written(vm.uid, snapshot_uid), self._layout.vm_snapshot(snapshot_uid)
        ensure_dir(self._layout.vm_snapshots, mode=0o700)
        with suppress(FileNotFoundError):  # moved by an attempt that was cut short
            written.rename(kept)
        _own(kept, 0o700)
        size_bytes = 0
        for name in _names(kept):
            size_bytes += _take(kept / name, 0o600, gid=0)
        atomic_write(kept / MARK, b"")
        sync_directory(self._layout.vm_snapshots)
        return size_bytes

    def _remove(self, vm_uid: str, snapshot_uid: str) -> None:
        for path in (self._written(vm_uid, snapshot_uid), self._layout.vm_snapshot(snapshot_uid)):
            if path.is_symlink():
                path.unlink()
            with suppress(FileNotFoundError):
                shutil.rmtree(path)

    def _written(self, vm_uid: str, snapshot_uid: str) -> Path:
        return self._layout.vm_save(vm_uid) / snapshot_uid

    # --- restoring

    def _hand_over(self, vm: VmHandle, snapshot_uid: str) -> str:
        kept, given = self._layout.vm_snapshot(snapshot_uid), self._layout.vm_restore(vm.uid)
        if not (kept / MARK).exists():
            raise DataLoss("the snapshot's memory is not there", resource=str(kept))
        self._withdraw(vm.uid, snapshot_uid)
        gid = self._layout.vmm_uid(vm.slot)
        ensure_dir(given, mode=0o750, gid=gid)
        with no_space_is_exhausted(given):
            for name in _names(kept):
                _lend(kept / name, given / name, gid)
        return str(given)

    def _withdraw(self, vm_uid: str, snapshot_uid: str) -> None:
        kept, given = self._layout.vm_snapshot(snapshot_uid), self._layout.vm_restore(vm_uid)
        with suppress(FileNotFoundError):
            shutil.rmtree(given)
        with suppress(FileNotFoundError):
            for name in _names(kept):
                _take(kept / name, 0o600, gid=0, links_max=2)


def _own(directory: Path, mode: int) -> None:
    """Make a directory root's; whoever has it open cannot change its names any more."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchown(fd, 0, 0)
        os.fchmod(fd, mode)
    finally:
        os.close(fd)


def _names(directory: Path) -> list[str]:
    names = sorted(each.name for each in directory.iterdir() if each.name != MARK)
    if len(names) > FILES_MAX:
        raise PermissionDenied(f"{len(names)} files in {directory}: more than {FILES_MAX}")
    return names


def _take(path: Path, mode: int, *, gid: int, links_max: int = 1) -> int:
    """Make a plain file root's; refuse what a VMM could have put there in its place."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except OSError as error:
        raise PermissionDenied(f"{path}: {error.strerror}") from error
    try:
        seen = os.fstat(fd)
        if not stat.S_ISREG(seen.st_mode) or seen.st_nlink > links_max:
            raise PermissionDenied(f"{path} is not a plain file of its own")
        os.fchown(fd, 0, gid)
        os.fchmod(fd, mode)
        return seen.st_blocks * 512
    finally:
        os.close(fd)


def _lend(path: Path, target: Path, gid: int) -> None:
    """Small files are copies, which a driver may rewrite; memory is linked, for reading only."""
    if path.stat().st_size <= COPIED_BYTES_MAX:
        copy_file(path, target)
        _take(target, 0o640, gid=gid)
        return
    _take(path, 0o640, gid=gid)
    target.hardlink_to(path)
