"""Image artifacts by their sha256: import, built-in images, removal. Knows no Image objects."""

from chv.images.builtin import ensure_builtin
from chv.images.store import Artifact, ImageStore, StoredFile

__all__ = ["Artifact", "ImageStore", "StoredFile", "ensure_builtin"]
