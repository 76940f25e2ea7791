"""The console holder and ports that come, go and come again."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from chv.agent.console import holder as module
from chv.agent.console.disk import Disk
from chv.agent.console.holder import Holder
from chv.agent.console.wire import AttachConsole, DetachConsole
from chv.common.layout import Layout
from chv.common.wire.types import Empty
from tests.helpers import wait_until


class Port:
    """A VMM's serial port."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)

    async def viewer(self) -> socket.socket:
        await anyio.wait_readable(self._listener)
        connection, _ = self._listener.accept()
        connection.setblocking(False)
        return connection

    def close(self) -> None:
        self._listener.close()
        self.path.unlink()


@asynccontextmanager
async def holder(tmp_path: Path) -> AsyncIterator[tuple[Holder, AttachConsole]]:
    request = AttachConsole(
        vm_id="0b7a6b0e-0000-4000-8000-000000000001",
        socket=str(tmp_path / "serial.sock"),
        directory=str(tmp_path),
    )
    with Disk() as disk:
        async with anyio.create_task_group() as tasks:
            made = Holder(Layout("abcdef", run_root=tmp_path, state_root=tmp_path), tasks, disk)
            yield made, request
            tasks.cancel_scope.cancel()


def recorded(tmp_path: Path) -> str:
    texts = [path.read_text() for path in tmp_path.iterdir() if path.is_file()]
    return "".join(texts)


async def attached(holder: Holder) -> list[str]:
    return (await holder.attached(Empty())).vm_ids


async def test_a_port_that_is_made_anew_is_recorded_on(tmp_path: Path) -> None:
    port = Port(tmp_path / "serial.sock")
    async with holder(tmp_path) as (made, request):
        await made.attach(request)
        viewer = await port.viewer()
        viewer.send(b"before\n")
        await wait_until(lambda: "before" in recorded(tmp_path))
        port.close()
        viewer.close()
        await wait_until(lambda: not made._lines)
        port = Port(tmp_path / "serial.sock")
        with anyio.fail_after(2):
            viewer = await port.viewer()
        viewer.send(b"after\n")
        await wait_until(lambda: "after" in recorded(tmp_path))
        assert await attached(made) == [request.vm_id]
        viewer.close()
    port.close()


async def test_a_port_that_stays_away_is_forgotten(tmp_path: Path) -> None:
    port = Port(tmp_path / "serial.sock")
    async with holder(tmp_path) as (made, request):
        await made.attach(request)
        viewer = await port.viewer()
        port.close()
        viewer.close()
        await wait_until(lambda: made._sought and not made._lines)
        assert await attached(made) == []
        await made.detach(DetachConsole(vm_id=request.vm_id))
        port = Port(tmp_path / "serial.sock")
        with anyio.move_on_after(5 * module.AGAIN_POLL_S) as patience:
            await port.viewer()
        assert patience.cancelled_caught  # whoever detached does not want it again
    port.close()


async def test_the_holder_takes_leave_with_nothing_unread(tmp_path: Path) -> None:
    port = Port(tmp_path / "serial.sock")
    async with holder(tmp_path) as (made, request):
        await made.attach(request)
        viewer = await port.viewer()
        viewer.send(b"x" * 5000 + b"\n")
        await made.detach(DetachConsole(vm_id=request.vm_id))
        await anyio.wait_readable(viewer)
        viewer.send(b"last words\n")
        assert viewer.recv(10) == b""  # and no reset of the connection
        viewer.close()
        await wait_until(lambda: "last words" in recorded(tmp_path))
    port.close()
