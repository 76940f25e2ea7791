"""Finds out which shared libraries a program needs, from its ELF headers. Pure: bytes in.

Only what Debian on amd64 ships: 64-bit, little endian. Anything else is Unsupported.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable

from chv.common.errors import FailedPrecondition, Unsupported

MAGIC = b"\x7fELF\x02\x01"
PT_LOAD, PT_DYNAMIC, PT_INTERP = 1, 2, 3
DT_NEEDED, DT_STRTAB = 1, 5
PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
DYNAMIC = struct.Struct("<qQ")
Segment = tuple[int, int, int, int]  # type, file offset, address, size in the file


def _segments(program: bytes) -> list[Segment]:
    if not program.startswith(MAGIC):
        raise Unsupported("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", program, 32)
    size, count = struct.unpack_from("<HH", program, 54)
    found: list[Segment] = []
    for index in range(count):
        fields = PROGRAM_HEADER.unpack_from(program, table + index * size)
        kind, _, offset, address, _, file_size, _, _ = fields
        found.append((kind, offset, address, file_size))
    return found


def _text(program: bytes, offset: int) -> str:
    return program[offset : program.index(b"\0", offset)].decode()


def interpreter(program: bytes) -> str | None:
    """Return the path of the dynamic loader, or None for a static program."""
    for kind, offset, _, _ in _segments(program):
        if kind == PT_INTERP:
            return _text(program, offset)
    return None


def needed(program: bytes) -> list[str]:
    """Return the names of the libraries that `program` asks for itself."""
    segments = _segments(program)
    wanted: list[int] = []
    strings = 0
    for kind, offset, _, size in segments:
        if kind != PT_DYNAMIC:
            continue
        for tag, value in DYNAMIC.iter_unpack(program[offset : offset + size]):
            if tag == DT_NEEDED:
                wanted.append(value)
            elif tag == DT_STRTAB:
                strings = value
    base = _file_offset(segments, strings)
    return [_text(program, base + at) for at in wanted]


def _file_offset(segments: list[Segment], address: int) -> int:
    for kind, offset, start, size in segments:
        if kind == PT_LOAD and start <= address < start + size:
            return offset + address - start
    return address


def closure(programs: Iterable[bytes], find: Callable[[str], bytes | None]) -> dict[str, bytes]:
    """Return every library that `programs` need, directly or not, by its name."""
    libraries: dict[str, bytes] = {}
    pending = [name for program in programs for name in needed(program)]
    while pending:
        name = pending.pop()
        if name in libraries:
            continue
        content = find(name)
        if content is None:
            raise FailedPrecondition(f"no downloaded package has the library {name}")
        libraries[name] = content
        pending.extend(needed(content))
    return dict(sorted(libraries.items()))
