"""What comes out of a guest: its SSH banner through nwd, its serial console from the recording."""

from __future__ import annotations

import re
import socket
from datetime import UTC, datetime

import anyio

from chv.agent.console.recording import MARK_ATTACHED, tail_lines
from chv.agent.links import DaemonLink
from chv.agent.ports import VmHandle
from chv.common.clock import timestamp
from chv.common.errors import ChvError, OutcomeUnknown, Unavailable
from chv.common.layout import Layout
from chv.common.wire.nwd import GUEST, OPEN_GUEST_CONNECTION, OpenGuestConnection

CONNECT_TIMEOUT_S = 2.0
BANNER_TIMEOUT_S = 5.0
BANNER_BYTES_MAX = 255  # RFC 4253 4.2: identification string, CR and LF included
SERIAL_LINES = 200
WRITTEN_S = 0.05  # a line of before a reset may be written so much later
# The tiny guest and the probe say `ready`; a general Linux says at last who may log in.
BOOTED = re.compile(
    r"chv-guest: ready|@[0-9]+ ready |\blogin: *$|Reached target .*(Multi-User|Login)"
)


class GuestProbe:
    """Implements the engine's `GuestPort`."""

    def __init__(self, nwd: DaemonLink, layout: Layout) -> None:
        self._nwd = nwd
        self._layout = layout

    async def probe_ssh(self, nic_id: str, port: int) -> str:
        """Return the banner that the guest's SSH server sent; OutcomeUnknown: not asked."""
        request = OpenGuestConnection(nic_id=nic_id, port=port, timeout_s=CONNECT_TIMEOUT_S)
        try:
            reply, fds = await self._nwd.call_fds(OPEN_GUEST_CONNECTION, request)
        except ChvError as error:
            if error.resource.startswith(GUEST):
                raise
            raise OutcomeUnknown(f"the guest could not be asked: {error}") from error
        with socket.socket(fileno=fds[0]) as connection:
            connection.setblocking(False)
            banner = b""
            with anyio.move_on_after(BANNER_TIMEOUT_S):
                banner = await _banner(connection)
        if not banner.startswith(b"SSH-2.0-"):
            raise Unavailable(f"no SSH banner from {reply.remote}: {banner[:40]!r}")
        return f"{banner_line(banner)} from {reply.remote}"

    async def serial_evidence(self, vm: VmHandle, since_s: float = 0.0) -> str:
        """Return the last serial line that shows a booted guest, of this incarnation only.

        `since_s`: and not from before that moment, since 1970.
        """
        try:
            lines = await anyio.to_thread.run_sync(
                tail_lines, self._layout.vm_state(vm.uid), SERIAL_LINES
            )
        except OSError:
            return ""  # no recording, no evidence
        since = timestamp(datetime.fromtimestamp(since_s + WRITTEN_S, UTC)) if since_s else ""
        for line in reversed(lines):
            if MARK_ATTACHED in line or line < since:
                return ""
            if BOOTED.search(line):
                return f"serial: {line.strip()}"
        return ""


def banner_line(received: bytes) -> str:
    """Return the identification line as text that is safe to print.

    What follows the line belongs to the key exchange, and the guest chooses every byte: a
    control character must not reach an operator's terminal.
    """
    line = received.split(b"\n", 1)[0].rstrip(b"\r").decode("ascii", "replace")
    return "".join(letter if letter.isprintable() else "?" for letter in line)


async def _banner(connection: socket.socket) -> bytes:
    """Read up to the first line end; what came until the peer left, if it leaves."""
    received = b""
    while b"\n" not in received and len(received) < BANNER_BYTES_MAX:
        await anyio.wait_readable(connection)
        try:
            chunk = connection.recv(BANNER_BYTES_MAX)
        except ConnectionError:
            return received
        if not chunk:
            return received
        received += chunk
    return received
