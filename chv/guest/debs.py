"""Reads Debian packages (ar, then a compressed tar) without any Debian tool and without root.

Nothing is ever unpacked onto the file system: the decompressed tar lives in an unlinked temporary
file, so a killed reader leaves nothing. A file that is no package, or whose compression this
Python cannot read, is a ChvError that names it. Blocking: call it in a worker thread.
"""

from __future__ import annotations

import gzip
import importlib
import lzma
import posixpath
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, cast

from chv.common.errors import DataLoss, NotFound, Unsupported

AR_MAGIC = b"!<arch>\n"
AR_HEADER_BYTES = 60
COPY_BYTES = 1 << 20
LINKS_MAX = 8
# Debian merges /bin, /sbin, /lib and /lib64 into /usr; old packages still ship the short names.
MERGED = ("bin/", "sbin/", "lib/", "lib64/")


def canonical(path: str) -> str:
    """Return `path` relative to the root and without the `usr/` of merged directories."""
    clean = posixpath.normpath(path).lstrip("/")
    rest = clean.removeprefix("usr/")
    return rest if rest.startswith(MERGED) else clean


def decompressor(name: str) -> Callable[[IO[bytes]], IO[bytes]]:
    """Return what opens the compressed member `name`, chosen by its suffix."""
    suffix = name.rpartition(".")[2]
    known: dict[str, Callable[[IO[bytes]], IO[bytes]]] = {
        "xz": lambda raw: cast(IO[bytes], lzma.LZMAFile(raw)),  # noqa: SIM115 (the caller does)
        "gz": lambda raw: cast(IO[bytes], gzip.GzipFile(fileobj=raw)),
        "tar": lambda raw: raw,
        "ko": lambda raw: raw,
        "zst": _open_zstd,
    }
    if suffix not in known:
        raise Unsupported(f"compression {suffix!r} of {name} is unknown")
    return known[suffix]


def _open_zstd(raw: IO[bytes]) -> IO[bytes]:
    try:
        module = importlib.import_module("compression.zstd")
    except ModuleNotFoundError as error:
        raise Unsupported(
            "this Python cannot read zstd", hint="Python 3.14 can; Debian itself uses xz"
        ) from error
    return cast(IO[bytes], module.open(raw))


class Deb:
    """One open package: its files by canonical path."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self.path = path
        # Kept open for the object's life and closed by `close`.
        self._plain = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115
        try:
            with path.open("rb") as source:
                name = _seek_data(source, path)
                with decompressor(name)(source) as stream:
                    shutil.copyfileobj(stream, self._plain, COPY_BYTES)
            self._plain.seek(0)
            self._tar = tarfile.open(fileobj=self._plain, mode="r:")  # noqa: SIM115
            self._members = {canonical(member.name): member for member in self._tar}
        except (tarfile.TarError, lzma.LZMAError, EOFError, ValueError) as error:
            self._plain.close()
            raise DataLoss(f"{path} is damaged: {error}", hint="delete it, then repeat") from error

    def __enter__(self) -> Deb:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the temporary file."""
        self._tar.close()
        self._plain.close()

    def paths(self) -> Iterator[str]:
        """Yield the canonical path of every file and link."""
        return iter(self._members)

    def __contains__(self, path: str) -> bool:
        return canonical(path) in self._members

    def read(self, path: str) -> bytes:
        """Return the content of a file; links within the package are followed."""
        name = canonical(path)
        for _ in range(LINKS_MAX):
            member = self._members.get(name)
            if member is None:
                break
            if member.issym():
                name = canonical(posixpath.join(posixpath.dirname(name), member.linkname))
                continue
            content = self._tar.extractfile(member)
            if content is None:
                break
            return content.read()
        raise NotFound(f"{self.path.name} has no file {path}")


def _seek_data(source: IO[bytes], path: Path) -> str:
    """Leave `source` at the start of the data member and return that member's name."""
    if source.read(len(AR_MAGIC)) != AR_MAGIC:
        raise DataLoss(f"{path} is no Debian package", hint="delete it, then repeat")
    while len(header := source.read(AR_HEADER_BYTES)) == AR_HEADER_BYTES:
        name = header[:16].decode("ascii").strip().rstrip("/")
        size_bytes = int(header[48:58])
        if name.startswith("data.tar"):
            return name
        source.seek(size_bytes + size_bytes % 2, 1)
    raise DataLoss(f"{path} holds no data member", hint="delete it, then repeat")
