"""Imports of one artifact by path, URL or upload, and the collection of what nobody needs.

Each import is an operation: it stores the bytes first and then applies the Image that names them;
where that is refused, the artifact goes again. Checks that can be made come before the long work.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from chv.agent.admission_rules import check_delete
from chv.agent.chores import Came, Chores, Task, Tell, Way, Wish
from chv.agent.context import Context
from chv.agent.node_record import NODE_UID
from chv.agent.ports import ArtifactInfo, OnProgress
from chv.agent.side_verbs import COLLECT_IMAGES, IMPORT
from chv.common.errors import FailedPrecondition, InvalidArgument, Unavailable
from chv.common.wire import agent as api
from chv.common.wire.agent import Operation
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
PARALLEL = 4  # imports at a time; the others wait in the order in which they came
_APART = frozenset({"name", "namespace", "requester", "reason", "idempotency_key"})
_REQUESTS: dict[str, type[ImportRequest]] = {
    each.__name__: each for each in (api.ImportImage, api.FetchImage, api.FinishUpload)
}
Apply = Callable[[api.Apply], Awaitable[api.ApplyReply]]


class ImageImports:
    """See the module."""

    def __init__(
        self,
        context: Context,
        chores: Chores,
        apply: Apply,
        refuse_when_short: Callable[[], Awaitable[None]],
    ) -> None:
        self._context = context
        self._chores = chores
        self._apply = apply
        self._refuse_when_short = refuse_when_short
        self._kept: dict[str, str] = {}  # what an operation has stored and no Image has yet
        noun = "one of the imports under way to end"
        chores.teach(IMPORT, Way(self._do, slots=PARALLEL, noun=noun, undo=self._undo))
        chores.teach(COLLECT_IMAGES, Way(self._collect))

    async def take(self, request: ImportRequest, tell: Tell | None = None) -> api.ImportImageReply:
        """Store a file of the node, what a URL gives, or what was sent, as an operation.

        It goes on where the caller leaves. The same again, while it is under way, joins it.
        """
        wish = _wish(request)
        if not await self._chores.knows(wish):
            await self._check(request)
        operation, _ = await self._chores.begin(wish)
        ended = await self._chores.outcome(operation.id, tell)
        return msgspec.convert(ended.result, api.ImportImageReply)

    async def _do(self, task: Task) -> Came:
        request = _request(task.operation)
        if task.again:
            self._await_node()
        await self._check(request)
        operation_id = task.operation.id

        async def on_progress(done: int, total: int) -> None:
            self._context.progress.put(operation_id, done, total)

        info = await self._bring(request, on_progress, again=task.again)
        self._kept[operation_id] = info.sha256
        reply = await self._define(request, info)
        self._kept.pop(operation_id, None)
        result = msgspec.to_builtins(reply)
        return Came(f"{reply.size_bytes} bytes, sha256:{reply.sha256}", result)

    async def _undo(self, operation: Operation) -> None:
        sha256 = self._kept.pop(operation.id, "")
        if sha256:
            await self._drop_unclaimed(sha256)

    def _await_node(self) -> None:
        """After a new start the node takes a moment until it admits what it admitted before."""
        refusal: FailedPrecondition | None = None
        try:
            self._context.world.gate.check("define")
        except FailedPrecondition as error:
            refusal = error
        if refusal is not None:
            raise Unavailable(refusal.message, hint=refusal.hint)

    async def _bring(
        self, request: ImportRequest, on_progress: OnProgress, *, again: bool
    ) -> ArtifactInfo:
        images, declared = self._context.world.images, _declared(request)
        match request:
            case api.ImportImage():
                return await images.import_file(request.path, request.sha256, declared, on_progress)
            case api.FetchImage():
                return await images.fetch(request.url, request.sha256, declared, on_progress)
            case api.FinishUpload():
                if again:
                    raise FailedPrecondition(
                        "the agent ended, and what was sent with it", hint="send it once more"
                    )
                return await images.take_upload(
                    request.upload_id, request.size_bytes, request.sha256, declared
                )

    async def open_upload(self, request: api.OpenUpload) -> tuple[str, int]:
        """Begin an upload; the descriptor is the caller's."""
        self._context.world.gate.check("define")
        await self._refuse_when_short()
        return self._context.world.images.open_upload(request.size_bytes_max)

    async def collect(self, request: api.CollectImages) -> api.CollectImagesReply:
        """Remove what no Image has, be it wanted or stored; a dry run is no operation."""
        if request.dry_run:
            return await self.unneeded(dry_run=True)
        wish = Wish(
            verb=COLLECT_IMAGES,
            kind="Node",
            name=NODE_UID,
            requester=request.requester,
            reason=request.reason,
            idempotency_key=request.idempotency_key,
        )
        operation, _ = await self._chores.begin(wish)
        ended = await self._chores.outcome(operation.id)
        return msgspec.convert(ended.result, api.CollectImagesReply)

    async def _collect(self, task: Task) -> Came:
        del task  # again or not: what is gone is gone
        reply = await self.unneeded(dry_run=False)
        words = f"{len(reply.removed)} files, {reply.freed_bytes} bytes"
        return Came(words, msgspec.to_builtins(reply))

    async def unneeded(self, *, dry_run: bool) -> api.CollectImagesReply:
        """Return what no Image has, and remove it but for a dry run.

        Volumes need no look of their own: an Image stays while one refers to it.
        """
        keep: set[str] = set()
        for stored in self._context.ledger.tables.of_kind("Image"):
            assert isinstance(stored.resource, Image)
            keep |= needed_sums(stored.resource)
        collected = await self._context.world.images.collect(frozenset(keep), dry_run=dry_run)
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
            reason=(request.reason or _reason(request))[:256],
        )
        applied = await self._apply(apply)
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


def _wish(request: ImportRequest) -> Wish:
    """Return what is recorded of a request: all that it takes to make it anew."""
    asked = msgspec.to_builtins(request)
    kept = {name: value for name, value in asked.items() if name not in _APART}
    return Wish(
        verb=IMPORT,
        kind="Image",
        namespace=request.namespace,
        name=request.name,
        requester=request.requester,
        reason=request.reason,
        idempotency_key=request.idempotency_key,
        request={"from": type(request).__name__, **kept},
    )


def _request(operation: Operation) -> ImportRequest:
    kept = {name: value for name, value in operation.request.items() if name != "from"}
    whole = {
        **kept,
        "name": operation.name,
        "namespace": operation.namespace,
        "requester": operation.requester,
        "reason": operation.reason,
    }
    return msgspec.convert(whole, _REQUESTS[str(operation.request["from"])])


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
