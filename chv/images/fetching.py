"""From a URL to an artifact of the store: at most one download of a file at a time, verified.

What a break leaves is used by the next attempt; a file that does not hash to what was expected is
thrown away, and if parts of it were old, fetched once more from the start.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable

import anyio
import anyio.to_thread

from chv.common.errors import InvalidArgument
from chv.images.partials import Partial
from chv.images.store import Artifact, ImageStore

PARALLEL_MAX = 4
OnBytes = Callable[[int, int], Awaitable[None]]


class Fetcher:
    """Downloads into one store."""

    def __init__(self, store: ImageStore, context: ssl.SSLContext | None = None) -> None:
        self._store = store
        self._context = context
        self._limiter = anyio.Semaphore(PARALLEL_MAX)
        self._locks: dict[tuple[str, str], anyio.Lock] = {}

    async def fetch(self, url: str, sha256: str, declared: str, on_bytes: OnBytes) -> Artifact:
        """Return the artifact, from the store where it is there already."""
        if sha256:
            known = await anyio.to_thread.run_sync(self._store.known, declared, sha256)
            if known is not None:
                return known
        key = (url, sha256)
        lock = self._locks.setdefault(key, anyio.Lock())
        try:
            async with lock, self._limiter:
                return await self._fetch(url, sha256, declared, on_bytes)
        finally:
            if not lock.locked():
                self._locks.pop(key, None)

    async def _fetch(self, url: str, sha256: str, declared: str, on_bytes: OnBytes) -> Artifact:
        if sha256:  # another one may have brought it while we waited
            known = await anyio.to_thread.run_sync(self._store.known, declared, sha256)
            if known is not None:
                return known
        partial = Partial(self._store.partials, url, sha256)
        try:
            await anyio.to_thread.run_sync(partial.open)
            resumed = partial.offset > 0
            try:
                return await self._complete(partial, url, sha256, declared, on_bytes)
            except InvalidArgument:
                if not resumed or partial.path.exists():
                    raise
            await anyio.to_thread.run_sync(partial.reopen)
            return await self._complete(partial, url, sha256, declared, on_bytes)
        finally:
            partial.close()

    async def _complete(
        self, partial: Partial, url: str, sha256: str, declared: str, on_bytes: OnBytes
    ) -> Artifact:
        from chv.images.download import download

        await download(url, sha256, partial, on_bytes, context=self._context)
        try:
            artifact = await self._store.take_file(partial.path, declared, sha256 or None)
        except InvalidArgument:
            partial.remove()  # whole, and not what was meant
            raise
        partial.remove()  # the record; the data has moved
        return artifact
