"""One pass over an Image: every artifact is stored under its sum; at the end the store is tidied.

An artifact goes when no Image has it any more. Images in use do not change (admission sees to
it), so that a volume's backing file stays what it was.
"""

from __future__ import annotations

from functools import partial

import msgspec

from chv.agent.actors import Again, Done, Gone, Outcome, Waiting
from chv.agent.cascade import finish_delete
from chv.agent.conditions import condition, merge
from chv.agent.image.imports import named_sums, needed_sums, stored_sums
from chv.agent.ports import ArtifactInfo, ImageArtifacts
from chv.agent.records import StoredObject
from chv.agent.references import referrers
from chv.agent.simple import SimpleReconciler
from chv.common.errors import Conflict, FailedPrecondition
from chv.common.failpoint import failpoint
from chv.common.racing import unless
from chv.common.wire.resources import (
    ArtifactStatus,
    Condition,
    Image,
    ImageDisk,
    ImageFile,
    ImageStatus,
)

FAILPOINTS = tuple(
    f"agent.image.{name}.{moment}"
    for name in ("import", "remove")
    for moment in ("before", "after")
)


class ImageReconciler(SimpleReconciler):
    """The reconciler of one image."""

    async def look_and_act(self, stored: StoredObject) -> Outcome:
        """Make one pass."""
        image = _image(stored)
        self._context.looked_at(self._uid)
        if stored.deleting:
            return await self._delete(stored, image)
        status = image.status
        current = status is not None and status.observed_generation == image.metadata.generation
        if status is None or not current or not await self._whole(status):
            return await self._import(stored, image)
        await self.settle("stored")
        return Done()

    async def _whole(self, status: ImageStatus) -> bool:
        """Tell whether everything that the status shows is there."""
        if status.phase != "Ready":
            return False
        for sha256 in stored_sums(status):
            if await self._context.world.images.find(sha256) is None:
                return False
        return True

    async def _import(self, stored: StoredObject, image: Image) -> Outcome:
        # What was stored before goes first; what comes is written down before it is there.
        await self._tidy(stored, stored_sums(image.status) - named_sums(image))
        await self._publish(stored, _intent(image), condition("Ready", False, "Importing"))
        made: list[ImageArtifacts] = []

        async def act(_: str) -> None:
            await failpoint("agent.image.import.before")
            made.append(await self._unless_changed(stored, image))
            await failpoint("agent.image.import.after")

        await self.effect(stored, "import", act)
        status = ImageStatus(
            phase="Ready",
            kernel=_status(made[0].kernel),
            initramfs=_status(made[0].initramfs),
            disk=_status(made[0].disk),
        )
        await self._publish(stored, status, condition("Ready", True, "Stored"))
        return Again()

    async def _unless_changed(self, stored: StoredObject, image: Image) -> ImageArtifacts:
        """Bring the artifacts; give up as soon as something else is wanted of the object."""
        made = await unless(partial(self._changed, stored), partial(self._artifacts, image))
        if not made:
            raise Conflict("something else is wanted by now")
        return made[0]

    async def _changed(self, stored: StoredObject) -> None:
        """Return when the object is deleted or its spec changes."""
        wanted = stored.resource.metadata.generation
        while True:
            changed = self._context.ledger.objects.event(self._uid)
            now = self._context.stored(self._uid)
            if now is None or now.deleting or now.resource.metadata.generation != wanted:
                return
            await changed.wait()

    async def _show_progress(self, artifact: str, done_bytes: int, total_bytes: int) -> None:
        """Publish how far a download is, each twentieth of it."""
        self._context.progress.put(self._serving, done_bytes, total_bytes)
        shown = f"{artifact} {done_bytes >> 20} MiB"
        if total_bytes:
            shown = f"{artifact} {done_bytes * 20 // total_bytes * 5}%"
        current = self._context.stored(self._uid)
        status = _image(current).status if current is not None else None
        if current is None or status is None or status.progress == shown:
            return
        await self._context.publish(current, msgspec.structs.replace(status, progress=shown))

    async def _artifacts(self, image: Image) -> ImageArtifacts:
        if image.spec.builtin:
            return await self._context.world.images.ensure_builtin(image.spec.builtin)
        return ImageArtifacts(
            kernel=await self._file(image.spec.kernel, "kernel"),
            initramfs=await self._file(image.spec.initramfs, "initramfs"),
            disk=await self._file(image.spec.disk, "disk"),
        )

    async def _file(
        self, source: ImageFile | ImageDisk | None, artifact: str
    ) -> ArtifactInfo | None:
        if source is None:
            return None
        format_name = _format(source, artifact)
        known = await self._context.world.images.find(source.sha256)
        if known is not None and known.format == format_name:
            return known  # the file it came from may be gone
        images = self._context.world.images
        if source.url:
            return await images.fetch(
                source.url,
                source.sha256,
                format_name,
                lambda done, total: self._show_progress(artifact, done, total),
            )
        if source.path or known is not None:
            return await images.import_file(source.path, source.sha256, format_name)
        raise FailedPrecondition(
            f"{artifact} {source.sha256[:12]} is not in the store of this node",
            field=f"spec.{artifact}",
            hint="send it with `chv image import`, or name its path or url",
        )

    async def _delete(self, stored: StoredObject, image: Image) -> Outcome:
        holders = referrers(self._context.ledger.tables, stored.key)
        if holders:
            names = ", ".join(holder.title for holder in holders)
            await self.wait(f"waits until {names} lets go of it")
            status = msgspec.structs.replace(image.status or ImageStatus(), phase="Deleting")
            await self._publish(
                stored, status, condition("Ready", False, "Deleting", f"held by {names}")
            )
            return Waiting(10.0)
        await self._tidy(stored, needed_sums(image))
        await finish_delete(self._context, self._uid)
        return Gone()

    async def _tidy(self, stored: StoredObject, sums: set[str]) -> None:
        """Remove artifacts that no other image has, be it wanted or stored."""
        for sha256 in sorted(sums):
            if any(sha256 in needed_sums(other) for other in self._others()):
                continue

            async def act(_: str, sha256: str = sha256) -> None:
                await failpoint("agent.image.remove.before")
                await self._context.world.images.remove(sha256)
                await failpoint("agent.image.remove.after")

            await self.effect(stored, f"remove {sha256[:12]}", act)

    def _others(self) -> list[Image]:
        stored = self._context.ledger.tables.of_kind("Image")
        return [_image(each) for each in stored if each.uid != self._uid]

    async def show_error(self, stored: StoredObject, ready: Condition, *, permanent: bool) -> None:
        """Publish a status that shows the error."""
        before = _image(stored).status or ImageStatus()
        phase = "Failed" if permanent else "Pending"
        if stored.deleting:
            phase = "Deleting"
        await self._publish(stored, msgspec.structs.replace(before, phase=phase), ready)

    async def _publish(self, stored: StoredObject, status: ImageStatus, ready: Condition) -> None:
        generation = stored.resource.metadata.generation
        before = _image(stored).status
        earlier = before.conditions if before is not None else []
        conditions = merge(earlier, [ready], generation, self._context.now())
        shown = msgspec.structs.replace(
            status, observed_generation=generation, conditions=conditions
        )
        await self._context.publish(stored, shown)


def _image(stored: StoredObject) -> Image:
    assert isinstance(stored.resource, Image)
    return stored.resource


def _status(info: ArtifactInfo | None) -> ArtifactStatus | None:
    if info is None:
        return None
    return ArtifactStatus(
        sha256=info.sha256, size_bytes=info.size_bytes, format=info.format, path=info.path
    )


def _intent(image: Image) -> ImageStatus:
    """Return the status that names what is going to be stored."""
    spec = image.spec
    return ImageStatus(
        phase="Importing",
        kernel=_coming(spec.kernel, "kernel"),
        initramfs=_coming(spec.initramfs, "initramfs"),
        disk=_coming(spec.disk, "disk"),
    )


def _coming(source: ImageFile | ImageDisk | None, artifact: str) -> ArtifactStatus | None:
    if source is None:
        return None
    return ArtifactStatus(sha256=source.sha256, size_bytes=0, format=_format(source, artifact))


def _format(source: ImageFile | ImageDisk, artifact: str) -> str:
    """Return what the file is declared to be: a disk by its field, the others by their place."""
    return source.format.value if isinstance(source, ImageDisk) else artifact
