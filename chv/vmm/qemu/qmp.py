"""A QEMU's monitor: one cached connection, one command at a time, every wait bounded.

QEMU serves one QMP client; a second one waits in the socket's backlog until the first is gone, so
nothing else may connect while a Monitor holds the connection. A lost connection is made anew by
the next call. Raises Unavailable where nobody answers, DeadlineExceeded where an answer is late
and nothing was changed, OutcomeUnknown where a command may have been applied, FailedPrecondition
where QEMU refuses one.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
from qemu.qmp import (
    ConnectError,
    ExecInterruptedError,
    ExecuteError,
    Message,
    QMPClient,
    QMPError,
    Runstate,
    StateError,
)

from chv.common import logs
from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    FailedPrecondition,
    OutcomeUnknown,
    Unavailable,
)
from chv.vmm.qemu.resets import Resets

COMMAND_S_MAX = 5.0
DISCONNECT_S_MAX = 5.0
REPLY_BYTES_MAX = 1 << 20

_log = logs.get("vmm.qemu")


class MonitorLost(OutcomeUnknown):
    """The connection ended between a command and its answer."""


_IN_DOUBT = (MonitorLost, OutcomeUnknown)


class _Client(QMPClient):
    """The library logs what it also raises; here it only raises."""

    def __init__(self) -> None:
        super().__init__(readbuflen=REPLY_BYTES_MAX)
        self.logger = logging.Logger("chv.vmm.qemu.silent", level=logging.CRITICAL + 1)

    def _cb_outbound(self, msg: Message) -> Message:
        return msg  # the library would make a text of every message for its log

    def _cb_inbound(self, msg: Message) -> Message:
        return msg


class Monitor:
    """The monitor of one QEMU process at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shutdown_reason = ""  # of the last SHUTDOWN event; lost with the connection
        self.resets = Resets()
        self._lock = anyio.Lock()
        self._client: _Client | None = None
        self._seen: Counter[str] = Counter()
        self._arrived = anyio.Event()

    async def ask(
        self,
        command: str,
        arguments: Mapping[str, object] | None = None,
        *,
        limit_s: float | None = None,
    ) -> Any:
        """Run a command that changes nothing and return its answer."""
        failures = (Unavailable, DeadlineExceeded)
        return await self._call(command, arguments, failures, limit_s=limit_s)

    async def tell(self, command: str, arguments: Mapping[str, object] | None = None) -> None:
        """Run a command that changes something."""
        await self._call(command, arguments, _IN_DOUBT)

    async def give(self, name: str, fd: int) -> None:
        """Hand QEMU a copy of a descriptor under a name; an earlier one of that name is closed."""
        await self._call("getfd", {"fdname": name}, _IN_DOUBT, fd=fd)

    async def tell_until(self, command: str, event: str) -> None:
        """Run a command and return once QEMU announced `event` after it."""
        before = self._seen[event]
        await self.tell(command)
        with anyio.move_on_after(COMMAND_S_MAX):
            while self._seen[event] == before:
                await self._arrived.wait()
            return
        raise OutcomeUnknown(f"{command}: no {event} within {COMMAND_S_MAX:g} s")

    def version(self) -> str:
        """Return what the greeting of the present connection says; empty without one."""
        greeting = self._client.greeting if self._client else None
        if greeting is None:
            return ""
        numbers: Any = greeting.QMP.version["qemu"]
        return f"{numbers['major']}.{numbers['minor']}.{numbers['micro']}"

    async def close(self) -> None:
        """Drop the connection; the next call makes a new one."""
        client, self._client = self._client, None
        if client is not None:
            with anyio.move_on_after(DISCONNECT_S_MAX, shield=True):
                await _discard(client)

    async def _call(
        self,
        command: str,
        arguments: Mapping[str, object] | None,
        failures: tuple[type[ChvError], type[ChvError]],
        *,
        fd: int | None = None,
        limit_s: float | None = None,
    ) -> Any:
        """Raise the first of `failures` where the connection is lost, the second for lateness."""
        sent, limit_s = False, limit_s or COMMAND_S_MAX
        lost, late = failures
        try:
            with anyio.fail_after(limit_s):
                async with self._lock:
                    client = await self._connected()
                    sent = True
                    if fd is not None:
                        client.send_fd_scm(fd)  # QEMU keeps it for the next command
                    return await client.execute(command, arguments)
        except TimeoutError as error:
            kind = late if sent else DeadlineExceeded
            raise kind(f"{self.path}: no answer to {command} in {limit_s:g} s") from error
        except ExecuteError as error:
            raise FailedPrecondition(f"QEMU refuses {command}: {error}") from error
        except StateError as error:  # found closed before anything was sent
            raise Unavailable(f"{self.path}: connection is closed") from error
        except (ExecInterruptedError, EOFError, OSError) as error:
            raise lost(f"{self.path}: connection lost during {command}") from error

    async def _connected(self) -> _Client:
        if self._client is not None and self._client.runstate == Runstate.RUNNING:
            return self._client
        await self.close()
        client = self._listening()
        try:
            await client.connect(await _greeted(self.path))
        except ConnectError as error:
            raise Unavailable(f"{self.path}: {error.exc}") from error
        finally:
            if client.runstate != Runstate.RUNNING:  # cancelled half-way: it has tasks to end
                with anyio.move_on_after(DISCONNECT_S_MAX, shield=True):
                    await _discard(client)
        self._client = client
        return client

    def _listening(self) -> _Client:
        client = _Client()
        client.events.event_filter = self._note
        return client

    def _note(self, event: Message) -> bool:
        """Take in an event; False keeps it out of the library's queue, which nobody reads."""
        name = str(event["event"])
        data: Any = event.get("data", {})
        if name == "SHUTDOWN":
            self.shutdown_reason = str(data.get("reason", ""))
        if name == "RESET":
            self.resets.told(_moment_s(event), by_guest=bool(data.get("guest")))
        self._seen[name] += 1
        self._arrived.set()
        self._arrived = anyio.Event()
        return False


def _moment_s(event: Message) -> float:
    """Return when an event happened, since 1970; 0 where QEMU could not tell."""
    at: Any = event.get("timestamp", {})
    return max(0.0, float(at.get("seconds", 0)) + float(at.get("microseconds", 0)) / 1e6)


async def _greeted(path: Path) -> socket.socket:
    """Return a connection on which QEMU has begun to speak; waiting here can be cancelled."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.setblocking(False)
        connection.connect(str(path))
        await anyio.wait_readable(connection)
    except BlockingIOError as error:
        connection.close()
        raise Unavailable(f"{path}: the monitor's queue is full") from error
    except OSError as error:
        connection.close()
        raise Unavailable(f"{path}: {error.strerror}") from error
    except BaseException:
        connection.close()
        raise
    return connection


async def _discard(client: _Client) -> None:
    """End a client and its tasks. A peer that is gone makes the library raise here."""
    if client.runstate == Runstate.IDLE:
        return
    try:
        await client.disconnect()
    except (QMPError, OSError, EOFError) as error:
        _log.debug("qmp_disconnected", error=repr(error))
