"""`chv console`: a terminal on a VM's serial line.

The bytes come from the console holder over a socket that the agent handed on, so the agent may die
meanwhile. The terminal is set back on every way out that a process can see.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import socket
import sys
import termios
import time
import tty
from collections.abc import Iterator
from types import FrameType
from typing import Any

import msgspec

from chv.cli import connect
from chv.common.errors import (
    ChvError,
    FailedPrecondition,
    InvalidArgument,
    ResourceExhausted,
    Unavailable,
)
from chv.common.wire import agent, agent_console
from chv.common.wire.agent_console import DROPPED, ENDED, INPUT, OUTPUT, READER, WRITER

LINGER_S = 1.0  # after the end of a piped input: how long silence means that nothing comes
REATTACH_S_MAX = 20.0
REATTACH_POLL_S = 0.2
PENDING_BYTES_MAX = 64 << 10  # typed and not taken by the guest; more is refused by not reading


def console(arguments: argparse.Namespace) -> int:
    """View until the escape key, the end of piped input or the VM's end (6)."""
    escape = parse_escape(arguments.escape)
    _require_running(arguments)
    with _open(arguments, take=arguments.take) as line, _terminal() as is_tty:
        session = Session(line, arguments, escape, is_tty=is_tty)
        while not session.run():
            session.line.close()
            session.line = _reattach(session)
    session.line.close()
    return session.exit_code


def parse_escape(text: str) -> bytes:
    """Return the byte of `^X`, or nothing for `none`; raises InvalidArgument."""
    if text == "none":
        return b""
    if len(text) == 2 and text[0] == "^" and 0x40 <= ord(text[1].upper()) <= 0x5F:
        return bytes([ord(text[1].upper()) & 0x1F])
    raise InvalidArgument(f"{text!r} is not ^X or none", field="--escape")


def _require_running(arguments: argparse.Namespace) -> None:
    target = agent.ObjectRef(
        kind="VirtualMachine", name=arguments.name, namespace=arguments.namespace
    )
    with connect.client(arguments.socket) as client:
        status = msgspec.json.decode(client.call(agent.GET, target).object).get("status") or {}
    phase = status.get("phase", "Pending")
    if phase not in ("Running", "Paused", "Starting", "Stopping", "Unknown"):
        raise FailedPrecondition(
            f"VM {arguments.name} is {phase}: it has no console",
            hint=f"`chv start {arguments.name}`; `chv logs vm/{arguments.name}` has what it said",
        )


def _open(arguments: argparse.Namespace, *, take: bool) -> socket.socket:
    request = agent_console.OpenConsole(
        name=arguments.name,
        namespace=arguments.namespace,
        read_only=arguments.read_only,
        take=take,
    )
    with connect.client(arguments.socket) as client:
        _, fds = client.call_fds(agent_console.OPEN_CONSOLE, request)
    line = socket.socket(fileno=fds[0])
    line.setblocking(False)
    return line


@contextlib.contextmanager
def _terminal() -> Iterator[bool]:
    """Raw mode where standard input is a terminal; set back whatever ends us but SIGKILL."""

    def leave(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.signal(number, leave) for number in signals}
    is_tty = sys.stdin.isatty()
    saved = termios.tcgetattr(sys.stdin) if is_tty else None
    try:
        if is_tty:
            tty.setraw(sys.stdin)
        yield is_tty
    finally:
        if saved is not None:
            # Not after what is still to be shown: a terminal that shows nothing would hold us here.
            termios.tcsetattr(sys.stdin, termios.TCSANOW, saved)
        for number, handler in before.items():
            signal.signal(number, handler)


class Session:
    """One user at one line."""

    def __init__(
        self, line: socket.socket, arguments: argparse.Namespace, escape: bytes, *, is_tty: bool
    ) -> None:
        self.line = line
        self.arguments = arguments
        self.exit_code = 0
        self._escape = escape
        self._is_tty = is_tty
        self._input_open = is_tty or not arguments.read_only
        self._pending = b""
        self.writer = not arguments.read_only

    def run(self) -> bool:
        """Return True when it is over, False when the holder has gone without a word."""
        while True:
            linger = None if self._input_open or self.arguments.read_only else LINGER_S
            readable, writable, _ = select.select(
                self._readers(), [self.line] if self._pending else [], [], linger
            )
            if self.line in readable:
                over = self._take_frame()
                if over is not None:
                    return over
            if sys.stdin in readable and self.read_keys():
                return True
            if writable:
                self._send()
            if not (readable or writable or self._pending):
                return True

    def _readers(self) -> list[Any]:
        # A terminal is always read: its escape key must work though the guest takes no input.
        wanted = self._input_open and (self._is_tty or not self._pending)
        return [self.line, sys.stdin] if wanted else [self.line]

    def read_keys(self) -> bool:
        """Take what was typed; True where the escape key is in it."""
        try:
            data = os.read(sys.stdin.fileno(), agent_console.INPUT_BYTES_MAX)
        except OSError:
            data = b""  # the terminal has gone
        if not data:
            self._input_open = False
            return self._is_tty
        escaped = self._is_tty and self._escape and self._escape in data
        if escaped:
            data = data.partition(self._escape)[0]
        if self.writer and len(self._pending) < PENDING_BYTES_MAX:
            self._pending += data
        if escaped:
            self._send()  # what was typed before the key
            self.say("left the console")
        return bool(escaped)

    def _send(self) -> None:
        piece = self._pending[: agent_console.INPUT_BYTES_MAX]
        with contextlib.suppress(OSError):  # gone: the next read says so
            self.line.send(INPUT + piece)
            self._pending = self._pending[len(piece) :]

    def _take_frame(self) -> bool | None:
        """Show a frame; True: over, False: the holder has gone, None: go on."""
        try:
            frame = self.line.recv(agent_console.FRAME_BYTES_MAX)
        except BlockingIOError:
            return None
        except OSError:
            frame = b""
        if not frame:
            return False
        return self._show(frame[:1], frame[1:])

    def _show(self, kind: bytes, data: bytes) -> bool | None:
        if kind == OUTPUT:
            write_all(data)
        elif kind == ENDED:
            self.say(data.decode())
            self.exit_code = FailedPrecondition.exit_code
            return True
        elif kind == DROPPED:
            raise ResourceExhausted(data.decode(), hint="attach again; `chv logs` has every line")
        elif kind in (WRITER, READER):
            self._change_pen(data.decode(), writer=kind == WRITER)
        return None

    def _change_pen(self, words: str, *, writer: bool) -> None:
        self.writer = writer
        if not writer:
            self._pending = b""
        if not writer and not self._is_tty and not self.arguments.read_only:
            raise FailedPrecondition(words, hint="--take, or --read-only")
        if words:
            self.say(words)

    def say(self, words: str) -> None:
        """Tell the user, beside what the guest says."""
        end = "\r\n" if self._is_tty else "\n"
        sys.stderr.write(f"{end if self._is_tty else ''}chv: {words}{end}")
        sys.stderr.flush()


def write_all(data: bytes) -> None:
    """Write to standard output, as slow as it is."""
    while data:
        data = data[os.write(sys.stdout.fileno(), data) :]


def _reattach(session: Session) -> socket.socket:
    session.say("the console holder has gone; what the guest says until the next one is lost")
    deadline = time.monotonic() + REATTACH_S_MAX
    while True:
        try:
            # Viewers come back in any order: who wrote goes on writing.
            line = _open(session.arguments, take=session.writer)
        except (Unavailable, FailedPrecondition) as error:
            if time.monotonic() > deadline:
                raise
            failed: ChvError = error
        else:
            session.say("attached again")
            return line
        if sys.stdin.isatty() and select.select([sys.stdin], [], [], 0)[0] and session.read_keys():
            raise failed
        time.sleep(REATTACH_POLL_S)
