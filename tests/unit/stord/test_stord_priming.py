"""Priming an export against peers that do not do what they should."""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream

from chv.common.errors import DeadlineExceeded, Internal, Unavailable
from chv.stord.qsd import vhost_user as vu

UID = os.geteuid()
SECTORS = 2048


class Export:
    """The other side: answers like an export, but for what a test changes."""

    def __init__(self) -> None:
        self.features = vu.FEATURE_PROTOCOL
        self.protocol = vu.PROTOCOL_CONFIG
        self.keeps_write_cache = True
        self.write_cache = 0
        self.mute = False
        self.answer: Callable[[int], int] = lambda request: request
        self.seen: list[int] = []
        self.left = anyio.Event()

    async def serve(self, stream: SocketStream) -> None:
        reader = BufferedByteReceiveStream(stream)
        try:
            while True:
                header = await reader.receive_exactly(vu.HEADER.size)
                request, _flags, size = vu.HEADER.unpack(header)
                payload = await reader.receive_exactly(size) if size else b""
                self.seen.append(request)
                await self.handle(stream, request, payload)
        except (anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
            await stream.aclose()
        self.left.set()

    async def handle(self, stream: SocketStream, request: int, payload: bytes) -> None:
        config = struct.pack("<Q", SECTORS).ljust(vu.WCE_OFFSET, b"\0")
        replies = {
            vu.GET_FEATURES: struct.pack("<Q", self.features),
            vu.GET_PROTOCOL_FEATURES: struct.pack("<Q", self.protocol),
            vu.GET_CONFIG: payload[:12] + config + bytes([self.write_cache, 0, 0, 0]),
        }
        if request == vu.SET_CONFIG and self.keeps_write_cache:
            self.write_cache = payload[12]
        if request in replies and not self.mute:
            reply = replies[request]
            head = vu.HEADER.pack(self.answer(request), vu.VERSION | vu.REPLY, len(reply))
            await stream.send(head + reply)


@asynccontextmanager
async def listening(export: Export) -> AsyncIterator[Path]:
    with tempfile.TemporaryDirectory(prefix="chv-test-") as directory:
        path = Path(directory) / "e.sock"
        listener = await anyio.create_unix_listener(path)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, export.serve)
            yield path
            with anyio.fail_after(5):
                await export.left.wait()
            tasks.cancel_scope.cancel()


async def test_priming_turns_the_write_cache_on_reads_it_back_and_tells_the_capacity() -> None:
    export = Export()
    async with listening(export) as path:
        assert await vu.prime(path, UID) == SECTORS * vu.SECTOR_BYTES

    assert export.write_cache == 1
    assert export.seen.index(vu.SET_CONFIG) < export.seen.index(vu.GET_CONFIG)


async def test_an_export_that_does_not_keep_the_write_cache_on_is_refused() -> None:
    export = Export()
    export.keeps_write_cache = False
    async with listening(export) as path:
        with pytest.raises(Internal, match="does not keep its write cache"):
            await vu.prime(path, UID)


@pytest.mark.parametrize("missing", ["features", "protocol"])
async def test_an_export_without_access_to_its_config_space_is_refused(missing: str) -> None:
    export = Export()
    setattr(export, missing, 0)
    async with listening(export) as path:
        with pytest.raises(Internal, match="offers no"):
            await vu.prime(path, UID)


async def test_a_socket_of_another_uid_is_refused_before_a_byte_is_sent() -> None:
    export = Export()
    async with listening(export) as path:
        with pytest.raises(Internal, match=f"belongs to uid {UID}"):
            await vu.prime(path, UID + 1)

    assert export.seen == []


async def test_an_answer_to_another_question_is_refused() -> None:
    export = Export()
    export.answer = lambda request: request + 1
    async with listening(export) as path:
        with pytest.raises(Internal, match="was answered by"):
            await vu.prime(path, UID)


async def test_a_mute_export_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vu, "PRIME_TIMEOUT_S", 0.05)
    export = Export()
    export.mute = True
    async with listening(export) as path:
        with pytest.raises(DeadlineExceeded):
            await vu.prime(path, UID)


async def test_no_export_at_all_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        await vu.prime(Path("/run/chv-test-no-such-socket"), UID)
