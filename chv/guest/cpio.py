"""Writes a newc cpio archive (the kernel's initramfs format) in memory. Pure, and deterministic:
owner root, time zero, inodes in order of addition.
"""

from __future__ import annotations

import posixpath
import stat

MAGIC = "070701"
ALIGN = 4
BLOCK_BYTES = 512
TRAILER = "TRAILER!!!"


class Cpio:
    """An archive under construction. Parent directories are added as needed, mode 0755."""

    def __init__(self) -> None:
        self._out = bytearray()
        self._inode = 0
        self._seen: set[str] = set()

    def directory(self, path: str, mode: int = 0o755) -> None:
        """Add a directory; a second time for the same path does nothing."""
        if path in self._seen or not path:
            return
        self._parents(path)
        self._add(path, stat.S_IFDIR | mode, b"")

    def file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Add a regular file."""
        self._parents(path)
        self._add(path, stat.S_IFREG | mode, content)

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link."""
        self._parents(path)
        self._add(path, stat.S_IFLNK | 0o777, target.encode())

    def finish(self) -> bytes:
        """Return the archive, ended and padded."""
        self._add(TRAILER, 0, b"")
        self._pad(BLOCK_BYTES)
        return bytes(self._out)

    def _parents(self, path: str) -> None:
        self.directory(posixpath.dirname(path))

    def _add(self, path: str, mode: int, content: bytes) -> None:
        if path in self._seen:
            raise ValueError(f"{path} is in the archive already")
        self._seen.add(path)
        self._inode += 1
        name = path.encode() + b"\0"
        links = 2 if stat.S_ISDIR(mode) else 1
        fields = (self._inode, mode, 0, 0, links, 0, len(content), 0, 0, 0, 0, len(name), 0)
        self._out += (MAGIC + "".join(f"{field:08X}" for field in fields)).encode() + name
        self._pad(ALIGN)
        self._out += content
        self._pad(ALIGN)

    def _pad(self, size: int) -> None:
        self._out += b"\0" * (-len(self._out) % size)
