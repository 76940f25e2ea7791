"""Which images a volume may start from: content-addressed, where stord may read, no larger than it.

Nothing is opened but by our own reader of qcow2 headers. Errors: InvalidArgument, NotFound.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from chv.common.config import StorageConfig
from chv.common.errors import InvalidArgument
from chv.common.layout import Layout
from chv.common.paths import resolve_inside
from chv.common.wire.stord import VolumeBackend, VolumeSource
from chv.stord.backends import disk_files


class Images:
    """The directories of images of this node."""

    def __init__(self, layout: Layout, storage: StorageConfig) -> None:
        self._roots = (layout.images, *map(Path, storage.allowed_paths))

    def checked(self, spec: VolumeBackend) -> VolumeBackend:
        """Return the spec with its image's path resolved, or raise. Blocks."""
        source = spec.source
        if source is None:
            return spec
        path = self._resolve(source)
        size_bytes = disk_files.image_size_bytes(path, source.format)
        if spec.size_bytes < size_bytes:
            raise InvalidArgument(
                f"{spec.size_bytes} bytes are less than the {size_bytes} of the image {path}",
                field="backend.size_bytes",
                hint=f"at least {size_bytes}",
            )
        resolved = VolumeSource(path=str(path), sha256=source.sha256, format=source.format)
        return msgspec.structs.replace(spec, source=resolved)

    def _resolve(self, source: VolumeSource) -> Path:
        given = Path(source.path)
        root = next((root for root in self._roots if given.is_relative_to(root)), None)
        if root is None:
            raise InvalidArgument(
                f"image {source.path!r} lies in no directory that stord may read",
                field="backend.source.path",
                hint="import it as an image, or add its directory to storage.allowed_paths",
            )
        path = resolve_inside(root, str(given.relative_to(root)))
        if path.name != source.sha256:
            raise InvalidArgument(
                f"image {source.path!r} does not carry the name of its sha256 {source.sha256}",
                field="backend.source.sha256",
                hint="content-addressed images are named by their own sha256",
            )
        return path
