"""The disks of a VM backed up as they were in one instant, under a guest that writes to all."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import anyio.to_thread
import pytest

from chv.common.errors import ChvError, FailedPrecondition, InvalidArgument, PermissionDenied
from chv.common.wire import stord as wire
from chv.stord import backup_files
from tests.helpers import wait_until
from tests.integration.storage_writer import BLOCK, content, write
from tests.integration.stord_helpers import IDS, MIB, Node, meta, needs_qsd, open_node
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]
SIZE = 16 * MIB
SECTOR = 200 * BLOCK // 512
NUMBER = 8


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_node(start=False) as node:
        backups = node.config.parent / "backups"
        backups.mkdir(mode=0o711)
        backups.chmod(0o711)
        text = node.config.read_text()
        text = text.replace("[storage]\n", f'[storage]\nbackup_paths = ["{backups}"]\n')
        node.config.write_text(text)
        await node.start()
        yield node


class Machine:
    """A VM with a raw disk, a qcow2 one, and a raw one more; what is written to each differs."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.vm = IDS.uid()
        self.volumes = [IDS.uid() for _ in range(3)]
        self.exports: list[str] = []

    async def attached(self) -> Machine:
        for volume, format in zip(self.volumes, ("raw", "qcow2", "raw"), strict=True):
            await self.node.open(volume, format=format)
            info = await self.node.attach(volume, self.vm)
            self.exports.append(info.export_path)
            with VhostDisk(Path(info.export_path)) as disk:
                for block in range(32):
                    write(disk, block, volume.encode() + b" %d" % block)
        return self

    async def detach(self) -> None:
        for volume in self.volumes:
            await self.node.detach(volume, self.vm)

    def target(self, volume: str) -> Path:
        return self.node.config.parent / "backups" / "vm" / volume

    async def begin(self, **more: object) -> wire.JobInfo:
        parts = [
            wire.BackupPart(volume_id=volume, target=str(self.target(volume)))
            for volume in self.volumes
        ]
        values: dict[str, object] = {"volumes": parts, "vm_id": self.vm, "meta": meta()}
        request = wire.BackupVm(**(values | more))  # type: ignore[arg-type]
        async with self.node.client() as client:
            return await client.call(wire.BACKUP_VM, request)

    async def back_up(self, **more: object) -> wire.JobInfo:
        ended = await self.node.job((await self.begin(**more)).job_id)
        assert ended.state is wire.JobState.DONE, ended.error
        return ended

    def listed(self) -> list[int]:
        found = [backup_files.load(self.target(volume)) for volume in self.volumes]
        return [len(each.backups) if each else 0 for each in found]

    def leftovers(self) -> list[str]:
        found = [*(self.node.config.parent / "backups").rglob("*.part")]
        for volume in self.volumes:
            found += self.node.layout.volume(volume).glob("fleece*")
            numbers = backup_files.load(self.target(volume))
            known = {f"{each.sequence}.qcow2" for each in numbers.backups} if numbers else set()
            found += [
                each for each in self.target(volume).glob("*.qcow2") if each.name not in known
            ]
        return [str(path) for path in found]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A guest that writes 1 to every disk in turn, then 2, and so on."""
        stop, failures, begun = threading.Event(), list[str](), threading.Event()
        with ExitStack() as stack:
            disks = [stack.enter_context(VhostDisk(Path(export))) for export in self.exports]

            def run() -> None:
                number = 0
                try:
                    while not stop.is_set():
                        number += 1
                        for disk in disks:
                            data = number.to_bytes(NUMBER, "big").ljust(512, b"\0")
                            assert disk.write(SECTOR, data) == 0
                        begun.set()
                except AssertionError as error:
                    failures.append(f"request {number}: {error}")

            thread = threading.Thread(target=run)
            thread.start()
            try:
                begun.wait(10)
                yield
            finally:
                stop.set()
                thread.join()
        assert failures == []

    async def restored(self, sequence: int) -> list[bytes]:
        """The content of new volumes that are made from a backup of all."""
        found = []
        for volume in self.volumes:
            new, vm = IDS.uid(), IDS.uid()
            source = wire.BackupSource(target=str(self.target(volume)), sequence=sequence)
            await self.node.open(new, format="qcow2", backup=source)

            async def is_open(new: str = new) -> bool:
                return (await self.node.get(new)).state == "open"

            await wait_until(is_open, timeout_s=30)
            info = await self.node.attach(new, vm, slot=7)
            found.append(await anyio.to_thread.run_sync(content, info.export_path))
            await self.node.detach(new, vm)
            await self.node.delete(new)
        return found


def numbers(contents: list[bytes]) -> list[int]:
    """What the guest had last written to each disk."""
    start = SECTOR * 512
    return [int.from_bytes(data[start : start + NUMBER], "big") for data in contents]


async def test_all_disks_are_as_they_were_in_one_instant_whole_and_incremental(
    node: Node,
) -> None:
    machine = await Machine(node).attached()
    with machine.writing():
        first = await machine.back_up()
        second = await machine.back_up(incremental=True)
    assert (first.volume_ids, first.result["volumes"]) == (machine.volumes, "3")
    assert int(first.result["bytes"]) > 6 * MIB > 3 * MIB > int(second.result["bytes"])
    assert machine.listed() == [2, 2, 2]
    assert machine.leftovers() == []
    seen = []
    for sequence in (1, 2):
        contents = await machine.restored(sequence)
        written = numbers(contents)
        # The guest writes a number to the first disk, then the second, then the third.
        assert sorted(written, reverse=True) == written
        assert written[0] - written[2] <= 1
        seen.append(written[0])
        for volume, data in zip(machine.volumes, contents, strict=True):
            assert data[5 * BLOCK :].startswith(volume.encode() + b" 5\0")
    assert 0 < seen[0] < seen[1]


async def test_a_backup_that_is_cancelled_leaves_nothing_of_any_disk(node: Node) -> None:
    machine = await Machine(node).attached()
    with machine.writing():
        job = await machine.begin(bps_max=3 * BLOCK)
        for volume in machine.volumes:  # a job of each of them
            assert (await node.get(volume)).job == job.job_id

        async def copies() -> bool:
            async with node.client() as client:
                shown = await client.call(wire.GET_JOB, wire.JobRef(job_id=job.job_id))
            return shown.total_bytes == 3 * SIZE

        await wait_until(copies, timeout_s=30)
        async with node.client() as client:
            await client.call(wire.CANCEL_JOB, wire.JobRef(job_id=job.job_id))
        assert (await node.job(job.job_id)).state is wire.JobState.CANCELLED
        await wait_until(lambda: machine.leftovers() == [], timeout_s=30)
    assert machine.listed() == [0, 0, 0]
    await machine.back_up()


async def test_where_one_cannot_be_listed_none_is(node: Node) -> None:
    machine = await Machine(node).attached()
    await machine.back_up()
    await node.end(signal.SIGTERM)
    await node.start("stord.backup.after_manifest=1*error(UNAVAILABLE)")
    ended = await node.job((await machine.begin(incremental=True)).job_id)
    assert ended.state is wire.JobState.FAILED
    assert machine.listed() == [1, 1, 1]
    await wait_until(lambda: machine.leftovers() == [], timeout_s=30)
    await machine.back_up(incremental=True)
    assert machine.listed() == [2, 2, 2]


async def test_disks_of_a_vm_that_does_not_run_are_backed_up_and_no_vm_takes_them_meanwhile(
    node: Node,
) -> None:
    machine = await Machine(node).attached()
    await machine.detach()
    job = await machine.begin(bps_max=18 * MIB)
    for volume in machine.volumes:
        with pytest.raises(ChvError, match=job.job_id):
            await node.attach(volume, machine.vm)
        with pytest.raises(ChvError, match=job.job_id):
            await node.delete(volume)
    assert (await node.job(job.job_id)).state is wire.JobState.DONE
    assert machine.listed() == [1, 1, 1]
    restored = await machine.restored(1)
    for volume, data in zip(machine.volumes, restored, strict=True):
        assert data[5 * BLOCK :].startswith(volume.encode() + b" 5\0")


async def test_what_does_not_go_together_is_refused_before_anything_is_made(node: Node) -> None:
    machine = await Machine(node).attached()
    one, two = (
        wire.BackupPart(volume_id=volume, target=str(machine.target(volume)))
        for volume in machine.volumes[:2]
    )
    with pytest.raises(InvalidArgument, match="named twice"):
        await machine.begin(volumes=[one, one])
    with pytest.raises(InvalidArgument, match="named twice"):
        await machine.begin(
            volumes=[one, wire.BackupPart(volume_id=two.volume_id, target=one.target)]
        )
    with pytest.raises(FailedPrecondition, match="incremental"):
        await machine.begin(incremental=True)
    with pytest.raises(FailedPrecondition, match="attached to VM"):
        await machine.begin(vm_id=IDS.uid())
    away = wire.BackupPart(volume_id=two.volume_id, target="/etc/backups")
    with pytest.raises(PermissionDenied):
        await machine.begin(volumes=[one, away])
    await node.detach(two.volume_id, machine.vm)
    with pytest.raises(FailedPrecondition, match=f"{two.volume_id} is attached to nothing"):
        await machine.begin()
    assert machine.listed() == [0, 0, 0]
    assert not (node.config.parent / "backups" / "vm").exists()
