"""Logical volumes for real: where the kernel has no device mapper, inside a guest that has it.

`CHV_TEST_LVM_DISK` names an empty disk that may be overwritten; with it the tests run right here.
Without it one test starts a guest and runs them there.
"""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import pytest
from msgspec.structs import replace

import chv
from chv.common.config import StorageConfig
from chv.common.errors import (
    FailedPrecondition,
    InUse,
    NotFound,
    OwnershipConflict,
    PermissionDenied,
    ResourceExhausted,
    Unavailable,
)
from chv.common.layout import Layout
from chv.common.wire import stord as wire
from chv.stord import luks
from chv.stord.backends import lvm_tools
from chv.stord.backends.block import BlockBackend
from chv.stord.backends.lvm import LvmBackend
from tests.helpers import wait_until
from tests.integration.class_places import made
from tests.integration.host_guest import run_in_guest, virtiofsd
from tests.integration.stord_classes_helpers import block, has, spec
from tests.integration.stord_helpers import IDS, MIB, Node, meta, open_node
from tests.integration.test_stord_encryption import KEY, TEXT
from tests.integration.vhost_client import VhostDisk

DISK = os.environ.get("CHV_TEST_LVM_DISK", "")
HERE = pytest.mark.skipif(not DISK, reason="runs in a guest: see the test that starts it")
pytestmark = [pytest.mark.root]
GROUP, POOL = "chvtest", "pool"
SIZE_BYTES = 8 * MIB
UID = 1_999_999_991
STORAGE = StorageConfig(volume_groups=[GROUP])
# Nobody makes device nodes in the guest but LVM itself.
LVM_ALONE = "activation { udev_sync = 0 udev_rules = 0 }"
MOVE_S = 240.0
GUEST_TIMEOUT_S = 1200.0  # an emulated one on a busy machine
TESTS = 13


@pytest.mark.skipif(
    bool(DISK) or not os.environ.get("CHV_LONG") or not virtiofsd() or not has("lvcreate"),
    reason="takes minutes (CHV_LONG=1); needs virtiofsd and lvm2",
)
async def test_logical_volumes_work_in_a_guest_whose_kernel_has_the_device_mapper() -> None:
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", __file__]
    command = (
        f"echo {shlex.quote(LVM_ALONE)} > /etc/lvm/lvmlocal.conf; "
        f"cd {shlex.quote(str(Path(chv.__file__).parents[1]))}; "
        f"CHV_TEST_LVM_DISK=/dev/vda {shlex.join([sys.executable, *tests])}"
    )

    code, console = await run_in_guest(
        ["/bin/sh", "-c", command],
        modules=["dm_mod", "dm_thin_pool"],
        disk_bytes=512 * MIB,
        timeout_s=GUEST_TIMEOUT_S,
    )

    assert code == 0, console[-6000:]
    assert f"{TESTS} passed" in console, console[-2000:]


def run(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True)


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    run("pvcreate", "--yes", DISK)
    run("vgcreate", GROUP, DISK)
    run("lvcreate", "--yes", "--type", "thin-pool", "--name", POOL, "--size", "128m", GROUP)
    yield
    run("vgremove", "--yes", "--force", GROUP)
    run("pvremove", "--yes", DISK)


@pytest.fixture
def layout() -> Iterator[Layout]:
    with tempfile.TemporaryDirectory(prefix="chv-lvm-") as name:
        layout = Layout(IDS.instance(), Path(name) / "run", Path(name) / "state")
        yield layout
        assert not layout.device("x").parent.exists(), "device nodes were left"


@pytest.fixture
def backend(group: None, layout: Layout) -> LvmBackend:
    return LvmBackend(layout, STORAGE)


def lvm(size_bytes: int = SIZE_BYTES, pool: str = "") -> wire.VolumeBackend:
    return spec("lvm", size_bytes, lvm=wire.LvmPlace(volume_group=GROUP, thin_pool=pool))


async def found(layout: Layout, volume: str) -> lvm_tools.LogicalVolume | None:
    return await lvm_tools.logical_volume(GROUP, layout.external_name(volume))


@HERE
@pytest.mark.parametrize("pool", ["", POOL])
async def test_a_logical_volume_is_made_enlarged_and_removed(
    layout: Layout, backend: LvmBackend, pool: str
) -> None:
    volume = IDS.uid()
    wanted = await backend.check(lvm(pool=pool))

    assert await backend.create(volume, wanted)
    assert not await backend.create(volume, wanted)
    made = await found(layout, volume)
    larger = lvm(3 * SIZE_BYTES + 512, pool)
    await backend.grow(volume, larger)
    await backend.grow(volume, larger)
    grown = await backend.inspect(volume, larger)
    await backend.delete(volume, larger)
    await backend.delete(volume, larger)

    assert made is not None
    assert made.size_bytes == SIZE_BYTES
    assert made.pool_lv == pool
    assert made.tags == [f"chv_{layout.instance}"]
    assert grown.state == "open"
    assert grown.size_bytes == 28 * MIB  # whole extents
    assert await found(layout, volume) is None
    assert not list(layout.volume(volume).parent.iterdir())


@HERE
async def test_nothing_that_another_volume_left_comes_to_light(
    layout: Layout, backend: LvmBackend
) -> None:
    first, second = IDS.uid(), IDS.uid()
    await backend.create(first, lvm(4 * SIZE_BYTES))
    backend.device(first, lvm()).write_bytes(b"secret!!" * (4 * SIZE_BYTES // 8))
    await backend.delete(first, lvm(4 * SIZE_BYTES))

    await backend.create(second, lvm())
    device = backend.device(second, lvm())
    device.write_bytes(b"mine")
    await backend.grow(second, lvm(4 * SIZE_BYTES))
    data = device.read_bytes()
    await backend.delete(second, lvm())

    assert len(data) == 4 * SIZE_BYTES
    assert data[:4] == b"mine"
    assert not data[4:].strip(b"\0")


@HERE
async def test_wiping_goes_on_where_a_deadline_cut_it_short(
    layout: Layout, backend: LvmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = IDS.uid()
    monkeypatch.setattr(lvm_tools, "ZERO_CHUNK_BYTES", MIB)
    with monkeypatch.context() as hurry:
        hurry.setattr("chv.stord.backends.lvm.ZEROING_S", 0.0)
        for _ in range(2):
            with pytest.raises(Unavailable, match=r"of \d+ bytes"):
                await backend.create(volume, lvm())

    assert await backend.create(volume, lvm())

    assert [path.name for path in layout.volume(volume).parent.iterdir()] == [volume]
    await backend.delete(volume, lvm())


@HERE
async def test_one_that_nobody_wants_any_more_is_swept_and_others_are_not(
    layout: Layout, backend: LvmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up, kept = IDS.uid(), IDS.uid()
    await backend.create(kept, lvm())
    with monkeypatch.context() as hurry:
        hurry.setattr("chv.stord.backends.lvm.ZEROING_S", -1.0)
        with pytest.raises(Unavailable):
            await backend.create(given_up, lvm())

    assert await backend.sweep([given_up]) == []
    assert await backend.sweep([]) == [layout.external_name(given_up)]

    assert await found(layout, given_up) is None
    assert await found(layout, kept) is not None
    await backend.delete(kept, lvm())


@HERE
async def test_a_logical_volume_that_we_know_nothing_of_is_left_alone(
    layout: Layout, backend: LvmBackend
) -> None:
    volume = IDS.uid()
    name = layout.external_name(volume)
    run("lvcreate", "--yes", "--name", name, "--size", f"{SIZE_BYTES}b", GROUP)

    with pytest.raises(OwnershipConflict, match=name):
        await backend.create(volume, lvm())
    await backend.delete(volume, lvm())

    assert await found(layout, volume) is not None
    run("lvremove", "--yes", f"{GROUP}/{name}")


@HERE
async def test_the_storage_uid_gets_the_device_also_after_it_was_inactive(
    layout: Layout, backend: LvmBackend
) -> None:
    volume = IDS.uid()
    await backend.create(volume, lvm())
    run("lvchange", "--activate", "n", f"{GROUP}/{layout.external_name(volume)}")

    await anyio.to_thread.run_sync(backend.grant, volume, lvm(), UID)

    node = Path(str(backend.protocol(volume, lvm()).options["filename"]))
    status = node.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (UID, 0o600)
    assert status.st_rdev == backend.device(volume, lvm()).stat().st_rdev
    await anyio.to_thread.run_sync(backend.grant, volume, lvm(), 0)
    assert not node.exists()
    await backend.delete(volume, lvm())


@HERE
async def test_our_logical_volume_is_no_device_for_another_volume(
    layout: Layout, backend: LvmBackend
) -> None:
    volume = IDS.uid()
    await backend.create(volume, lvm())
    devices = BlockBackend(layout, StorageConfig(allowed_devices=[f"/dev/{GROUP}/*"]))

    with pytest.raises(InUse, match=volume):
        await devices.create(IDS.uid(), block(Path(f"/dev/{GROUP}/{layout.external_name(volume)}")))

    await backend.delete(volume, lvm())


@HERE
async def test_a_full_group_and_a_missing_pool_are_told(
    layout: Layout, backend: LvmBackend
) -> None:
    with pytest.raises(ResourceExhausted):
        await backend.create(IDS.uid(), lvm(1 << 40))
    with pytest.raises(NotFound, match="nosuch"):
        await backend.create(IDS.uid(), lvm(pool="nosuch"))
    with pytest.raises(PermissionDenied, match="other"):
        place = wire.LvmPlace(volume_group="other")
        await backend.check(spec("lvm", lvm=place))
    assert await lvm_tools.tagged(GROUP, f"chv_{layout.instance}") == []


@HERE
async def test_a_pool_that_shows_old_data_is_refused(backend: LvmBackend) -> None:
    run("lvchange", "--zero", "n", f"{GROUP}/{POOL}")
    try:
        with pytest.raises(FailedPrecondition, match=POOL):
            await backend.create(IDS.uid(), lvm(pool=POOL))
    finally:
        run("lvchange", "--zero", "y", f"{GROUP}/{POOL}")


@HERE
async def test_what_is_left_is_that_of_pool_and_group(layout: Layout, backend: LvmBackend) -> None:
    volume = IDS.uid()
    await backend.create(volume, lvm(pool=POOL))
    before = await backend.space(volume, lvm(pool=POOL))
    backend.device(volume, lvm(pool=POOL)).write_bytes(b"x" * SIZE_BYTES)
    os.sync()
    after = await backend.space(volume, lvm(pool=POOL))
    group = await backend.space(volume, lvm())
    await backend.delete(volume, lvm(pool=POOL))

    assert before is not None
    assert after is not None
    assert before.total_bytes == after.total_bytes == 128 * MIB
    assert before.free_bytes - after.free_bytes >= SIZE_BYTES - MIB
    assert group is not None
    assert 0 < group.free_bytes < group.total_bytes


@HERE
@pytest.mark.parametrize("pool", ["", POOL])
async def test_a_locked_volume_with_an_image_is_served_and_moves_to_a_file_and_back(
    group: None, pool: str
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    allowed = f'volume_groups = ["{GROUP}"]\nproxy = "off"'
    async with open_node(storage=allowed, start=False) as node:
        node.add_key("default/disk", KEY)
        await node.start()
        key, source = wire.Encryption(key="default/disk"), node.image(TEXT * 8)
        wanted = replace(lvm(pool=pool), source=source, encryption=key)
        info = await made(node, volume, wanted)
        assert (info.state, info.last_error) == ("open", "")
        name = f"/dev/{GROUP}/{node.layout.external_name(volume)}"
        with Path(name).open("rb") as device:
            assert device.read(len(luks.MAGIC)) == luks.MAGIC

        for target in (None, spec("file", SIZE_BYTES, encryption=key), lvm(pool=pool)):
            if target is not None:
                await moved(node, volume, replace(target, encryption=key))
            attached = await node.attach(volume, vm)
            with VhostDisk(Path(attached.export_path)) as disk:
                assert disk.size_bytes >= SIZE_BYTES
                assert disk.read(0, len(TEXT)) == TEXT
            await node.detach(volume, vm)
        await node.delete(volume)
        assert not Path(name).exists()


async def moved(node: Node, volume: str, target: wire.VolumeBackend) -> None:
    """Move a volume; where all is emulated, keys are derived slowly."""
    request = wire.MoveVolume(meta=meta(), volume_id=volume, backend=target)
    async with node.client() as client:
        job = await client.call(wire.MOVE_VOLUME, request)

        async def ended() -> wire.JobInfo | None:
            found = await client.call(wire.GET_JOB, wire.JobRef(job_id=job.job_id))
            return None if found.state is wire.JobState.RUNNING else found

        final = await wait_until(ended, timeout_s=MOVE_S)
    assert final is not None
    assert final.state is wire.JobState.DONE, final.error
