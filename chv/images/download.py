"""Fetches one file by HTTP into a `Partial`, going on where an earlier attempt was broken off.

The only place of aiohttp in this package; imported late. No proxy, cookie, credential or netrc of
the environment is used, nothing is decoded. http:// is only for what a checksum pins. Transport
failures and 5xx answers are Unavailable and tried again here a few times; other refusals of the
server are InvalidArgument. Cancellation keeps what was fetched.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from urllib.parse import urljoin, urlsplit

import aiohttp
import anyio
import anyio.to_thread
import tenacity

from chv.common.errors import ChvError, InvalidArgument, Unavailable
from chv.images.partials import Partial

REDIRECTS_MAX = 5
ATTEMPTS_MAX = 5
BLOCK_BYTES = 1 << 20
SIZE_BYTES_MAX = 1 << 40
CONNECT_S_MAX = 30.0
SILENCE_S_MAX = 60.0
CHECKPOINT_S_MAX = 30.0
RETRIED_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
REDIRECTS = frozenset({301, 302, 303, 307, 308})
OnBytes = Callable[[int, int], Awaitable[None]]
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)\Z")


class _Elsewhere(Exception):
    """The server has the file at another URL."""

    def __init__(self, url: str) -> None:
        self.url = url


def check_url(url: str, sha256: str) -> None:
    """Refuse what is not fetched: another scheme, a password within, http without a checksum."""
    parts = urlsplit(url)
    problem = hint = ""
    if parts.scheme not in ("http", "https") or not parts.hostname:
        problem, hint = "is not an http or https URL", "https://host/path"
    elif parts.username is not None:
        problem, hint = "carries a user name", "take it out: URLs are stored and shown"
    elif parts.scheme == "http" and not sha256:
        problem, hint = "is not protected and no sha256 is given", "give the sha256, or use https"
    if problem:
        raise InvalidArgument(f"{shown(url)!r} {problem}", field="url", hint=hint)


def shown(url: str) -> str:
    """Return a URL as logs and errors may have it: without query, user and fragment."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


async def download(
    url: str,
    sha256: str,
    partial: Partial,
    on_bytes: OnBytes,
    *,
    context: ssl.SSLContext | None = None,
) -> None:
    """Bring an opened partial to its end. The caller verifies the content."""
    check_url(url, sha256)
    async for attempt in tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(ATTEMPTS_MAX),
        wait=tenacity.wait_exponential(multiplier=0.2, max=5),
        retry=tenacity.retry_if_exception_type(Unavailable),
        sleep=anyio.sleep,
        reraise=True,
    ):
        with attempt:
            await _follow(url, sha256, partial, on_bytes, context)


async def _follow(
    url: str,
    sha256: str,
    partial: Partial,
    on_bytes: OnBytes,
    context: ssl.SSLContext | None,
) -> None:
    """Make one attempt, through redirects."""
    async with _session(context) as session:
        for _ in range(REDIRECTS_MAX + 1):
            try:
                await _attempt(session, url, partial, on_bytes)
                return
            except _Elsewhere as moved:
                url = moved.url
                check_url(url, sha256)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if isinstance(error, aiohttp.InvalidURL):
                    raise InvalidArgument(f"{shown(url)!r} is not a URL", field="url") from error
                raise Unavailable(
                    f"{shown(url)}: {error or type(error).__name__} after {partial.offset} bytes"
                ) from error
            finally:
                with anyio.move_on_after(CHECKPOINT_S_MAX, shield=True):
                    await anyio.to_thread.run_sync(_keep, partial)
    raise InvalidArgument(f"more than {REDIRECTS_MAX} redirects, last {shown(url)}", field="url")


def _keep(partial: Partial) -> None:
    if partial.path.exists():  # not where it was removed for want of space
        partial.checkpoint()


@asynccontextmanager
async def _session(context: ssl.SSLContext | None) -> AsyncIterator[aiohttp.ClientSession]:
    timeout = aiohttp.ClientTimeout(
        total=None, sock_connect=CONNECT_S_MAX, sock_read=SILENCE_S_MAX, connect=CONNECT_S_MAX
    )
    connector = aiohttp.TCPConnector(limit=1, force_close=True, ssl=context or True)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        trust_env=False,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity", "User-Agent": "chv"},
    ) as session:
        yield session


async def _attempt(
    session: aiohttp.ClientSession, url: str, partial: Partial, on_bytes: OnBytes
) -> None:
    headers: dict[str, str] = {}
    if partial.offset and partial.resumable:
        headers["Range"] = f"bytes={partial.offset}-"
        if partial.etag:
            headers["If-Range"] = partial.etag
    async with session.get(url, headers=headers, allow_redirects=False) as response:
        _refuse_status(url, response)
        if response.status == 416 and await _is_complete(response, partial):
            return
        await _begin(url, response, partial)
        total_bytes = partial.total_bytes
        await on_bytes(partial.offset, total_bytes)
        async for block in response.content.iter_chunked(BLOCK_BYTES):
            await anyio.to_thread.run_sync(partial.write, block)
            if partial.offset > SIZE_BYTES_MAX:
                raise _too_large(url, partial.offset)
            await on_bytes(partial.offset, total_bytes)
    if total_bytes and partial.offset != total_bytes:
        raise Unavailable(f"{shown(url)} ended after {partial.offset} of {total_bytes} bytes")


def _refuse_status(url: str, response: aiohttp.ClientResponse) -> None:
    status = response.status
    if status in REDIRECTS and "Location" in response.headers:
        raise _Elsewhere(urljoin(url, response.headers["Location"]))
    if status in (200, 206, 416):
        return
    error: type[ChvError] = Unavailable if status in RETRIED_STATUSES else InvalidArgument
    reason = f" {response.reason}" if response.reason else ""
    raise error(f"{shown(url)}: the server answers {status}{reason}", field="url")


async def _is_complete(response: aiohttp.ClientResponse, partial: Partial) -> bool:
    """Tell whether nothing is missing; where the file became another one, start anew."""
    if response.headers.get("Content-Range") == f"bytes */{partial.offset}":
        return True
    await anyio.to_thread.run_sync(partial.begin, "", 0)
    raise Unavailable("what was fetched before does not fit with what the server has now")


async def _begin(url: str, response: aiohttp.ClientResponse, partial: Partial) -> None:
    """Take the answer as the rest of what is there, or as a new beginning."""
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise InvalidArgument(f"{shown(url)}: the server sends it encoded", field="url")
    length_bytes = response.content_length or 0
    if response.status == 206:
        found = _RANGE.match(response.headers.get("Content-Range", ""))
        if found is None or not _fits(found, partial):
            await anyio.to_thread.run_sync(partial.begin, "", 0)
            raise Unavailable(f"{shown(url)}: the server sent another range than was asked for")
        await anyio.to_thread.run_sync(partial.require_space, length_bytes)
        return
    if length_bytes > SIZE_BYTES_MAX:
        raise _too_large(url, length_bytes)
    etag = response.headers.get("ETag", "")
    strong = etag if etag.startswith('"') else ""
    await anyio.to_thread.run_sync(partial.begin, strong, length_bytes)


def _fits(found: re.Match[str], partial: Partial) -> bool:
    """Tell whether the range that came is the one that is missing, of the same file."""
    start, total = int(found[1]), found[3]
    same = total == "*" or not partial.total_bytes or int(total) == partial.total_bytes
    return start == partial.offset and same


def _too_large(url: str, size_bytes: int) -> InvalidArgument:
    return InvalidArgument(
        f"{shown(url)} is {size_bytes} bytes or more, at most {SIZE_BYTES_MAX} are taken",
        field="url",
    )
