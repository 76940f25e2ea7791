"""Checks that a file can be what its format was declared to be. Pure: the first bytes in.

Formats are declared, never probed. These checks only refuse: a raw disk that is really qcow2
would let its content name other files of the host, and so would a qcow2 with a backing or data
file.
"""

from __future__ import annotations

import struct
from typing import Literal, get_args

from chv.common.errors import InvalidArgument

Format = Literal["raw", "qcow2", "kernel", "initramfs"]
FORMATS: tuple[str, ...] = get_args(Format)
HEADER_BYTES = 4096
QCOW2_MAGIC = b"QFI\xfb"
# magic, version, backing offset, backing size, cluster bits, size, crypt
QCOW2_HEADER = struct.Struct(">4sIQIIQI")
QCOW2_FEATURES = struct.Struct(">Q")
QCOW2_FEATURES_OFFSET = 72
QCOW2_DIRTY, QCOW2_CORRUPT, QCOW2_DATA_FILE = 1 << 0, 1 << 1, 1 << 2
# dirty, compression type, extended L2: harmless for reading; all else is unknown or refused.
QCOW2_ALLOWED = QCOW2_DIRTY | 1 << 3 | 1 << 4
ELF_MAGIC = b"\x7fELF"
LINUX_MAGIC, LINUX_MAGIC_OFFSET = b"HdrS", 0x202
INITRAMFS_MAGICS = (
    b"070701", b"070702", b"\x1f\x8b", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"BZh",
    b"\x02\x21\x4c\x18", b"\x04\x22\x4d\x18", b"\x89LZO", b"\x5d\x00\x00",
)  # fmt: skip


def check_format(declared: str, header: bytes) -> None:
    """Raise InvalidArgument unless a file that starts with `header` may be `declared`."""
    if declared not in FORMATS:
        raise InvalidArgument(
            f"{declared!r} is not a format", field="format", hint=f"one of {', '.join(FORMATS)}"
        )
    if declared == "raw" and header.startswith(QCOW2_MAGIC):
        raise InvalidArgument(
            "taken as raw, but it starts as a qcow2 image",
            field="format",
            hint="declare it: `format: qcow2`, or --format qcow2 of `chv image import`",
        )
    if declared == "qcow2":
        _check_qcow2(header)
    if declared == "kernel" and not _is_kernel(header):
        raise InvalidArgument(
            "neither a bzImage nor an ELF kernel", field="format", hint="a vmlinuz or vmlinux file"
        )
    if declared == "initramfs" and not header.startswith(INITRAMFS_MAGICS):
        raise InvalidArgument("neither a cpio archive nor a compressed one", field="format")


def _is_kernel(header: bytes) -> bool:
    return header.startswith(ELF_MAGIC) or header[LINUX_MAGIC_OFFSET:].startswith(LINUX_MAGIC)


def _check_qcow2(header: bytes) -> None:
    if len(header) < QCOW2_HEADER.size or not header.startswith(QCOW2_MAGIC):
        raise InvalidArgument("declared qcow2, but it is none", field="format")
    _, version, backing, _, _, _, encryption = QCOW2_HEADER.unpack_from(header)
    if version not in (2, 3):
        raise InvalidArgument(f"qcow2 version {version} is unknown", field="format")
    if backing:
        raise InvalidArgument(
            "the qcow2 image has a backing file",
            field="format",
            hint="flatten it: qemu-img convert -O qcow2",
        )
    if encryption:
        raise InvalidArgument("the qcow2 image is encrypted", field="format")
    if version == 3:
        _check_features(header)


def _check_features(header: bytes) -> None:
    if len(header) < QCOW2_FEATURES_OFFSET + QCOW2_FEATURES.size:
        raise InvalidArgument("the qcow2 header is cut short", field="format")
    (features,) = QCOW2_FEATURES.unpack_from(header, QCOW2_FEATURES_OFFSET)
    if features & QCOW2_DATA_FILE:
        raise InvalidArgument(
            "the qcow2 image keeps its data in another file",
            field="format",
            hint="convert it: qemu-img convert -O qcow2",
        )
    if features & QCOW2_CORRUPT:
        raise InvalidArgument("the qcow2 image is marked corrupt", field="format")
    if features & ~QCOW2_ALLOWED:
        raise InvalidArgument(
            f"the qcow2 image has unknown features {features & ~QCOW2_ALLOWED:#x}", field="format"
        )
