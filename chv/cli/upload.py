"""Sends a file or standard input to the agent through a pipe that the agent hands out.

For callers that are not root, whose files the agent must not read for them, and for `-`. The
checksum is made on the way, so that what is stored is what was read here. Blocking.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from chv.common.errors import FailedPrecondition, InvalidArgument
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire import agent

BLOCK_BYTES = 1 << 20
PROGRESS_BYTES = 32 << 20
OnProgress = Callable[[agent.Progress], None]


class Wanted(msgspec.Struct, frozen=True):
    """What the data is to become."""

    name: str
    namespace: str
    artifact: str
    format: str
    sha256: str
    requester: str
    reason: str = ""


def send(
    client: BlockingClient, source: str, wanted: Wanted, on_progress: OnProgress
) -> agent.ImportImageReply:
    """Send a file (`-`: standard input) and define the Image."""
    with _opened(source) as reader:
        opened, descriptors = client.call_fds(agent.OPEN_UPLOAD, agent.OpenUpload())
        try:
            if len(descriptors) != 1:
                raise FailedPrecondition(f"the agent sent {len(descriptors)} descriptors, not one")
            digest, size_bytes = _pump(reader, descriptors[0], on_progress)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
    if wanted.sha256 and wanted.sha256 != digest:
        raise InvalidArgument(
            f"the file's sha256 is {digest}, expected {wanted.sha256}",
            field="sha256",
            hint="the file is not the one that was meant, or it is damaged",
        )
    finish = agent.FinishUpload(
        upload_id=opened.upload_id,
        size_bytes=size_bytes,
        **msgspec.structs.asdict(msgspec.structs.replace(wanted, sha256=digest)),
    )
    return client.stream(agent.FINISH_UPLOAD, finish, on_progress)


@contextmanager
def _opened(source: str) -> Iterator[int]:
    """Open with the caller's own rights."""
    if source == "-":
        yield sys.stdin.fileno()
        return
    try:
        reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidArgument(f"{source}: {error.strerror}", field="source") from error
    try:
        yield reader
    finally:
        os.close(reader)


def _pump(reader: int, writer: int, on_progress: OnProgress) -> tuple[str, int]:
    """Copy all; return sum and size. A broken pipe ends it: FinishUpload will say why."""
    status = os.fstat(reader)
    total_bytes = status.st_size if stat.S_ISREG(status.st_mode) else 0
    digest, size_bytes = hashlib.sha256(), 0
    while block := os.read(reader, BLOCK_BYTES):
        digest.update(block)
        size_bytes += len(block)
        view = memoryview(block)
        try:
            while view:
                view = view[os.write(writer, view) :]
        except BrokenPipeError:
            return digest.hexdigest(), size_bytes
        if size_bytes % PROGRESS_BYTES == 0:
            on_progress(agent.Progress(step="sending", done=size_bytes, total=total_bytes))
    return digest.hexdigest(), size_bytes
