"""Reading logs for `chv logs`: the end of a file, then what is appended, across rotation."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import anyio

from chv.common.errors import NotFound

POLL_S = 0.2
TAIL_BYTES_MAX = 8 << 20
CHUNK_BYTES = 65536


async def read(path: Path, tail_lines: int, what: str) -> tuple[str, os.stat_result]:
    """Return the last lines and where the file stood; NotFound while nothing was written."""

    def tail() -> tuple[str, os.stat_result]:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            stream.seek(max(0, status.st_size - TAIL_BYTES_MAX))
            data = stream.read(TAIL_BYTES_MAX)
            lines = data.splitlines(keepends=True)[-tail_lines:] if tail_lines else []
            return b"".join(lines).decode("utf-8", "replace"), status

    try:
        return await anyio.to_thread.run_sync(tail)
    except FileNotFoundError as error:
        raise NotFound(f"{what} has written nothing yet", resource=what) from error


async def follow(path: Path, start: os.stat_result) -> AsyncIterator[str]:
    """Yield what is appended after `start`, for ever; a new file is read from its beginning."""
    inode, offset = start.st_ino, start.st_size
    while True:
        text, inode, offset = await anyio.to_thread.run_sync(_appended, path, inode, offset)
        if text:
            yield text
        else:
            await anyio.sleep(POLL_S)


def _appended(path: Path, inode: int, offset: int) -> tuple[str, int, int]:
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_ino != inode or status.st_size < offset:
                inode, offset = status.st_ino, 0
            stream.seek(offset)
            data = stream.read(CHUNK_BYTES)
    except FileNotFoundError:
        return "", inode, offset
    return data.decode("utf-8", "replace"), inode, offset + len(data)
