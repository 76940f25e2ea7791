"""Attachments for real: a storage daemon under its own uid serves a vhost-user-blk socket."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from chv.common.errors import (
    ChvError,
    FailedPrecondition,
    InUse,
    InvalidArgument,
    NotFound,
    StaleGeneration,
)
from chv.common.ids import short_uid
from chv.common.wire import stord as wire
from tests.helpers import wait_until
from tests.integration.stord_helpers import IDS, MIB, Node, meta, needs_qsd, open_node
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]
CYCLES = 50
SETTLE_S = 0.1


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_node() as node:
        yield node


async def attached(node: Node, **options: object) -> tuple[str, str, wire.AttachmentInfo]:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume)
    return volume, vm, await node.attach(volume, vm, **options)  # type: ignore[arg-type]


async def test_an_attached_volume_takes_and_gives_data_with_its_write_cache_on(node: Node) -> None:
    _volume, _vm, info = await attached(node)

    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.size_bytes == 16 * MIB
        assert disk.write_back
        assert not disk.read_only
        assert disk.write(8, b"x" * 4096) == 0
        disk.flush()
        assert disk.read(8, 4096) == b"x" * 4096
    assert info.write_cache == "write back"
    assert info.crash_class is wire.CrashClass.RESET_VM
    assert info.backend is wire.BackendState.SERVING


async def test_the_storage_daemon_has_its_own_uid_and_no_capability(node: Node) -> None:
    _volume, vm, info = await attached(node)

    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{info.backend_pid}/status").read_text().splitlines()
        if ":\t" in line
    )
    uid = str(node.layout.storage_uid(0))
    assert status["Uid"].split() == [uid] * 4
    assert status["Gid"].split() == [uid] * 4
    assert status["NoNewPrivs"] == "1"
    assert {status[key] for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    (worker,) = node.workers()
    assert worker.worker_id.startswith(f"chv:{node.layout.instance}:qsd:{short_uid(vm)}:")
    assert os.getpgid(worker.pid) != os.getpgid(node.pid)


async def test_sockets_and_directories_have_exactly_the_owners_and_modes_of_the_design(
    node: Node,
) -> None:
    _volume, vm, info = await attached(node)
    storage_uid, vm_gid = node.layout.storage_uid(0), node.layout.vmm_uid(0)

    def seen(path: Path) -> tuple[int, int, int]:
        status = path.lstat()
        return stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid

    assert seen(node.layout.run) == (0o711, 0, 0)
    assert seen(node.layout.vms) == (0o711, 0, 0)
    assert seen(node.layout.vm(vm)) == (0o710, 0, vm_gid)
    assert seen(node.layout.qsd(vm)) == (0o700, storage_uid, storage_uid)
    assert seen(Path(info.export_path)) == (0o660, storage_uid, vm_gid)
    (monitor,) = node.layout.qsd(vm).glob("*.qmp")
    assert seen(monitor) == (0o600, storage_uid, storage_uid)


async def test_the_files_belong_to_the_storage_uid_only_while_they_are_attached(
    node: Node,
) -> None:
    volume, vm, _info = await attached(node)
    disk = node.layout.volume(volume) / "disk.raw"

    during = disk.stat().st_uid, stat.S_IMODE(disk.stat().st_mode)
    await node.detach(volume, vm)

    assert during == (node.layout.storage_uid(0), 0o600)
    assert (disk.stat().st_uid, stat.S_IMODE(disk.stat().st_mode)) == (0, 0o600)


async def test_an_equal_attach_gets_the_same_answer_and_the_export_is_not_touched(
    node: Node,
) -> None:
    volume, vm, first = await attached(node)

    with VhostDisk(Path(first.export_path)) as disk:
        assert await node.attach(volume, vm) == first
        assert disk.read(0, 512) == bytes(512)


async def test_two_attaches_at_once_get_one_storage_daemon_and_one_answer(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume)
    answers = []

    async def attach() -> None:
        answers.append(await node.attach(volume, vm))

    async with anyio.create_task_group() as tasks:
        for _ in range(4):
            tasks.start_soon(attach)

    assert len(node.workers()) == 1
    assert answers == [answers[0]] * 4


async def test_a_second_vm_is_refused_and_told_who_holds_the_volume(node: Node) -> None:
    volume, vm, _info = await attached(node)

    with pytest.raises(InUse, match=vm):
        await node.attach(volume, IDS.uid(), slot=1)

    assert len(node.workers()) == 1


async def test_of_many_vms_that_want_one_volume_at_once_exactly_one_gets_it(node: Node) -> None:
    volume = IDS.uid()
    await node.open(volume)
    outcomes: list[str] = []

    async def attach(slot: int) -> None:
        try:
            await node.attach(volume, IDS.uid(), slot=slot)
            outcomes.append("attached")
        except InUse:
            outcomes.append("refused")

    async with anyio.create_task_group() as tasks:
        for slot in range(6):
            tasks.start_soon(attach, slot)

    assert sorted(outcomes) == ["attached"] + ["refused"] * 5
    assert len(node.workers()) == 1


async def test_the_lock_of_a_volume_is_in_the_kernel_and_refuses_a_foreign_storage_daemon() -> None:
    """Two nodes with one state directory and no common record: the second one is refused."""
    async with open_node() as node, open_node(start=False) as other:
        volume, _vm, _info = await attached(node)
        other.layout.state.mkdir(parents=True)
        other.layout.volume("x").parent.symlink_to(node.layout.volume("x").parent)
        await other.start()
        await other.open(volume)

        with pytest.raises(InUse, match="a process holds the volume"):
            await other.attach(volume, IDS.uid())

        assert other.workers() == []
        owner = (node.layout.volume(volume) / "disk.raw").stat().st_uid
        assert owner == node.layout.storage_uid(0)


async def test_a_read_only_attachment_refuses_writes_and_still_says_write_back(node: Node) -> None:
    _volume, _vm, info = await attached(node, read_only=True)

    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.read_only
        assert disk.write_back
        assert disk.write(0, b"x" * 512) != 0
        assert disk.read(0, 512) == bytes(512)
    assert info.read_only


async def test_an_attach_with_another_mode_than_the_recorded_one_is_refused(node: Node) -> None:
    volume, vm, _info = await attached(node)

    with pytest.raises(FailedPrecondition, match="read_only"):
        await node.attach(volume, vm, read_only=True)
    with pytest.raises(FailedPrecondition, match="storage_uid"):
        await node.attach(volume, vm, slot=3)


async def test_two_volumes_of_a_vm_share_its_storage_daemon_and_leave_one_by_one(
    node: Node,
) -> None:
    first, vm, info = await attached(node)
    second = IDS.uid()
    await node.open(second, format="qcow2")

    other = await node.attach(second, vm)
    with VhostDisk(Path(other.export_path)) as disk:
        assert other.backend_pid == info.backend_pid
        assert disk.write(0, b"y" * 512) == 0
        await node.detach(first, vm)
        assert disk.read(0, 512) == b"y" * 512

    assert not Path(info.export_path).exists()
    await node.attach(first, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.write_back
    assert len(node.workers()) == 1


async def test_the_last_detach_leaves_no_process_no_file_and_no_cgroup(node: Node) -> None:
    volume, vm, _info = await attached(node)
    assert len(node.workers()) == 1
    assert len(node.run_files()) > 1
    assert len(node.cgroups()) == (1 if node.has_cgroups() else 0)

    await node.detach(volume, vm)
    await node.detach(volume, vm)

    assert node.workers() == []
    assert node.run_files() == []
    assert node.cgroups() == []
    assert await node.sessions() == []


async def test_a_volume_that_is_not_open_at_that_generation_is_not_attached(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    with pytest.raises(NotFound):
        await node.attach(volume, vm)
    await node.open(volume, generation=5)

    with pytest.raises(StaleGeneration):
        await node.attach(volume, vm, generation=4)
    with pytest.raises(FailedPrecondition, match="OpenVolume with generation 6"):
        await node.attach(volume, vm, generation=6)
    await node.close(volume, generation=5)
    with pytest.raises(FailedPrecondition, match="closed"):
        await node.attach(volume, vm, generation=5)

    assert node.run_files() == []


async def test_root_is_refused_as_the_uid_of_a_storage_daemon(node: Node) -> None:
    volume = IDS.uid()
    await node.open(volume)
    request = wire.AttachVolumeToVm(
        meta=meta(),
        volume_id=volume,
        vm_id=IDS.uid(),
        storage_uid=0,
        vm_gid=1,
    )

    async with node.client() as client:
        with pytest.raises(InvalidArgument, match="never runs as root"):
            await client.call(wire.ATTACH_VOLUME, request)


async def test_a_failed_attach_takes_back_everything_and_frees_the_volume(node: Node) -> None:
    source = node.image(b"z" * 4096)
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="qcow2", source=source)
    Path(source.path).chmod(0o600)

    with pytest.raises(ChvError, match="readable by everyone"):
        await node.attach(volume, vm)

    assert node.workers() == []
    assert node.run_files() == []
    assert (await node.get(volume)).attached_to == ""
    assert "readable by everyone" in (await node.get(volume)).last_error
    Path(source.path).chmod(0o644)
    assert (await node.attach(volume, IDS.uid())).backend is wire.BackendState.SERVING


async def test_fifty_cycles_of_open_attach_detach_and_delete_leak_nothing(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await cycle(node, volume, vm)
    before = await open_files(node)

    for _ in range(CYCLES):
        await cycle(node, IDS.uid(), IDS.uid())

    assert await open_files(node) == before
    assert list(node.layout.logs.iterdir()) == []
    assert node.workers() == []
    assert node.run_files() == []
    assert node.volume_names() == []
    assert node.cgroups() == []
    assert await node.census() == []


async def open_files(node: Node) -> list[str]:
    """What stord has open once it has seen every client leave."""

    def links() -> list[str]:
        found = []
        for path in Path(f"/proc/{node.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                found.append(str(path.readlink()))
        return sorted(found)

    async def settled() -> list[str]:
        first = links()
        await anyio.sleep(SETTLE_S)
        return first if links() == first else []

    return await wait_until(settled)


async def cycle(node: Node, volume: str, vm: str) -> None:
    await node.open(volume)
    await node.attach(volume, vm)
    await node.detach(volume, vm)
    await node.close(volume)
    await node.delete(volume)
