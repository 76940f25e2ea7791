"""Classic BPF on a socket: what the kernel hands to it at all. Sans-I/O but for `attach`.

A program is a list of (code, jump if true, jump if false, operand).
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Iterable

LOAD_WORD, LOAD_HALF, LOAD_BYTE = 0x20, 0x28, 0x30
EQUALS, ABOVE, AND, RETURN = 0x15, 0x25, 0x54, 0x06
ALL_BYTES = 0xFFFFFFFF
Instruction = tuple[int, int, int, int]
_ATTACH_FILTER = 26
_NETLINK_TYPE_AT = 4


def attach(filtered: socket.socket, program: Iterable[Instruction]) -> None:
    """Let only what `program` takes into a socket from now on."""
    code = b"".join(struct.pack("=HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code)
    head = struct.pack("HP", len(code) // 8, ctypes.addressof(buffer))
    filtered.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, head)


def netlink_types(kinds: Iterable[int]) -> list[Instruction]:
    """Return a program that takes netlink messages of these types."""
    wanted = [socket.htons(kind) for kind in kinds]  # a filter reads numbers as networks do
    tests = [(EQUALS, len(wanted) - at, 0, kind) for at, kind in enumerate(wanted)]
    return [
        (LOAD_HALF, 0, 0, _NETLINK_TYPE_AT),
        *tests,
        (RETURN, 0, 0, 0),
        (RETURN, 0, 0, ALL_BYTES),
    ]
