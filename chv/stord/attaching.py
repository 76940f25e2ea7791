"""The way to an attachment, of one volume or of several together: checks, then the sessions.

The locks of all volumes that a call names are held, in the order of their ids, from the first
check until they are served. Those that can be on a storage daemon's command line are attached in
one go, so that all of them cost one start; if that fails, each by itself, so that the error is of
the volume that has it. What keeps one volume away keeps no other away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass

import anyio
import msgspec

from chv.common import logs
from chv.common.errors import ChvError, DeadlineExceeded, InvalidArgument
from chv.common.wire import stord as wire
from chv.common.wire.stord import VolumeClass
from chv.stord.integrity import Integrity
from chv.stord.records import Records
from chv.stord.sessions import Sessions
from chv.stord.volumes import Volumes

log = logs.get(__name__)
NOTE_TIMEOUT_S = 5.0
ROOT_UID = 0
LOCAL = (VolumeClass.FILE, VolumeClass.BLOCK, VolumeClass.LVM)
Hold = Callable[[str], AbstractAsyncContextManager[None]]
Outcome = wire.AttachmentInfo | ChvError


@dataclass(frozen=True, slots=True)
class Gates:
    """What stands before an attach: the volume's lock, its layers at rest, nothing that forbids."""

    lock: Hold
    before_attach: Hold
    refuse: Callable[[str], None]


class Attaching:
    """Attachments, from the call to the sessions."""

    def __init__(
        self,
        records: Records,
        sessions: Sessions,
        volumes: Volumes,
        integrity: Integrity,
        gates: Gates,
    ) -> None:
        self._records = records
        self._sessions = sessions
        self._volumes = volumes
        self._integrity = integrity
        self._gates = gates

    async def attach(self, request: wire.AttachVolumeToVm) -> wire.AttachmentInfo:
        """Attach one volume."""
        outcome = (await self._attach([request]))[request.volume_id]
        if isinstance(outcome, ChvError):
            raise outcome
        return outcome

    async def attach_all(self, request: wire.AttachVolumesToVm) -> wire.AttachVolumesReply:
        """Attach several, each with an outcome of its own."""
        requests = _singles(request)
        outcomes = await self._attach(requests)
        return wire.AttachVolumesReply(
            outcomes=[_outcome(each.volume_id, outcomes[each.volume_id]) for each in requests]
        )

    # --- inward
    async def _attach(self, requests: list[wire.AttachVolumeToVm]) -> dict[str, Outcome]:
        _refuse_root(requests[0])
        outcomes: dict[str, Outcome] = {}
        ready: list[wire.AttachVolumeToVm] = []
        async with AsyncExitStack() as held:
            for each in sorted(requests, key=lambda one: one.volume_id):
                await held.enter_async_context(self._gates.lock(each.volume_id))
                error = await self._problem(each, held)
                if error is None:
                    ready.append(each)
                else:
                    outcomes[each.volume_id] = error
            served = await self._serve(ready)
            for volume_id, outcome in served.items():
                if isinstance(outcome, ChvError):
                    await self._note(volume_id, outcome)
        return outcomes | served

    async def _note(self, volume_id: str, error: ChvError) -> None:
        """Keep for the volume's health what it is not well with."""
        with anyio.move_on_after(NOTE_TIMEOUT_S, shield=True):
            await self._volumes.note_error(volume_id, error)

    async def _problem(
        self, request: wire.AttachVolumeToVm, held: AsyncExitStack
    ) -> ChvError | None:
        """Return what keeps the volume from being attached; None where nothing does."""
        volume_id = request.volume_id
        try:
            await held.enter_async_context(self._gates.before_attach(volume_id))
            await self._volumes.servable(volume_id, request.meta.generation)
            self._gates.refuse(volume_id)
        except ChvError as error:
            return error
        try:
            if self._records.holder(volume_id) is None:
                await self._integrity.require(volume_id)
                await self._volumes.grow_pending(volume_id)
        except ChvError as error:
            await self._note(volume_id, error)
            return error
        return None

    async def _serve(self, ready: Sequence[wire.AttachVolumeToVm]) -> dict[str, Outcome]:
        together = [each for each in ready if self._is_simple(each.volume_id)]
        outcomes = await self._serve_together(together, ready) if len(together) > 1 else {}
        for request in ready:
            if request.volume_id not in outcomes:
                outcomes[request.volume_id] = await self._serve_one(request)
        return outcomes

    def _is_simple(self, volume_id: str) -> bool:
        """Tell whether a storage daemon may start with it: no key, and no server to wait for."""
        spec = self._records.volumes[volume_id].backend
        return spec.class_name in LOCAL and spec.encryption is None

    async def _serve_together(
        self, together: Sequence[wire.AttachVolumeToVm], ready: Sequence[wire.AttachVolumeToVm]
    ) -> dict[str, Outcome]:
        """Return the outcome of each; nothing where each is to be tried by itself."""
        foreseen = [each for each in ready if each not in together]
        try:
            infos = await self._sessions.attach_together(together, foreseen)
        except DeadlineExceeded as error:
            return {each.volume_id: error for each in together}  # it hangs: once is enough
        except ChvError as error:
            log.warning("attach_together_failed", vm_id=together[0].vm_id, error=error, next="each")
            return {}
        return {info.volume_id: info for info in infos}

    async def _serve_one(self, request: wire.AttachVolumeToVm) -> Outcome:
        try:
            return await self._sessions.attach(request)
        except ChvError as error:
            return error


def _singles(request: wire.AttachVolumesToVm) -> list[wire.AttachVolumeToVm]:
    ids = [each.volume_id for each in request.volumes]
    if len(set(ids)) != len(ids):
        raise InvalidArgument("a volume is named twice", resource=request.vm_id, field="volumes")
    return [
        wire.AttachVolumeToVm(
            meta=msgspec.structs.replace(request.meta, generation=each.generation),
            volume_id=each.volume_id,
            vm_id=request.vm_id,
            storage_uid=request.storage_uid,
            vm_gid=request.vm_gid,
            read_only=each.read_only,
            network=request.network,
        )
        for each in request.volumes
    ]


def _outcome(volume_id: str, outcome: Outcome) -> wire.AttachOutcome:
    if isinstance(outcome, ChvError):
        return wire.AttachOutcome(volume_id=volume_id, error=outcome.data())
    return wire.AttachOutcome(volume_id=volume_id, attachment=outcome)


def _refuse_root(request: wire.AttachVolumeToVm) -> None:
    if ROOT_UID in (request.storage_uid, request.vm_gid):
        raise InvalidArgument(
            "a storage daemon never runs as root",
            field="storage_uid" if request.storage_uid == ROOT_UID else "vm_gid",
            hint="give each VM ids of its own",
        )
