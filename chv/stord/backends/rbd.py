"""Volumes that are an RBD image of a Ceph pool, made, enlarged and removed by stord.

The image carries our instance and the volume's uid in its name. It has the feature
`exclusive-lock`: one client writes at a time, and a client whose lock was broken is shut out. The
lock passes to whoever asks for it, so it does not keep a second VM away; what does is our lock on
this node, and that an image with a client on another node is not attached.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import anyio.from_thread
import anyio.to_thread

from chv.common.config import StorageConfig
from chv.common.errors import InUse, NotFound, Unsupported
from chv.common.layout import Layout
from chv.common.wire.stord import AccessMode, RbdPlace, VolumeBackend, VolumeClass
from chv.stord import allow
from chv.stord.backends import ceph, disk_files
from chv.stord.backends.base import Space, space_of
from chv.stord.backends.elsewhere import stored_bytes, visible_bytes
from chv.stord.backends.remote import EXTRA_PACKAGE, OnServer, require_driver
from chv.stord.qsd.graph import Protocol as ProtocolNode


class RbdBackend(OnServer):
    """Class `rbd`."""

    class_name = VolumeClass.RBD
    driver = "rbd"
    package = f"{EXTRA_PACKAGE} {ceph.PACKAGE}"

    def place(self, spec: VolumeBackend) -> RbdPlace:
        """Return the pool's part of the spec."""
        assert spec.rbd is not None, "`check` refuses a spec without its place"
        return spec.rbd

    async def check(self, spec: VolumeBackend) -> VolumeBackend:
        """Return the spec, or raise; asked before anything is made."""
        spec = await super().check(spec)
        if spec.access is AccessMode.READ_ONLY_MANY:
            raise Unsupported(
                "a volume of class rbd cannot be shared: each VM would need the cluster's key",
                field="backend.access",
                hint="access mode rwo",
            )
        await require_driver(self._layout, self.driver)
        return spec

    def permit(self, spec: VolumeBackend) -> None:
        """Refuse a pool that is not allowed and a configuration that is not /etc/ceph's."""
        allow.check_remote(self.place(spec), self._storage.remotes)
        ceph.configuration(self.place(spec))

    async def prepare(self, volume_id: str, spec: VolumeBackend) -> None:
        """Make the image, or go on with the one that an earlier try made."""
        place, image = self.place(spec), self._layout.external_name(volume_id)
        found = await ceph.info(place, image)
        if found is None:
            await ceph.make(place, image, stored_bytes(spec))
        elif found.size < stored_bytes(spec):
            await ceph.resize(place, image, stored_bytes(spec))

    async def discard(self, volume_id: str, spec: VolumeBackend) -> None:
        """Remove the image."""
        await ceph.remove(self.place(spec), self._layout.external_name(volume_id))
        directory = self._layout.volume(volume_id)
        for lent in directory.glob("ceph-*") if directory.is_dir() else ():
            await anyio.to_thread.run_sync(ceph.take_back, lent)

    async def extend_device(self, volume_id: str, spec: VolumeBackend) -> None:
        """Enlarge the image; its client is told by the cluster."""
        await self.prepare(volume_id, spec)

    async def grow(self, volume_id: str, spec: VolumeBackend) -> None:
        """Enlarge the image while nobody has it open."""
        with disk_files.exclusively(self.lock_path(volume_id)):
            await self.prepare(volume_id, spec)
        directory = self._layout.volume(volume_id)
        await anyio.to_thread.run_sync(disk_files.describe, directory, spec)

    async def size_bytes(self, volume_id: str, spec: VolumeBackend) -> int:
        """Return what the image holds for a guest."""
        image = self._layout.external_name(volume_id)
        found = await ceph.info(self.place(spec), image)
        if found is None:
            raise NotFound(f"{self.location(spec)} has no image {image}")
        return visible_bytes(spec, found.size)

    async def space(self, _volume_id: str, spec: VolumeBackend) -> Space | None:
        """Return what the pool has left, if the cluster counts."""
        found = await ceph.usage(self.place(spec))
        return None if found is None else space_of(*found, self._storage)

    def protocol(self, volume_id: str, spec: VolumeBackend) -> ProtocolNode:
        """Describe how the storage daemon reaches the image, with what was lent to its uid."""
        uid = self.lock_path(volume_id).stat().st_uid or self._layout.tools_uid
        return self._protocol(volume_id, spec, uid)

    def tool_protocol(self, volume_id: str, spec: VolumeBackend) -> ProtocolNode:
        """Describe how the tools uid reaches the image while `reach` lasts."""
        return self._protocol(volume_id, spec, self._layout.tools_uid)

    def _protocol(self, volume_id: str, spec: VolumeBackend, uid: int) -> ProtocolNode:
        place = self.place(spec)
        options: dict[str, object] = {
            "pool": place.pool,
            "image": self._layout.external_name(volume_id),
            "user": place.user or ceph.DEFAULT_USER,
            "conf": str(self._layout.cluster_access(volume_id, uid) / "conf"),
        }
        # Not direct, librbd would keep written data in the storage daemon, where a kill takes it.
        return ProtocolNode(driver=self.driver, options=options, direct=True, local=False)

    def grant(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give lock and key to a storage uid; 0 takes them back. In a worker thread."""
        lock = self.lock_path(volume_id)
        with disk_files.exclusively(lock):
            before = lock.stat().st_uid
            if uid != 0:
                self.permit(spec)
                anyio.from_thread.run(self._lend, volume_id, spec, uid)
            os.chown(lock, uid, uid, follow_symlinks=False)
            if before not in (0, uid):
                ceph.take_back(self._layout.cluster_access(volume_id, before))

    def lend_base(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give the key to a storage uid; 0 takes it back from the one that has the lock."""
        if uid != 0:
            self.permit(spec)
            anyio.from_thread.run(self._lend, volume_id, spec, uid)
            return
        holder = self.lock_path(volume_id).stat().st_uid
        ceph.take_back(self._layout.cluster_access(volume_id, holder))

    @asynccontextmanager
    async def reach(self, volume_id: str, spec: VolumeBackend) -> AsyncIterator[None]:
        """Let the tools uid be the cluster's client."""
        self.permit(spec)
        uid = self._layout.tools_uid
        try:
            await self._lend(volume_id, spec, uid)
            yield
        finally:
            directory = self._layout.cluster_access(volume_id, uid)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(ceph.take_back, directory)

    async def _lend(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        place, image = self.place(spec), self._layout.external_name(volume_id)
        others = [host for host in await ceph.watchers(place, image) if not ceph.is_ours(host)]
        if others:
            raise InUse(
                f"the image {image} is open on {', '.join(others)}",
                resource=volume_id,
                hint="a client that died lets go after 30 s",
            )
        await ceph.lend(place, self._layout.cluster_access(volume_id, uid), uid)


def make(layout: Layout, storage: StorageConfig) -> RbdBackend:
    """Return the backend of this class."""
    return RbdBackend(layout, storage)
