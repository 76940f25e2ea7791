"""Volumes that are a whole block device of the node: a disk, a partition, a LUN of the host's.

The device is somebody else's: it is never made, enlarged or wiped, and deletion forgets it. It
must be allowed, must not be in use by the host, and belongs to one volume: under any name, also
as the disk that a partition is on.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from functools import partial
from pathlib import Path, PurePosixPath

import anyio.to_thread

from chv.common.config import StorageConfig
from chv.common.errors import ChvError, NotFound
from chv.common.layout import Layout
from chv.common.wire.stord import VolumeBackend, VolumeClass
from chv.stord import allow
from chv.stord.backends import devices, disk_files
from chv.stord.backends.base import Inspection
from chv.stord.backends.elsewhere import (
    Elsewhere,
    described,
    refuse_smaller,
    visible_bytes,
    writable,
)
from chv.stord.qsd.graph import Protocol as ProtocolNode

LVM_NODES = Path("/dev")


class OnDevice(Elsewhere):
    """Classes whose bytes the kernel shows as a block device."""

    driver = "host_device"
    package = "qemu-utils"

    @abstractmethod
    def device(self, volume_id: str, spec: VolumeBackend) -> Path:
        """Return the host's name of the device."""

    def grant(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give node and lock to a storage uid; 0 takes them back, also from a vanished device."""
        lock = self.lock_path(volume_id)
        with disk_files.exclusively(lock):
            if uid == 0:
                devices.drop_node(self._layout.device(volume_id))
            else:
                self._put_node(volume_id, spec, uid)
            os.chown(lock, uid, uid, follow_symlinks=False)

    def lend_base(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        """Give our node of the device to a storage uid; 0 takes it back."""
        if uid == 0:
            devices.drop_node(self._layout.device(volume_id))
        else:
            self._put_node(volume_id, spec, uid)

    def _put_node(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        self.permit(spec)
        device = self.device(volume_id, spec)
        devices.check_free(device, writable=writable(spec))
        devices.put_node(self._layout.device(volume_id), devices.number(device), uid)

    def protocol(self, volume_id: str, spec: VolumeBackend) -> ProtocolNode:
        """Describe how the storage daemon reaches the device: by our node of it."""
        node = self._layout.device(volume_id)
        if not devices.is_node(node, devices.number(self.device(volume_id, spec))):
            self._put_node(volume_id, spec, 0)  # nobody's yet, or a boot or a new disk since
        return ProtocolNode(
            driver=self.driver, options={"filename": str(node)}, direct=True, aio=self._storage.aio
        )

    async def inspect(self, volume_id: str, spec: VolumeBackend) -> Inspection:
        """Look at the device."""
        return await anyio.to_thread.run_sync(self._inspect, volume_id, spec)

    def _inspect(self, volume_id: str, spec: VolumeBackend) -> Inspection:
        try:
            device = self.device(volume_id, spec)
            size_bytes = visible_bytes(spec, devices.size_bytes(device))
        except NotFound as error:
            return Inspection(location=self.location(spec), state="missing", problem=error.message)
        except ChvError as error:
            return Inspection(location=self.location(spec), state="broken", problem=error.message)
        had_bytes = disk_files.described_bytes(self._layout.volume(volume_id))
        if size_bytes < had_bytes:
            problem = f"{str(device)!r} holds {size_bytes} bytes of the {had_bytes} that it had"
            return Inspection(location=str(device), state="broken", problem=problem)
        return Inspection(
            location=str(device),
            state="open",
            size_bytes=size_bytes,
            allocated_bytes=size_bytes,
            device_bytes=size_bytes,
        )

    @abstractmethod
    def location(self, spec: VolumeBackend) -> str:
        """Return where the bytes are, for people."""

    async def describe(self, volume_id: str, spec: VolumeBackend) -> None:
        """Write down the size that the volume has reached."""
        directory = self._layout.volume(volume_id)
        await anyio.to_thread.run_sync(disk_files.describe, directory, spec)


class BlockBackend(OnDevice):
    """Class `block`."""

    class_name = VolumeClass.BLOCK

    def location(self, spec: VolumeBackend) -> str:
        """Return the device as given."""
        return _given(spec)

    def permit(self, spec: VolumeBackend) -> None:
        """Refuse a device that is not allowed, by its name as given or its real one."""
        given = PurePosixPath(_given(spec))
        allow.check_name(given)
        real = devices.resolve(str(given))
        allow.check_device([given, PurePosixPath(real)], self._storage.allowed_devices)
        devices.number(real)

    def device(self, volume_id: str, spec: VolumeBackend) -> Path:
        """Return the real name of the device."""
        return devices.resolve(_given(spec))

    async def prepare(self, volume_id: str, spec: VolumeBackend) -> None:
        """Find the device: allowed, free and large enough."""
        await anyio.to_thread.run_sync(self.permit, spec)
        free = partial(devices.check_free, writable=writable(spec))
        await anyio.to_thread.run_sync(free, self.device(volume_id, spec))
        refuse_smaller(await self.inspect(volume_id, spec), spec)

    async def discard(self, volume_id: str, _spec: VolumeBackend) -> None:
        """Forget the device; what is on it stays."""
        await anyio.to_thread.run_sync(devices.drop_node, self._layout.device(volume_id))

    async def grow(self, volume_id: str, spec: VolumeBackend) -> None:
        """See that the device has grown."""
        refuse_smaller(await self.inspect(volume_id, spec), spec)
        await self.describe(volume_id, spec)

    def overlaps(self, spec: VolumeBackend, other: VolumeBackend) -> bool:
        """Tell whether another volume has this device, or one that it is a part of."""
        shared = devices.overlapping(devices.number(devices.resolve(_given(spec))))
        if other.class_name is not VolumeClass.BLOCK:
            return False
        try:
            return devices.number(devices.resolve(_given(other))) in shared
        except NotFound:  # the other's device is gone; by name it may come back
            return _given(other) == _given(spec)

    def _refuse_shared(self, volume_id: str, spec: VolumeBackend) -> None:
        super()._refuse_shared(volume_id, spec)
        device = devices.number(devices.resolve(_given(spec)))
        for other_id, other in described(self._layout):
            if other.lvm is not None and _is_logical_volume(
                device, other.lvm.volume_group, self._layout.external_name(other_id)
            ):
                raise devices.taken(_given(spec), other_id)


def _given(spec: VolumeBackend) -> str:
    assert spec.block is not None, "`check` refuses a spec without its place"
    return spec.block.device


def _is_logical_volume(device: int, volume_group: str, name: str) -> bool:
    try:
        return devices.number(LVM_NODES / volume_group / name) == device
    except NotFound:
        return False


def make(layout: Layout, storage: StorageConfig) -> BlockBackend:
    """Return the backend of this class."""
    return BlockBackend(layout, storage)
