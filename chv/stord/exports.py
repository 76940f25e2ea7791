"""The run directory of a VM: who owns what, and how a socket gets its VMM-facing name.

`vm/<short>/` belongs to root, so what lies in it was put there by us; `qsd/` in it belongs to the
storage uid, which may be hostile: nothing there is trusted, followed or chowned in place. A
socket is moved out first, looked at, then given to the VM's group and its final name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
from functools import partial
from pathlib import Path

from chv.common.errors import Internal
from chv.common.failpoint import failpoint_sync
from chv.common.files import ensure_dir
from chv.common.ids import short_uid
from chv.common.layout import Layout, check_socket_path
from chv.stord.proxy import command

SOCKET_MODE = 0o660


class RunDirectory:
    """Paths and changes below the run directory of one VM."""

    def __init__(self, layout: Layout, vm_id: str) -> None:
        self._layout = layout
        self.vm_id = vm_id
        self.path = layout.vm(vm_id)
        self.private = layout.qsd(vm_id)

    def monitor(self, incarnation: str) -> Path:
        """Return the monitor socket of an incarnation."""
        return self.private / f"{incarnation}.qmp"

    def pid_file(self, worker_id: str) -> Path:
        """Return the file whose name carries the worker id."""
        return self.private / f"{worker_id}.pid"

    def unprimed(self, volume_id: str) -> Path:
        """Return the name under which the storage daemon makes an export."""
        return self.private / f"{short_uid(volume_id)}.sock"

    def export(self, volume_id: str) -> Path:
        """Return the VMM-facing path."""
        return self._layout.export(self.vm_id, volume_id)

    def primed(self, volume_id: str) -> Path:
        """Return where the proxy of a volume looks for the primed export."""
        return self.private / f"{short_uid(volume_id)}.live"

    def bound(self, volume_id: str) -> Path:
        """Return the name that the listener of a proxy was bound to, before it got its last."""
        return self._moving(volume_id)

    def _moving(self, volume_id: str) -> Path:
        return self.path / f".{short_uid(volume_id)}"

    def check(self, volume_id: str, incarnation: str) -> None:
        """Raise InvalidArgument where one of the paths is too long for a socket."""
        for path in (
            self.monitor(incarnation),
            self.unprimed(volume_id),
            self.primed(volume_id),
            self.export(volume_id),
        ):
            check_socket_path(path)

    def prepare(self, storage_uid: int, vm_gid: int) -> None:
        """Make the directories, the private one new and empty."""
        make = partial(ensure_dir, durable=False)
        make(self._layout.run, mode=0o711)
        make(self._layout.vms, mode=0o711)
        make(self.path, mode=0o710, uid=0, gid=vm_gid)
        self.clear_private()
        make(self.private, mode=0o700, uid=storage_uid, gid=storage_uid)

    def clear_private(self) -> None:
        """Remove the storage daemon's own directory."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.private)

    def remains(self) -> bool:
        """Tell whether something of a storage daemon is left."""
        return self.private.exists()

    def published(self, volume_ids: list[str]) -> frozenset[str]:
        """Return those of the volumes whose VMM-facing path exists."""
        return frozenset(item for item in volume_ids if os.path.lexists(self.export(item)))

    def publish(self, volume_id: str, storage_uid: int, vm_gid: int) -> None:
        """Move a primed socket to its VMM-facing path, 0660 storage_uid:vm_gid."""
        moving, final = self._moving(volume_id), self.export(volume_id)
        self.unprimed(volume_id).rename(moving)
        failpoint_sync("stord.attach.after_move")
        status = moving.lstat()
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != storage_uid:
            moving.unlink()
            raise Internal(f"what the storage daemon made for {final} is not a socket of its own")
        os.chown(moving, storage_uid, vm_gid, follow_symlinks=False)
        moving.chmod(SOCKET_MODE)
        moving.rename(final)

    def moving(self, volume_ids: list[str]) -> frozenset[str]:
        """Return those of the volumes that have a socket on its way to its VMM-facing path."""
        return frozenset(item for item in volume_ids if os.path.lexists(self._moving(item)))

    def has_primed(self, volume_ids: list[str]) -> frozenset[str]:
        """Return those of the volumes that have an export for their proxy."""
        return frozenset(item for item in volume_ids if os.path.lexists(self.primed(item)))

    def hand_over(self, volume_id: str) -> None:
        """Move a primed socket to where the proxy, which is of the same uid, looks for it."""
        self.unprimed(volume_id).rename(self.primed(volume_id))

    def listen(self, volume_id: str, storage_uid: int, vm_gid: int) -> socket.socket:
        """Return a listener for a proxy, 0660 storage_uid:vm_gid, not at its final name yet."""
        moving = self._moving(volume_id)
        moving.unlink(missing_ok=True)
        listener = command.listen(moving)
        os.chown(moving, storage_uid, vm_gid, follow_symlinks=False)
        moving.chmod(SOCKET_MODE)
        return listener

    def place(self, volume_id: str) -> None:
        """Give a listener its VMM-facing name, over that of a dead one."""
        self._moving(volume_id).rename(self.export(volume_id))

    def unpublish(self, volume_id: str) -> None:
        """Remove the VMM-facing path and a half-moved socket; fine when there is none."""
        for path in (self.export(volume_id), self._moving(volume_id)):
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the private directory, and the VM's own if it is empty then."""
        self.clear_private()
        with contextlib.suppress(FileNotFoundError, OSError):
            self.path.rmdir()
