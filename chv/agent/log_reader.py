"""Reading logs for `chv logs`: the end of a file, then what is appended, across rotation."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Iterator
from datetime import datetime
from pathlib import Path

import anyio

from chv.common.errors import InvalidArgument, NotFound

POLL_S = 0.2
TAIL_BYTES_MAX = 8 << 20
CHUNK_BYTES = 65536
MISSING = "--- rotated faster than it was read: lines are missing here\n"
# At the start of a serial line, in the first field of a daemon's.
STAMP = re.compile(rb'^(?:\{"time":")?(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z)')


def moment(text: str) -> datetime | None:
    """Return the time that a caller wrote, if one; raises InvalidArgument."""
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError as error:
        raise InvalidArgument(f"{text!r} is no time", field="since") from error


async def read(
    path: Path, tail_lines: int, what: str, since: datetime | None = None
) -> tuple[str, os.stat_result]:
    """Return the last lines and where the file stood; NotFound while nothing was written.

    Reads into the rotated file before it; `since`: only from the first line of that time or later.
    """

    def tail() -> tuple[str, os.stat_result]:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            stream.seek(max(0, status.st_size - TAIL_BYTES_MAX))
            data = stream.read(TAIL_BYTES_MAX)
            lines = data.split(b"\n")
            if status.st_size <= TAIL_BYTES_MAX and (since or len(lines) <= tail_lines):
                lines = (_rotated(path) + data).split(b"\n")
            ended = [line + b"\n" for line in lines[:-1]] + [line for line in lines[-1:] if line]
            if since is not None:
                ended = list(_since(ended, since))
            return b"".join(ended[-tail_lines:] if tail_lines else []).decode(
                "utf-8", "replace"
            ), status

    try:
        return await anyio.to_thread.run_sync(tail)
    except FileNotFoundError as error:
        raise NotFound(f"{what} has written nothing yet", resource=what) from error


def _rotated(path: Path) -> bytes:
    try:
        with path.with_name(f"{path.name}.1").open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - TAIL_BYTES_MAX))
            return stream.read(TAIL_BYTES_MAX)
    except FileNotFoundError:
        return b""


def _since(lines: list[bytes], since: datetime) -> Iterator[bytes]:
    """Yield from the first line that is late enough; one without a time goes with those before."""
    late = False
    for line in lines:
        if not late and (found := STAMP.match(line)):
            late = datetime.fromisoformat(found[1].decode()) >= since
        if late:
            yield line


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
    """Return what comes next and where that ended: the rest of a rotated file before the new."""
    try:
        with path.open("rb") as stream:
            status = os.fstat(stream.fileno())
            if status.st_ino != inode:
                rest, missing = _rest_of_rotated(path, inode, offset)
                if rest:
                    return rest.decode("utf-8", "replace"), inode, offset + len(rest)
                return MISSING if missing else "", status.st_ino, 0
            offset = 0 if status.st_size < offset else offset
            stream.seek(offset)
            data = stream.read(CHUNK_BYTES)
    except FileNotFoundError:
        return "", inode, offset
    return data.decode("utf-8", "replace"), inode, offset + len(data)


def _rest_of_rotated(path: Path, inode: int, offset: int) -> tuple[bytes, bool]:
    """Return what was not read of the file that was rotated, and whether it is gone already."""
    try:
        with path.with_name(f"{path.name}.1").open("rb") as stream:
            if os.fstat(stream.fileno()).st_ino != inode:
                return b"", True
            stream.seek(offset)
            return stream.read(CHUNK_BYTES), False
    except FileNotFoundError:
        return b"", False
