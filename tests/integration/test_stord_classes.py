"""Volume classes for real: loop devices, NBD servers, an iSCSI target, each backend by itself."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from chv.common.config import StorageConfig
from chv.common.errors import (
    ChvError,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from chv.common.layout import Layout
from chv.common.wire import stord as wire
from chv.stord.backends import ceph
from chv.stord.backends.block import BlockBackend
from chv.stord.backends.iscsi import IscsiBackend
from chv.stord.backends.nbd import NbdBackend
from chv.stord.backends.rbd import RbdBackend
from chv.stord.tools import json_image
from tests.integration.stord_classes_helpers import (
    CEPH_POOL,
    SIZE_BYTES,
    block,
    ceph_cluster,
    enlarge,
    has,
    iscsi_target,
    loop_device,
    nbd_server,
    partition,
    silent_server,
    spec,
)
from tests.integration.stord_helpers import IDS, MIB, needs_qsd
from tests.integration.tiny_vm import free_port

needs_loop = pytest.mark.skipif(
    not Path("/dev/loop-control").exists(), reason="the kernel has no loop devices"
)
pytestmark = [pytest.mark.root, needs_qsd]
UID = 1_999_999_991
LOOPS = StorageConfig(allowed_devices=["/dev/loop*"])


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Return a directory that every uid may pass through, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="chv-classes-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture
def layout(tmp_path: Path) -> Iterator[Layout]:
    layout = Layout(IDS.instance(), tmp_path / "run", tmp_path / "state")
    yield layout
    assert not layout.device("x").parent.exists(), "device nodes were left"


# --- block
@needs_loop
async def test_a_device_becomes_a_volume_and_is_forgotten_with_its_data(
    layout: Layout, tmp_path: Path
) -> None:
    backend, volume = BlockBackend(layout, LOOPS), IDS.uid()
    with loop_device(tmp_path / "disk") as device:
        device.write_bytes(b"precious")
        wanted = await backend.check(block(device))

        assert await backend.create(volume, wanted)
        assert not await backend.create(volume, wanted)
        found = await backend.inspect(volume, wanted)
        await backend.delete(volume, wanted)
        await backend.delete(volume, wanted)

        assert (found.state, found.size_bytes, found.device_bytes) == (
            "open",
            SIZE_BYTES,
            SIZE_BYTES,
        )
        assert device.read_bytes()[:8] == b"precious"
        assert not layout.volume(volume).exists()


@needs_loop
async def test_the_storage_uid_gets_a_node_of_its_own_and_the_hosts_stays_as_it_was(
    layout: Layout, tmp_path: Path
) -> None:
    backend, volume = BlockBackend(layout, LOOPS), IDS.uid()
    with loop_device(tmp_path / "disk") as device:
        before = device.stat()
        await backend.create(volume, block(device))

        await anyio.to_thread.run_sync(backend.grant, volume, block(device), UID)

        node = Path(str(backend.protocol(volume, block(device)).options["filename"]))
        ours = node.stat()
        assert (ours.st_uid, stat.S_IMODE(ours.st_mode)) == (UID, 0o600)
        assert ours.st_rdev == before.st_rdev
        assert backend.lock_path(volume).stat().st_uid == UID
        after = device.stat()
        assert (after.st_uid, after.st_gid, after.st_mode) == (
            before.st_uid,
            before.st_gid,
            before.st_mode,
        )
        await anyio.to_thread.run_sync(backend.grant, volume, block(device), 0)
        assert not node.exists()
        assert backend.lock_path(volume).stat().st_uid == 0
        await backend.delete(volume, block(device))


@needs_loop
async def test_an_empty_list_allows_no_device(layout: Layout, tmp_path: Path) -> None:
    backend = BlockBackend(layout, StorageConfig())
    with loop_device(tmp_path / "disk") as device:
        with pytest.raises(PermissionDenied) as refused:
            await backend.check(block(device))

        assert refused.value.field == "backend.block.device"
        assert "storage.allowed_devices" in refused.value.hint


@needs_loop
async def test_a_second_volume_on_one_device_is_refused_under_any_name(
    layout: Layout, tmp_path: Path
) -> None:
    allowed = StorageConfig(allowed_devices=["/dev/loop*", "/dev/chv-test-*"])
    backend, volume = BlockBackend(layout, allowed), IDS.uid()
    other_name = Path(f"/dev/chv-test-{layout.instance}")
    with loop_device(tmp_path / "disk") as device:
        await backend.create(volume, block(device))
        other_name.symlink_to(device)
        try:
            for name in (device, other_name):
                with pytest.raises(InUse, match=volume):
                    await backend.create(IDS.uid(), block(name))
        finally:
            other_name.unlink()
        await backend.delete(volume, block(device))
        second = IDS.uid()
        assert await backend.create(second, block(device))
        await backend.delete(second, block(device))


@needs_loop
@pytest.mark.skipif(
    not has("addpart"), reason="needs addpart, on newer Debians of util-linux-extra"
)
async def test_a_partition_of_a_disk_that_is_a_volume_is_refused(
    layout: Layout, tmp_path: Path
) -> None:
    backend, volume = BlockBackend(layout, LOOPS), IDS.uid()
    with (
        loop_device(tmp_path / "disk", SIZE_BYTES, "--partscan") as device,
        partition(device, 2048, 8192) as part,
    ):
        await backend.create(volume, block(device))

        with pytest.raises(InUse, match=volume):
            await backend.create(IDS.uid(), block(part, size_bytes=MIB))

        await backend.delete(volume, block(device))
        second = IDS.uid()
        await backend.create(second, block(part, size_bytes=MIB))
        with pytest.raises(InUse, match=second):
            await backend.create(volume, block(device))
        await backend.delete(second, block(part, size_bytes=MIB))


@needs_loop
async def test_a_device_that_the_host_holds_is_refused_at_creation_and_at_attachment(
    layout: Layout, tmp_path: Path
) -> None:
    backend, volume = BlockBackend(layout, LOOPS), IDS.uid()
    with loop_device(tmp_path / "disk") as device:
        held = os.open(device, os.O_RDONLY | os.O_EXCL)
        try:
            with pytest.raises(InUse, match=str(device)):
                await backend.create(volume, block(device))
        finally:
            os.close(held)
        await backend.create(volume, block(device))
        held = os.open(device, os.O_RDONLY | os.O_EXCL)
        try:
            with pytest.raises(InUse, match=str(device)):
                await anyio.to_thread.run_sync(backend.grant, volume, block(device), UID)
        finally:
            os.close(held)
        await backend.delete(volume, block(device))


@needs_loop
async def test_a_mounted_device_is_refused_and_the_mount_is_named(
    layout: Layout, tmp_path: Path
) -> None:
    backend, mountpoint = BlockBackend(layout, LOOPS), tmp_path / "mnt"
    mountpoint.mkdir()
    with loop_device(tmp_path / "disk") as device:
        subprocess.run(["mke2fs", "-q", str(device)], check=True)
        subprocess.run(["mount", str(device), str(mountpoint)], check=True)
        try:
            with pytest.raises(InUse, match=f"mounted at {mountpoint}"):
                await backend.create(IDS.uid(), block(device))
        finally:
            subprocess.run(["umount", str(mountpoint)], check=True)


@needs_loop
async def test_a_device_never_grows_by_itself_and_is_found_grown(
    layout: Layout, tmp_path: Path
) -> None:
    backend, volume = BlockBackend(layout, LOOPS), IDS.uid()
    with loop_device(tmp_path / "disk") as device:
        with pytest.raises(FailedPrecondition, match=str(SIZE_BYTES)):
            await backend.create(volume, block(device, size_bytes=2 * SIZE_BYTES))
        await backend.create(volume, block(device))
        larger = block(device, size_bytes=2 * SIZE_BYTES)
        with pytest.raises(FailedPrecondition):
            await backend.grow(volume, larger)

        enlarge(device, tmp_path / "disk", 2 * SIZE_BYTES)
        await backend.extend_device(volume, larger)
        await backend.grow(volume, larger)

        assert (await backend.inspect(volume, larger)).size_bytes == 2 * SIZE_BYTES
        await backend.delete(volume, larger)


@needs_loop
async def test_a_device_that_became_smaller_or_vanished_is_told(
    layout: Layout, tmp_path: Path
) -> None:
    allowed = StorageConfig(allowed_devices=["/dev/chv-test-*"])
    backend, volume = BlockBackend(layout, allowed), IDS.uid()
    name = Path(f"/dev/chv-test-{layout.instance}")
    try:
        with loop_device(tmp_path / "large") as device:
            name.symlink_to(device)
            await backend.create(volume, block(name))
        name.unlink()
        missing = await backend.inspect(volume, block(name))
        with loop_device(tmp_path / "small", MIB) as device:
            name.symlink_to(device)
            broken = await backend.inspect(volume, block(name))
        assert (missing.state, broken.state) == ("missing", "broken")
        assert str(SIZE_BYTES) in broken.problem
        await backend.delete(volume, block(name))
    finally:
        name.unlink(missing_ok=True)


async def test_what_is_no_block_device_is_refused(layout: Layout, tmp_path: Path) -> None:
    backend = BlockBackend(layout, StorageConfig(allowed_devices=["/dev/*"]))

    with pytest.raises(InvalidArgument, match="not a block device"):
        await backend.check(block(Path("/dev/null")))
    with pytest.raises(InvalidArgument, match="below /dev"):
        await backend.check(block(tmp_path / "file"))
    with pytest.raises(NotFound):
        await backend.check(block(Path("/dev/no-such-device")))


@needs_loop
async def test_a_device_takes_no_format_but_raw_and_no_image_of_elsewhere(
    layout: Layout, tmp_path: Path
) -> None:
    backend = BlockBackend(layout, LOOPS)
    with loop_device(tmp_path / "disk") as device:
        image = wire.VolumeSource(path="/i", sha256="0" * 64, format=wire.VolumeFormat.RAW)
        refusals: list[tuple[dict[str, Any], type[ChvError], str]] = [
            ({"format": wire.VolumeFormat.QCOW2}, Unsupported, "backend.format"),
            ({"source": image}, InvalidArgument, "backend.source.path"),
        ]
        for options, kind, field in refusals:
            with pytest.raises(kind) as refused:
                await backend.check(block(device, **options))
            assert refused.value.field == field


# --- nbd
def nbd(port: int, **options: int) -> wire.VolumeBackend:
    return spec("nbd", nbd=wire.NbdPlace(host="127.0.0.1", port=port, export="vol"), **options)


async def test_an_export_becomes_a_volume_and_is_forgotten(layout: Layout, tmp_path: Path) -> None:
    port, volume = free_port(), IDS.uid()
    backend = NbdBackend(layout, StorageConfig(remotes=[f"nbd://127.0.0.1:{port}"]))
    async with nbd_server(tmp_path / "disk", port):
        wanted = await backend.check(nbd(port))

        assert await backend.create(volume, wanted)
        assert not await backend.create(volume, wanted)
        found = await backend.inspect(volume, wanted)
        with pytest.raises(InUse, match=volume):
            await backend.create(IDS.uid(), wanted)
        with pytest.raises(FailedPrecondition):
            await backend.grow(volume, nbd(port, size_bytes=2 * SIZE_BYTES))

        assert (found.state, found.size_bytes) == ("open", SIZE_BYTES)
    gone = await backend.inspect(volume, nbd(port))
    assert gone.state == "broken"
    assert f"nbd server nbd://127.0.0.1:{port}" in gone.problem
    await backend.delete(volume, nbd(port))
    assert not layout.volume(volume).exists()


async def test_a_server_that_is_not_listed_is_never_asked(layout: Layout) -> None:
    backend = NbdBackend(layout, StorageConfig(remotes=["nbd://127.0.0.1:1"]))

    with pytest.raises(PermissionDenied) as refused:
        await backend.check(nbd(2))

    assert "nbd://127.0.0.1:2" in refused.value.hint


async def test_an_export_that_the_server_does_not_have_is_not_found(
    layout: Layout, tmp_path: Path
) -> None:
    port = free_port()
    backend = NbdBackend(layout, StorageConfig(remotes=[f"nbd://127.0.0.1:{port}"]))
    async with nbd_server(tmp_path / "disk", port, export="other"):
        with pytest.raises(NotFound, match="nbd://"):
            await backend.create(IDS.uid(), nbd(port))


async def test_a_server_that_says_nothing_is_unavailable_in_time(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chv.stord.backends.remote.PROBE_TIMEOUT_S", 0.5)
    with silent_server() as port:
        backend = NbdBackend(layout, StorageConfig(remotes=[f"nbd://127.0.0.1:{port}"]))

        with pytest.raises(Unavailable, match=f"nbd server nbd://127.0.0.1:{port}.*0.5 s"):
            await backend.create(IDS.uid(), nbd(port))


async def test_a_private_unix_socket_lets_the_storage_uid_in_and_out_again(
    layout: Layout, tmp_path: Path
) -> None:
    path, volume = tmp_path / "nbd.sock", IDS.uid()
    wanted = spec("nbd", nbd=wire.NbdPlace(socket=str(path), export="vol"))
    backend = NbdBackend(layout, StorageConfig(remotes=[f"nbd+unix://{path}"]))
    async with nbd_server(tmp_path / "disk", path):
        path.chmod(0o600)
        assert await backend.create(volume, await backend.check(wanted))
        as_uid = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "qemu-img"]
        info = [*as_uid, "info", f"nbd+unix:///vol?socket={path}"]

        def works() -> bool:
            return subprocess.run(info, check=False, capture_output=True).returncode == 0

        before = works()
        await anyio.to_thread.run_sync(backend.grant, volume, wanted, UID)
        during = works()
        await anyio.to_thread.run_sync(backend.grant, volume, wanted, 0)

        assert (before, during, works()) == (False, True, False)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        await backend.delete(volume, wanted)


async def test_a_socket_behind_a_link_is_refused(layout: Layout, tmp_path: Path) -> None:
    real, link = tmp_path / "real.sock", tmp_path / "link.sock"
    link.symlink_to(real)
    backend = NbdBackend(layout, StorageConfig(remotes=[f"nbd+unix://{link}"]))
    async with nbd_server(tmp_path / "disk", real):
        with pytest.raises(InvalidArgument, match="link"):
            await backend.check(spec("nbd", nbd=wire.NbdPlace(socket=str(link))))


# --- iscsi
TARGET = "iqn.2026-01.chv.test:disk"
needs_tgt = pytest.mark.skipif(
    not has("tgtd", "tgtadm") or not list(Path("/usr/lib").glob("*/qemu/block-iscsi.so")),
    reason="needs tgt and qemu-block-extra",
)


def iscsi(port: int) -> wire.VolumeBackend:
    place = wire.IscsiPlace(host="127.0.0.1", port=port, target=TARGET, lun=1)
    return spec("iscsi", iscsi=place)


@needs_tgt
async def test_a_lun_becomes_a_volume_and_is_forgotten(layout: Layout, tmp_path: Path) -> None:
    volume = IDS.uid()
    async with iscsi_target(tmp_path, TARGET) as port:
        remote = f"iscsi://127.0.0.1:{port}/{TARGET}"
        backend = IscsiBackend(layout, StorageConfig(remotes=[remote]))
        wanted = await backend.check(iscsi(port))

        assert await backend.create(volume, wanted)
        found = await backend.inspect(volume, wanted)
        with pytest.raises(InUse, match=volume):
            await backend.create(IDS.uid(), wanted)

        assert (found.state, found.size_bytes) == ("open", SIZE_BYTES)
    gone = await backend.inspect(volume, iscsi(port))
    assert gone.state == "broken"
    assert f"iscsi server {remote}" in gone.problem
    await backend.delete(volume, iscsi(port))


@needs_tgt
async def test_a_lun_or_target_that_does_not_exist_is_told_with_the_server(
    layout: Layout, tmp_path: Path
) -> None:
    async with iscsi_target(tmp_path, TARGET) as port:
        other = TARGET + "2"
        remotes = [f"iscsi://127.0.0.1:{port}/{name}" for name in (TARGET, other)]
        backend = IscsiBackend(layout, StorageConfig(remotes=remotes))
        for target, lun in ((TARGET, 7), (other, 1)):
            place = wire.IscsiPlace(host="127.0.0.1", port=port, target=target, lun=lun)
            with pytest.raises(NotFound, match="iscsi server"):
                await backend.create(IDS.uid(), spec("iscsi", iscsi=place))


# --- rbd
needs_ceph = pytest.mark.skipif(
    not has("ceph-mon", "ceph-osd", "ceph", "rbd"), reason="needs ceph-mon, ceph-osd, ceph-common"
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="chv-ceph-") as name, ceph_cluster(Path(name)) as conf:
        yield conf


def rbd(conf: Path, size_bytes: int = SIZE_BYTES, user: str = "chv") -> wire.VolumeBackend:
    place = wire.RbdPlace(pool=CEPH_POOL, user=user, conf=str(conf))
    return spec("rbd", size_bytes, rbd=place)


def as_uid(uid: int, *argv: str) -> subprocess.CompletedProcess[str]:
    drop = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
    return subprocess.run([*drop, *argv], check=False, capture_output=True, text=True)


@needs_ceph
async def test_an_image_is_made_with_its_lock_feature_enlarged_and_removed(
    layout: Layout, cluster: Path
) -> None:
    backend, volume = RbdBackend(layout, StorageConfig(remotes=[f"rbd://{CEPH_POOL}"])), IDS.uid()
    place = wire.RbdPlace(pool=CEPH_POOL, user="chv", conf=str(cluster))
    name = layout.external_name(volume)
    wanted = await backend.check(rbd(cluster))

    assert await backend.create(volume, wanted)
    assert not await backend.create(volume, wanted)
    made = await ceph.info(place, name)
    await backend.grow(volume, rbd(cluster, 2 * SIZE_BYTES))
    await backend.grow(volume, rbd(cluster, 2 * SIZE_BYTES))
    grown = await backend.inspect(volume, rbd(cluster, 2 * SIZE_BYTES))
    await backend.delete(volume, rbd(cluster, 2 * SIZE_BYTES))
    await backend.delete(volume, rbd(cluster, 2 * SIZE_BYTES))

    assert made is not None
    assert made.size == SIZE_BYTES
    assert "exclusive-lock" in made.features
    assert (grown.state, grown.size_bytes) == ("open", 2 * SIZE_BYTES)
    assert await ceph.info(place, name) is None
    assert not layout.volume(volume).exists()


@needs_ceph
async def test_the_storage_uid_reaches_the_image_with_a_key_that_is_taken_back(
    layout: Layout, cluster: Path
) -> None:
    backend, volume = RbdBackend(layout, StorageConfig(remotes=[f"rbd://{CEPH_POOL}"])), IDS.uid()
    await backend.create(volume, rbd(cluster))
    await anyio.to_thread.run_sync(backend.grant, volume, rbd(cluster), UID)
    try:
        protocol = backend.protocol(volume, rbd(cluster))
        image = json_image({"driver": "raw", "file": {"driver": "rbd", **protocol.options}})
        written = as_uid(UID, "qemu-io", "-c", "write -P 0x5a 0 64k", image)
        read = as_uid(UID, "qemu-io", "-r", "-c", "read -P 0x5a 0 64k", image)
        stranger = as_uid(UID + 2, "qemu-io", "-r", "-c", "read 0 64k", image)
    finally:
        await anyio.to_thread.run_sync(backend.grant, volume, rbd(cluster), 0)

    assert written.returncode == 0, written.stderr
    assert read.returncode == 0, read.stderr
    assert "verification failed" not in read.stdout
    assert stranger.returncode != 0
    assert sorted(path.name for path in layout.volume(volume).iterdir()) == ["lock", "volume.json"]
    await backend.delete(volume, rbd(cluster))


@needs_ceph
async def test_an_image_that_was_begun_before_a_kill_is_finished(
    layout: Layout, cluster: Path
) -> None:
    backend, volume = RbdBackend(layout, StorageConfig(remotes=[f"rbd://{CEPH_POOL}"])), IDS.uid()
    await backend.prepare(volume, rbd(cluster))  # and killed before there is a directory

    assert await backend.create(volume, rbd(cluster, 2 * SIZE_BYTES))

    assert (await backend.inspect(volume, rbd(cluster))).size_bytes == 2 * SIZE_BYTES
    await backend.delete(volume, rbd(cluster))


@needs_ceph
async def test_a_pool_is_refused_that_is_not_listed_or_whose_configuration_is_elsewhere(
    layout: Layout, cluster: Path, tmp_path: Path
) -> None:
    with pytest.raises(PermissionDenied, match="rbd://vms"):
        await RbdBackend(layout, StorageConfig()).check(rbd(cluster))
    backend = RbdBackend(layout, StorageConfig(remotes=[f"rbd://{CEPH_POOL}"]))
    with pytest.raises(InvalidArgument, match="/etc/ceph"):
        await backend.check(rbd(tmp_path / "ceph.conf"))
    with pytest.raises(PermissionDenied) as refused:
        await backend.create(IDS.uid(), rbd(cluster, user="nobody"))
    assert refused.value.field == "backend.rbd.user"


@pytest.mark.skipif(not has("rbd"), reason="needs ceph-common")
async def test_a_cluster_that_says_nothing_is_unavailable_in_time(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("chv.stord.backends.ceph.TIMEOUT_S", 1.0)
    conf = Path("/etc/ceph") / f"chv-test-{layout.instance}.conf"
    conf.parent.mkdir(exist_ok=True)
    with silent_server() as port:
        conf.write_text(f"[global]\nmon host = v1:127.0.0.1:{port}\n")
        try:
            backend = RbdBackend(layout, StorageConfig(remotes=[f"rbd://{CEPH_POOL}"]))

            with pytest.raises(Unavailable, match=f"rbd cluster of {conf}.*within 1 s"):
                await backend.create(IDS.uid(), rbd(conf))
        finally:
            conf.unlink()
