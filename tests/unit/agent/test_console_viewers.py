"""Viewers of one serial line: order of the pen, a slow one, a guest that does not read."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from chv.agent.console.viewers import QUEUE_BYTES_MAX, RING_BYTES, VIEWERS_MAX, Screen
from chv.common.errors import FailedPrecondition, ResourceExhausted
from chv.common.wire.agent_console import (
    DROPPED,
    ENDED,
    FRAME_BYTES_MAX,
    INPUT,
    OUTPUT,
    READER,
    WRITER,
    OpenLine,
)

VM = "0b7a6b0e-0000-4000-8000-000000000001"


@asynccontextmanager
async def screen() -> AsyncIterator[tuple[Screen, socket.socket, anyio.abc.TaskGroup]]:
    guest, ours = socket.socketpair()
    guest.setblocking(False)
    ours.setblocking(False)
    made = Screen()
    made.connection = ours
    async with anyio.create_task_group() as tasks:
        yield made, guest, tasks
        tasks.cancel_scope.cancel()
    guest.close()
    ours.close()


def look(made: Screen, tasks: anyio.abc.TaskGroup, *, take: bool = False) -> socket.socket:
    _, viewer = made.open(OpenLine(vm_id=VM, take=take), tasks)
    viewer.setblocking(False)
    return viewer


async def frame(viewer: socket.socket) -> bytes:
    with anyio.fail_after(10):
        await anyio.wait_readable(viewer)
    return viewer.recv(FRAME_BYTES_MAX)


async def test_who_comes_first_writes_and_the_next_inherits() -> None:
    async with screen() as (made, guest, tasks):
        first, second = look(made, tasks), look(made, tasks)
        assert (await frame(first))[:1] == WRITER
        assert (await frame(second))[:1] == READER
        second.send(INPUT + b"no")
        first.send(INPUT + b"yes")
        await anyio.wait_readable(guest)
        assert guest.recv(100) == b"yes"
        first.close()
        assert (await frame(second))[:1] == WRITER
        second.send(INPUT + b"now")
        await anyio.wait_readable(guest)
        assert guest.recv(100) == b"now"
        second.close()


async def test_who_loses_the_pen_is_told() -> None:
    async with screen() as (made, _, tasks):
        first = look(made, tasks)
        assert (await frame(first))[:1] == WRITER
        with look(made, tasks, take=True) as second:
            assert (await frame(second))[:1] == WRITER
            assert b"took the pen" in await frame(first)
        first.close()


async def test_who_attaches_sees_the_last_bytes_as_they_were() -> None:
    async with screen() as (made, _, tasks):
        made.show(b"old" + bytes(range(256)) * (RING_BYTES // 256))
        with look(made, tasks) as viewer:
            assert (await frame(viewer))[:1] == WRITER
            assert await frame(viewer) == OUTPUT + bytes(range(256)) * (RING_BYTES // 256)


async def test_a_slow_viewer_is_dropped_and_told_and_the_other_sees_all() -> None:
    async with screen() as (made, _, tasks):
        slow, quick = look(made, tasks), look(made, tasks)
        assert (await frame(quick))[:1] == READER
        chunk = b"x" * 8192
        for _ in range(20 * QUEUE_BYTES_MAX // len(chunk)):
            made.show(chunk)
            assert await frame(quick) == OUTPUT + chunk
        kinds = [(await frame(slow))[:1]]
        while kinds[-1] != DROPPED:
            kinds.append((await frame(slow))[:1])
        assert set(kinds[1:-1]) == {OUTPUT}
        assert await frame(slow) == b""
        assert (await frame(quick))[:1] == WRITER  # the slow one had the pen
        slow.close()
        quick.close()


async def test_a_guest_that_reads_nothing_holds_up_nobody_else() -> None:
    async with screen() as (made, _, tasks):
        writer, other = look(made, tasks), look(made, tasks)
        assert (await frame(other))[:1] == READER
        with pytest.raises(BlockingIOError):
            while True:
                writer.send(INPUT + b"y" * 4096)
                await anyio.lowlevel.checkpoint()
        made.show(b"still here")
        assert await frame(other) == OUTPUT + b"still here"
        writer.close()
        other.close()


async def test_the_end_of_the_line_is_the_last_frame() -> None:
    async with screen() as (made, _, tasks):
        with look(made, tasks) as viewer:
            made.show(b"bye")
            made.end("the VM ended")
            assert [(await frame(viewer))[:1] for _ in range(4)] == [WRITER, OUTPUT, ENDED, b""]


async def test_viewers_have_a_limit_and_need_a_line() -> None:
    async with screen() as (made, _, tasks):
        viewers = [look(made, tasks) for _ in range(VIEWERS_MAX)]
        with pytest.raises(ResourceExhausted):
            look(made, tasks)
        made.connection = None
        with pytest.raises(FailedPrecondition):
            look(made, tasks)
        for viewer in viewers:
            viewer.close()
