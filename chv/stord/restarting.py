"""A restart of a VM's storage daemon that was asked for, under the running guest.

Allowed where a death would be no loss either: every disk plain or read only, and behind an
in-flight proxy, which gives what is under way to the next storage daemon (`crash_class`). It is
asked to end, so it completes what it can. Journalled as a restart before it is; a kill anywhere
leaves either the old one serving, or a death that the keeper answers with a new one. If the VMM
does not come back to its disks the VM is given up to be reset, as after a loss.
"""

from __future__ import annotations

import anyio
import msgspec

from chv.common import logs
from chv.common.clock import timestamp
from chv.common.errors import FailedPrecondition, NotFound, Unavailable
from chv.common.failpoint import failpoint
from chv.common.process import WorkerRecord, terminate
from chv.common.wire.stord import CrashClass
from chv.stord import clients, crash_class
from chv.stord.exports import RunDirectory
from chv.stord.keeper import REASON_CHARACTERS_MAX, Keeper
from chv.stord.records import Attachment, Backend, BackendPhase
from chv.stord.work import STOP_GRACE_S

log = logs.get(__name__)
COME_BACK_S = 10.0
LOOK_S = 0.02


class Restarting:
    """Planned restarts."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._parts = keeper.parts
        self._records = keeper.parts.records

    async def restart(self, vm_id: str, operation_id: str) -> None:
        """Replace the storage daemon of a VM; fine where this operation has done so."""
        async with self._keeper.locks.hold(vm_id):
            backend = self._records.backends.get(vm_id)
            if backend is None:
                raise NotFound(
                    "the VM has no storage daemon",
                    resource=vm_id,
                    hint="every start of a VM has a new one",
                )
            if backend.restart_id != operation_id:
                await self._replace(vm_id, self._checked(backend), operation_id)

    async def give_network(self, vm_id: str, job_id: str) -> None:
        """Replace the storage daemon of a VM by one with a network, for a job; fine if it has one.

        As its record says it has one only when the old one has ended, a kill leaves no lie.
        """
        async with self._keeper.locks.hold(vm_id):
            backend = self._records.backends.get(vm_id)
            if backend is None:
                raise Unavailable("the VM's storage daemon has ended", resource=vm_id)
            if not backend.network:
                old = self._checked(backend, but=job_id)
                await self._replace(vm_id, old, job_id, network=True)

    # --- whether it may be
    def _checked(self, backend: Backend, *, but: str = "") -> WorkerRecord:
        """Return the process to replace; raise where that may not be."""
        vm_id = backend.vm_id
        if backend.phase is BackendPhase.RESTARTING or backend.worker is None:
            raise Unavailable("the storage daemon is just starting", resource=vm_id)
        if backend.phase is not BackendPhase.SERVING:
            raise FailedPrecondition(
                f"the storage daemon is {backend.phase.value}: there is nothing to restart",
                resource=vm_id,
                hint="the VM gets a new one when it recovers or starts",
            )
        unsafe = [problem for row in self._rows(vm_id) if (problem := self._problem(row))]
        if unsafe:
            raise FailedPrecondition(
                f"its storage daemon cannot be replaced under the guest: {'; '.join(unsafe)}",
                resource=vm_id,
                hint="stop and start the VM: every start has a new storage daemon",
            )
        for row in self._rows(vm_id):
            self._refuse_job(row.volume_id, but)
        return backend.worker

    def _problem(self, row: Attachment) -> str:
        """Say why the guest would notice; empty where it would not."""
        volume = self._records.volumes.get(row.volume_id)
        if crash_class.of_attachment(row, volume) is CrashClass.KEEP_VM:
            return ""
        if volume is None or row.read_only or crash_class.is_plain(volume):
            return f"volume {row.volume_id} has no in-flight proxy"
        if len(volume.layers) > 1:
            return f"volume {row.volume_id} has snapshots"
        kind = f"{volume.backend.class_name.value}, {volume.backend.format.value}"
        return f"volume {row.volume_id} ({kind}) keeps data in the storage daemon's memory"

    def _refuse_job(self, volume_id: str, but: str) -> None:
        job = self._records.job_of(volume_id)
        if job is not None and job.info.job_id != but:
            raise FailedPrecondition(
                f"job {job.info.kind.value} is under way in it",
                resource=volume_id,
                hint=f"wait for it, or chv ops cancel {job.info.job_id}",
            )

    def _rows(self, vm_id: str) -> list[Attachment]:
        return [row for row in self._records.of_vm(vm_id) if row.wanted]

    # --- how it is done
    async def _replace(
        self, vm_id: str, old: WorkerRecord, operation_id: str, **changes: object
    ) -> None:
        before = self._connected(vm_id)
        version = self._parts.monitors.versions.get(vm_id, "")
        await self._put(vm_id, phase=BackendPhase.RESTARTING)
        await failpoint("stord.planned.after_intent")
        await self._parts.monitors.drop(vm_id)
        await terminate(old, grace_s=STOP_GRACE_S)
        await failpoint("stord.planned.after_stop")
        await self._parts.provider.cleanup(old)
        # Without a worker its end is no death: those are counted, and there may be few.
        await self._put(vm_id, worker=None, worker_id="", **changes)
        await failpoint("stord.planned.after_record")
        await self._keeper.look(vm_id)
        new = self._served(vm_id)
        await self._until_back(vm_id, before)
        now = timestamp(self._parts.clock.now())
        text = f"{now}: {self._name(vm_id, new)} follows {version or 'an unknown version'}"
        text = f"{text} (pid {old.pid}), {len(before)} disks are connected again"
        await failpoint("stord.planned.before_end")
        await self._put(vm_id, restart_id=operation_id, last_restart=text[:REASON_CHARACTERS_MAX])
        log.info("backend_replaced", vm_id=vm_id, pid=new.pid, before=old.pid)

    def _name(self, vm_id: str, worker: WorkerRecord) -> str:
        version = self._parts.monitors.versions.get(vm_id, "")
        return f"storage daemon {version} (pid {worker.pid})"

    async def _put(self, vm_id: str, **changes: object) -> None:
        backend = self._records.backends[vm_id]
        await self._records.put_backend(msgspec.structs.replace(backend, **changes))

    def _served(self, vm_id: str) -> WorkerRecord:
        backend = self._records.backends.get(vm_id)
        if backend is None or backend.phase is BackendPhase.RESTARTING:
            raise Unavailable("the new storage daemon is not there yet", resource=vm_id)
        if backend.phase is not BackendPhase.SERVING or backend.worker is None:
            raise FailedPrecondition(
                f"the new storage daemon did not serve: {backend.message}", resource=vm_id
            )
        return backend.worker

    async def _until_back(self, vm_id: str, before: frozenset[str]) -> None:
        """Return when every VMM that was connected is so again; else give the VM up."""
        with anyio.move_on_after(COME_BACK_S):
            while before - self._connected(vm_id):
                await self._parts.clock.sleep(LOOK_S)
            return
        away = ", ".join(sorted(before - self._connected(vm_id)))
        reason = f"the VMM did not come back to {away} in {COME_BACK_S:g} s after a restart"
        await self._keeper.give_up_recovery(vm_id, reason)
        raise FailedPrecondition(reason, resource=vm_id)

    def _connected(self, vm_id: str) -> frozenset[str]:
        """Return the volumes whose proxy has a VMM: it takes one when a storage daemon answers."""
        run = RunDirectory(self._parts.layout, vm_id)
        found = set()
        for row in self._rows(vm_id):
            path = run.bound(row.volume_id)
            if row.proxy is not None and path in clients.look(row.proxy.pid, [path]).exports:
                found.add(row.volume_id)
        return frozenset(found)
