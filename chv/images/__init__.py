"""Image artifacts by their sha256: import by path, URL and pipe, built-in images, collection.

Knows no Image objects. `download` (and with it aiohttp) is imported by who fetches, when needed.
"""

from chv.images.builtin import ensure_builtin
from chv.images.fetching import Fetcher
from chv.images.store import Artifact, Collected, ImageStore, StoredFile
from chv.images.uploads import Uploads

__all__ = [
    "Artifact",
    "Collected",
    "Fetcher",
    "ImageStore",
    "StoredFile",
    "Uploads",
    "ensure_builtin",
]
