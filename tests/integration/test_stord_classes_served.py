"""Volumes of every class served to a VM's side by stord and a real storage daemon."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from chv.common.errors import ChvError, InvalidArgument, Unavailable
from chv.common.wire import stord as wire
from chv.stord.backends.nbd import RECONNECT_S
from chv.stord.backends.remote import PROBE_TIMEOUT_S
from tests.helpers import wait_until
from tests.integration.snapshot_rig import snapshot as take_snapshot
from tests.integration.stord_classes_helpers import (
    CEPH_POOL,
    SIZE_BYTES,
    block,
    ceph_cluster,
    has,
    iscsi_target,
    loop_device,
    nbd_server,
    open_class,
    relay,
    spec,
)
from tests.integration.stord_helpers import IDS, Node, meta, needs_qsd, open_node
from tests.integration.tiny_vm import free_port
from tests.integration.vhost_client import VhostDisk
from tests.sampling import LONG

pytestmark = [pytest.mark.root, needs_qsd]
TARGET = "iqn.2026-01.chv.test:served"
NBD_PORT, OTHER_NBD_PORT = free_port(), free_port()
REMOTES = [f"nbd://127.0.0.1:{port}" for port in (NBD_PORT, OTHER_NBD_PORT)]
DATA = b"through it all!!" * 256
LISTING_S = PROBE_TIMEOUT_S / 2
REMOTES_TEXT = 'remotes = ["nbd://127.0.0.1:{}", "nbd://127.0.0.1:{}"]'


@pytest.fixture
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="chv-served-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    allowed = f'allowed_devices = ["/dev/loop*"]\nremotes = {REMOTES}'.replace("'", '"')
    async with open_node(storage=allowed) as node:
        yield node


async def write_and_read(node: Node, backend: wire.VolumeBackend) -> None:
    """Serve a volume, write to it, and find the data again in the next storage daemon."""
    volume = IDS.uid()
    opened = await open_class(node, volume, backend)
    assert opened.size_bytes >= backend.size_bytes
    for step in range(2):
        vm = IDS.uid()
        info = await node.attach(volume, vm)
        await anyio.to_thread.run_sync(_use, Path(info.export_path), step)
        await node.detach(volume, vm)
    await node.delete(volume)
    assert not node.workers()
    assert not node.layout.device(volume).parent.exists()


def _use(export: Path, step: int) -> None:
    with VhostDisk(export) as disk:
        assert disk.size_bytes == SIZE_BYTES
        assert disk.write_back
        if step == 0:
            assert disk.write(8, DATA) == 0
            disk.flush()
        assert disk.read(8, len(DATA)) == DATA


async def test_a_device_is_served(node: Node, scratch: Path) -> None:
    with loop_device(scratch / "disk") as device:
        await write_and_read(node, block(device))
        assert device.read_bytes()[8 * 512 :][: len(DATA)] == DATA


async def test_an_nbd_export_is_served(node: Node, scratch: Path) -> None:
    async with nbd_server(scratch / "disk", NBD_PORT):
        await write_and_read(node, nbd(NBD_PORT))


async def test_a_server_of_one_client_is_not_asked_while_its_volume_is_served(
    node: Node, scratch: Path
) -> None:
    # `_listens` of the helper is gone again; the storage daemon is the one client.
    volume, vm = IDS.uid(), IDS.uid()
    async with nbd_server(scratch / "disk", NBD_PORT, clients=1):
        await open_class(node, volume, nbd(NBD_PORT))
        await node.attach(volume, vm)

        with anyio.fail_after(PROBE_TIMEOUT_S / 2):
            info = await node.get(volume)
            again = await node.attach(volume, vm)

        assert (info.state, info.size_bytes, info.last_error) == ("open", SIZE_BYTES, "")
        assert again.volume_id == volume
        await node.detach(volume, vm)
        await node.delete(volume)


async def test_an_export_on_a_private_unix_socket_is_served(scratch: Path) -> None:
    path = scratch / "nbd.sock"
    async with nbd_server(scratch / "disk", path):
        path.chmod(0o600)
        async with open_node(storage=f'remotes = ["nbd+unix://{path}"]') as node:
            place = wire.NbdPlace(socket=str(path), export="vol")
            await write_and_read(node, spec("nbd", nbd=place))


async def test_a_size_beyond_the_device_is_refused_below_a_vm_and_without(
    node: Node, scratch: Path
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    with loop_device(scratch / "disk") as device:
        await open_class(node, volume, block(device))
        await take_snapshot(node, [volume])
        await node.attach(volume, vm)
        for attached in (True, False):
            if not attached:
                await node.detach(volume, vm)
            with pytest.raises(InvalidArgument, match=str(SIZE_BYTES)) as refused:
                larger = block(device, size_bytes=2 * SIZE_BYTES)
                await open_class(node, volume, larger, generation=2)
            assert refused.value.field == "backend.size_bytes"

            info = await node.get(volume)
            assert (info.size_bytes, info.pending_size_bytes) == (SIZE_BYTES, 0)
        await node.delete(volume)


async def test_a_device_in_order_has_no_errors(node: Node, scratch: Path) -> None:
    volume = IDS.uid()
    with loop_device(scratch / "disk") as device:
        await open_class(node, volume, block(device))
        async with node.client() as client:
            request = wire.CheckVolume(meta=meta(), volume_id=volume)
            job = await client.call(wire.CHECK_VOLUME, request)
        assert (await node.job(job.job_id)).result["errors"] == "0"
        await node.delete(volume)


async def test_a_device_is_read_by_many_and_its_node_goes_with_the_volume(
    node: Node, scratch: Path
) -> None:
    volume, vms = IDS.uid(), [IDS.uid(), IDS.uid()]
    with loop_device(scratch / "disk") as device:
        device.write_bytes(DATA)
        await open_class(node, volume, block(device, access=wire.AccessMode.READ_ONLY_MANY))

        exports = [
            (await node.attach(volume, vm, slot=slot, read_only=True)).export_path
            for slot, vm in enumerate(vms)
        ]

        for export in exports:
            with VhostDisk(Path(export)) as disk:
                assert disk.read_only
                assert disk.read(0, len(DATA)) == DATA
        for vm in vms:
            await node.detach(volume, vm)
        await node.delete(volume)
        assert not node.layout.device(volume).parent.exists()


async def test_a_device_stays_served_and_is_given_back_after_stord_was_killed(
    node: Node, scratch: Path
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    with loop_device(scratch / "disk") as device:
        await open_class(node, volume, block(device))
        info = await node.attach(volume, vm)

        await node.end()
        await anyio.to_thread.run_sync(_use, Path(info.export_path), 0)
        await node.start()
        await anyio.to_thread.run_sync(_use, Path(info.export_path), 1)
        await node.detach(volume, vm)

        assert not node.layout.device(volume).exists()
        await node.delete(volume)


@pytest.mark.parametrize("attached", [False, True])
async def test_a_file_moves_to_a_device_and_back(node: Node, scratch: Path, attached: bool) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    file = spec("file")
    with loop_device(scratch / "disk") as device:
        device.write_bytes(b"old" * 1000)
        await open_class(node, volume, file)
        info = await node.attach(volume, vm)
        await anyio.to_thread.run_sync(_use, Path(info.export_path), 0)
        for target in (block(device), file):
            if not attached:
                await node.detach(volume, vm)
            await move(node, volume, target)
            if not attached:
                info = await node.attach(volume, vm)
            await anyio.to_thread.run_sync(_use, Path(info.export_path), 1)
        await node.detach(volume, vm)
        await node.delete(volume)

        assert device.read_bytes()[8 * 512 :][: len(DATA)] == DATA
        assert not node.layout.device(volume).parent.exists()


async def move(node: Node, volume: str, target: wire.VolumeBackend) -> None:
    """Move a volume and wait for the end of it."""
    request = wire.MoveVolume(meta=meta(), volume_id=volume, backend=target)
    async with node.client() as client:
        job = await client.call(wire.MOVE_VOLUME, request)

        async def ended() -> wire.JobInfo | None:
            found = await client.call(wire.GET_JOB, wire.JobRef(job_id=job.job_id))
            return None if found.state is wire.JobState.RUNNING else found

        final = await wait_until(ended, timeout_s=30.0)
        assert final is not None
        assert final.state is wire.JobState.DONE, final


@pytest.mark.parametrize("point", ["after_grant", "after_spawn", "after_prime", "after_rename"])
async def test_a_kill_at_any_step_of_an_attachment_leaves_no_device_node(
    node: Node, scratch: Path, point: str
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    with loop_device(scratch / "disk") as device:
        await open_class(node, volume, block(device))
        await node.end()
        await node.start(failpoints=f"stord.attach.{point}=kill")
        with pytest.raises(ChvError):
            await node.attach(volume, vm)
        await node.ended()

        await node.start()
        await node.detach(volume, vm)
        await node.delete(volume)

        assert not node.layout.device(volume).parent.exists()
        assert not node.workers()


@pytest.mark.skipif(not has("tgtd", "tgtadm"), reason="needs tgt")
async def test_a_lun_is_served(scratch: Path) -> None:
    async with iscsi_target(scratch, TARGET) as port:
        remote = f'remotes = ["iscsi://127.0.0.1:{port}/{TARGET}"]'
        place = wire.IscsiPlace(host="127.0.0.1", port=port, target=TARGET, lun=1)
        async with open_node(storage=remote) as node:
            await write_and_read(node, spec("iscsi", iscsi=place))


@pytest.mark.skipif(
    not has("ceph-mon", "ceph-osd", "ceph", "rbd"), reason="needs ceph-mon, ceph-osd, ceph-common"
)
async def test_an_rbd_image_is_served() -> None:
    with tempfile.TemporaryDirectory(prefix="chv-ceph-") as name, ceph_cluster(Path(name)) as conf:
        place = wire.RbdPlace(pool=CEPH_POOL, user="chv", conf=str(conf))
        async with open_node(storage=f'remotes = ["rbd://{CEPH_POOL}"]') as node:
            await write_and_read(node, spec("rbd", rbd=place))


def nbd(port: int) -> wire.VolumeBackend:
    return spec("nbd", nbd=wire.NbdPlace(host="127.0.0.1", port=port, export="vol"))


async def test_a_dead_server_refuses_an_attach_and_the_vms_other_disk_goes_on(
    node: Node, scratch: Path
) -> None:
    alive, dead, vm = IDS.uid(), IDS.uid(), IDS.uid()
    async with nbd_server(scratch / "alive", NBD_PORT):
        await open_class(node, alive, nbd(NBD_PORT))
        async with nbd_server(scratch / "dead", OTHER_NBD_PORT):
            await open_class(node, dead, nbd(OTHER_NBD_PORT))
        info = await node.attach(alive, vm)

        with pytest.raises(Unavailable, match=f"nbd server {REMOTES[1]}"):
            await node.attach(dead, vm)

        await anyio.to_thread.run_sync(_use, Path(info.export_path), 0)
        assert [session.attachments[0].volume_id for session in await node.sessions()] == [alive]
        await node.detach(alive, vm)
        await node.delete(dead)
        await node.delete(alive)


async def test_a_server_that_falls_silent_while_it_is_opened_is_told_and_nothing_hangs(
    scratch: Path,
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    # It answers at the creation and just before the attachment, then never again.
    async with (
        nbd_server(scratch / "disk", NBD_PORT),
        relay(NBD_PORT, forwards=2) as port,
        open_node(storage=f'remotes = ["nbd://127.0.0.1:{port}"]') as node,
    ):
        await open_class(node, volume, nbd(port))

        with pytest.raises(Unavailable, match=f"nbd server nbd://127.0.0.1:{port}"):
            await node.attach(volume, vm)

        assert not node.workers()
        assert await node.sessions() == []
        await node.delete(volume)


async def test_a_server_that_dies_is_an_error_for_the_guest_and_shown_and_one_that_comes_back_not(
    node: Node, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.integration.vhost_client.TIMEOUT_S", 2 * RECONNECT_S)
    volume, vm = IDS.uid(), IDS.uid()
    async with nbd_server(scratch / "disk", NBD_PORT):
        await open_class(node, volume, nbd(NBD_PORT))
        info = await node.attach(volume, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        async with nbd_server(scratch / "disk", NBD_PORT):
            assert await anyio.to_thread.run_sync(disk.write, 8, DATA) == 0

        status = await anyio.to_thread.run_sync(disk.write, 8, DATA)

        assert status != 0

        async def problem() -> str:
            info = await node.get(volume)
            return info.last_error or (info.state if info.state != "open" else "")

        assert await wait_until(problem, timeout_s=10.0)
    await node.detach(volume, vm)
    with pytest.raises(ChvError) as refused:
        await node.attach(volume, vm)
    assert refused.value.code == Unavailable.code
    await node.delete(volume)


@pytest.mark.skipif(not LONG, reason="in the long run alone: CHV_LONG=1")
async def test_a_listing_waits_for_no_server_and_says_how_old_it_is(scratch: Path) -> None:
    volumes = [IDS.uid() for _ in range(2)]
    async with (
        nbd_server(scratch / "disk", NBD_PORT),
        relay(NBD_PORT, forwards=2) as one,
        relay(NBD_PORT, forwards=2) as other,
        open_node(storage=REMOTES_TEXT.format(one, other)) as node,
    ):
        for volume, port in zip(volumes, (one, other), strict=True):
            await open_class(node, volume, nbd(port))

        async def told_broken() -> bool:
            with anyio.fail_after(LISTING_S):
                listed = await node.volumes()
            return all("did not answer" in each.last_error for each in listed)

        with anyio.fail_after(LISTING_S):
            assert [each.state for each in await node.volumes()] == ["open", "open"]
        await wait_until(told_broken, timeout_s=30.0)
        listed = await wait_until(partial(aged, node), timeout_s=30.0)
        assert listed

        # A stord that has never asked waits a moment, once and not for each of them.
        await node.end()
        await node.start()
        with anyio.fail_after(LISTING_S):
            assert [each.state for each in await node.volumes()] == ["broken", "broken"]
        for volume in volumes:
            await node.delete(volume)


async def aged(node: Node) -> list[int]:
    """How old what is told of each volume is, once all of it has an age."""
    ages = [each.seen_s for each in await node.volumes()]
    return ages if all(ages) else []
