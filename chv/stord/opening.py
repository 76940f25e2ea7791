"""How a storage daemon gets its disks: on its command line, or by its monitor.

A monitor reads byte by byte and a disk is a thousand of them, so a new storage daemon opens by its
command line whatever it can: what needs no key, which nobody may read there, and no server, which
may not answer. All else comes by QMP, in the same order: the lock first, so that nothing is opened
that somebody else writes. The caller holds the VM's lock; errors are those of the parts.
"""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from chv.common.errors import AlreadyExists, ChvError, DeadlineExceeded, Unavailable
from chv.common.process import wait_gone
from chv.common.wire.stord import AccessMode
from chv.stord import allow, luks
from chv.stord.disks import LOCAL_DRIVERS
from chv.stord.exports import RunDirectory
from chv.stord.qsd import graph
from chv.stord.qsd.monitor import Monitor
from chv.stord.records import Backend

if TYPE_CHECKING:
    from chv.stord.work import Parts

Reached = Callable[[str], Awaitable[None]]


class Opening:
    """The disks of one VM. `reached` names the failpoints."""

    def __init__(self, parts: Parts, run: RunDirectory, reached: Reached) -> None:
        self._parts = parts
        self._run = run
        self._reached = reached

    @property
    def _backend(self) -> Backend:
        return self._parts.records.backends[self._run.vm_id]

    # --- by the command line
    async def at_start(self) -> tuple[graph.Serving, ...]:
        """Give the files of the wanted disks to the storage uid; describe those to start with."""
        rows = [row for row in self._parts.records.of_vm(self._run.vm_id) if row.wanted]
        wanted = [(row.volume_id, row.read_only) for row in rows]
        serving = await anyio.to_thread.run_sync(self._granted, sorted(wanted))
        await self._reached("after_grant")
        return serving

    def _granted(self, wanted: list[tuple[str, bool]]) -> tuple[graph.Serving, ...]:
        found: list[graph.Serving] = []
        for volume_id, read_only in wanted:
            serving = self._serving(volume_id, read_only=read_only)
            if is_plain(serving.disk):
                self._parts.disks.grant(volume_id, self._backend.storage_uid)
                found.append(serving)
        return tuple(found)

    def _serving(self, volume_id: str, *, read_only: bool) -> graph.Serving:
        disks = self._parts.disks
        return graph.Serving(
            disk=disks.disk(volume_id, read_only=read_only),
            lock_path=disks.lock_path(volume_id),
            socket_path=self._run.unprimed(volume_id),
            shared=self._is_shared(volume_id),
        )

    def _is_shared(self, volume_id: str) -> bool:
        spec = self._parts.records.volumes[volume_id].backend
        return spec.access is AccessMode.READ_ONLY_MANY

    # --- by the monitor
    async def add(self, monitor: Monitor, volume_id: str, *, read_only: bool) -> None:
        """Give the files to the storage uid, take the lock, then all that lies under its guard."""
        serving = await anyio.to_thread.run_sync(
            partial(self._given, volume_id, read_only=read_only)
        )
        await self._reached("after_grant")
        lock, *rest = graph.commands(serving)
        await monitor.call(*lock)
        await self._reached("after_lock")
        try:
            await self._add_rest(monitor, serving.disk, rest)
        except DeadlineExceeded as error:
            late = error
        else:
            await self._reached("after_export")
            return
        await self._give_up(serving.disk, late)

    def _given(self, volume_id: str, *, read_only: bool) -> graph.Serving:
        self._parts.disks.grant(volume_id, self._backend.storage_uid)
        serving = self._serving(volume_id, read_only=read_only)
        serving.socket_path.unlink(missing_ok=True)
        return serving

    async def _add_rest(
        self, monitor: Monitor, disk: graph.Disk, commands: list[graph.Command]
    ) -> None:
        layout = self._parts.layout
        async with luks.secrets(monitor, layout, disk.volume_id, disk.keys):
            group, *others = await monitor.batch(*commands)
            # There is one already where an attachment was cut short after this step.
            known = isinstance(group, AlreadyExists)
            for answer in others if known else (group, *others):
                if isinstance(answer, ChvError):  # what fails after it fails because of it
                    raise answer
        if known:
            await monitor.set_limits(graph.throttle_group(disk.volume_id), disk.limits)

    async def _give_up(self, disk: graph.Disk, late: DeadlineExceeded) -> None:
        """Raise. A storage daemon that waits for a server answers nothing else.

        If no VMM has had anything of it, it is killed; else that is up to the pulses.
        """
        spec = self._parts.records.volumes[disk.volume_id].backend
        place = spec.nbd or spec.iscsi or spec.rbd
        if place is None:
            raise late
        message = f"{spec.class_name.value} server {allow.remote_of(place)} does not answer"
        worker = self._backend.worker
        rows = self._parts.records.of_vm(self._run.vm_id)
        if worker is None or any(row.published for row in rows):
            raise DeadlineExceeded(message, resource=disk.volume_id) from late
        await self._parts.provider.kill(worker, signal.SIGKILL)
        await wait_gone(worker)
        raise Unavailable(message, resource=disk.volume_id) from late


def is_plain(disk: graph.Disk) -> bool:
    """Tell whether a command line can open the disk."""
    layers = (*disk.below, *disk.own)
    return not disk.keys and all(layer.protocol.driver in LOCAL_DRIVERS for layer in layers)
