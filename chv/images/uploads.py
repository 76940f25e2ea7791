"""Data that a caller sends through a pipe: received into a temporary file, hashed on the way.

`open` gives the writing end away and starts to read; `finish` waits for its end and hands out
what came. A caller that stays silent for long, or never asks for the result, loses its upload.
Whatever goes wrong while reading closes our end (the sender gets EPIPE) and is told by `finish`.
Nothing outlives `run`; its leftovers are removed by the store's `recover`.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from chv.common import logs
from chv.common.errors import (
    ChvError,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from chv.common.files import free_bytes
from chv.common.ids import Ids
from chv.images.copying import write_at

log = logs.get(__name__)
UPLOADS_MAX = 8
PIPE_BYTES = 1 << 20
SILENCE_S_MAX = 600.0
CLAIM_S_MAX = 120.0
END_S_MAX = 30.0
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class _Upload:
    """One upload under way."""

    id: str
    path: Path
    size_bytes_max: int
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    size_bytes: int = 0
    failure: ChvError | None = None


class Uploads:
    """All uploads of an image store."""

    def __init__(self, ids: Ids | None = None) -> None:
        self._ids = ids or Ids()
        self._uploads: dict[str, _Upload] = {}
        self._group: TaskGroup | None = None

    async def run(self) -> None:
        """Receive until cancelled."""
        async with anyio.create_task_group() as group:
            self._group = group
            try:
                await anyio.sleep_forever()
            finally:
                self._group = None

    def open(self, path: Path, size_bytes_max: int) -> tuple[str, int]:
        """Begin: return the upload's id and the descriptor to write into, the caller's to close."""
        if self._group is None:
            raise Unavailable("the node does not take uploads yet")
        if len(self._uploads) >= UPLOADS_MAX:
            raise ResourceExhausted(f"{UPLOADS_MAX} uploads are under way", hint="try again later")
        reader, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(reader, False)
        _widen(reader)
        upload = _Upload(self._ids.uid(), path, size_bytes_max)
        self._uploads[upload.id] = upload
        self._group.start_soon(self._serve, upload, reader)
        return upload.id, writer

    @asynccontextmanager
    async def finish(self, upload_id: str, size_bytes: int) -> AsyncIterator[Path]:
        """Yield the complete file; whatever is left of it afterwards is removed."""
        upload = self._uploads.pop(upload_id, None)
        if upload is None:
            raise NotFound(
                f"there is no upload {upload_id!r}",
                hint="it was given up after long silence or the node restarted: send it again",
            )
        try:
            with anyio.move_on_after(END_S_MAX):
                await upload.ended.wait()
            _check(upload, size_bytes)
            yield upload.path
        finally:
            upload.scope.cancel()
            upload.path.unlink(missing_ok=True)

    async def _serve(self, upload: _Upload, reader: int) -> None:
        """Receive one upload, then wait for somebody to claim it."""
        try:
            with upload.scope:
                await self._receive(upload, reader)
                upload.ended.set()
                await anyio.sleep(CLAIM_S_MAX)
        finally:
            upload.ended.set()
            if self._uploads.pop(upload.id, None) is not None:
                upload.path.unlink(missing_ok=True)
                log.info("images.upload_given_up", upload=upload.id, size_bytes=upload.size_bytes)

    async def _receive(self, upload: _Upload, reader: int) -> None:
        out = -1
        try:
            out = os.open(upload.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            await self._pump(upload, reader, out)
        except ChvError as error:
            upload.failure = error
        except OSError as error:
            upload.failure = _typed(error, upload)
        finally:
            os.close(reader)
            if out >= 0:
                os.close(out)

    async def _pump(self, upload: _Upload, reader: int, out: int) -> None:
        while True:
            with anyio.move_on_after(SILENCE_S_MAX) as silence:
                await anyio.wait_readable(reader)
            if silence.cancelled_caught:
                raise FailedPrecondition(f"nothing came for {SILENCE_S_MAX:.0f} s")
            if not await anyio.to_thread.run_sync(_take, upload, reader, out):
                return


def _take(upload: _Upload, reader: int, out: int) -> bool:
    """Store what the pipe holds; False at its end. Zeros become holes."""
    try:
        block = os.read(reader, PIPE_BYTES)
    except BlockingIOError:
        return True
    if not block:
        os.ftruncate(out, upload.size_bytes)
        return False
    if upload.size_bytes + len(block) > upload.size_bytes_max:
        raise InvalidArgument(
            f"more than the {upload.size_bytes_max} bytes came that were announced",
            field="size_bytes_max",
        )
    if any(block):
        write_at(out, block, upload.size_bytes)
    upload.size_bytes += len(block)
    return True


def _check(upload: _Upload, size_bytes: int) -> None:
    if not upload.ended.is_set():
        raise FailedPrecondition("the upload's descriptor is still open", hint="close it first")
    if upload.failure is not None:
        raise upload.failure
    if upload.size_bytes != size_bytes:
        raise InvalidArgument(
            f"{upload.size_bytes} bytes came, {size_bytes} were sent", field="size_bytes"
        )
    if not size_bytes:
        raise InvalidArgument("the upload is empty", field="size_bytes")


def _typed(error: OSError, upload: _Upload) -> ChvError:
    if error.errno in NO_SPACE:
        directory = upload.path.parent
        return ResourceExhausted(
            f"no space after {upload.size_bytes} bytes: {directory} has "
            f"{free_bytes(directory)} free",
            hint="remove unused images with `chv image rm` and `chv image gc`, or make room",
        )
    return Internal(f"the upload cannot be stored: {error.strerror}")


def _widen(pipe: int) -> None:
    """Ask for a larger pipe; where the user's limit is reached the usual size will do."""
    try:
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EBUSY):
            raise
