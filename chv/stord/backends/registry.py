"""Which backend a class of volumes has. Modules are imported when the first volume needs them.

Every module of a class offers `make(layout, storage) -> Backend`. A class whose module is not
there is Unsupported, as is one whose driver the storage daemon lacks (the backend says so).
"""

from __future__ import annotations

import importlib

from chv.common.config import StorageConfig
from chv.common.errors import Unsupported
from chv.common.layout import Layout
from chv.common.wire.stord import VolumeBackend, VolumeClass
from chv.stord.backends.base import Backend
from chv.stord.backends.file import FileBackend
from chv.stord.tools import Tools

PACKAGE = "chv.stord.backends"


class Backends:
    """One backend per class, made on demand."""

    def __init__(self, layout: Layout, storage: StorageConfig, tools: Tools | None = None) -> None:
        self._layout = layout
        self._storage = storage
        self.file = FileBackend(layout, storage, tools)
        self._made: dict[VolumeClass, Backend] = {VolumeClass.FILE: self.file}

    def of(self, spec: VolumeBackend) -> Backend:
        """Return the backend of the spec's class."""
        made = self._made.get(spec.class_name)
        if made is None:
            made = self._made[spec.class_name] = self._make(spec.class_name)
        return made

    def _make(self, class_name: VolumeClass) -> Backend:
        name = f"{PACKAGE}.{class_name.value}"
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise Unsupported(
                f"volumes of class {class_name.value} are not there yet",
                field="backend.class_name",
                hint="use class file",
            ) from error
        backend: Backend = module.make(self._layout, self._storage)
        return backend
