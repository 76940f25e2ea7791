"""Imports of one artifact by path, URL or upload, and the collection of what nobody needs.

Each import stores the bytes first and then applies the Image that names them; where that is
refused, the artifact goes again. The checks that can be made come before the long work.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from chv.agent.admission_rules import check_delete
from chv.agent.context import Context
from chv.agent.ports import ArtifactInfo, OnProgress
from chv.common.errors import ChvError, FailedPrecondition, InvalidArgument
from chv.common.wire import agent as api
from chv.common.wire.manifest import encode
from chv.common.wire.resources import (
    Image,
    ImageDisk,
    ImageFile,
    ImageFormat,
    ImageSpec,
    ImageStatus,
    ObjectMeta,
)

_replace = msgspec.structs.replace
ImportRequest = api.ImportImage | api.FetchImage | api.FinishUpload
Apply = Callable[[api.Apply], Awaitable[api.ApplyReply]]


class ImageImports:
    """See the module."""

    def __init__(
        self, context: Context, apply: Apply, refuse_when_short: Callable[[], Awaitable[None]]
    ) -> None:
        self._context = context
        self._apply = apply
        self._refuse_when_short = refuse_when_short

    async def import_image(
        self, request: api.ImportImage, on_progress: OnProgress | None
    ) -> api.ImportImageReply:
        """Store a file of the node."""
        await self._check(request)
        info = await self._context.world.images.import_file(
            request.path, request.sha256, _declared(request), on_progress
        )
        return await self._define(request, info)

    async def fetch(
        self, request: api.FetchImage, on_progress: OnProgress | None
    ) -> api.ImportImageReply:
        """Store what a URL gives."""
        await self._check(request)
        info = await self._context.world.images.fetch(
            request.url, request.sha256, _declared(request), on_progress
        )
        return await self._define(request, info)

    async def open_upload(self, request: api.OpenUpload) -> tuple[str, int]:
        """Begin an upload; the descriptor is the caller's."""
        self._context.world.gate.check("define")
        await self._refuse_when_short()
        return self._context.world.images.open_upload(request.size_bytes_max)

    async def finish_upload(self, request: api.FinishUpload) -> api.ImportImageReply:
        """Store what was sent."""
        await self._check(request)
        info = await self._context.world.images.take_upload(
            request.upload_id, request.size_bytes, request.sha256, _declared(request)
        )
        return await self._define(request, info)

    async def collect(self, request: api.CollectImages) -> api.CollectImagesReply:
        """Remove what no Image has, be it wanted or stored.

        Volumes need no look of their own: an Image stays while one refers to it.
        """
        keep: set[str] = set()
        for stored in self._context.ledger.tables.of_kind("Image"):
            assert isinstance(stored.resource, Image)
            keep |= needed_sums(stored.resource)
        collected = await self._context.world.images.collect(
            frozenset(keep), dry_run=request.dry_run
        )
        return api.CollectImagesReply(removed=collected.names, freed_bytes=collected.freed_bytes)

    async def _check(self, request: ImportRequest) -> None:
        """Say so before a long copy, not after it."""
        self._context.world.gate.check("define")
        _declared(request)
        stored = self._context.ledger.tables.find("Image", request.namespace, request.name)
        if stored is not None:
            if stored.deleting:
                raise FailedPrecondition("it is being deleted", resource=stored.title)
            assert isinstance(stored.resource, Image)
            current = getattr(stored.resource.spec, request.artifact)
            if current is None or current.sha256 != request.sha256:
                check_delete(self._context.ledger.tables, stored)
        await self._refuse_when_short()

    async def _define(self, request: ImportRequest, info: ArtifactInfo) -> api.ImportImageReply:
        apply = api.Apply(
            objects=[msgspec.Raw(encode(self._image_with(request, info)))],
            requester=request.requester,
            reason=_reason(request)[:256],
        )
        refusal: ChvError | None = None
        try:
            applied = await self._apply(apply)
        except ChvError as error:
            refusal = error
        if refusal is not None:
            await self._drop_unclaimed(info.sha256)
            raise refusal
        return api.ImportImageReply(
            sha256=info.sha256,
            size_bytes=info.size_bytes,
            operation_id=applied.results[0].operation_id,
        )

    def _image_with(self, request: ImportRequest, info: ArtifactInfo) -> Image:
        stored = self._context.ledger.tables.find("Image", request.namespace, request.name)
        spec = ImageSpec()
        if stored is not None and isinstance(stored.resource, Image):
            spec = _replace(stored.resource.spec, builtin="")
        path = request.path if isinstance(request, api.ImportImage) else ""
        url = request.url if isinstance(request, api.FetchImage) else ""
        artifact: ImageFile | ImageDisk = ImageFile(path=path, url=url, sha256=info.sha256)
        if request.artifact == "disk":
            format_name = ImageFormat(info.format)
            artifact = ImageDisk(path=path, url=url, sha256=info.sha256, format=format_name)
        return Image(
            metadata=ObjectMeta(name=request.name, namespace=request.namespace),
            spec=_replace(spec, **{request.artifact: artifact}),
        )

    async def _drop_unclaimed(self, sha256: str) -> None:
        images = self._context.ledger.tables.of_kind("Image")
        if not any(sha256 in encode(image.resource).decode() for image in images):
            await self._context.world.images.remove(sha256)


def stored_sums(status: ImageStatus | None) -> set[str]:
    """Return what a status shows as stored or coming."""
    if status is None:
        return set()
    stored = (status.kernel, status.initramfs, status.disk)
    return {each.sha256 for each in stored if each is not None}


def named_sums(image: Image) -> set[str]:
    """Return what a spec names."""
    named = (image.spec.kernel, image.spec.initramfs, image.spec.disk)
    return {each.sha256 for each in named if each is not None}


def needed_sums(image: Image) -> set[str]:
    """Return what an Image has or wants."""
    return stored_sums(image.status) | named_sums(image)


def _reason(request: ImportRequest) -> str:
    match request:
        case api.ImportImage():
            return f"import of {request.path}"
        case api.FetchImage():
            return f"import of {request.url.partition('?')[0]}"
        case api.FinishUpload():
            return "import of an upload"


def _declared(request: ImportRequest) -> str:
    """Return the format that the file must have: `format` is for disks alone."""
    if request.artifact == "disk":
        return request.format
    if request.format != ImageFormat.RAW:
        raise InvalidArgument(
            f"the artifact {request.artifact!r} is no disk, so it cannot be {request.format!r}",
            field="format",
            hint="leave the format out",
        )
    return request.artifact
