"""A VM goes on when its storage daemon or a proxy dies: raw disks, real daemons, verified writes.

With CHV_LONG=1 the full counts of kills, else a sample.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from chv.common import config as configuration
from chv.common.clock import SystemClock
from chv.common.errors import Unavailable
from chv.common.wire import stord as wire
from chv.common.wire.types import Empty
from chv.stord import restarts
from chv.stord.__main__ import prepare, serve
from tests.helpers import wait_until
from tests.integration.inflight_client import InflightDisk, StampedWriter
from tests.integration.snapshot_rig import snapshot
from tests.integration.stord_helpers import IDS, MIB, Node, needs_qsd, open_node
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]
LONG = bool(os.environ.get("CHV_LONG"))
AUTO = 'proxy = "auto"'
KILLS = 40 if LONG else 5
TERMS = 10 if LONG else 3
PROXY_KILLS = 5 if LONG else 2
BLOCKS = 2048


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_node(storage=AUTO) as node:
        yield node


@asynccontextmanager
async def patient_node(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    """A stord in this process, which allows more deaths than a real one."""
    monkeypatch.setattr(restarts, "DEATHS_MAX", 1000)
    async with open_node(storage=AUTO, start=False) as node, anyio.create_task_group() as tasks:
        prepare(node.layout)
        tasks.start_soon(serve, configuration.load(node.config), node.layout)
        await wait_until(node.layout.socket("stord").exists)
        await wait_until(lambda: answers(node))
        yield node
        tasks.cancel_scope.cancel()


async def answers(node: Node) -> bool:
    try:
        await node.volumes()
    except Unavailable:
        return False
    return True


async def served(node: Node, vm: str, volume_format: str = "raw") -> wire.AttachmentInfo:
    volume = IDS.uid()
    await node.open(volume, format=volume_format)
    return await node.attach(volume, vm)


async def session(node: Node, vm: str) -> wire.VmBackendInfo:
    return next(row for row in await node.sessions() if row.vm_id == vm)


async def is_back(node: Node, vm: str, old_pid: int) -> bool:
    row = await session(node, vm)
    return row.backend is wire.BackendState.SERVING and row.backend_pid not in (0, old_pid)


async def is_lost(node: Node, vm: str) -> bool:
    return (await session(node, vm)).backend is wire.BackendState.LOST


@asynccontextmanager
async def writing(path: str, seed: int = 1) -> AsyncIterator[StampedWriter]:
    """A verifying writer at full depth; checked at the end: nothing bad, nothing hung."""
    with InflightDisk(Path(path), depth=32) as disk:
        assert disk.write_back
        writer = StampedWriter(disk, BLOCKS, seed)
        stop = threading.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, writer.run, stop.is_set)
            try:
                await progress(writer)
                yield writer
                await progress(writer)
            finally:
                stop.set()
        await anyio.to_thread.run_sync(writer.verify)
        assert (writer.bad, writer.errors, writer.hung) == (0, 0, 0)
        print(f"{writer.writes} writes, longest gap {writer.longest_gap_s:.3f} s")


async def progress(writer: StampedWriter) -> None:
    """Wait until a few hundred more writes were acknowledged."""
    goal = writer.writes + 300
    await wait_until(lambda: writer.writes >= goal, timeout_s=20, what="writes go on")


async def test_a_raw_disk_gets_a_proxy_that_owns_the_path_and_all_is_gone_after_the_detach(
    node: Node,
) -> None:
    vm = IDS.uid()
    info = await served(node, vm)

    assert info.crash_class is wire.CrashClass.KEEP_VM
    assert info.proxy_pid
    status = Path(info.export_path).lstat()
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o660
    assert (status.st_uid, status.st_gid) == (node.layout.storage_uid(0), node.layout.vmm_uid(0))
    assert Path(f"/proc/{info.proxy_pid}").stat().st_uid == node.layout.storage_uid(0)
    assert len([item for item in await node.census() if item.kind == "process"]) == 2
    assert all(item.known for item in await node.census())
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.write_back
        assert disk.write(0, b"d" * 512) == 0
        assert disk.read(0, 512) == b"d" * 512
    assert await node.attach(info.volume_id, vm) == info

    await node.detach(info.volume_id, vm)

    assert node.workers() == []
    assert node.run_files() == []
    assert node.cgroups() == []
    assert not list(node.layout.logs.glob("proxy-*"))


@pytest.mark.parametrize("volume_format", ["raw", "qcow2"])
async def test_one_disk_with_metadata_or_the_operators_word_means_no_proxy(
    volume_format: str,
) -> None:
    storage = AUTO if volume_format == "qcow2" else 'proxy = "off"'
    async with open_node(storage=storage) as node:
        vm = IDS.uid()
        first = await served(node, vm, volume_format)
        second = await served(node, vm)
        assert (first.proxy_pid, second.proxy_pid) == (0, 0)
        assert (await session(node, vm)).crash_class is wire.CrashClass.RESET_VM


async def test_the_writer_of_a_raw_disk_goes_on_through_kills_of_the_storage_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with patient_node(monkeypatch) as node:
        vm = IDS.uid()
        info = await served(node, vm)
        async with writing(info.export_path) as writer:
            for number in [signal.SIGKILL] * KILLS + [signal.SIGTERM] * TERMS:
                await end_backend(node, vm, number)
                await progress(writer)
        row = await session(node, vm)
        assert row.losses == KILLS + TERMS
        assert "restarted under the VM" in row.last_loss
        assert row.attachments[0].proxy_pid == info.proxy_pid
        await node.detach(info.volume_id, vm)
        assert node.workers() == []


async def end_backend(node: Node, vm: str, number: int = signal.SIGKILL) -> None:
    pid = (await session(node, vm)).backend_pid
    os.kill(pid, number)
    await wait_until(lambda: is_back(node, vm, pid))


async def test_the_writer_goes_on_through_kills_of_the_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with patient_node(monkeypatch) as node:
        vm = IDS.uid()
        info = await served(node, vm)
        async with writing(info.export_path) as writer:
            for _ in range(PROXY_KILLS):
                await kill_proxy(node, vm)
                await progress(writer)


async def kill_proxy(node: Node, vm: str) -> None:
    pid = (await session(node, vm)).attachments[0].proxy_pid

    async def is_back() -> bool:
        row = await session(node, vm)
        serving = row.backend is wire.BackendState.SERVING
        return serving and row.attachments[0].proxy_pid not in (0, pid)

    os.kill(pid, signal.SIGKILL)
    await wait_until(is_back)


async def test_the_writer_notices_nothing_of_a_killed_stord_and_its_deaths_meanwhile(
    node: Node,
) -> None:
    vm = IDS.uid()
    info = await served(node, vm)
    async with writing(info.export_path) as writer:
        await node.end(signal.SIGKILL)
        await progress(writer)
        await node.start()
        assert await node.attach(info.volume_id, vm) == info
        await node.end(signal.SIGKILL)
        os.kill(info.backend_pid, signal.SIGKILL)
        await node.start()
        await wait_until(lambda: is_back(node, vm, info.backend_pid))
        await progress(writer)
        await node.end(signal.SIGKILL)
        for each in node.workers():
            os.kill(each.pid, signal.SIGKILL)
        await node.start()
        assert len(node.workers()) == 2
    assert (await session(node, vm)).losses == 2


async def test_a_restart_under_the_vm_is_told(node: Node) -> None:
    vm = IDS.uid()
    info = await served(node, vm)
    send, receive = anyio.create_memory_object_stream[wire.StorageEvent](16)
    async with send, receive, node.client() as client, anyio.create_task_group() as tasks:
        tasks.start_soon(client.stream, wire.WATCH_STORAGE, Empty(), send.send_nowait)
        await anyio.wait_all_tasks_blocked()
        os.kill(info.backend_pid, signal.SIGKILL)
        with anyio.fail_after(10):
            event = await receive.receive()
        tasks.cancel_scope.cancel()
    assert (event.kind, event.vm_id) == ("backend_restarted", vm)
    assert event.crash_class is wire.CrashClass.KEEP_VM
    assert Path(info.export_path).exists()


@pytest.mark.parametrize("what", ["backend", "proxy"])
async def test_too_many_deaths_in_a_row_are_a_loss_and_a_recovery_serves_again(
    node: Node, what: str
) -> None:
    vm = IDS.uid()
    info = await served(node, vm)
    for _ in range(restarts.DEATHS_MAX):
        await (end_backend(node, vm) if what == "backend" else kill_proxy(node, vm))
    row = await session(node, vm)
    os.kill(row.backend_pid if what == "backend" else row.attachments[0].proxy_pid, signal.SIGKILL)

    await wait_until(lambda: is_lost(node, vm))

    assert not Path(info.export_path).exists()
    assert node.workers() == []
    again = (await node.recover(vm)).attachments[0]
    assert again.export_path == info.export_path
    # A proxy that does not stay alive is done without.
    assert bool(again.proxy_pid) == (what == "backend")
    with VhostDisk(Path(again.export_path)) as disk:
        assert disk.write(0, b"x" * 512) == 0
    await node.detach(info.volume_id, vm)
    assert node.run_files() == []


async def test_a_storage_daemon_that_does_not_come_back_is_a_loss_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(restarts, "RESTART_S_MAX", 1.0)
    async with patient_node(monkeypatch) as node:
        vm = IDS.uid()
        info = await served(node, vm)
        disk = next(node.layout.volume(info.volume_id).glob("disk.raw"))
        disk.rename(disk.with_name("elsewhere"))
        os.kill(info.backend_pid, signal.SIGKILL)

        await wait_until(lambda: is_lost(node, vm))

        assert not Path(info.export_path).exists()
        assert node.workers() == []
        disk.with_name("elsewhere").rename(disk)
        assert (await node.recover(vm)).crash_class is wire.CrashClass.KEEP_VM


async def test_no_request_completes_after_the_death_of_a_storage_daemon_with_metadata(
    node: Node,
) -> None:
    """The path is gone and stays so until the VM was reset."""
    vm = IDS.uid()
    info = await served(node, vm, "qcow2")
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.write(0, b"1" * 512) == 0
        os.kill(info.backend_pid, signal.SIGKILL)
        await wait_until(lambda: is_lost(node, vm))
        assert disk.closed_by_peer()
        with pytest.raises((AssertionError, OSError)):
            disk.write(1, b"2" * 512)
    assert not Path(info.export_path).exists()
    with pytest.raises(OSError):
        VhostDisk(Path(info.export_path))
    await node.recover(vm)
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.write(1, b"3" * 512) == 0


async def test_a_snapshot_makes_the_vm_one_that_is_reset_and_its_proxy_goes_with_the_loss(
    node: Node,
) -> None:
    vm = IDS.uid()
    info = await served(node, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        await snapshot(node, [info.volume_id], vm)
        assert (await session(node, vm)).crash_class is wire.CrashClass.RESET_VM
        assert disk.write(0, b"o" * 512) == 0
        disk.flush()
        os.kill(info.backend_pid, signal.SIGKILL)
        await wait_until(lambda: is_lost(node, vm))
    assert not Path(info.export_path).exists()
    assert node.workers() == []

    again = (await node.recover(vm)).attachments[0]

    assert again.proxy_pid == 0
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.read(0, 512) == b"o" * 512
    await node.detach(info.volume_id, vm)
    assert node.run_files() == []


@pytest.mark.parametrize("volume_format", ["raw", "qcow2"])
async def test_flushed_batches_survive_the_kill_of_the_storage_daemon(
    node: Node, volume_format: str
) -> None:
    vm = IDS.uid()
    info = await served(node, vm, volume_format)
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.write_back
        for batch in range(10):
            for block in range(8):
                assert disk.write((batch * 8 + block) * 256, bytes([batch + 1]) * 4096) == 0
            disk.flush()
        os.kill(info.backend_pid, signal.SIGKILL)
    if volume_format == "qcow2":
        await wait_until(lambda: is_lost(node, vm))
        await node.recover(vm)
    await wait_until(lambda: is_back(node, vm, info.backend_pid))
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.write_back
        intact = [
            all(
                disk.read((batch * 8 + block) * 256, 4096) == bytes([batch + 1]) * 4096
                for block in range(8)
            )
            for batch in range(10)
        ]
    assert intact.count(True) == 10


async def test_attaching_with_a_proxy_costs_milliseconds_and_the_proxy_little_memory(
    node: Node,
) -> None:
    clock, times = SystemClock(), list[float]()
    for _ in range(5):
        vm, volume = IDS.uid(), IDS.uid()
        await node.open(volume)
        before = clock.monotonic()
        info = await node.attach(volume, vm)
        times.append(clock.monotonic() - before)
        with VhostDisk(Path(info.export_path)) as disk:
            assert disk.write_back
        pss = pss_bytes(info.proxy_pid)
        await node.detach(volume, vm)
    print(f"attach {sorted(times)[2] * 1000:.1f} ms, PSS {pss / MIB:.1f} MiB")
    assert pss <= 20 * MIB


def pss_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024
