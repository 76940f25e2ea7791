"""Makes small Debian packages for tests, the same way dpkg-deb lays them out."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
from pathlib import Path


def make_deb(path: Path, files: dict[str, bytes], suffix: str = "xz") -> Path:
    """Write a package with `files`; a value that starts with `->` is a symbolic link."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"./{name}")
            if content.startswith(b"->"):
                entry.type, entry.linkname = tarfile.SYMTYPE, content[2:].decode()
                tar.addfile(entry)
            else:
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    data = plain.getvalue()
    packed = data
    if suffix == "xz":
        packed = lzma.compress(data)
    elif suffix == "gz":
        packed = gzip.compress(data)
    name = "data.tar" if suffix == "tar" else f"data.tar.{suffix}"
    members = [("debian-binary", b"2.0\n"), ("control.tar.xz", b"odd"), (name, packed)]
    path.write_bytes(b"!<arch>\n" + b"".join(_member(*member) for member in members))
    return path


def _member(name: str, content: bytes) -> bytes:
    header = f"{name:<16}{0:<12}{0:<6}{0:<6}{'100644':<8}{len(content):<10}`\n"
    return header.encode() + content + b"\n" * (len(content) % 2)
