"""Snapshots of fake VMMs in files, and their moves over Unix sockets.

An image is one line of JSON; the receiver answers a line once its VM has it. Fails as the port
says: FailedPrecondition where there is a snapshot already or nobody takes a VM, InvalidArgument
where there is no snapshot.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
from anyio.abc import ByteReceiveStream

from chv.common.errors import FailedPrecondition, InvalidArgument
from chv.common.files import atomic_write
from chv.vmm.fake_state import Image

IMAGE_FILE = "fake.json"
LINE_BYTES_MAX = 64 * 1024
TAKEN = b"taken\n"


def write(directory: Path, image: Image) -> None:
    """Write a snapshot to an empty directory."""
    if list(directory.iterdir()):
        raise FailedPrecondition(f"{directory} is not empty", field="directory")
    atomic_write(directory / IMAGE_FILE, msgspec.json.encode(image), mode=0o600)


def read(directory: Path) -> Image:
    """Read a snapshot."""
    try:
        return msgspec.json.decode((directory / IMAGE_FILE).read_bytes(), type=Image)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidArgument(f"no snapshot in {directory}", field="restore_dir") from error


@asynccontextmanager
async def take(socket: Path) -> AsyncIterator[Image]:
    """Wait for an image; its sender is told once the block is left without an error."""
    socket.unlink(missing_ok=True)
    listener = await anyio.create_unix_listener(socket, mode=0o600)
    try:
        stream = await listener.accept()
    finally:
        await listener.aclose()
        socket.unlink(missing_ok=True)
    async with stream:
        yield msgspec.json.decode(await _line(stream), type=Image)
        await stream.send(TAKEN)


async def offer(socket: Path, image: Image) -> None:
    """Hand an image over."""
    try:
        async with await anyio.connect_unix(socket) as stream:
            await stream.send(msgspec.json.encode(image) + b"\n")
            taken = await _line(stream)
    except OSError as error:
        raise FailedPrecondition(f"nobody takes the VM on {socket}: it goes on here") from error
    if taken != TAKEN:
        raise FailedPrecondition("the other side did not take the VM: it goes on here")


async def _line(stream: ByteReceiveStream) -> bytes:
    """Return a line, or what there was of it."""
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) <= LINE_BYTES_MAX:
            line += await stream.receive()
    except (anyio.EndOfStream, anyio.BrokenResourceError):
        pass
    return line
