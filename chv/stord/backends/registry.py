"""Which backend a class of volumes has. Modules are imported when the first volume needs them.

Every module of a class offers `make(layout, storage) -> Backend`. A class whose module is not
there is Unsupported, as is one whose driver the storage daemon lacks (the backend says so).
"""

from __future__ import annotations

import importlib
from collections.abc import Collection

from chv.common import logs
from chv.common.config import StorageConfig
from chv.common.errors import ChvError, Unsupported
from chv.common.layout import Layout
from chv.common.wire.stord import VolumeBackend, VolumeClass
from chv.stord.backends import lvm
from chv.stord.backends.base import Backend
from chv.stord.backends.file import FileBackend
from chv.stord.tools import Tools

log = logs.get(__name__)
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

    async def sweep(self, known: Collection[str]) -> None:
        """Remove what creations cut short have left outside of the volumes' directories."""
        if not self._storage.volume_groups:
            return
        try:
            removed = await lvm.make(self._layout, self._storage).sweep(known)
        except ChvError as error:
            log.warning("sweep_failed", class_name=VolumeClass.LVM.value, error=error)
            return
        for name in removed:
            log.info("logical_volume_swept", name=name, reason="it was never whole")

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
