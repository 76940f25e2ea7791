"""Uploads through a real pipe: whole, cut short, too long, given up."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from chv.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from chv.images import Uploads
from chv.images import uploads as uploads_module

CONTENT = b"upload" * 500_000 + bytes(1 << 20)
WAIT_S_MAX = 10.0


@asynccontextmanager
async def running() -> AsyncIterator[Uploads]:
    uploads = Uploads()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(uploads.run)
        await anyio.wait_all_tasks_blocked()
        yield uploads
        tasks.cancel_scope.cancel()


def send(writer: int, data: bytes) -> None:
    with os.fdopen(writer, "wb", buffering=0) as pipe:
        view = memoryview(data)
        while view:
            view = view[pipe.write(view) :]


async def sent(uploads: Uploads, path: Path, data: bytes, size_bytes_max: int = 1 << 30) -> str:
    upload_id, writer = uploads.open(path, size_bytes_max)
    await anyio.to_thread.run_sync(send, writer, data)
    return upload_id


async def until_gone(path: Path) -> None:
    with anyio.fail_after(WAIT_S_MAX):
        while path.exists():
            await anyio.sleep(0.01)


async def test_what_was_sent_is_there_with_holes_and_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "upload"
    async with running() as uploads:
        upload_id = await sent(uploads, path, CONTENT)
        async with uploads.finish(upload_id, len(CONTENT)) as received:
            assert received.read_bytes() == CONTENT
            assert received.stat().st_blocks * 512 < len(CONTENT)
        assert not path.exists()
        with pytest.raises(NotFound, match="again"):
            async with uploads.finish(upload_id, len(CONTENT)):
                pass


@pytest.mark.parametrize("claimed", [len(CONTENT) - 1, len(CONTENT) + 1, 0])
async def test_another_size_than_was_sent_is_refused(tmp_path: Path, claimed: int) -> None:
    path = tmp_path / "upload"
    async with running() as uploads:
        upload_id = await sent(uploads, path, CONTENT)
        with pytest.raises(InvalidArgument, match=f"{len(CONTENT)} bytes came"):
            async with uploads.finish(upload_id, claimed):
                pass
        assert not path.exists()


async def test_nothing_at_all_is_refused(tmp_path: Path) -> None:
    async with running() as uploads:
        upload_id = await sent(uploads, tmp_path / "upload", b"")
        with pytest.raises(InvalidArgument, match="empty"):
            async with uploads.finish(upload_id, 0):
                pass


async def test_too_much_breaks_the_pipe_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "upload"
    async with running() as uploads:
        upload_id, writer = uploads.open(path, 1 << 20)
        with pytest.raises(BrokenPipeError):
            await anyio.to_thread.run_sync(send, writer, CONTENT * 2)
        with pytest.raises(InvalidArgument, match="more than"):
            async with uploads.finish(upload_id, len(CONTENT)):
                pass
        assert not path.exists()


async def test_an_end_that_is_still_open_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "END_S_MAX", 0.05)
    path = tmp_path / "upload"
    async with running() as uploads:
        upload_id, writer = uploads.open(path, 1 << 20)
        with pytest.raises(FailedPrecondition, match="still open"):
            async with uploads.finish(upload_id, 10):
                pass
        await until_gone(path)
        os.close(writer)


async def test_an_upload_that_nobody_claims_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "CLAIM_S_MAX", 0.05)
    path = tmp_path / "upload"
    async with running() as uploads:
        upload_id = await sent(uploads, path, CONTENT)
        await until_gone(path)
        with pytest.raises(NotFound):
            async with uploads.finish(upload_id, len(CONTENT)):
                pass


async def test_a_silent_sender_loses_its_upload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "SILENCE_S_MAX", 0.05)
    async with running() as uploads:
        upload_id, writer = uploads.open(tmp_path / "upload", 1 << 20)
        with pytest.raises(FailedPrecondition, match="nothing came"):
            async with uploads.finish(upload_id, 10):
                pass
        with pytest.raises(BrokenPipeError):
            os.write(writer, b"late")
        os.close(writer)


async def test_there_are_only_so_many_uploads_at_a_time(tmp_path: Path) -> None:
    async with running() as uploads:
        writers = [
            uploads.open(tmp_path / str(number), 1 << 20)[1]
            for number in range(uploads_module.UPLOADS_MAX)
        ]
        with pytest.raises(ResourceExhausted):
            uploads.open(tmp_path / "one more", 1 << 20)
        for writer in writers:
            os.close(writer)


async def test_without_its_task_there_are_no_uploads(tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        Uploads().open(tmp_path / "upload", 1 << 20)
