"""Space where volumes are: on real small disks that fill up and empty again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import anyio
import pytest

from chv.common.clock import SystemClock
from chv.common.config import StorageConfig
from chv.common.errors import ResourceExhausted
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import Provider
from chv.common.store import Store
from chv.common.wire import stord as wire
from chv.common.wire.stord import SpaceLevel
from chv.stord.backends.registry import Backends
from chv.stord.disks import Disks
from chv.stord.events import Events
from chv.stord.records import Attachment, Backend, Records, Volume, VolumeState
from chv.stord.space import SpaceMonitor
from chv.stord.tools import Tools
from chv.stord.work import Parts
from tests.disks import small_tmpfs
from tests.integration.stord_helpers import needs_qsd

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

    site.monitor._statvfs = lambda directory: gone()  # type: ignore[assignment, return-value]
    await site.monitor.look()
    assert site.levels.get(volume) is CRITICAL
