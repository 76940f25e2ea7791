"""The header of a qcow2 file, read by us. Pure but for `read_header`.

Images come from outside and volumes have been in the hands of a guest, so no QEMU tool that runs
as root opens them to find out what they are. A header that names other files (a backing file, an
external data file) is reported, so that the caller can refuse it. See docs/interop/qcow2 of QEMU
for the layout; every number is big endian.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

import msgspec

from chv.common.errors import InvalidArgument

MAGIC = b"QFI\xfb"
# magic, version, backing_file_offset, backing_file_size, cluster_bits, size
_FIXED = struct.Struct(">4sIQIIQ")
_INCOMPATIBLE = struct.Struct(">Q")
_INCOMPATIBLE_OFFSET = 72
_EXTERNAL_DATA = 1 << 2
_CORRUPT = 1 << 1
HEADER_BYTES = 104
SIZE_BYTES_MAX = 2**60


class Header(msgspec.Struct, frozen=True):
    """What matters of a header."""

    size_bytes: int
    has_backing: bool
    has_external_data: bool
    corrupt: bool


def parse(data: bytes, name: str) -> Header:
    """Parse the first bytes of the file called `name`."""
    if len(data) < _INCOMPATIBLE_OFFSET or not data.startswith(MAGIC):
        raise InvalidArgument(
            f"{name} is not a qcow2 file",
            field="backend.source.format",
            hint="the format is declared, never guessed: say raw if it is raw",
        )
    _magic, version, backing_offset, _length, _bits, size_bytes = _FIXED.unpack_from(data)
    if version not in (2, 3) or size_bytes > SIZE_BYTES_MAX:
        raise InvalidArgument(f"{name}: qcow2 version {version}, size {size_bytes}: not supported")
    features = 0
    if version == 3 and len(data) >= _INCOMPATIBLE_OFFSET + _INCOMPATIBLE.size:
        (features,) = _INCOMPATIBLE.unpack_from(data, _INCOMPATIBLE_OFFSET)
    return Header(
        size_bytes=size_bytes,
        has_backing=backing_offset != 0,
        has_external_data=bool(features & _EXTERNAL_DATA),
        corrupt=bool(features & _CORRUPT),
    )


def read_header(path: Path) -> Header:
    """Read and parse the header of the regular file at `path`."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return parse(os.pread(fd, HEADER_BYTES, 0), str(path))
    finally:
        os.close(fd)
