"""Asks one target of an exposure whether it is well: by TCP, or by HTTP above it.

The connection comes from the gateway of the network, inside its namespace; every wait is on the
event loop and bounded by the check's timeout. Returns what is wrong, empty where nothing is; no
answer of a target, however odd, is an error of ours.
"""

from __future__ import annotations

import re
import socket
from dataclasses import dataclass

import anyio

from chv.common.errors import ChvError
from chv.common.names import shown
from chv.common.wire.nwd_policy import HealthProtocol
from chv.nwd import guest_connection

HEAD_BYTES_MAX = 4096
MESSAGE_CHARACTERS_MAX = 160
WELL = range(200, 400)
_STATUS = re.compile(rb"HTTP/\d(?:\.\d)? (\d{3})(?: [^\r\n]*)?\r?\n")


@dataclass(frozen=True, slots=True)
class Question:
    """Whom to ask, from where, and how."""

    netns_path: str
    gateway: str
    address: str
    port: int
    protocol: HealthProtocol
    path: str
    timeout_s: float


async def ask(question: Question) -> str:
    """Return what is wrong with a target, empty: nothing."""
    try:
        with anyio.fail_after(question.timeout_s):
            return await _ask(question)
    except TimeoutError:
        return f"no answer within {question.timeout_s:g} s"
    except (ChvError, OSError) as error:
        return str(error)[:MESSAGE_CHARACTERS_MAX]


async def _ask(question: Question) -> str:
    target = (question.address, question.port)
    connection, _, _ = await guest_connection.connect(
        question.netns_path, question.gateway, target, question.timeout_s
    )
    with connection:
        if question.protocol is not HealthProtocol.HTTP:
            return ""
        connection.setblocking(False)
        host = f"[{question.address}]" if ":" in question.address else question.address
        connection.send(  # it is far smaller than the buffer of a new connection
            f"GET {question.path} HTTP/1.1\r\nHost: {host}:{question.port}\r\n"
            "User-Agent: chv-health\r\nAccept: */*\r\nConnection: close\r\n\r\n".encode()
        )
        return judged(await _first_line(connection))


async def _first_line(connection: socket.socket) -> bytes:
    head = b""
    while b"\n" not in head and len(head) < HEAD_BYTES_MAX:
        await anyio.wait_readable(connection)
        more = connection.recv(HEAD_BYTES_MAX)
        if not more:
            break
        head += more
    return head


def judged(head: bytes) -> str:
    """Return what the beginning of an HTTP answer says is wrong, empty: nothing."""
    match = _STATUS.match(head)
    if match is None:
        return f"no HTTP answer: {shown(head[:20].decode('ascii', 'replace'))}"
    status = int(match.group(1))
    return "" if status in WELL else f"HTTP status {status}"
