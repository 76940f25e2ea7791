"""One pass over a Volume: open it in stord, let it grow, delete it once nobody refers to it.

A volume that exists is never made anew: what is missing or broken is told, not hidden.
"""

from __future__ import annotations

import msgspec

from chv.agent.actors import Again, Done, Gone, Outcome, Waiting
from chv.agent.cascade import finish_delete
from chv.agent.conditions import condition, merge
from chv.agent.records import StoredObject
from chv.agent.references import referrers
from chv.agent.simple import SimpleReconciler
from chv.common.errors import DataLoss, NotFound
from chv.common.failpoint import failpoint
from chv.common.quantity import parse_bytes
from chv.common.wire import stord
from chv.common.wire.resources import Condition, ImageStatus, Volume, VolumeStatus

LOST = ("missing", "broken")
FAILPOINTS = tuple(
    f"agent.volume.{name}.{moment}"
    for name in ("open", "close", "delete")
    for moment in ("before", "after")
)


class VolumeReconciler(SimpleReconciler):
    """The reconciler of one volume."""

    async def look_and_act(self, stored: StoredObject) -> Outcome:
        """Make one pass."""
        listed = (await self._context.volumes.fresh()).volumes
        seen = next((each for each in listed if each.volume_id == self._uid), None)
        self._context.looked_at(self._uid)
        if stored.deleting:
            return await self._delete(stored, seen)
        volume = _volume(stored)
        if seen is not None and seen.state in LOST:
            raise DataLoss(f"the volume is {seen.state}: {seen.last_error}", resource=stored.title)
        behind = seen is None or seen.generation < volume.metadata.generation
        if behind or (seen is not None and seen.state != "open"):
            return await self._open(stored, volume)
        assert seen is not None
        await self._show(stored, seen, condition("Ready", True, "Open", evidence=seen.path))
        await self.settle("open")
        return Done()

    async def _open(self, stored: StoredObject, volume: Volume) -> Outcome:
        source = self._source(volume)
        if volume.spec.source is not None and source is None:
            message = f"waits for image {volume.spec.source.image}"
            await self.wait(message)
            await self._show(stored, None, condition("Ready", False, "ImageNotReady", message))
            return Waiting(30.0)

        async def act(operation_id: str) -> None:
            await failpoint("agent.volume.open.before")
            request = stord.OpenVolume(
                meta=self._context.meta(operation_id, volume.metadata.generation),
                volume_id=self._uid,
                backend=stord.VolumeBackend(
                    class_name=stord.VolumeClass(volume.spec.class_.value),
                    format=stord.VolumeFormat(volume.spec.format.value),
                    size_bytes=parse_bytes(volume.spec.size, field="spec.size"),
                    source=source,
                ),
            )
            await self._context.stord.call(stord.OPEN_VOLUME, request)
            await failpoint("agent.volume.open.after")

        await self.effect(stored, "open", act)
        return Again()

    def _source(self, volume: Volume) -> stord.VolumeSource | None:
        if volume.spec.source is None:
            return None
        tables = self._context.ledger.tables
        image = tables.find("Image", volume.metadata.namespace, volume.spec.source.image)
        status = image.resource.status if image is not None else None
        if not isinstance(status, ImageStatus) or status.phase != "Ready" or status.disk is None:
            return None
        return stord.VolumeSource(
            path=status.disk.path,
            sha256=status.disk.sha256,
            format=stord.VolumeFormat(status.disk.format),
        )

    async def _delete(self, stored: StoredObject, seen: stord.VolumeInfo | None) -> Outcome:
        holders = referrers(self._context.ledger.tables, stored.key)
        if holders or (seen is not None and seen.attached_to):
            names = ", ".join(holder.title for holder in holders) or "a VM that is being stopped"
            await self.wait(f"waits until {names} lets go of it")
            await self._show(
                stored, seen, condition("Ready", False, "Deleting", f"held by {names}")
            )
            return Waiting(10.0)
        if seen is not None:
            await self.effect(
                stored, "close", lambda operation_id: self._close(stored, operation_id)
            )
            await self.effect(
                stored, "delete", lambda operation_id: self._drop(stored, operation_id)
            )
        await finish_delete(self._context, self._uid)
        return Gone()

    async def _close(self, stored: StoredObject, operation_id: str) -> None:
        await failpoint("agent.volume.close.before")
        try:
            await self._context.stord.call(stord.CLOSE_VOLUME, self._ref(stored, operation_id))
        except NotFound:
            return
        await failpoint("agent.volume.close.after")

    async def _drop(self, stored: StoredObject, operation_id: str) -> None:
        await failpoint("agent.volume.delete.before")
        try:
            await self._context.stord.call(stord.DELETE_VOLUME, self._ref(stored, operation_id))
        except NotFound:
            return
        await failpoint("agent.volume.delete.after")

    def _ref(self, stored: StoredObject, operation_id: str) -> stord.VolumeRef:
        generation = stored.resource.metadata.generation
        return stord.VolumeRef(
            meta=self._context.meta(operation_id, generation), volume_id=self._uid
        )

    async def show_error(self, stored: StoredObject, ready: Condition, *, permanent: bool) -> None:
        """Publish a status that shows the error."""
        before = _volume(stored).status or VolumeStatus()
        phase = "Failed" if permanent else before.phase
        await self._publish(stored, msgspec.structs.replace(before, phase=phase), ready)

    async def _show(
        self, stored: StoredObject, seen: stord.VolumeInfo | None, ready: Condition
    ) -> None:
        status = VolumeStatus(phase=_phase(stored, seen))
        if seen is not None:
            status = msgspec.structs.replace(
                status,
                size_bytes=seen.size_bytes,
                allocated_bytes=seen.allocated_bytes,
                attached_to=self._name_of(seen.attached_to),
            )
        await self._publish(stored, status, ready)

    def _name_of(self, vm_uid: str) -> str:
        vm = self._context.stored(vm_uid) if vm_uid else None
        return f"{vm.key[1]}/{vm.key[2]}" if vm is not None else vm_uid

    async def _publish(self, stored: StoredObject, status: VolumeStatus, ready: Condition) -> None:
        generation = stored.resource.metadata.generation
        before = _volume(stored).status
        earlier = before.conditions if before is not None else []
        conditions = merge(earlier, [ready], generation, self._context.now())
        shown = msgspec.structs.replace(
            status, observed_generation=generation, conditions=conditions
        )
        await self._context.publish(stored, shown)


def _volume(stored: StoredObject) -> Volume:
    assert isinstance(stored.resource, Volume)
    return stored.resource


def _phase(stored: StoredObject, seen: stord.VolumeInfo | None) -> str:
    if stored.deleting:
        return "Deleting"
    if seen is None:
        return "Pending"
    return "Attached" if seen.attached_to else "Ready"
