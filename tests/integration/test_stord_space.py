"""Space where volumes are: on real small disks that fill up and empty again."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import anyio
import pytest

from chv.common.clock import SystemClock
from chv.common.config import StorageConfig
from chv.common.errors import ChvError, ResourceExhausted
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import Provider
from chv.common.store import Store
from chv.common.wire import stord as wire
from chv.common.wire.stord import SpaceLevel
from chv.common.wire.types import Empty
from chv.stord.backends.registry import Backends
from chv.stord.disks import Disks
from chv.stord.events import Events
from chv.stord.records import Attachment, Backend, Records, Volume, VolumeState
from chv.stord.space import SpaceMonitor
from chv.stord.tools import Tools
from chv.stord.work import Parts
from tests.disks import small_tmpfs
from tests.integration.stord_helpers import Node, needs_qsd, open_node, short_root
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]
MIB = 1 << 20
OK, WARN, CRITICAL = SpaceLevel.OK, SpaceLevel.WARN, SpaceLevel.CRITICAL


class Site:
    """A monitor over two pools, one of them small, and who is told."""

    def __init__(self, root: Path, small: Path) -> None:
        roomy = root / "roomy"
        roomy.mkdir()
        self.small = small
        self.storage = StorageConfig(
            pools={"small": str(small), "roomy": str(roomy)},
            space_warn_percent=50, space_critical_percent=80, space_critical_bytes=0,
        )  # fmt: skip
        self.layout = Layout(Ids().instance(), root / "run", root / "state")
        self.records = Records(cast(Store, None))
        self.events = Events()
        disks = Disks(self.records, Backends(self.layout, self.storage), "threads")
        self.parts = Parts(
            layout=self.layout,
            records=self.records,
            provider=cast(Provider, None),
            disks=disks,
            tools=cast(Tools, None),
            clock=SystemClock(),
            ids=Ids(),
            boot_id="b",
            storage=self.storage,
        )
        self.levels = self.parts.levels
        self.monitor = SpaceMonitor(self.parts, self.events)

    def add(self, pool: str, size_bytes: int = 64 * MIB) -> str:
        volume_id = Ids().uid()
        self.records.volumes[volume_id] = Volume(
            volume_id=volume_id,
            generation=1,
            backend=spec(pool, size_bytes),
            state=VolumeState.OPEN,
        )
        return volume_id

    def attach(self, volume_id: str) -> str:
        vm_id = Ids().uid()
        row = Attachment(volume_id=volume_id, vm_id=vm_id, read_only=False)
        self.records.attachments[volume_id, vm_id] = row
        self.records.backends[vm_id] = Backend(vm_id=vm_id, storage_uid=1, vm_gid=1, boot_id="b")
        return vm_id

    def use(self, mib: int) -> None:
        """Let the small disk hold so much."""
        (self.small / "ballast").write_bytes(b"x" * (mib * MIB))

    async def after(self, mib: int, volume_id: str) -> SpaceLevel:
        self.use(mib)
        await self.monitor.look()
        return self.levels.get(volume_id)


def spec(pool: str, size_bytes: int) -> wire.VolumeBackend:
    return wire.VolumeBackend(
        class_name=wire.VolumeClass.FILE,
        format=wire.VolumeFormat.RAW,
        size_bytes=size_bytes,
        pool=pool,
    )


@pytest.fixture
def site() -> Iterator[Site]:
    with (
        tempfile.TemporaryDirectory(prefix="chv-test-") as root,
        small_tmpfs(Path(root) / "small", 20) as small,
    ):
        yield Site(Path(root), small)


async def test_a_level_is_reached_at_once_and_left_only_with_room_to_spare(site: Site) -> None:
    volume = site.add("small")
    assert await site.after(5, volume) is OK
    assert await site.after(11, volume) is WARN
    assert await site.after(17, volume) is CRITICAL
    (site.small / "ballast").unlink()
    site.use(15)  # 75 %, clearly below 80
    await site.monitor.look()
    assert site.levels.get(volume) is WARN


async def test_at_the_threshold_it_does_not_flap(site: Site) -> None:
    volume = site.add("small")
    assert await site.after(16, volume) is CRITICAL  # 80 %
    ballast = site.small / "ballast"
    with ballast.open("r+b") as file:
        file.truncate(16 * MIB - (200 << 10))  # 79 %: not critical, and not clearly so
    await site.monitor.look()
    assert site.levels.get(volume) is CRITICAL
    with ballast.open("r+b") as file:
        file.truncate(15 * MIB)
    await site.monitor.look()
    assert site.levels.get(volume) is WARN


async def test_each_change_is_told_once_with_the_vm_that_writes(site: Site) -> None:
    volume, other = site.add("small"), site.add("roomy")
    vm = site.attach(volume)
    with site.events.subscribe() as stream:
        for mib in (5, 17, 17, 2):
            await site.after(mib, volume)
        told = []
        while stream.statistics().current_buffer_used:
            told.append(await stream.receive())
    assert [(each.kind, each.volume_id, each.vm_id, each.space) for each in told] == [
        ("space", volume, vm, CRITICAL),
        ("space", volume, vm, OK),
    ]
    assert site.levels.get(other) is OK


async def test_volumes_of_one_file_system_are_one_place_with_all_they_promise(site: Site) -> None:
    site.add("small", 64 * MIB)
    site.add("small", 36 * MIB)
    site.add("roomy", MIB)
    await site.monitor.look()
    places = {
        place.location: place for place in await anyio.to_thread.run_sync(site.monitor.places)
    }
    small = places[str(site.small)]
    assert (small.volumes, small.promised_bytes) == (2, 100 * MIB)
    assert small.total_bytes == 20 * MIB
    assert small.promised_bytes > small.total_bytes  # thin: allowed, and shown
    assert len(places) == 2


async def test_when_it_is_critical_nothing_new_and_nothing_larger_is_taken(site: Site) -> None:
    volume = site.add("small", 64 * MIB)
    await site.monitor.admit(Ids().uid(), spec("small", MIB))
    site.use(17)
    with pytest.raises(ResourceExhausted) as caught:
        await site.monitor.admit(Ids().uid(), spec("small", 7 * MIB))
    message = caught.value.message
    for part in (str(7 * MIB), str(site.small), str(3 * MIB), str(20 * MIB), str(4 * MIB)):
        assert part in message, message
    with pytest.raises(ResourceExhausted):
        await site.monitor.admit(volume, spec("small", 65 * MIB))
    await site.monitor.admit(volume, spec("small", 64 * MIB))  # nothing more is asked for
    await site.monitor.admit(Ids().uid(), spec("roomy", MIB))


async def test_a_place_that_is_gone_keeps_its_volumes_level_and_harms_no_other(site: Site) -> None:
    volume = site.add("small")
    assert await site.after(17, volume) is CRITICAL

    async def gone() -> None:
        raise OSError(5, "Input/output error")

    site.monitor._statvfs = lambda directory: gone()  # type: ignore[method-assign]
    await site.monitor.look()
    assert site.levels.get(volume) is CRITICAL


async def test_a_volume_shows_its_level_a_watcher_is_told_and_metrics_count() -> None:
    with short_root() as root, small_tmpfs(root / "pool", 20) as pool:
        settings = f'pools = {{ small = "{pool}" }}\nspace_critical_percent = 80'
        async with open_node(storage=settings) as node:
            await tell_of_space(node, pool)


async def tell_of_space(node: Node, pool: Path) -> None:
    volume, vm = Ids().uid(), Ids().uid()
    await node.open(volume, pool="small", size_bytes=64 * MIB)
    await node.attach(volume, vm)
    told: list[wire.StorageEvent] = []
    async with node.client() as watcher, anyio.create_task_group() as watching:

        async def watch() -> None:
            await watcher.stream(wire.WATCH_STORAGE, Empty(), told.append)

        watching.start_soon(watch)
        (pool / "ballast").write_bytes(b"x" * (17 * MIB))
        with anyio.fail_after(10):
            while not told:
                await anyio.sleep(0.05)
        watching.cancel_scope.cancel()
    assert (told[0].kind, told[0].vm_id, told[0].space) == ("space", vm, CRITICAL)
    info = await node.get(volume)
    assert info.space is CRITICAL
    assert info.free_bytes <= 3 * MIB
    with pytest.raises(ResourceExhausted, match="must stay free"):
        await node.open(volume, pool="small", size_bytes=65 * MIB, generation=2)
    async with node.client() as client:
        metrics = await client.call(wire.GET_METRICS, Empty())
        health = await client.call(wire.STORD_HEALTH, Empty())
    small = next(place for place in metrics.places if place.location == str(pool))
    assert (small.promised_bytes, small.volumes, small.level) == (64 * MIB, 1, CRITICAL)
    assert health.status == "degraded"
    assert str(pool) in health.last_error


async def test_metrics_count_what_was_written_and_name_what_nobody_counts() -> None:
    async with open_node() as node:
        volume, vm = Ids().uid(), Ids().uid()
        await node.open(volume)
        attached = await node.attach(volume, vm)
        async with node.client() as client:
            before = await client.call(wire.GET_METRICS, Empty())
            with VhostDisk(Path(attached.export_path)) as disk:
                for sector in range(0, 8192, 256):
                    disk.write(sector, b"m" * (128 << 10))
                disk.flush()
            after = await client.call(wire.GET_METRICS, Empty())
        kind = file_system(node.layout.volume(volume))
    (vm_before,), (vm_after,) = before.vms, after.vms
    assert vm_after.vm_id == vm
    assert vm_after.backend_pid == attached.backend_pid
    if kind != "tmpfs":  # there nothing is written as far as the kernel counts
        assert vm_after.write_bytes - vm_before.write_bytes >= 4 * MIB
    assert 0 < vm_after.resident_bytes < 64 * MIB
    (seen,) = after.volumes
    assert (seen.volume_id, seen.attached, seen.limited, seen.snapshots) == (volume, True, False, 0)
    assert seen.allocated_bytes >= 4 * MIB
    assert "volume_operations" in after.unsupported


def file_system(path: Path) -> str:
    argv = ["findmnt", "--noheadings", "--output", "FSTYPE", "--target", str(path)]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


async def test_errors_of_a_volume_are_counted_and_its_last_one_is_shown() -> None:
    async with open_node() as node:
        volume = Ids().uid()
        await node.open(volume)
        (node.layout.volume(volume) / "disk.raw").unlink()
        for _ in range(2):
            with pytest.raises(ChvError):
                await node.attach(volume, Ids().uid())
        async with node.client() as client:
            metrics = await client.call(wire.GET_METRICS, Empty())
            health = await client.call(wire.GET_VOLUME_HEALTH, wire.GetVolume(volume_id=volume))
    assert metrics.volumes[0].errors == 2
    assert health.status == "failed"
    assert health.last_error
    assert health.last_error_at
