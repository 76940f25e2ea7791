"""QMP to one storage daemon: connect, call with a deadline, read its graph.

The storage daemon serves one monitor client at a time, so the caller holds the VM's lock;
`monitors` keeps connections between pieces of work. Commands are done in the order in which they
are sent, so several may be under way. Errors: DeadlineExceeded where it hangs, Unavailable where it
died or is not there, Unsupported/Internal with QEMU's own text where it refuses.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import anyio
import msgspec
import tenacity
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
from qemu.qmp.qmp_client import NegotiationError

from chv.common.errors import (
    AlreadyExists,
    ChvError,
    DeadlineExceeded,
    Internal,
    InUse,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from chv.common.wire.stord import Limits
from chv.stord.qsd.graph import Node, limits_arguments, limits_from
from chv.stord.qsd.peer import check_peer

CALL_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
CONNECT_PAUSE_S = 0.001
NEGOTIATIONS_MAX = 3
DISCONNECT_TIMEOUT_S = 1.0
DELETED_POLL_S = 0.1
OBJECTS = "/objects"
_NODES: tuple[str, Node] = ("query-named-block-nodes", {"flat": True})
_EXPORTS: tuple[str, Node] = ("query-block-exports", {})
REPLY_BYTES_MAX = 16 * 1024 * 1024

# The library reports what we raise, tracebacks as critical ones; once is enough.
logging.getLogger("qemu.qmp").setLevel(logging.CRITICAL + 1)


class _Client(QMPClient):
    """The library's client without what costs memory or time and serves nobody.

    It makes a text of every message, keys included, for a log, and keeps every event for ever.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, readbuflen=REPLY_BYTES_MAX)
        self.events.event_filter = lambda _event: False

    def _get_exec_id(self) -> str:
        self._execute_id += 1
        return str(self._execute_id)  # every byte counts, see `graph`

    def _cb_outbound(self, msg: Message) -> Message:
        return msg

    def _cb_inbound(self, msg: Message) -> Message:
        return msg


class _Version(msgspec.Struct, frozen=True):
    major: int
    minor: int
    micro: int


class _Greeted(msgspec.Struct, frozen=True):
    qemu: _Version


class Monitor:
    """Typed calls on one connection."""

    def __init__(self, client: QMPClient) -> None:
        self._client = client
        self._unanswered = 0

    @property
    def usable(self) -> bool:
        """Tell whether the connection stands and every command was answered."""
        return self._unanswered == 0 and self._client.runstate is Runstate.RUNNING

    @property
    def version(self) -> str:
        """The storage daemon's version, as it greeted; empty where it did not say."""
        greeting = self._client.greeting
        try:
            version = msgspec.convert(greeting and greeting.QMP.version, _Greeted).qemu
        except msgspec.ValidationError:
            return ""
        return f"{version.major}.{version.minor}.{version.micro}"

    async def close(self) -> None:
        """Disconnect; never fails."""
        with anyio.move_on_after(DISCONNECT_TIMEOUT_S, shield=True):
            await _disconnect(self._client)

    async def call(
        self, command: str, arguments: Node | None = None, *, timeout_s: float = 0.0
    ) -> object:
        """Execute one command; every failure is one of ours."""
        self._unanswered += 1
        try:
            with anyio.fail_after(timeout_s or CALL_TIMEOUT_S):
                answer = await self._client.execute(command, arguments)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the storage daemon did not answer {command} within"
                f" {timeout_s or CALL_TIMEOUT_S:g} s"
            ) from error
        except ExecuteError as error:
            self._unanswered -= 1
            raise translate(command, str(error)) from error
        except (ExecInterruptedError, StateError, QMPError, EOFError, OSError) as error:
            raise Unavailable(f"the storage daemon went away during {command}") from error
        self._unanswered -= 1
        return answer

    async def batch(self, *commands: tuple[str, Node]) -> list[object]:
        """Send several at once; return each one's answer or ChvError, in their order.

        All are executed, whatever becomes of those before.
        """
        answers = list[object](commands)

        async def one(index: int) -> None:
            try:
                answers[index] = await self.call(*commands[index])
            except ChvError as error:
                answers[index] = error

        async with anyio.create_task_group() as calls:
            for index in range(len(commands)):
                calls.start_soon(one, index)  # each sends before it first waits
        return answers

    async def ping(self) -> None:
        """Raise where the storage daemon does not answer."""
        await self.call("query-version")

    async def major(self) -> int:
        """Return the major version of the storage daemon that runs, whatever is installed."""
        answer = cast(dict[str, dict[str, int]], await self.call("query-version"))
        return answer["qemu"]["major"]

    async def exports(self) -> frozenset[str]:
        """Return the ids of all exports, those that are shutting down included."""
        return _names(await self.call(*_EXPORTS), "id")

    async def nodes(self) -> frozenset[str]:
        """Return the names of all block nodes."""
        return _names(await self.call(*_NODES), "node-name")

    async def graph(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return both, the nodes first."""
        nodes, exports = await self.batch(_NODES, _EXPORTS)
        for answer in (nodes, exports):
            if isinstance(answer, ChvError):
                raise answer
        return _names(nodes, "node-name"), _names(exports, "id")

    async def add_node(self, node: Node) -> None:
        """Open a block node."""
        await self.call("blockdev-add", node)

    async def delete_node(self, name: str) -> None:
        """Close a block node."""
        await self.call("blockdev-del", {"node-name": name})

    async def resize(self, name: str, size_bytes: int) -> None:
        """Make a node larger. See `chv.stord.growth` for when this is safe."""
        await self.call("block_resize", {"node-name": name, "size": size_bytes})

    # --- objects
    async def objects(self) -> frozenset[str]:
        """Return the ids of the objects that were added by `add_object`."""
        try:
            answer = await self.call("qom-list", {"path": OBJECTS})
        except NotFound:  # it comes into being with the first object
            return frozenset()
        rows = cast(list[dict[str, str]], answer)
        return frozenset(row["name"] for row in rows if row["type"].startswith("child<"))

    async def add_object(self, kind: str, name: str, options: Node) -> None:
        """Make an object; `options` may hold a secret and are in no error."""
        await self.call("object-add", {"qom-type": kind, "id": name, **options})

    async def delete_object(self, name: str) -> None:
        """Remove an object."""
        await self.call("object-del", {"id": name})

    async def set_limits(self, group: str, limits: Limits) -> None:
        """Change a throttle group, all of it at once."""
        value = limits_arguments(limits)
        await self.call("qom-set", {"path": group, "property": "limits", "value": value})

    async def limits(self, group: str) -> Limits:
        """Read a throttle group back."""
        answer = await self.call("qom-get", {"path": group, "property": "limits"})
        return limits_from(cast(dict[str, int], answer))

    # --- exports
    async def add_export(self, export: Node) -> None:
        """Start to listen."""
        await self.call("block-export-add", export)

    async def delete_export(self, export_id: str) -> None:
        """Delete an export and return when it is gone: its node is free only then."""
        with self._client.listener("BLOCK_EXPORT_DELETED") as listener:
            await self.call("block-export-del", {"id": export_id, "mode": "hard"})
            with anyio.move_on_after(CALL_TIMEOUT_S):
                while export_id in await self.exports():
                    with anyio.move_on_after(DELETED_POLL_S):
                        await listener.get()
                return
        raise DeadlineExceeded(f"export {export_id} did not end within {CALL_TIMEOUT_S} s")


def _names(answer: object, key: str) -> frozenset[str]:
    return frozenset(row[key] for row in cast(list[dict[str, str]], answer))


@asynccontextmanager
async def open_monitor(path: Path, uid: int) -> AsyncIterator[Monitor]:
    """Connect to the monitor at `path` once it listens; a process of `uid` must own it."""
    async with AsyncExitStack() as stack:
        monitor = await connect(path, uid)
        stack.push_async_callback(monitor.close)
        yield monitor


async def connect(path: Path, uid: int) -> Monitor:
    """Return a connection that the caller closes. As `open_monitor`."""
    return Monitor(await _connect_again(path, uid))


async def _connect_again(path: Path, uid: int) -> QMPClient:
    """Connect, once more where the first words were not an answer.

    An event for the client before, which was killed while a job ran, can come to the next one
    in place of the answer to its first command (QEMU 11).
    """
    for _ in range(NEGOTIATIONS_MAX - 1):
        try:
            return await _connect(path, uid)
        except Unavailable as error:
            cause = error.__cause__
            if not (isinstance(cause, ConnectError) and isinstance(cause.exc, NegotiationError)):
                raise
    return await _connect(path, uid)


async def _connect(path: Path, uid: int) -> QMPClient:
    peer = await _dial(path)
    try:
        check_peer(peer, path, uid)
    except Internal:
        peer.close()
        raise
    client = _Client("stord")
    try:
        with anyio.fail_after(CALL_TIMEOUT_S):
            await client.connect(peer)
    except TimeoutError as error:
        peer.close()
        raise DeadlineExceeded(
            f"the storage daemon at {path} did not greet within {CALL_TIMEOUT_S} s"
        ) from error
    except (QMPError, EOFError, OSError) as error:
        peer.close()
        raise Unavailable(f"the storage daemon at {path} went away: {error}") from error
    return client


async def _dial(path: Path) -> socket.socket:
    """Connect as soon as the storage daemon listens."""
    try:
        with anyio.fail_after(CONNECT_TIMEOUT_S):
            async for attempt in tenacity.AsyncRetrying(
                sleep=anyio.sleep,
                wait=tenacity.wait_fixed(CONNECT_PAUSE_S),
                retry=tenacity.retry_if_exception_type((FileNotFoundError, ConnectionRefusedError)),
            ):
                with attempt:
                    return _connect_socket(path)
    except TimeoutError as error:
        raise Unavailable(f"no storage daemon listens at {path}") from error
    except OSError as error:
        raise Unavailable(f"cannot connect to the storage daemon at {path}: {error}") from error
    raise AssertionError("retries ended without a result")


def _connect_socket(path: Path) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.setblocking(False)  # a full backlog is EAGAIN, never a wait
        peer.connect(str(path))
    except OSError:
        peer.close()
        raise
    return peer


async def _disconnect(client: QMPClient) -> None:
    try:
        await client.disconnect()
    except (QMPError, EOFError, OSError):
        return  # it reports again why the connection had ended; callers have seen that


def translate(command: str, text: str) -> ChvError:
    """Return our error for QEMU's text; every QMP error has the same class."""
    message = f"{command}: {text}"
    if " lock" in text and "Failed to get" in text:
        return InUse(f"another process holds the volume: {message}")
    if "Permission denied" in text:
        return PermissionDenied(
            f"the storage uid may not open a file: {message}",
            hint="images must be readable by everyone",
        )
    if "AIO context" in text:
        return ResourceExhausted(
            message, hint="raise fs.aio-max-nr: each storage daemon takes 1024 of it"
        )
    if "accurate CPU usage" in text:  # the timing of a key derivation; nothing was written
        return Unavailable(message)
    if "duplicate property" in text:
        return AlreadyExists(message)
    if "No such file or directory" in text or text.endswith(" not found"):
        return NotFound(message)
    return Internal(message)
