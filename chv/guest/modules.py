"""Chooses kernel modules from a kernel package and orders them by dependency.

Debian's package has no modules.dep, so dependencies come from each module's own `.modinfo`.
Modules are stored plain: the guest loads them with `insmod`, without a decompressor.
"""

from __future__ import annotations

import io
import posixpath
import re

from chv.common.errors import FailedPrecondition
from chv.guest.debs import Deb, decompressor

MODULE_PATH = re.compile(r"^lib/modules/[^/]+/kernel/.*/([^/]+)\.ko(?:\.[a-z0-9]+)?$")
DEPENDS = re.compile(rb"\0depends=([^\0]*)\0")
BUILTIN = re.compile(r"^kernel/.*/([^/]+)\.ko$")


def _name(text: str) -> str:
    return text.replace("-", "_")


class KernelModules:
    """The modules of one kernel package."""

    def __init__(self, kernel: Deb) -> None:
        self._kernel = kernel
        self._paths: dict[str, str] = {}
        self._builtin: set[str] = set()
        self._cache: dict[str, bytes] = {}
        for path in kernel.paths():
            if match := MODULE_PATH.match(path):
                self._paths[_name(match[1])] = path
            elif posixpath.basename(path) == "modules.builtin":
                self._read_builtin(path)

    def _read_builtin(self, path: str) -> None:
        for line in self._kernel.read(path).decode().splitlines():
            if match := BUILTIN.match(line):
                self._builtin.add(_name(match[1]))

    def content(self, name: str) -> bytes:
        """Return the module itself, decompressed."""
        if name not in self._cache:
            path = self._paths[name]
            with decompressor(path)(io.BytesIO(self._kernel.read(path))) as stream:
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
            raise FailedPrecondition(f"{self._kernel.path.name} has no module {name}")
        for dependency in self.depends(name):
            self._visit(dependency, done)
        done.append(name)
