"""The archive, parsed back by an independent reader."""

from __future__ import annotations

import stat

import pytest

from chv.guest.cpio import Cpio

Entry = tuple[int, bytes]


def parse(archive: bytes) -> dict[str, Entry]:
    """Read newc as its specification says: 13 fields of 8 hexadecimal digits, parts padded to 4."""
    entries: dict[str, Entry] = {}
    at = 0
    while True:
        assert archive[at : at + 6] == b"070701"
        fields = [int(archive[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(13)]
        mode, size, name_size = fields[1], fields[6], fields[11]
        name = archive[at + 110 : at + 110 + name_size - 1].decode()
        start = at + (110 + name_size + 3) // 4 * 4
        if name == "TRAILER!!!":
            return entries
        assert name not in entries
        entries[name] = (mode, archive[start : start + size])
        at = start + (size + 3) // 4 * 4


def test_files_links_and_directories_come_back_with_their_modes() -> None:
    archive = Cpio()
    archive.directory("root", 0o700)
    archive.file("root/a/b", b"12345", 0o600)
    archive.link("root/l", "a/b")
    entries = parse(archive.finish())
    assert entries["root"] == (stat.S_IFDIR | 0o700, b"")
    assert entries["root/a/b"] == (stat.S_IFREG | 0o600, b"12345")
    assert entries["root/l"] == (stat.S_IFLNK | 0o777, b"a/b")


def test_parents_come_before_their_children() -> None:
    archive = Cpio()
    archive.file("a/b/c", b"")
    assert list(parse(archive.finish())) == ["a", "a/b", "a/b/c"]


def test_a_path_cannot_be_added_twice() -> None:
    archive = Cpio()
    archive.file("a", b"1")
    with pytest.raises(ValueError, match="a is in the archive"):
        archive.file("a", b"2")
