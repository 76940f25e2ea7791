"""Attach, detach and recover: what callers ask for, checked, recorded, then left to the keeper.

The caller holds the volume's lock where a volume is named; the VM's lock is taken here, always
after it. A failed attach takes back what it recorded; a failed recovery leaves the VM LOST.
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import msgspec

from chv.common import logs
from chv.common.clock import timestamp
from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    FailedPrecondition,
    InUse,
    NotFound,
    Unavailable,
)
from chv.common.failpoint import failpoint
from chv.common.wire.stord import (
    AccessMode,
    AttachmentInfo,
    AttachVolumeToVm,
    BackendState,
    VmBackendInfo,
)
from chv.stord import confinement, crash_class
from chv.stord.exports import RunDirectory
from chv.stord.integrity import Integrity
from chv.stord.keeper import REASON_CHARACTERS_MAX, Keeper
from chv.stord.records import Attachment, Backend, BackendPhase

log = logs.get(__name__)
_STATES = {
    BackendPhase.SERVING: BackendState.SERVING,
    BackendPhase.LOST: BackendState.LOST,
    BackendPhase.RECOVERING: BackendState.LOST,
    BackendPhase.RESTARTING: BackendState.RESTARTING,
}
READ_ONLY_MANY = AccessMode.READ_ONLY_MANY
_ANY_INCARNATION = "0" * 8
UNDO_TIMEOUT_S = 10.0


class Sessions:
    """What is attached where."""

    def __init__(self, keeper: Keeper, integrity: Integrity) -> None:
        self._keeper = keeper
        self._integrity = integrity
        self._records = keeper.parts.records
        self._layout = keeper.parts.layout

    async def attach(self, request: AttachVolumeToVm) -> AttachmentInfo:
        """Serve the volume to the VM; the same answer where it is served already."""
        return (await self.attach_together([request], []))[0]

    async def attach_together(
        self, requests: Sequence[AttachVolumeToVm], foreseen: Sequence[AttachVolumeToVm]
    ) -> list[AttachmentInfo]:
        """Serve several volumes to one VM in one go, or none of them that was not served before.

        `foreseen`: what the VM gets besides. An error need not say which of them has it.
        """
        vm_id = requests[0].vm_id
        async with self._keeper.locks.hold(vm_id):
            new = await self._admit_all(requests, foreseen)
            if new:
                await failpoint("stord.attach.after_intent")
            try:
                await self._keeper.converge(vm_id, "attach")
                for request in requests:
                    self._require_served(request)
            except ChvError as error:
                if new:
                    with anyio.move_on_after(UNDO_TIMEOUT_S, shield=True):
                        await self._undo_attach(new, error)
                raise
            rows = [self._records.attachments[each.volume_id, vm_id] for each in requests]
            return [self.attachment_info(row) for row in rows]

    async def detach(self, volume_id: str, vm_id: str) -> None:
        """Stop serving; fine when it is not attached."""
        async with self._keeper.locks.hold(vm_id):
            row = self._records.attachment(volume_id, vm_id)
            if row is None:
                return
            await self._records.put_attachment(msgspec.structs.replace(row, wanted=False))
            await failpoint("stord.detach.after_intent")
            await self._keeper.converge(vm_id, "detach")

    async def recover(self, vm_id: str) -> VmBackendInfo:
        """Start a new incarnation where the old one is dead; a served VM stays as it is."""
        async with self._keeper.locks.hold(vm_id):
            backend = self._records.backends.get(vm_id)
            if backend is None:
                raise NotFound("the VM has no attachment", resource=vm_id)
            if backend.phase is BackendPhase.ABSENT:
                raise FailedPrecondition(
                    "the host has booted since", resource=vm_id, hint="attach the volumes again"
                )
            await self._keeper.converge(vm_id, "adopt")
            if vm_id not in self._records.backends:
                raise NotFound("the VM has no attachment", resource=vm_id)
            if not self.is_served(vm_id):
                for row in self._records.of_vm(vm_id):
                    await self._integrity.require(row.volume_id)
                await self._restart(vm_id)
            return self.backend_info(vm_id)

    def attachment_info(self, row: Attachment) -> AttachmentInfo:
        """Describe one attachment as recorded."""
        backend = self._records.backends[row.vm_id]
        return AttachmentInfo(
            volume_id=row.volume_id,
            vm_id=row.vm_id,
            export_path=str(self._layout.export(row.vm_id, row.volume_id)),
            read_only=row.read_only,
            crash_class=crash_class.of_attachment(row, self._records.volumes.get(row.volume_id)),
            backend=state_of(backend),
            backend_pid=_pid(backend),
            proxy_pid=0 if row.proxy is None else row.proxy.pid,
        )

    def backend_info(self, vm_id: str) -> VmBackendInfo:
        """Describe the storage daemon of one VM as recorded."""
        backend = self._records.backends[vm_id]
        return VmBackendInfo(
            vm_id=vm_id,
            backend=state_of(backend),
            backend_pid=_pid(backend),
            incarnation=backend.incarnation,
            crash_class=self._keeper.crash_class(vm_id),
            losses=backend.losses,
            last_loss=backend.last_loss,
            version=self._keeper.parts.monitors.versions.get(vm_id, ""),
            last_restart=backend.last_restart,
            attachments=[self.attachment_info(row) for row in self._records.of_vm(vm_id)],
        )

    def is_served(self, vm_id: str) -> bool:
        """Tell whether every wanted attachment of the VM has its VMM-facing path."""
        backend = self._records.backends.get(vm_id)
        rows = [row for row in self._records.of_vm(vm_id) if row.wanted]
        run = RunDirectory(self._layout, vm_id)
        paths = run.published([row.volume_id for row in rows])
        return (
            backend is not None
            and backend.phase is BackendPhase.SERVING
            and all(row.published and row.volume_id in paths for row in rows)
        )

    # --- inward; the VM's lock is held
    async def _admit_all(
        self, requests: Sequence[AttachVolumeToVm], foreseen: Sequence[AttachVolumeToVm]
    ) -> list[Attachment]:
        """Check against the records and record, all at once; return what was not there before."""
        vm_id = requests[0].vm_id
        backend = await self._backend_for([*requests, *foreseen])
        new = [row for each in requests if (row := self._admitted(each, backend)) is not None]
        if not new:
            return []
        there = [each for each in self._records.of_vm(vm_id) if each.wanted]
        later = [_row(each) for each in foreseen]
        proxied = self._keeper.takes_proxy(vm_id, [*there, *later, *new])
        new = [msgspec.structs.replace(row, proxied=proxied) for row in new]
        await self._records.put_vm(new, backend)
        return new

    def _admitted(self, request: AttachVolumeToVm, backend: Backend) -> Attachment | None:
        """Return the new attachment, None where it is there already; raise where it may not be."""
        self._refuse_others(request)
        _require_same(backend.storage_uid, request.storage_uid, "storage_uid", request)
        _require_same(backend.vm_gid, request.vm_gid, "vm_gid", request)
        there = self._records.attachment(request.volume_id, request.vm_id)
        if there is not None and there.wanted:
            _require_same(there.read_only, request.read_only, "read_only", request)
            return None
        if backend.phase is BackendPhase.LOST:
            raise FailedPrecondition(
                "the VM's storage daemon was lost",
                resource=request.vm_id,
                hint="RecoverVmBackend first",
            )
        if self._needs_network(request.volume_id):
            confinement.require_network(backend, f"volume {request.volume_id}")
        RunDirectory(self._layout, request.vm_id).check(request.volume_id, _ANY_INCARNATION)
        return _row(request)

    def _needs_network(self, volume_id: str) -> bool:
        return confinement.needs_network(self._records.volumes, volume_id)

    def _refuse_others(self, request: AttachVolumeToVm) -> None:
        """Refuse a second VM, unless the volume is there to be read by many."""
        many = self._records.volumes[request.volume_id].backend.access is READ_ONLY_MANY
        if many and not request.read_only:
            raise FailedPrecondition(
                "a ReadOnlyMany volume is attached read only",
                resource=request.volume_id,
                field="read_only",
                hint="attach it with read_only, or make a clone of it to write to",
            )
        for held in self._records.holders(request.volume_id):
            if held.vm_id != request.vm_id and not (many and held.read_only):
                raise InUse(
                    f"volume {request.volume_id} is attached to VM {held.vm_id}",
                    resource=request.volume_id,
                    hint="detach it there first",
                )

    async def _backend_for(self, requests: Sequence[AttachVolumeToVm]) -> Backend:
        request = requests[0]
        backend = self._records.backends.get(request.vm_id)
        if backend is not None and backend.phase is BackendPhase.ABSENT:
            await self._records.drop_backend(request.vm_id)
            backend = None
        return backend or Backend(
            vm_id=request.vm_id,
            storage_uid=request.storage_uid,
            vm_gid=request.vm_gid,
            boot_id=self._keeper.parts.boot_id,
            network=request.network or any(self._needs_network(one.volume_id) for one in requests),
        )

    async def _undo_attach(self, new: Sequence[Attachment], reason: ChvError) -> None:
        """Take back what a failed attach recorded; where that fails too, it is tried again."""
        vm_id = new[0].vm_id
        rows = [self._records.attachment(row.volume_id, vm_id) for row in new]
        unwanted = [msgspec.structs.replace(row, wanted=False) for row in rows if row is not None]
        if not unwanted:
            return
        await self._records.put_vm(unwanted, None)
        if isinstance(reason, DeadlineExceeded):
            return  # it hangs: do not make the caller wait once more, the next pulse cleans up
        try:
            await self._keeper.converge(vm_id, "undo")
        except ChvError as error:
            log.warning("undo_failed", vm_id=vm_id, error=error, next="tried again")

    async def _restart(self, vm_id: str) -> None:
        rows = self._records.of_vm(vm_id)
        proxied = self._keeper.takes_proxy(vm_id, [row for row in rows if row.wanted])
        rows = [msgspec.structs.replace(row, published=False, proxied=proxied) for row in rows]
        backend = msgspec.structs.replace(
            self._records.backends[vm_id], phase=BackendPhase.RECOVERING
        )
        await self._records.put_vm(rows, backend)
        await failpoint("stord.recover.after_intent")
        try:
            await self._keeper.converge(vm_id, "recover")
            if not self.is_served(vm_id):
                raise Unavailable("the new storage daemon died at once", resource=vm_id)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await self._keeper.give_up_recovery(vm_id, f"recovery failed: {error}")
            raise
        await self._note_recovery(vm_id)
        log.info("backend_recovered", vm_id=vm_id)
        self._keeper.tell_ready(vm_id)

    async def _note_recovery(self, vm_id: str) -> None:
        backend = self._records.backends[vm_id]
        loss = backend.last_loss.replace("disks are down until RecoverVmBackend", "recovered")
        now = timestamp(self._keeper.parts.clock.now())
        text = f"{loss}, served again {now}"[:REASON_CHARACTERS_MAX]
        await self._records.put_backend(msgspec.structs.replace(backend, last_loss=text))

    def _require_served(self, request: AttachVolumeToVm) -> None:
        backend = self._records.backends.get(request.vm_id)
        row = self._records.attachment(request.volume_id, request.vm_id)
        if backend is None or row is None or not row.published:
            raise Unavailable(
                "the storage daemon died during the attach",
                resource=request.vm_id,
                hint="RecoverVmBackend if the VM has other attachments, then attach again",
            )


def state_of(backend: Backend | None) -> BackendState:
    """Return the outward state of a VM's storage daemon."""
    if backend is None:
        return BackendState.ABSENT
    return _STATES.get(backend.phase, BackendState.ABSENT)


def _pid(backend: Backend) -> int:
    serving = backend.phase is BackendPhase.SERVING and backend.worker is not None
    return backend.worker.pid if serving and backend.worker is not None else 0


def _row(request: AttachVolumeToVm) -> Attachment:
    return Attachment(volume_id=request.volume_id, vm_id=request.vm_id, read_only=request.read_only)


def _require_same(there: object, asked: object, field: str, request: AttachVolumeToVm) -> None:
    if there != asked:
        raise FailedPrecondition(
            f"attached with {field} {there}, asked for {asked}",
            resource=request.volume_id,
            field=field,
            hint="detach first",
        )
