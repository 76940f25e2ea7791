"""The node's image store as the engine's `ImagePort`: built-in images and imports."""

from __future__ import annotations

from pathlib import Path

import anyio

from chv.agent.ports import ArtifactInfo, ImageArtifacts, OnProgress
from chv.common import logs
from chv.images import Artifact, ImageStore, ensure_builtin

log = logs.get(__name__)


class Images:
    """Implements `ImagePort`. The cache of built images is shared by the machine's nodes."""

    def __init__(self, root: Path, cache_dir: Path) -> None:
        self._store = ImageStore(root)
        self._cache_dir = cache_dir

    async def recover(self) -> None:
        """Make the store; remove what killed imports left."""
        removed = await anyio.to_thread.run_sync(self._store.recover)
        if removed:
            log.warning("images.debris_removed", count=removed)

    async def ensure_builtin(self, name: str) -> ImageArtifacts:
        """Build or find a builtin image and have it in the store."""
        found = await ensure_builtin(
            name,
            self._cache_dir,
            self._store,
            lambda message: log.info("images.build", name=name, step=message),
        )
        return ImageArtifacts(
            kernel=self._info(found.get("kernel")),
            initramfs=self._info(found.get("initramfs")),
            disk=self._info(found.get("disk")),
        )

    async def import_file(
        self, path: str, sha256: str, format: str, on_progress: OnProgress | None = None
    ) -> ArtifactInfo:
        """Copy a file in, verified."""
        artifact = await self._store.import_file(Path(path), format, sha256 or None)
        if on_progress is not None:
            await on_progress(artifact.size_bytes, artifact.size_bytes)
        info = self._info(artifact)
        assert info is not None
        return info

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

    def _info(self, artifact: Artifact | None) -> ArtifactInfo | None:
        if artifact is None:
            return None
        return ArtifactInfo(
            sha256=artifact.sha256,
            size_bytes=artifact.size_bytes,
            format=artifact.format,
            path=str(self._store.path(artifact.sha256)),
        )
