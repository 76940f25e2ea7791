"""The holder's part of the console: one process, every serial line of a node.

One reader per serial line, always connected, so a guest never blocks on its console. A line that
ends is closed and forgotten, but looked for a moment longer: a VMM may make its port anew when its
guest reboots. Losing the holder loses recording, never a guest.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

import anyio
import anyio.abc

from chv import VERSION
from chv.agent.console.bound import RecordingsBound
from chv.agent.console.disk import Disk, Spool
from chv.agent.console.log_stream import log_stream
from chv.agent.console.recording import MARK_ATTACHED
from chv.agent.console.viewers import Screen
from chv.agent.console.wire import (
    ATTACH_CONSOLE,
    BOUND_RECORDINGS,
    DETACH_CONSOLE,
    LIST_CONSOLES,
    METHODS,
    SHUT_DOWN,
    AttachConsole,
    AttachedConsoles,
    BoundRecordings,
    DetachConsole,
)
from chv.common import logs
from chv.common.clock import boot_id
from chv.common.errors import FailedPrecondition, Unavailable
from chv.common.files import FileLock
from chv.common.layout import Layout
from chv.common.rpc import Server, WithFds
from chv.common.wire.agent_console import OPEN_LINE, ConsoleReply, OpenLine
from chv.common.wire.hello import common_version
from chv.common.wire.types import HELLO, Done, Empty, HelloReply, HelloRequest

CHUNK_BYTES = 16384
CONSOLES_MAX = 10_000
# How long a line that ended is looked for: a reboot within the VMM takes tens of milliseconds.
AGAIN_S_MAX, AGAIN_POLL_S = 2.0, 0.02
HANG_UP_S_MAX = 1.0


class Holder:
    """Every attached serial line."""

    def __init__(self, layout: Layout, tasks: anyio.abc.TaskGroup, disk: Disk) -> None:
        self._layout = layout
        self._disk = disk
        self._bound = RecordingsBound(disk, layout.vm_state("x").parent)
        self._tasks = tasks
        self._lines: dict[str, anyio.CancelScope] = {}
        self._sought: set[str] = set()  # that ended a moment ago
        self._held: set[str] = set()  # whose lines are or were held here
        self._screens: dict[str, Screen] = {}

    async def hello(self, request: HelloRequest) -> HelloReply:
        """Say who we are."""
        return HelloReply(
            daemon="console",
            version=VERSION,
            protocol=common_version(request),
            instance=self._layout.instance,
            boot_id=boot_id(),
            pid=os.getpid(),
            state="ready",
        )

    async def bound(self, request: BoundRecordings) -> Done:
        """Bound all recordings together."""
        self._bound.set(request.bytes_max)
        return Done()

    async def attach(self, request: AttachConsole) -> Done:
        """Connect and start recording; returns once connected."""
        if request.vm_id in self._lines:
            return Done()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            connection.connect(request.socket)
        except OSError as error:
            connection.close()
            raise Unavailable(f"serial line of {request.vm_id}: {error.strerror}") from error
        spool = self._spool(request)
        screen = self._screens.setdefault(request.vm_id, Screen())
        screen.connection = connection
        scope = anyio.CancelScope()
        self._lines[request.vm_id] = scope
        self._tasks.start_soon(self._record, request, connection, spool, scope)
        return Done()

    def _spool(self, request: AttachConsole) -> Spool:
        spool = self._disk.open(request.vm_id, Path(request.directory))
        if request.vm_id not in self._held:
            self._held.add(request.vm_id)
            spool.mark_if_held(Path(request.socket))
        spool.mark(MARK_ATTACHED)
        return spool

    async def _record(
        self,
        request: AttachConsole,
        connection: socket.socket,
        spool: Spool,
        scope: anyio.CancelScope,
    ) -> None:
        screen = self._screens.get(request.vm_id) or Screen()  # detached before this began
        try:
            with scope:
                while data := await _receive(connection):
                    screen.show(data)
                    await spool.write(data)
            await _hang_up(connection, spool)
        finally:
            if screen.connection is connection:
                screen.connection = None
            connection.close()
            spool.release()
            ended = self._lines.get(request.vm_id) is scope
            if ended:
                del self._lines[request.vm_id]
        if ended:
            await self._take_up_again(request)

    async def _take_up_again(self, request: AttachConsole) -> None:
        """Attach to a port that was made anew, unless the agent is faster or wants it no more."""
        self._sought.add(request.vm_id)
        with anyio.move_on_after(AGAIN_S_MAX):
            while True:
                await anyio.sleep(AGAIN_POLL_S)
                if request.vm_id not in self._sought or request.vm_id in self._lines:
                    break
                with suppress(Unavailable):
                    await self.attach(request)
        self._sought.discard(request.vm_id)
        if request.vm_id not in self._lines:
            self._end_screen(request.vm_id, "the VM ended")

    def _end_screen(self, vm_id: str, why: str) -> None:
        screen = self._screens.pop(vm_id, None)
        if screen is not None:
            screen.end(why)

    async def open_line(self, request: OpenLine) -> WithFds[ConsoleReply]:
        """Hand out the viewer's end of a socket."""
        screen = self._screens.get(request.vm_id)
        if screen is None:
            raise FailedPrecondition(f"no serial line of {request.vm_id} is held")
        reply, viewer = screen.open(request, self._tasks)
        return WithFds(reply, [viewer.detach()])

    async def detach(self, request: DetachConsole) -> Done:
        """Stop recording one VM."""
        self._sought.discard(request.vm_id)
        self._held.discard(request.vm_id)
        scope = self._lines.pop(request.vm_id, None)
        if scope is not None:
            scope.cancel()
        self._end_screen(request.vm_id, "the VM ended")
        return Done()

    async def attached(self, request: Empty) -> AttachedConsoles:
        """List what is connected."""
        return AttachedConsoles(vm_ids=sorted(self._lines))

    async def shut_down(self, request: Empty) -> Done:
        """End the holder; the reply still goes out."""
        self._tasks.start_soon(self._end)
        return Done()

    async def _end(self) -> None:
        await anyio.sleep(0.05)
        self._tasks.cancel_scope.cancel()


async def _receive(connection: socket.socket) -> bytes:
    while True:
        await anyio.wait_readable(connection)
        try:
            return connection.recv(CHUNK_BYTES)
        except BlockingIOError:
            continue
        except OSError:
            return b""


async def _hang_up(connection: socket.socket, spool: Spool) -> None:
    """Take leave without anything unread: Cloud Hypervisor 53 loses its port to a reset by that."""
    with anyio.move_on_after(HANG_UP_S_MAX, shield=True), suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while data := await _receive(connection):
            await spool.write(data)


async def run(layout: Layout) -> None:
    """Serve until told to end."""
    allowed = frozenset({os.geteuid()})
    with FileLock.acquire(layout.lock("console")), Disk() as disk:
        logs.setup("console", stream=log_stream(disk, "console.log"))
        async with anyio.create_task_group() as tasks:
            holder = Holder(layout, tasks, disk)
            server = Server("console", METHODS, allow_uids=allowed)
            server.add(HELLO, holder.hello)
            server.add(ATTACH_CONSOLE, holder.attach)
            server.add(BOUND_RECORDINGS, holder.bound)
            server.add(DETACH_CONSOLE, holder.detach)
            server.add(LIST_CONSOLES, holder.attached)
            server.add(OPEN_LINE, holder.open_line)
            server.add(SHUT_DOWN, holder.shut_down)
            await server.serve(layout.socket("console"), mode=0o600)
