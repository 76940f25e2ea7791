"""The node's image store as the engine's `ImagePort`: built-in images, imports, collection."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread

from chv.agent.ports import ArtifactInfo, ImageArtifacts, OnProgress
from chv.common import logs
from chv.images import Artifact, Collected, Fetcher, ImageStore, Uploads, ensure_builtin

log = logs.get(__name__)
# Progress of a download is told after so much more, not with each block.
PROGRESS_BYTES = 4 << 20


class Images:
    """Implements `ImagePort`. The cache of built images is shared by the machine's nodes."""

    def __init__(self, root: Path, cache_dir: Path) -> None:
        self._store = ImageStore(root)
        self._cache_dir = cache_dir
        self._fetcher = Fetcher(self._store)
        self._uploads = Uploads()
        self._builtin: set[str] = set()  # sums that the node itself boots its probes from

    async def recover(self) -> None:
        """Make the store; remove what killed imports left."""
        removed = await anyio.to_thread.run_sync(self._store.recover)
        if removed:
            log.warning("images.debris_removed", count=removed)

    async def run(self) -> None:
        """Receive uploads until cancelled."""
        await self._uploads.run()

    async def ensure_builtin(self, name: str) -> ImageArtifacts:
        """Build or find a builtin image and have it in the store."""
        found = await ensure_builtin(
            name,
            self._cache_dir,
            self._store,
            lambda message: log.info("images.build", name=name, step=message),
        )
        self._builtin |= {artifact.sha256 for artifact in found.values()}
        return ImageArtifacts(
            kernel=self._of(found.get("kernel")),
            initramfs=self._of(found.get("initramfs")),
            disk=self._of(found.get("disk")),
        )

    async def import_file(
        self, path: str, sha256: str, format: str, on_progress: OnProgress | None = None
    ) -> ArtifactInfo:
        """Copy a file in, verified."""

        async def tell(done_bytes: int, total_bytes: int) -> None:
            await (on_progress or _nobody)(done_bytes, total_bytes)

        artifact = await self._store.import_file(
            Path(path),
            format,
            sha256 or None,
            progress=lambda done, total: anyio.from_thread.run(tell, done, total),
        )
        await tell(artifact.size_bytes, artifact.size_bytes)
        return self._info(artifact)

    async def fetch(
        self, url: str, sha256: str, format: str, on_progress: OnProgress | None = None
    ) -> ArtifactInfo:
        """Download a file, verified; what an earlier attempt brought is used."""
        tell = on_progress or _nobody
        told_bytes = -PROGRESS_BYTES

        async def on_bytes(done_bytes: int, total_bytes: int) -> None:
            nonlocal told_bytes
            if done_bytes - told_bytes >= PROGRESS_BYTES or done_bytes in (0, total_bytes):
                told_bytes = done_bytes
                await tell(done_bytes, total_bytes)

        return self._info(await self._fetcher.fetch(url, sha256, format, on_bytes))

    def open_upload(self, size_bytes_max: int) -> tuple[str, int]:
        """Begin an upload; the descriptor is the caller's to send and close."""
        return self._uploads.open(self._store.temporary(), size_bytes_max)

    async def take_upload(
        self, upload_id: str, size_bytes: int, sha256: str, format: str
    ) -> ArtifactInfo:
        """Make a finished upload an artifact, verified."""
        async with self._uploads.finish(upload_id, size_bytes) as path:
            return self._info(await self._store.take_file(path, format, sha256 or None))

    async def find(self, sha256: str) -> ArtifactInfo | None:
        """Return what is stored; the format is the Image's knowledge."""
        stored = await anyio.to_thread.run_sync(self._store.get, sha256)
        if stored is None:
            return None
        return ArtifactInfo(
            sha256=sha256,
            size_bytes=stored.size_bytes,
            format="",
            path=str(self._store.path(sha256)),
        )

    async def remove(self, sha256: str) -> None:
        """Remove an artifact that the engine has found unused."""
        await anyio.to_thread.run_sync(self._store.remove, sha256, lambda _: ())

    async def collect(self, keep: frozenset[str], *, dry_run: bool) -> Collected:
        """Remove artifacts that are not in `keep`, and old partial downloads."""
        kept = keep | self._builtin
        work = partial(self._store.collect, kept, dry_run=dry_run)
        return await anyio.to_thread.run_sync(work)

    def _of(self, artifact: Artifact | None) -> ArtifactInfo | None:
        return None if artifact is None else self._info(artifact)

    def _info(self, artifact: Artifact) -> ArtifactInfo:
        return ArtifactInfo(
            sha256=artifact.sha256,
            size_bytes=artifact.size_bytes,
            format=artifact.format,
            path=str(self._store.path(artifact.sha256)),
        )


async def _nobody(done_bytes: int, total_bytes: int) -> None:
    """Take progress and drop it."""
