"""stord is killed at every step of backups, moves and rotations, while a guest writes.

The next stord goes on with what was begun: the guest sees no error, the volume is whole at one
place, a backup that is listed can be restored, and nothing else is left.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.to_thread
import pytest

from chv.common.errors import ChvError, OutcomeUnknown, Unavailable
from chv.common.wire import stord as wire
from chv.stord import backup_files
from tests.helpers import wait_until
from tests.integration.storage_writer import content, write, writing
from tests.integration.stord_helpers import IDS, MIB, Node, meta, needs_qsd, open_node
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]
LONG = bool(os.environ.get("CHV_LONG"))
SAMPLE = 3
SIZE = 16 * MIB
BACKUP = (
    "stord.job.after_record",
    "stord.tools.after_loan",
    "stord.backup.after_target",
    "stord.backup.after_start",
    "stord.backup.after_copy",
    "stord.backup.after_checksum",
    "stord.backup.after_rename",
    "stord.backup.after_manifest",
    "stord.backup.after_record",
    "stord.job.before_end",
)
# Of several: the second of two is reached as well.
BACKUP_VM = (
    *BACKUP,
    "stord.backup.after_checksum=1*off->1*kill",
    "stord.backup.after_rename=1*off->1*kill",
    "stord.backup.after_manifest=1*off->1*kill",
)
MOVE = (
    "stord.move.after_intent",
    "stord.move.after_make",
    "stord.move.after_start",
    "stord.move.after_pivot_intent",
    "stord.move.after_finalize",
    "stord.move.after_record",
    "stord.move.after_drop",
)
MOVE_DETACHED = (
    "stord.move.after_make",
    "stord.move.after_copy",
    "stord.move.after_record",
    "stord.move.after_drop",
)
REKEY = (
    "stord.rekey.after_intent",
    "stord.rekey.after_add",
    "stord.rekey.after_added",
    "stord.rekey.after_remove",
)
T = TypeVar("T")


def sampled(names: tuple[str, ...]) -> list[str]:
    """All of them in a long run, else a few, always the same."""
    return list(names) if LONG else sorted(random.Random(len(names)).sample(names, SAMPLE))


@asynccontextmanager
async def prepared(format: str, key: str = "") -> AsyncIterator[tuple[Node, str, str]]:
    """A node with an attached volume that has data."""
    async with open_node(start=False) as node:
        for name in ("backups", "pool"):
            (node.config.parent / name).mkdir(mode=0o711)
            (node.config.parent / name).chmod(0o711)
        root = node.config.parent
        text = f'[storage]\nbackup_paths = ["{root}/backups"]\npools = {{ fast = "{root}/pool" }}\n'
        node.config.write_text(node.config.read_text().replace("[storage]\n", text))
        for number, name in enumerate(("default/disk", "default/new")):
            node.add_key(name, b"a passphrase that is long enough %d" % number)
        await node.start()
        volume, vm = IDS.uid(), IDS.uid()
        await node.open(volume, format=format, key=key)
        info = await node.attach(volume, vm)
        with VhostDisk(Path(info.export_path)) as disk:
            for block in range(32):
                write(disk, block, b"%d" % block)
        yield node, volume, vm


async def killed_at(node: Node, failpoint: str, call: Callable[[], Awaitable[T]]) -> None:
    """Make a call on a stord that is killed at a failpoint, then start the next one."""
    await node.end(signal.SIGTERM)
    await node.start(failpoint if "=" in failpoint else f"{failpoint}=1*kill")
    with suppress(OutcomeUnknown, Unavailable):  # it died before it answered
        await call()
    assert await node.ended() == -signal.SIGKILL, "the failpoint was not reached"
    await node.start()


def leftovers(node: Node, volume: str) -> list[str]:
    """What no kill may leave once everything has ended."""
    root, home = node.config.parent, node.layout.volume(volume)
    found = [*home.glob("fleece*"), *(root / "backups").rglob("*.part")]
    for directory in (node.layout.run / "tools", node.layout.state / "grants"):
        found += list(directory.iterdir()) if directory.exists() else []
    found += [path for path in home.iterdir() if path.stat().st_uid == node.layout.tools_uid]
    return [str(path) for path in found]


@pytest.mark.parametrize("format", ["raw", "qcow2"])
@pytest.mark.parametrize("failpoint", sampled(BACKUP))
async def test_a_backup_that_was_cut_short_is_made_and_the_next_one_is_true(
    failpoint: str, format: str
) -> None:
    async with prepared(format) as (node, volume, vm):
        export = (await node.attach(volume, vm)).export_path
        target = node.config.parent / "backups" / "one"
        request = wire.BackupVolume(meta=meta(), volume_id=volume, target=str(target))

        async def call() -> wire.JobInfo:
            async with node.client() as client:
                return await client.call(wire.BACKUP_VOLUME, request)

        with writing(export):
            await killed_at(node, failpoint, call)
            ended = await node.job((await call()).job_id)
        assert ended.state is wire.JobState.DONE, ended.error
        await wait_until(lambda: leftovers(node, volume) == [])
        with VhostDisk(Path(export)) as disk:
            write(disk, 40, b"after the kill")
        request = wire.BackupVolume(
            meta=meta(), volume_id=volume, target=str(target), incremental=True
        )
        ended = await node.job((await call()).job_id)
        if ended.state is not wire.JobState.DONE:  # killed between the list and the record
            assert ended.error is not None
            assert ended.error.code == "FAILED_PRECONDITION"
            request = wire.BackupVolume(meta=meta(), volume_id=volume, target=str(target))
            ended = await node.job((await call()).job_id)
        assert ended.state is wire.JobState.DONE, ended.error
        listed = backup_files.load(target)
        assert listed is not None
        for entry in listed.backups:
            backup_files.verify(target, entry)
        expected = await anyio.to_thread.run_sync(content, export)
        assert await restored(node, target) == expected


@pytest.mark.parametrize("failpoint", sampled(BACKUP_VM))
async def test_a_backup_of_a_vm_that_was_cut_short_is_made_of_all_its_disks(
    failpoint: str,
) -> None:
    async with prepared("raw") as (node, first, vm):
        second = IDS.uid()
        await node.open(second, format="qcow2")
        exports = [(await node.attach(each, vm)).export_path for each in (first, second)]
        targets = [node.config.parent / "backups" / "vm" / each for each in (first, second)]
        parts = [
            wire.BackupPart(volume_id=each, target=str(target))
            for each, target in zip((first, second), targets, strict=True)
        ]

        async def backed_up(*, incremental: bool = False) -> wire.JobInfo:
            begun = meta() if incremental else once
            request = wire.BackupVm(meta=begun, vm_id=vm, volumes=parts, incremental=incremental)
            async with node.client() as client:
                return await client.call(wire.BACKUP_VM, request)

        once = meta()
        with writing(exports[0]):
            await killed_at(node, failpoint, backed_up)
            ended = await node.job((await backed_up()).job_id)
        assert ended.state is wire.JobState.DONE, ended.error
        await wait_until(lambda: leftovers(node, first) + leftovers(node, second) == [])
        for export in exports:
            with VhostDisk(Path(export)) as disk:
                write(disk, 40, b"after the kill")
        ended = await node.job((await backed_up(incremental=True)).job_id)
        assert ended.state is wire.JobState.DONE, ended.error
        for target, export in zip(targets, exports, strict=True):
            listed = backup_files.load(target)
            assert listed is not None
            assert [entry.sequence for entry in listed.backups] == [1, 2]
            assert sorted(path.name for path in target.iterdir()) == [
                "1.qcow2",
                "2.qcow2",
                "backup.json",
            ]
            expected = await anyio.to_thread.run_sync(content, export)
            assert await restored(node, target) == expected


async def restored(node: Node, target: Path) -> bytes:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="qcow2", backup=wire.BackupSource(target=str(target)))
    with anyio.fail_after(60):
        while (await node.get(volume)).state == "creating":
            await anyio.sleep(0.05)
    info = await node.attach(volume, vm, slot=7)
    data = await anyio.to_thread.run_sync(content, info.export_path)
    await node.detach(volume, vm)
    return data


def moved(node: Node, volume: str) -> wire.MoveVolume:
    backend = wire.VolumeBackend(
        class_name=wire.VolumeClass.FILE,
        format=wire.VolumeFormat.QCOW2,
        size_bytes=SIZE,
        pool="fast",
    )
    return wire.MoveVolume(meta=meta(), volume_id=volume, backend=backend)


@pytest.mark.parametrize("failpoint", sampled(MOVE))
async def test_a_move_that_was_cut_short_ends_at_one_place(failpoint: str) -> None:
    async with prepared("raw") as (node, volume, vm):
        export = (await node.attach(volume, vm)).export_path
        await move_with_kill(node, volume, failpoint, export)
        with VhostDisk(Path(export)) as disk:
            assert disk.read(5 * 128, 512)[:1] == b"5"
        before = await anyio.to_thread.run_sync(content, export)
        await node.detach(volume, vm)
        info = await node.attach(volume, vm)
        assert await anyio.to_thread.run_sync(content, info.export_path) == before


@pytest.mark.parametrize("failpoint", sampled(MOVE_DETACHED))
async def test_a_move_of_a_detached_volume_that_was_cut_short_ends_at_one_place(
    failpoint: str,
) -> None:
    async with prepared("raw") as (node, volume, vm):
        export = (await node.attach(volume, vm)).export_path
        before = await anyio.to_thread.run_sync(content, export)
        await node.detach(volume, vm)
        await move_with_kill(node, volume, failpoint, "")
        info = await node.attach(volume, vm)
        assert await anyio.to_thread.run_sync(content, info.export_path) == before


async def move_with_kill(node: Node, volume: str, failpoint: str, export: str) -> None:
    request = moved(node, volume)

    async def call() -> wire.JobInfo:
        async with node.client() as client:
            return await client.call(wire.MOVE_VOLUME, request)

    async def both() -> wire.JobInfo:
        await killed_at(node, failpoint, call)
        return await node.job((await call()).job_id)

    if export:
        with writing(export):
            ended = await both()
    else:
        ended = await both()
    assert ended.state is wire.JobState.DONE, ended.error
    assert leftovers(node, volume) == []
    assert list(node.layout.volume(volume).glob("disk*")) == []
    assert (node.config.parent / "pool" / volume / "disk.qcow2").exists()
    assert (await node.get(volume)).pool == "fast"


@pytest.mark.parametrize("failpoint", sampled(MOVE))
async def test_a_move_survives_the_loss_of_both_daemons(failpoint: str) -> None:
    async with prepared("raw") as (node, volume, vm):
        export = (await node.attach(volume, vm)).export_path
        before = await anyio.to_thread.run_sync(content, export)
        request = moved(node, volume)

        async def call() -> wire.JobInfo:
            async with node.client() as client:
                return await client.call(wire.MOVE_VOLUME, request)

        await node.end(signal.SIGTERM)
        await node.start(f"{failpoint}=1*kill")
        with suppress(OutcomeUnknown, Unavailable):
            await call()
        assert await node.ended() == -signal.SIGKILL
        for worker in node.workers():
            os.kill(worker.pid, signal.SIGKILL)
        await wait_until(lambda: not node.workers())
        await node.start()
        await node.job((await call()).job_id)
        with suppress(ChvError):  # stord brought it back by itself
            await node.recover(vm)
        await node.detach(volume, vm)
        info = await node.attach(volume, vm)
        assert await anyio.to_thread.run_sync(content, info.export_path) == before
        pool = (node.config.parent / "pool" / volume / "disk.qcow2").exists()
        home = (node.layout.volume(volume) / "disk.raw").exists()
        assert (pool, home) in ((True, False), (False, True))
        assert leftovers(node, volume) == []


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("failpoint", sampled(REKEY))
async def test_a_rotation_that_was_cut_short_ends_with_the_new_key_alone(
    failpoint: str, attached: bool
) -> None:
    async with prepared("raw", "default/disk") as (node, volume, vm):
        export = (await node.attach(volume, vm)).export_path
        before = await anyio.to_thread.run_sync(content, export)
        if not attached:
            await node.detach(volume, vm)

        async def call() -> wire.VolumeInfo:
            return await node.open(volume, format="raw", key="default/new", generation=2)

        await killed_at(node, failpoint, call)
        await call()
        if attached:
            await node.detach(volume, vm, generation=2)
        node.add_key("default/disk", b"nobody needs the old key any more")
        info = await node.attach(volume, vm, generation=2)
        assert await anyio.to_thread.run_sync(content, info.export_path) == before
