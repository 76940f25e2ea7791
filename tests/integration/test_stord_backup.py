"""Backups for real: under a guest that writes, whole and incremental, to and from a directory."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from chv.common.errors import (
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    OwnershipConflict,
    PermissionDenied,
)
from chv.common.wire import stord as wire
from chv.common.wire.types import Empty
from chv.stord import backup_files
from tests.helpers import wait_until
from tests.integration.storage_writer import BLOCK, content, write, writing
from tests.integration.stord_helpers import (
    IDS,
    MIB,
    Node,
    meta,
    mounted_tmpfs,
    needs_qsd,
    open_node,
)
from tests.integration.vhost_client import VhostDisk
from tests.sampling import sampled

pytestmark = [pytest.mark.root, needs_qsd]
FORMATS = ("raw", "qcow2")
KEY = b"correct-horse-battery-staple-0123456789"
SIZE = 16 * MIB


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_node(start=False) as node:
        backups = node.config.parent / "backups"
        backups.mkdir(mode=0o711)
        backups.chmod(0o711)
        node.config.write_text(
            node.config.read_text().replace(
                "[storage]\n", f'[storage]\nbackup_paths = ["{backups}"]\n'
            )
        )
        node.add_key("default/disk", KEY)
        await node.start()
        yield node


def directory(node: Node, name: str = "one") -> Path:
    return node.config.parent / "backups" / name


async def begin(
    node: Node, volume: str, target: str, *, incremental: bool = False, bps_max: int = 0
) -> wire.JobInfo:
    request = wire.BackupVolume(
        meta=meta(), volume_id=volume, target=target, incremental=incremental, bps_max=bps_max
    )
    async with node.client() as client:
        return await client.call(wire.BACKUP_VOLUME, request)


async def back_up(
    node: Node, volume: str, name: str = "one", *, incremental: bool = False
) -> wire.JobInfo:
    job = await begin(node, volume, str(directory(node, name)), incremental=incremental)
    ended = await node.job(job.job_id)
    assert ended.state is wire.JobState.DONE, ended.error
    return ended


async def restored(
    node: Node, name: str = "one", sequence: int = 0, format: str = "qcow2", key: str = ""
) -> bytes:
    """The content of a new volume that is made from a backup."""
    volume, vm = IDS.uid(), IDS.uid()
    source = wire.BackupSource(target=str(directory(node, name)), sequence=sequence)
    await node.open(volume, format=format, backup=source, key=key)
    with anyio.fail_after(60):
        while (info := await node.get(volume)).state == "creating":
            await anyio.sleep(0.05)
    assert info.state == "open", info
    attached = await node.attach(volume, vm, slot=7)
    data = await anyio.to_thread.run_sync(content, attached.export_path)
    await node.detach(volume, vm)
    await node.delete(volume)
    return data


@pytest.mark.parametrize("format", FORMATS)
async def test_a_chain_of_backups_gives_every_state_back(node: Node, format: str) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format=format)
    attached = await node.attach(volume, vm)
    states = {}
    for number in (1, 2, 3):
        with VhostDisk(Path(attached.export_path)) as disk:
            write(disk, number, b"state %d" % number)
            write(disk, 9, b"" if number == 3 else b"gone in the third")
        states[number] = await anyio.to_thread.run_sync(content, attached.export_path)
        job = await back_up(node, volume, incremental=number > 1)
        assert job.result["sequence"] == str(number)
        assert job.result["path"] == str(directory(node) / f"{number}.qcow2")
    for number in (1, 2, 3):
        assert await restored(node, sequence=number) == states[number]
    assert await restored(node, format="raw") == states[3]


async def test_an_incremental_backup_holds_only_what_changed(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="qcow2")
    attached = await node.attach(volume, vm)
    with VhostDisk(Path(attached.export_path)) as disk:
        for block in range(64):
            write(disk, block, os.urandom(BLOCK))
    whole = await back_up(node, volume)
    with VhostDisk(Path(attached.export_path)) as disk:
        write(disk, 3, b"changed")
    part = await back_up(node, volume, incremental=True)
    assert int(whole.result["bytes"]) > 4 * MIB > MIB > int(part.result["bytes"])


async def test_files_of_a_backup_belong_to_root_alone(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="qcow2")
    await node.attach(volume, vm)
    await back_up(node, volume)
    names = sorted(path.name for path in directory(node).iterdir())
    assert names == ["1.qcow2", "backup.json"]
    for path in directory(node).iterdir():
        status = path.stat()
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (0, 0o600)
    entry = backup_files.load(directory(node))
    assert entry is not None
    assert backup_files.verify(directory(node), entry.backups[0])
    assert leftovers(node, volume) == []


def leftovers(node: Node, volume: str) -> list[str]:
    """What a backup must not leave: a fleece, a partial file, a process or directory of ours."""
    found = [str(path) for path in node.layout.volume(volume).glob("fleece*")]
    found += [str(path) for path in (node.config.parent / "backups").rglob("*.part")]
    tools = node.layout.run / "tools"
    found += [str(path) for path in tools.iterdir()] if tools.exists() else []
    grants = node.layout.state / "grants"
    return found + ([str(path) for path in grants.iterdir()] if grants.exists() else [])


@pytest.mark.parametrize("format", FORMATS)
async def test_a_guest_writes_on_without_an_error_and_the_backup_is_one_instant(
    node: Node, format: str
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format=format)
    attached = await node.attach(volume, vm)
    with writing(attached.export_path):
        await back_up(node, volume)
        await back_up(node, volume, incremental=True)
    await back_up(node, volume, incremental=True)
    final = await anyio.to_thread.run_sync(content, attached.export_path)
    assert await restored(node) == final
    for sequence in (1, 2):
        assert in_order(await restored(node, sequence=sequence))


def in_order(data: bytes) -> bool:
    """The writer's numbers go round: of one instant they have one seam at most."""
    numbers = [int.from_bytes(data[b * BLOCK : b * BLOCK + 8], "big") for b in range(128, 256)]
    order = [number for number in numbers[1:] + numbers[:1] if number]
    seams = sum(1 for a, b in pairwise(order) if b != a + 1)
    return seams <= 1


async def test_a_full_target_fails_the_backup_and_not_the_guest(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="qcow2")
    attached = await node.attach(volume, vm)
    with VhostDisk(Path(attached.export_path)) as disk:
        for block in range(128):
            write(disk, block, os.urandom(BLOCK))
    with mounted_tmpfs(directory(node), "2m"), writing(attached.export_path):
        directory(node).chmod(0o711)
        job = await begin(node, volume, str(directory(node) / "x"))
        ended = await node.job(job.job_id)
        assert ended.state is wire.JobState.FAILED
        assert list((directory(node) / "x").glob("*")) == []
    assert leftovers(node, volume) == []


async def test_a_failed_backup_loses_no_record_of_changes(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="qcow2")
    attached = await node.attach(volume, vm)
    await back_up(node, volume)
    with VhostDisk(Path(attached.export_path)) as disk:
        for block in range(64):
            write(disk, block, os.urandom(BLOCK))
    job = await begin(node, volume, str(directory(node)), incremental=True, bps_max=BLOCK)
    async with node.client() as client:
        await client.call(wire.CANCEL_JOB, wire.JobRef(job_id=job.job_id))
    assert (await node.job(job.job_id)).state is wire.JobState.CANCELLED
    assert leftovers(node, volume) == []
    await back_up(node, volume, incremental=True)
    assert await restored(node) == await anyio.to_thread.run_sync(content, attached.export_path)


@pytest.mark.parametrize("format", FORMATS)
async def test_a_detached_volume_is_backed_up_and_goes_on_incrementally(
    node: Node, format: str
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format=format)
    attached = await node.attach(volume, vm)
    with VhostDisk(Path(attached.export_path)) as disk:
        write(disk, 1, b"first")
    await node.detach(volume, vm)
    await back_up(node, volume)
    if format == "raw":  # its bitmap is in the memory of a storage daemon that is gone
        job = await begin(node, volume, str(directory(node)), incremental=True)
        ended = await node.job(job.job_id)
        assert ended.error is not None
        assert ended.error.code == FailedPrecondition.code
        assert "full backup" in ended.error.hint
        return
    attached = await node.attach(volume, vm)
    with VhostDisk(Path(attached.export_path)) as disk:
        write(disk, 2, b"second")
    await node.detach(volume, vm)
    part = await back_up(node, volume, incremental=True)
    assert int(part.result["bytes"]) < 2 * MIB
    data = await restored(node)
    assert data[BLOCK : BLOCK + 5] == b"first"
    assert data[2 * BLOCK : 2 * BLOCK + 6] == b"second"


async def test_after_an_unclean_end_an_incremental_backup_is_refused_with_the_remedy(
    node: Node,
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="qcow2")
    await node.attach(volume, vm)
    await back_up(node, volume)
    (worker,) = node.workers()
    os.kill(worker.pid, 9)
    await wait_until(lambda: not node.workers())
    with anyio.fail_after(20):
        while (await node.sessions())[0].backend is not wire.BackendState.LOST:
            await anyio.sleep(0.05)
    await node.recover(vm)
    job = await begin(node, volume, str(directory(node)), incremental=True)
    ended = await node.job(job.job_id)
    assert ended.state is wire.JobState.FAILED
    assert ended.error is not None
    assert ended.error.code == FailedPrecondition.code
    await back_up(node, volume)
    await back_up(node, volume, incremental=True)


async def test_after_a_snapshot_the_next_backup_must_be_whole(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="qcow2")
    attached = await node.attach(volume, vm)
    await back_up(node, volume)
    snapshot = wire.CreateSnapshot(
        meta=meta(), snapshot_id=IDS.uid(), volume_ids=[volume], vm_id=vm
    )
    async with node.client() as client:
        await client.call(wire.CREATE_SNAPSHOT, snapshot)
    with VhostDisk(Path(attached.export_path)) as disk:
        write(disk, 5, b"after the snapshot")
    with pytest.raises(FailedPrecondition, match="record of what changed") as refused:
        await begin(node, volume, str(directory(node)), incremental=True)
    assert "full backup" in refused.value.hint
    await back_up(node, volume)
    with VhostDisk(Path(attached.export_path)) as disk:
        write(disk, 6, b"later")
    await back_up(node, volume, incremental=True)
    assert await restored(node) == await anyio.to_thread.run_sync(content, attached.export_path)


@pytest.mark.parametrize("format", sampled(FORMATS, 1, seed=1))
async def test_the_backup_of_an_encrypted_volume_is_encrypted(node: Node, format: str) -> None:
    text = b"plain text of the guest " * 100
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format=format, key="default/disk")
    attached = await node.attach(volume, vm)
    with VhostDisk(Path(attached.export_path)) as disk:
        write(disk, 1, text)
    await back_up(node, volume)
    with VhostDisk(Path(attached.export_path)) as disk:
        write(disk, 2, text)
    await back_up(node, volume, incremental=True)
    for path in directory(node).iterdir():
        assert text[:24] not in path.read_bytes()
        assert KEY not in path.read_bytes()
    node.add_key("default/new", b"another-key-of-the-new-volume-1234")
    node.add_key("other/new", b"another-key-of-another-tenant-1234")
    for key in ("", "other/new"):
        with pytest.raises(PermissionDenied, match="encrypted with a key of namespace default"):
            await restored(node, key=key)
    for made in FORMATS:
        data = await restored(node, key="default/new", format=made)
        assert data[BLOCK : BLOCK + len(text)] == text
        assert data[2 * BLOCK : 2 * BLOCK + len(text)] == text


async def test_a_backup_that_was_changed_is_not_restored(node: Node) -> None:
    volume = IDS.uid()
    await node.open(volume, format="qcow2")
    await back_up(node, volume)
    with (directory(node) / "1.qcow2").open("r+b") as file:
        file.seek(100_000)
        file.write(b"\xff" * 100)
    new = IDS.uid()
    source = wire.BackupSource(target=str(directory(node)))
    await node.open(new, format="qcow2", backup=source)
    async with node.client() as client:
        jobs = (await client.call(wire.LIST_JOBS, Empty())).jobs
    (job,) = [job for job in jobs if job.volume_id == new]
    ended = await node.job(job.job_id)
    assert ended.error is not None
    assert ended.error.code == "DATA_LOSS"
    assert "1.qcow2" in ended.error.message


async def test_targets_outside_and_of_other_volumes_are_refused(node: Node) -> None:
    one, other = IDS.uid(), IDS.uid()
    await node.open(one, format="qcow2")
    await node.open(other, format="qcow2")
    with pytest.raises(PermissionDenied, match="backup_paths"):
        await begin(node, one, "/etc/backup")
    with pytest.raises(PermissionDenied, match="nbd://127"):
        await begin(node, one, "nbd://127.0.0.1:1/x")
    await back_up(node, one)
    with pytest.raises(OwnershipConflict, match=one):
        await begin(node, other, str(directory(node)))
    with pytest.raises(FailedPrecondition, match="incremental"):
        await begin(node, other, str(directory(node, "two")), incremental=True)
    with pytest.raises(FailedPrecondition, match="went to"):
        await begin(node, one, str(directory(node, "two")), incremental=True)


async def test_a_backup_that_cannot_be_restored_is_refused_before_anything_is_made(
    node: Node,
) -> None:
    volume = IDS.uid()
    await node.open(volume, format="qcow2")
    await back_up(node, volume)
    before = node.volume_names()
    for sequence, size_bytes, error in ((7, SIZE, NotFound), (1, MIB, InvalidArgument)):
        source = wire.BackupSource(target=str(directory(node)), sequence=sequence)
        with pytest.raises(error):
            await node.open(IDS.uid(), format="qcow2", size_bytes=size_bytes, backup=source)
    with pytest.raises(PermissionDenied):
        await node.open(IDS.uid(), backup=wire.BackupSource(target="/etc/backups/x"))
    assert node.volume_names() == before


async def test_a_disk_that_is_detached_ends_its_backup_and_is_free(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="qcow2")
    attached = await node.attach(volume, vm)
    with VhostDisk(Path(attached.export_path)) as disk:
        for block in range(128):
            write(disk, block, os.urandom(BLOCK))
    job = await begin(node, volume, str(directory(node)), bps_max=BLOCK)
    await wait_until(lambda: any(node.layout.volume(volume).glob("fleece*")))
    await node.detach(volume, vm)
    assert (await node.job(job.job_id)).state is wire.JobState.FAILED
    await wait_until(lambda: leftovers(node, volume) == [])
    await node.attach(volume, vm)
    await back_up(node, volume)


async def test_a_vm_waits_for_the_backup_of_a_detached_disk_or_cancels_it(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="qcow2")
    attached = await node.attach(volume, vm)
    with VhostDisk(Path(attached.export_path)) as disk:
        for block in range(128):
            write(disk, block, os.urandom(BLOCK))
    await node.detach(volume, vm)
    job = await begin(node, volume, str(directory(node)), bps_max=BLOCK)
    with pytest.raises(InUse, match=job.job_id):
        await node.attach(volume, vm)
    async with node.client() as client:
        await client.call(wire.CANCEL_JOB, wire.JobRef(job_id=job.job_id))
    await node.job(job.job_id)
    await node.attach(volume, vm)


async def test_the_same_call_again_is_the_same_backup(node: Node) -> None:
    volume = IDS.uid()
    await node.open(volume, format="qcow2")
    request = wire.BackupVolume(meta=meta(), volume_id=volume, target=str(directory(node)))
    async with node.client() as client:
        first = await client.call(wire.BACKUP_VOLUME, request)
        await node.job(first.job_id)
        again = await client.call(wire.BACKUP_VOLUME, request)
    assert again.job_id == first.job_id
    assert again.state is wire.JobState.DONE
    assert (directory(node) / "1.qcow2").exists()
    assert not (directory(node) / "2.qcow2").exists()


async def test_a_server_gets_the_data_as_they_are(tmp_path: Path) -> None:
    image = tmp_path / "far.raw"
    image.write_bytes(bytes(SIZE))
    server = subprocess.Popen(
        ["qemu-nbd", "-f", "raw", "-x", "far", "-t", "-b", "127.0.0.1", "-p", "10977", image]
    )
    try:
        async with open_node(storage='remotes = ["nbd://127.0.0.1:10977"]') as node:
            volume, vm = IDS.uid(), IDS.uid()
            await node.open(volume, format="qcow2")
            attached = await node.attach(volume, vm)
            for number, incremental in ((1, False), (2, True)):
                with VhostDisk(Path(attached.export_path)) as disk:
                    write(disk, number, b"text %d" % number)
                target = "nbd://127.0.0.1:10977/far"
                job = await begin(node, volume, target, incremental=incremental)
                ended = await node.job(job.job_id)
                assert ended.state is wire.JobState.DONE, ended.error
                assert ended.result["sequence"] == str(number)
                assert image.read_bytes() == content(attached.export_path)
    finally:
        server.kill()
        server.wait()
