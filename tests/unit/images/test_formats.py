"""Declared formats: what is refused, made with real qcow2 headers."""

from __future__ import annotations

import struct

import pytest

from chv.common.errors import InvalidArgument
from chv.images.formats import check_format


def qcow2(
    version: int = 3, backing: int = 0, encryption: int = 0, features: int = 0, size: int = 104
) -> bytes:
    """A header as docs of the format lay it out: big-endian, features at offset 72."""
    head = b"QFI\xfb" + struct.pack(">IQIIQI", version, backing, 8, 16, 1 << 30, encryption)
    return (head + bytes(72 - len(head)) + struct.pack(">Q", features) + bytes(24))[:size]


BZIMAGE = bytes(0x202) + b"HdrS" + bytes(100)


@pytest.mark.parametrize(
    ("declared", "header"),
    [
        ("raw", b""),
        ("raw", bytes(512)),
        ("raw", b"\xeb\x63\x90 a boot sector"),
        ("qcow2", qcow2()),
        ("qcow2", qcow2(version=2, features=1 << 2)),  # version 2 has no such field
        ("qcow2", qcow2(features=0b11001)),
        ("kernel", BZIMAGE),
        ("kernel", b"\x7fELF\x02\x01"),
        ("initramfs", b"070701" + bytes(100)),
        ("initramfs", b"\x1f\x8b\x08"),
        ("initramfs", b"\x28\xb5\x2f\xfd"),
    ],
)
def test_a_file_of_its_declared_format_passes(declared: str, header: bytes) -> None:
    check_format(declared, header)


@pytest.mark.parametrize(
    ("declared", "header", "message"),
    [
        ("raw", qcow2(), "starts as a qcow2"),
        ("qcow2", bytes(512), "it is none"),
        ("qcow2", b"QFI\xfb", "it is none"),
        ("qcow2", qcow2(size=72), "cut short"),
        ("qcow2", qcow2(backing=0x200), "backing file"),
        ("qcow2", qcow2(version=2, backing=0x200), "backing file"),
        ("qcow2", qcow2(version=4), "version 4"),
        ("qcow2", qcow2(encryption=2), "encrypted"),
        ("qcow2", qcow2(features=1 << 2), "in another file"),
        ("qcow2", qcow2(features=1 << 1), "corrupt"),
        ("qcow2", qcow2(features=1 << 9), "unknown features 0x200"),
        ("kernel", b"#!/bin/sh\n", "neither a bzImage"),
        ("initramfs", b"#!/bin/sh\n", "neither a cpio"),
        ("vmdk", b"", "is not a format"),
    ],
)
def test_a_file_of_another_format_is_refused(declared: str, header: bytes, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        check_format(declared, header)
    assert caught.value.field == "format"
