"""Moves a VM to another QEMU of this host over a Unix socket.

Before QEMU's own stream, one line goes each way: the sender's layout, then whether the receiver
has made the same devices. A receiver that cannot says so, and the VM goes on where it is. Once the
stream has begun QEMU alone decides, and the sender is told whether the VM was taken; from then on
it never runs here again.
"""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import msgspec

from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    FailedPrecondition,
    OutcomeUnknown,
    Unavailable,
)
from chv.common.layout import check_socket_path
from chv.vmm.driver import VmmConfig, VmmState
from chv.vmm.qemu import layout, machine, stream
from chv.vmm.qemu.qmp import Monitor, MonitorLost

SENDER_S_MAX = 600.0  # how long a receiver waits for one
GREETING_S_MAX = 60.0
END_S_MAX = 10.0
POLL_S = 0.01
_CHUNK_BYTES = 4096


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """The receiver's line; with a reason it takes nothing."""

    refusal: str = ""


async def receive(
    monitor: Monitor,
    config: VmmConfig,
    nic_fds: Mapping[str, Sequence[int]],
    path: Path,
    version: tuple[int, int],
) -> None:
    """Wait for a VM; it runs, or stands, as it did where it comes from."""
    if await stream_began(monitor):
        await stream.taken_up(monitor)
        return
    machine.require("receive", await machine.state(monitor), VmmState.EMPTY)
    async with _accepted(path) as connection:
        refusal: ChvError | None = None
        try:
            sent = layout.decode(await _line(connection), "the sender's layout")
            await layout.rebuild(monitor, config, sent, nic_fds, version)
        except ChvError as error:
            refusal = error
        await _say(connection, Ready(refusal=refusal.message if refusal else ""))
        if refusal is not None:
            raise refusal
        await stream.read(monitor, connection.fileno())


async def stream_began(monitor: Monitor) -> bool:
    """Tell whether a stream is, or was, on its way into this QEMU."""
    return (await stream.progress(monitor))[0] != "none"


@asynccontextmanager
async def _accepted(path: Path) -> AsyncIterator[socket.socket]:
    check_socket_path(path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.setblocking(False)
        os.fchmod(listener.fileno(), 0o600)
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        try:
            listener.listen(1)
            with anyio.fail_after(SENDER_S_MAX):
                await anyio.wait_readable(listener)
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise DeadlineExceeded(f"nobody sent a VM in {SENDER_S_MAX:g} s") from error
        finally:
            path.unlink(missing_ok=True)
    with connection:
        connection.setblocking(False)
        yield connection


async def send(monitor: Monitor, path: Path) -> None:
    """Hand the VM over and end this QEMU."""
    if await machine.status(monitor) == machine.HANDED_OVER:
        await _end(monitor)
        return
    allowed = (VmmState.RUNNING, VmmState.PAUSED)
    machine.require("send", await machine.state(monitor), *allowed)
    if not await machine.is_sending(monitor):
        await _begin(monitor, path)
    else:  # by someone who did not live to see the end
        await _goes_on_unless(monitor)
    await _end(monitor)


async def _begin(monitor: Monitor, path: Path) -> None:
    with _connected(path) as connection:
        await _say(connection, await layout.observe(monitor))
        answer = msgspec.json.decode(await _line(connection), type=Ready)
        if answer.refusal:
            raise FailedPrecondition(f"not taken ({answer.refusal}): the VM goes on here")
        await machine.mark_sending(monitor)
        await _goes_on_unless(monitor, connection)


async def _goes_on_unless(monitor: Monitor, connection: socket.socket | None = None) -> None:
    """Write the stream, or wait for one; where it does not arrive, the VM stays."""
    arrived = False
    failure: FailedPrecondition | None = None
    try:
        if connection is None:
            await stream.finish(monitor)
        else:
            await stream.write(monitor, connection.fileno(), two_way=True)
        arrived = True
    except FailedPrecondition as error:
        failure = error
    finally:
        if not arrived:
            with anyio.move_on_after(END_S_MAX, shield=True):
                await _stay(monitor)
    if failure is not None:
        raise FailedPrecondition(f"{failure.message}: the VM goes on here") from failure


async def _stay(monitor: Monitor) -> None:
    """Take the mark away, unless the VM has left in the last moment."""
    with suppress(ChvError):
        if (await stream.progress(monitor))[0] != stream.COMPLETED:
            await machine.unmark_sending(monitor)


async def _end(monitor: Monitor) -> None:
    with suppress(MonitorLost):
        await monitor.tell("quit")
    with anyio.move_on_after(END_S_MAX):
        with suppress(Unavailable):
            while True:
                await machine.status(monitor)
                await anyio.sleep(POLL_S)
        return
    raise OutcomeUnknown("the VM was handed over, and its old VMM does not end")


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    try:
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise FailedPrecondition(
            f"nobody takes the VM on {path} ({error.strerror}): it goes on here", field="socket"
        ) from error
    return connection


async def _say(connection: socket.socket, message: msgspec.Struct) -> None:
    data = msgspec.json.encode(message) + b"\n"
    with suppress(OSError):  # the answer that does not come tells more
        while data:
            await anyio.wait_writable(connection)
            data = data[connection.send(data) :]


async def _line(connection: socket.socket) -> bytes:
    """Read one line, and nothing of what follows: that is QEMU's."""
    line = bytearray()
    try:
        with anyio.fail_after(GREETING_S_MAX):
            while not line.endswith(b"\n"):
                await anyio.wait_readable(connection)
                seen = connection.recv(_CHUNK_BYTES, socket.MSG_PEEK)
                taken = connection.recv(seen.find(b"\n") + 1 or len(seen))
                line += taken
                if not taken or len(line) > layout.LAYOUT_BYTES_MAX:
                    raise FailedPrecondition("the other side hung up: the VM goes on where it is")
    except TimeoutError as error:
        raise DeadlineExceeded("the other side says nothing: the VM goes on") from error
    except OSError as error:
        raise FailedPrecondition(f"{error.strerror}: the VM goes on where it is") from error
    return bytes(line)
