"""Chooses the kernel and its modules from its packages; orders modules by dependency.

Debian's packages have no modules.dep, so dependencies come from each module's own `.modinfo`.
Modules are stored plain: the guest loads them with `insmod`, without a decompressor.
"""

from __future__ import annotations

import io
import posixpath
import re
from collections.abc import Iterable

from chv.common.errors import FailedPrecondition
from chv.guest.debs import Deb, decompressor

MODULE_PATH = re.compile(r"^lib/modules/[^/]+/kernel/.*/([^/]+)\.ko(?:\.[a-z0-9]+)?$")
DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")
IMAGE_PATH = re.compile(r"^(?:boot/vmlinuz-[^/]+|lib/modules/[^/]+/vmlinuz)$")
BUILTIN = re.compile(r"^kernel/.*/([^/]+)\.ko$")


def _name(text: str) -> str:
    return text.replace("-", "_")


def kernel_image(parts: Iterable[Deb]) -> bytes:
    """Return the kernel itself, from whichever of its packages ships it."""
    for deb in parts:
        for path in deb.paths():
            if IMAGE_PATH.match(path):
                return deb.read(path)
    raise FailedPrecondition(f"no kernel in {_names(parts)}")


def _names(parts: Iterable[Deb]) -> str:
    return ", ".join(deb.path.name for deb in parts) or "no package"


class KernelModules:
    """The modules of one kernel, which may be spread over several packages."""

    def __init__(self, *parts: Deb) -> None:
        self._parts = parts
        self._paths: dict[str, tuple[Deb, str]] = {}
        self._builtin: set[str] = set()
        self._cache: dict[str, bytes] = {}
        for deb in parts:
            for path in deb.paths():
                if match := MODULE_PATH.match(path):
                    self._paths[_name(match[1])] = deb, path
                elif posixpath.basename(path) == "modules.builtin":
                    self._read_builtin(deb, path)

    def _read_builtin(self, deb: Deb, path: str) -> None:
        for line in deb.read(path).decode().splitlines():
            if match := BUILTIN.match(line):
                self._builtin.add(_name(match[1]))

    def content(self, name: str) -> bytes:
        """Return the module itself, decompressed."""
        if name not in self._cache:
            deb, path = self._paths[name]
            with decompressor(path)(io.BytesIO(deb.read(path))) as stream:
                self._cache[name] = stream.read()
        return self._cache[name]

    def depends(self, name: str) -> list[str]:
        """Return the modules that must be loaded before `name`."""
        match = DEPENDS.search(self.content(name))
        return [_name(part.decode()) for part in match[1].split(b",") if part] if match else []

    def ordered(self, wanted: list[str], loaded: list[str] | None = None) -> list[str]:
        """Return `wanted` and what they need, dependencies first, without what is `loaded`."""
        done = list(loaded or [])
        skip = len(done)
        for name in wanted:
            self._visit(_name(name), done)
        return done[skip:]

    def _visit(self, name: str, done: list[str]) -> None:
        if name in done or name in self._builtin:
            return
        if name not in self._paths:
            raise FailedPrecondition(f"{_names(self._parts)}: no module {name}")
        for dependency in self.depends(name):
            self._visit(dependency, done)
        done.append(name)
