"""Volumes that are a logical volume, thin or not, made, enlarged and removed by stord.

Its name carries instance and uid, its tag the instance. What a logical volume held before must
not come to a guest: a thin pool has to give out zeros, anything else is written over before the
volume is there. How far that came is in `wiping/<uid>` of the node's state, so that it goes on
after a kill or a deadline; a logical volume without that note and without a directory is never
touched.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import anyio
import anyio.from_thread
import anyio.to_thread
import msgspec

from chv.common.config import StorageConfig
from chv.common.errors import (
    FailedPrecondition,
    NotFound,
    OwnershipConflict,
    Unavailable,
)
from chv.common.failpoint import failpoint
from chv.common.files import atomic_write, ensure_dir
from chv.common.layout import Layout
from chv.common.wire.stord import LvmPlace, SpaceLevel, VolumeBackend, VolumeClass
from chv.stord import allow
from chv.stord.backends import devices, disk_files, lvm_tools
from chv.stord.backends.base import Space, space_of
from chv.stord.backends.block import OnDevice
from chv.stord.backends.elsewhere import stored_bytes

# A call writes zeros for so long, then says that it is not done; the next one goes on.
ZEROING_S = 40.0


class LvmBackend(OnDevice):
    """Class `lvm`."""

    class_name = VolumeClass.LVM
    package = lvm_tools.PACKAGE

    def permit(self, spec: VolumeBackend) -> None:
        """Refuse a volume group that is not allowed."""
        allow.check_volume_group(_place(spec), self._storage.volume_groups)

    def device(self, volume_id: str, spec: VolumeBackend) -> Path:
        """Return the host's name of the logical volume."""
        return devices.resolve(f"/dev/{_place(spec).volume_group}/{self._name(volume_id)}")

    def location(self, spec: VolumeBackend) -> str:
        """Return the group, and the pool in it."""
        place = _place(spec)
        return "/".join(part for part in (place.volume_group, place.thin_pool) if part)

    def _name(self, volume_id: str) -> str:
        return self._layout.external_name(volume_id)

    def _is_ours(self, place: LvmPlace, found: lvm_tools.LogicalVolume) -> bool:
        """Tell whether it is the volume's at this very place: thin or not as described."""
        return self._tag() in found.tags and found.pool_lv == place.thin_pool

    def _tag(self) -> str:
        return f"chv_{self._layout.instance}"

    def _note(self, volume_id: str) -> Path:
        return self._layout.state / "wiping" / volume_id

    # --- made, enlarged, removed
    async def prepare(self, volume_id: str, spec: VolumeBackend) -> None:
        """Make the logical volume, or go on with the one that an earlier try made."""
        place, name = _place(spec), self._name(volume_id)
        await self._check_pool(place)
        found = await lvm_tools.logical_volume(place.volume_group, name)
        if found is None:
            if not place.thin_pool:
                await self._put_note(volume_id, 0)
            await failpoint("stord.lvm.before_create")
            await lvm_tools.make(
                place.volume_group,
                name,
                stored_bytes(spec),
                thin_pool=place.thin_pool,
                tag=self._tag(),
            )
            await failpoint("stord.lvm.after_create")
        elif not self._is_ours(place, found) or not (place.thin_pool or self._noted(volume_id)):
            raise OwnershipConflict(
                f"{place.volume_group}/{name} is there although no volume has it; left alone",
                resource=volume_id,
                hint=f"look what it holds, then lvremove {place.volume_group}/{name}",
            )
        await self._enlarge(volume_id, spec)

    async def _check_pool(self, place: LvmPlace) -> None:
        if not place.thin_pool:
            return
        pool = await lvm_tools.logical_volume(place.volume_group, place.thin_pool)
        name = f"{place.volume_group}/{place.thin_pool}"
        if pool is None:
            raise NotFound(f"there is no thin pool {name}", field="backend.lvm.thin_pool")
        if not pool.zeroes:
            raise FailedPrecondition(
                f"the thin pool {name} gives out what others have left in it",
                field="backend.lvm.thin_pool",
                hint=f"lvchange --zero y {name}",
            )

    async def grow(self, volume_id: str, spec: VolumeBackend) -> None:
        """Enlarge it while nobody has it open."""
        with disk_files.exclusively(self.lock_path(volume_id)):
            await self._enlarge(volume_id, spec)
        await self.describe(volume_id, spec)

    async def extend_device(self, volume_id: str, spec: VolumeBackend) -> None:
        """Enlarge it under a storage daemon, which does not see more of it before it is told."""
        await self._enlarge(volume_id, spec)

    async def _enlarge(self, volume_id: str, spec: VolumeBackend) -> None:
        place, name = _place(spec), self._name(volume_id)
        found = await lvm_tools.logical_volume(place.volume_group, name)
        if found is None:
            raise NotFound(f"{place.volume_group} has no {name}", resource=volume_id)
        if found.size_bytes < stored_bytes(spec):
            if not place.thin_pool and not self._noted(volume_id):
                await self._put_note(volume_id, found.size_bytes)
            await lvm_tools.extend(place.volume_group, name, stored_bytes(spec))
            await failpoint("stord.lvm.after_extend")
        await self._zero(volume_id, spec)

    async def _zero(self, volume_id: str, spec: VolumeBackend) -> None:
        """Write zeros over what is noted as not yet written over."""
        note, began = self._note(volume_id), anyio.current_time()
        if not self._noted(volume_id):
            return
        await lvm_tools.activate(_place(spec).volume_group, self._name(volume_id))
        device = await anyio.to_thread.run_sync(self.device, volume_id, spec)
        size_bytes = await anyio.to_thread.run_sync(devices.size_bytes, device)
        done = int(await anyio.to_thread.run_sync(note.read_text))
        while done < size_bytes:
            if anyio.current_time() - began > ZEROING_S:
                raise Unavailable(
                    f"{done} of {size_bytes} bytes of the logical volume are wiped",
                    resource=volume_id,
                    hint="the next try goes on; a thin pool has nothing to wipe",
                )
            done = await anyio.to_thread.run_sync(lvm_tools.zero, device, done, size_bytes)
            await self._put_note(volume_id, done)
            await failpoint("stord.lvm.while_zeroing")
        await anyio.to_thread.run_sync(note.unlink, True)

    def _noted(self, volume_id: str) -> bool:
        return self._note(volume_id).exists()

    async def _put_note(self, volume_id: str, done: int) -> None:
        await anyio.to_thread.run_sync(_write_note, self._note(volume_id), done)

    async def discard(self, volume_id: str, spec: VolumeBackend) -> None:
        """Remove the logical volume, unless it is somebody else's."""
        place, name = _place(spec), self._name(volume_id)
        await anyio.to_thread.run_sync(devices.drop_node, self._layout.device(volume_id))
        found = await lvm_tools.logical_volume(place.volume_group, name)
        if found is not None and self._is_ours(place, found):
            await lvm_tools.remove(place.volume_group, name)
        await anyio.to_thread.run_sync(self._note(volume_id).unlink, True)

    async def sweep(self, known: Collection[str]) -> list[str]:
        """Remove what was never whole and is wanted by no record; at start only."""
        removed = []
        for group in self._storage.volume_groups:
            for found in await lvm_tools.tagged(group, self._tag()):
                volume_id = found.lv_name.removeprefix(self._name(""))
                if volume_id not in known and self._noted(volume_id):
                    await lvm_tools.remove(group, found.lv_name)
                    await anyio.to_thread.run_sync(self._note(volume_id).unlink, True)
                    removed.append(found.lv_name)
        return removed

    # --- in use
    def _put_node(self, volume_id: str, spec: VolumeBackend, uid: int) -> None:
        name = f"/dev/{_place(spec).volume_group}/{self._name(volume_id)}"
        if not Path(name).exists():  # after a boot, where nothing activates it
            anyio.from_thread.run(
                lvm_tools.activate, _place(spec).volume_group, self._name(volume_id)
            )
        super()._put_node(volume_id, spec, uid)

    async def space(self, _volume_id: str, spec: VolumeBackend) -> Space | None:
        """Return what pool or group have left; what is not thin cannot run out of it."""
        place = _place(spec)
        if place.thin_pool:
            pool = await lvm_tools.logical_volume(place.volume_group, place.thin_pool)
            if pool is None:
                return None
            space = space_of(pool.scarcest_free_bytes, pool.size_bytes, self._storage)
            return msgspec.structs.replace(space, free_bytes=pool.data_free_bytes)
        group = await lvm_tools.volume_group(place.volume_group)
        return Space(
            free_bytes=int(group.vg_free), total_bytes=int(group.vg_size), level=SpaceLevel.OK
        )


def _write_note(note: Path, done: int) -> None:
    ensure_dir(note.parent, mode=0o711)
    atomic_write(note, str(done).encode())


def _place(spec: VolumeBackend) -> LvmPlace:
    assert spec.lvm is not None, "`check` refuses a spec without its place"
    return spec.lvm


def make(layout: Layout, storage: StorageConfig) -> LvmBackend:
    """Return the backend of this class."""
    return LvmBackend(layout, storage)
