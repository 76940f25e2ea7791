"""A small HTTP server with the manners of real ones: ranges, validators, breaks, redirects."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class Site:
    """What the server has, how it behaves, what it was asked."""

    content: bytes
    etag: str = '"one"'
    ranges: bool = True
    break_after: list[int] = field(default_factory=list)  # bytes of each answer to come
    statuses: list[int] = field(default_factory=list)  # answers before the real one
    location: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    length: bool = True
    asked: list[dict[str, str]] = field(default_factory=list)
    on_part: Callable[[], None] = lambda: None
    url: str = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append({key.lower(): value for key, value in request.headers.items()})
        if self.location:
            return web.Response(status=302, headers={"Location": self.location})
        if self.statuses:
            return web.Response(status=self.statuses.pop(0))
        start = self._start(request)
        if start is not None and start >= len(self.content):
            return web.Response(
                status=416, headers={"Content-Range": f"bytes */{len(self.content)}"}
            )
        return await self._stream(request, start)

    def _start(self, request: web.Request) -> int | None:
        asked = request.headers.get("Range", "")
        current = request.headers.get("If-Range", self.etag) == self.etag
        if not asked or not self.ranges or not current:
            return None
        return int(asked.removeprefix("bytes=").removesuffix("-"))

    async def _stream(self, request: web.Request, start: int | None) -> web.StreamResponse:
        headers = dict(self.headers)
        if self.etag:
            headers["ETag"] = self.etag
        body = self.content[start or 0 :]
        if start is not None:
            last = len(self.content) - 1
            headers["Content-Range"] = f"bytes {start}-{last}/{len(self.content)}"
        response = web.StreamResponse(status=200 if start is None else 206, headers=headers)
        if self.length:
            response.content_length = len(body)
        await response.prepare(request)
        limit = self.break_after.pop(0) if self.break_after else None
        await response.write(body[:limit])
        self.on_part()
        if limit is not None:
            assert request.transport is not None
            request.transport.close()
        return response


@asynccontextmanager
async def serving(site: Site) -> AsyncIterator[Site]:
    """Serve on a port of the loopback."""
    application = web.Application()
    application.router.add_get("/{tail:.*}", site.answer)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        listener = web.TCPSite(runner, "127.0.0.1", 0)
        await listener.start()
        host, port = runner.addresses[0][:2]
        site.url = f"http://{host}:{port}/disk.raw"
        yield site
    finally:
        await runner.cleanup()
