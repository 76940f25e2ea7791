"""What a name means inside a network: the network's own DNS is asked, as a guest would.

The question leaves from the network's namespace to its gateway. The answer may come from anywhere
in the world: every length in it is checked, and only addresses come out of it. Fails with NotFound
where there is no such name, DeadlineExceeded where the DNS is silent.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address

import anyio

from chv.common.errors import DeadlineExceeded, FailedPrecondition, NotFound, Unavailable
from chv.common.names import shown
from chv.common.wire.nwd_policy import ResolvedName, ResolveName
from chv.nwd.kernel import netns
from chv.nwd.kernel.errors import translated
from chv.nwd.parts import Parts

TIMEOUT_S = 3.0
ATTEMPT_S = 1.0
ANSWER_BYTES_MAX = 4096
ANSWERS_MAX = 16
_HEADER = struct.Struct("!HHHHHH")
_RECORD = struct.Struct("!HHIH")
_RECURSIVE, _IS_ANSWER, _CODE = 0x0100, 0x8000, 0xF
_A, _AAAA, _INTERNET = 1, 28, 1
_POINTER = 0xC0
_PORT = 53


class Resolver:
    """Answers ResolveName."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def resolve(self, request: ResolveName) -> ResolvedName:
        """See the wire."""
        row = self._parts.records.networks.get(request.network_id)
        if row is None:
            raise NotFound("there is no such network", resource=request.network_id)
        if not self._parts.is_due(row):
            raise FailedPrecondition("the network is absent", resource=request.network_id)
        path = self._parts.netns_path(request.network_id)
        gateway = row.topology.gateway
        found: list[str] = []
        with translated("asking the network's DNS"):
            asker = await netns.inside(path, _open)
            with asker:
                asker.connect((gateway, _PORT))
                for kind in (_A, _AAAA):
                    found += await _ask(asker, request.name, kind)
        if not found:
            raise NotFound(
                f"the network's DNS knows no address of {shown(request.name)}", field="name"
            )
        return ResolvedName(addresses=found)


def _open() -> socket.socket:
    asker = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    asker.setblocking(False)
    return asker


async def _ask(asker: socket.socket, name: str, kind: int) -> list[str]:
    question = query(name, kind)
    with anyio.move_on_after(TIMEOUT_S):
        while True:
            asker.send(question)
            with anyio.move_on_after(ATTEMPT_S):
                while True:
                    await anyio.wait_readable(asker)
                    try:
                        data = asker.recv(ANSWER_BYTES_MAX)
                    except ConnectionRefusedError as error:
                        raise Unavailable("the network's DNS is not there") from error
                    if data[:2] == question[:2] and len(data) >= _HEADER.size:
                        return answers(data, kind)
    raise DeadlineExceeded(
        f"the network's DNS has not answered within {TIMEOUT_S:g} s", field="name"
    )


def query(name: str, kind: int) -> bytes:
    """Return the question for a checked name; each kind has an id of its own."""
    labels = b"".join(bytes((len(part),)) + part.encode("ascii") for part in name.split("."))
    head = _HEADER.pack(kind, _RECURSIVE, 1, 0, 0, 0)
    return head + labels + b"\0" + struct.pack("!HH", kind, _INTERNET)


def answers(data: bytes, kind: int) -> list[str]:
    """Return the addresses in an answer; what cannot be read is left out."""
    try:
        return list(_addresses(data, kind))[:ANSWERS_MAX]
    except (IndexError, struct.error, ValueError):
        return []


def _addresses(data: bytes, kind: int) -> Iterator[str]:
    _, flags, questions, count, _, _ = _HEADER.unpack_from(data)
    if not flags & _IS_ANSWER or flags & _CODE:
        return
    offset = _HEADER.size
    for _ in range(questions):
        offset = _after_name(data, offset) + 4
    for _ in range(count):
        offset = _after_name(data, offset)
        found, _, _, length = _RECORD.unpack_from(data, offset)
        offset += _RECORD.size
        content = data[offset : offset + length]
        offset += length
        if found == kind:
            yield str(IPv4Address(content) if kind == _A else IPv6Address(content))


def _after_name(data: bytes, offset: int) -> int:
    while data[offset]:
        if data[offset] >= _POINTER:
            return offset + 2
        offset += 1 + data[offset]
    return offset + 1
