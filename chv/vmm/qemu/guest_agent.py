"""Speaks to qemu-guest-agent over the line that QEMU serves; freezes and thaws file systems.

What comes back is written by the guest: every answer is bounded in size and time, decoded into a
type and never acted upon beyond that. A call makes a connection of its own and finds its place in
the stream by a random id, since a line keeps what an earlier call did not wait for. Raises
Unavailable or DeadlineExceeded where nobody answers and nothing was asked for, OutcomeUnknown
where a freeze or thaw may have been done, FailedPrecondition where the agent refuses.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
from anyio.abc import SocketStream

from chv.common.errors import (
    ChvError,
    DeadlineExceeded,
    FailedPrecondition,
    OutcomeUnknown,
    Unavailable,
)
from chv.common.ids import Ids

SYNC_S_MAX = 3.0
COMMAND_S_MAX = 5.0
FREEZE_S_MAX = 20.0  # the guest writes out what it has
LINE_BYTES_MAX = 64 * 1024
REFUSAL_CHARACTERS_MAX = 200
SENTINEL = b"\xff"  # not JSON and not UTF-8: both ends drop what came before it
FROZEN, THAWED = "frozen", "thawed"

_ids = Ids()


class _Refusal(msgspec.Struct):
    desc: str = ""


class _Answer(msgspec.Struct):
    value: msgspec.Raw = msgspec.field(name="return", default_factory=lambda: msgspec.Raw(b""))
    error: _Refusal | None = None


async def ping(path: Path) -> None:
    """Return where the agent answers."""
    async with _agent(path):
        pass


async def frozen(path: Path) -> bool:
    """Tell whether the agent has frozen the file systems."""
    async with _agent(path) as line:
        return await _is_frozen(line)


async def freeze(path: Path) -> None:
    """Freeze all that can be frozen."""
    async with _agent(path) as line:
        if not await _is_frozen(line):
            await line.change("guest-fsfreeze-freeze", FREEZE_S_MAX)
            await _require(line, FROZEN)


async def thaw(path: Path) -> None:
    """Thaw all."""
    async with _agent(path) as line:
        if await _is_frozen(line):
            await line.change("guest-fsfreeze-thaw", COMMAND_S_MAX)
            await _require(line, THAWED)


async def _is_frozen(line: _Line) -> bool:
    return await line.ask("guest-fsfreeze-status", str) == FROZEN


async def _require(line: _Line, state: str) -> None:
    """Read back; whatever keeps us from it leaves a change in doubt."""
    try:
        seen = await line.ask("guest-fsfreeze-status", str)
    except ChvError as error:
        raise OutcomeUnknown(f"not read back: {error.message}") from error
    if seen != state:
        raise OutcomeUnknown(f"the guest's file systems are not {state} after all")


class _Line:
    """A connection on which the agent has answered."""

    def __init__(self, path: Path, stream: SocketStream) -> None:
        self._path = path
        self._stream = stream
        self._buffer = b""

    async def synchronize(self) -> None:
        """Find the place in the stream from which on the answers are ours."""
        number = int(_ids.nonce(), 16)
        request = {"execute": "guest-sync-delimited", "arguments": {"id": number}}
        await self._send(SENTINEL + msgspec.json.encode(request))
        while True:
            line = await self._receive()
            _, mark, answer = line.rpartition(SENTINEL)
            if mark and self._is_sync(answer, number):
                return

    def _is_sync(self, answer: bytes, number: int) -> bool:
        try:
            return msgspec.json.decode(self._decode(answer).value, type=int) == number
        except (msgspec.MsgspecError, FailedPrecondition, Unavailable):
            return False  # left from somebody else's question

    async def ask(self, command: str, kind: type[str]) -> str:
        """Run a command that changes nothing."""
        try:
            with anyio.fail_after(COMMAND_S_MAX):
                answer = await self._run(command)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the guest agent does not answer {command}") from error
        try:
            return msgspec.json.decode(answer.value, type=kind)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"the guest agent answers {command} with something else") from error

    async def change(self, command: str, timeout_s: float) -> None:
        """Run a command that changes something."""
        try:
            with anyio.fail_after(timeout_s):
                await self._run(command)
        except (TimeoutError, Unavailable) as error:
            raise OutcomeUnknown(f"the guest agent has not answered {command}") from error

    async def _run(self, command: str) -> _Answer:
        await self._send(msgspec.json.encode({"execute": command}))
        return self._decode(await self._receive())

    async def _send(self, data: bytes) -> None:
        try:
            await self._stream.send(data + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise Unavailable(f"{self._path}: hung up") from error

    async def _receive(self) -> bytes:
        while b"\n" not in self._buffer:
            if len(self._buffer) > LINE_BYTES_MAX:
                raise Unavailable(f"the guest agent sent more than {LINE_BYTES_MAX} bytes")
            try:
                self._buffer += await self._stream.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
                raise Unavailable(f"{self._path}: hung up") from error
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    @staticmethod
    def _decode(line: bytes) -> _Answer:
        try:
            answer = msgspec.json.decode(line, type=_Answer)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise Unavailable("the guest agent does not speak JSON") from error
        if answer.error is not None:
            raise FailedPrecondition(f"the guest agent refuses: {_plain(answer.error.desc)}")
        return answer


def _plain(text: str) -> str:
    """Return a guest's words as far as they may be shown."""
    return "".join(c if c.isprintable() else "?" for c in text[:REFUSAL_CHARACTERS_MAX])


@asynccontextmanager
async def _agent(path: Path) -> AsyncIterator[_Line]:
    try:
        stream = await anyio.connect_unix(path)
    except OSError as error:
        raise Unavailable(f"{path}: {error.strerror}") from error
    async with stream:
        line = _Line(path, stream)
        try:
            with anyio.fail_after(SYNC_S_MAX):
                await line.synchronize()
        except TimeoutError as error:
            raise Unavailable(
                f"no guest agent answered within {SYNC_S_MAX:g} s",
                hint="install and start qemu-guest-agent in the guest",
            ) from error
        yield line
