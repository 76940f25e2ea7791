"""Death and hanging of storage daemons and of stord itself, for real."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import msgspec
import pytest
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from chv.common import config as configuration
from chv.common.errors import DeadlineExceeded, FailedPrecondition, NotFound, Unavailable
from chv.common.rpc import Client, connect
from chv.common.store import Store
from chv.common.wire import stord as wire
from chv.common.wire.types import HELLO, Empty, HelloRequest, ListPage
from chv.stord import keeper
from chv.stord.__main__ import prepare, serve
from chv.stord.qsd import monitor
from chv.stord.records import MIGRATIONS, Records
from tests.helpers import wait_until
from tests.integration.stord_helpers import IDS, MIB, Node, needs_qsd, open_node
from tests.integration.vhost_client import VhostDisk

pytestmark = [pytest.mark.root, needs_qsd]


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_node() as node:
        yield node


@asynccontextmanager
async def watching(node: Node) -> AsyncIterator[MemoryObjectReceiveStream[wire.StorageEvent]]:
    """A subscription to the events of stord."""
    send, receive = anyio.create_memory_object_stream[wire.StorageEvent](16)
    async with connect(node.layout.socket("stord")) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(follow, client, send)
        yield receive
        tasks.cancel_scope.cancel()
    send.close()
    receive.close()


async def next_event(
    events: MemoryObjectReceiveStream[wire.StorageEvent],
) -> wire.StorageEvent:
    with anyio.fail_after(10):
        return await events.receive()


async def follow(client: Client, send: MemoryObjectSendStream[wire.StorageEvent]) -> None:
    with contextlib.suppress(Unavailable):  # stord may end before its watchers
        await client.stream(wire.WATCH_STORAGE, Empty(), send.send_nowait)


async def served(node: Node, volume_format: str = "raw") -> tuple[str, str, wire.AttachmentInfo]:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format=volume_format)
    return volume, vm, await node.attach(volume, vm)


async def state(node: Node, vm: str) -> wire.BackendState:
    return next(row.backend for row in await node.sessions() if row.vm_id == vm)


async def test_a_killed_storage_daemon_is_told_its_path_goes_and_recover_brings_it_back(
    node: Node,
) -> None:
    volume, vm, info = await served(node, "qcow2")
    path = Path(info.export_path)
    with VhostDisk(path) as disk:
        disk.write(0, b"f" * 512)
        disk.flush()

    async with watching(node) as events:
        os.kill(info.backend_pid, signal.SIGKILL)
        lost = await next_event(events)

    assert (lost.kind, lost.vm_id, lost.crash_class) == ("backend_lost", vm, "reset_vm")
    assert not path.exists()
    assert await state(node, vm) is wire.BackendState.LOST
    assert (await node.attach(volume, vm)).backend is wire.BackendState.LOST
    assert node.workers() == []
    async with watching(node) as events:
        assert await next_event(events) == lost
        recovered = await node.recover(vm)
        assert (await next_event(events)).kind == "backend_ready"

    assert recovered.backend is wire.BackendState.SERVING
    assert recovered.attachments[0].export_path == info.export_path
    with VhostDisk(path) as disk:
        assert disk.write_back
        assert disk.read(0, 512) == b"f" * 512
    assert (await node.recover(vm)) == recovered


async def test_health_of_a_lost_volume_is_failed_and_that_of_a_served_one_healthy(
    node: Node,
) -> None:
    volume, vm, info = await served(node)

    async def health() -> wire.VolumeHealth:
        async with node.client() as client:
            return await client.call(wire.GET_VOLUME_HEALTH, wire.GetVolume(volume_id=volume))

    assert (await health()).status == "healthy"
    os.kill(info.backend_pid, signal.SIGKILL)
    await wait_until(lambda: is_lost(node, vm))
    assert ((await health()).status, (await health()).backend) == ("failed", "lost")
    async with node.client() as client:
        assert (await client.call(wire.STORD_HEALTH, Empty())).status == "degraded"


async def is_lost(node: Node, vm: str) -> bool:
    return await state(node, vm) is wire.BackendState.LOST


async def test_a_lost_vm_takes_no_new_volume_but_lets_go_of_the_old_ones(node: Node) -> None:
    volume, vm, info = await served(node)
    other = IDS.uid()
    await node.open(other)
    os.kill(info.backend_pid, signal.SIGKILL)
    await wait_until(lambda: is_lost(node, vm))

    with pytest.raises(FailedPrecondition, match="RecoverVmBackend first"):
        await node.attach(other, vm)
    await node.detach(volume, vm)

    assert await node.sessions() == []
    assert node.run_files() == []
    assert node.cgroups() == []
    with pytest.raises(NotFound):
        await node.recover(vm)


async def test_killing_stord_does_not_disturb_io_and_the_next_one_adopts(node: Node) -> None:
    volume, vm, info = await served(node)
    second = IDS.uid()
    await node.open(second)
    with VhostDisk(Path(info.export_path)) as disk:
        disk.write(0, b"1" * 512)
        await node.end(signal.SIGKILL)
        disk.write(1, b"2" * 512)
        assert disk.read(0, 1024) == b"1" * 512 + b"2" * 512
        await node.start()
        assert disk.read(0, 1024) == b"1" * 512 + b"2" * 512

        assert await node.attach(volume, vm) == info
        assert (await node.attach(second, vm)).backend_pid == info.backend_pid
        disk.write(2, b"3" * 512)
        assert not disk.closed_by_peer()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_stord_at_once_with_success_and_tears_nothing_down(
    node: Node, number: int
) -> None:
    _volume, _vm, info = await served(node)
    async with watching(node):
        assert await node.end(number) == 0

    assert [worker.pid for worker in node.workers()] == [info.backend_pid]
    assert not node.layout.socket("stord").exists()


async def test_a_death_while_stord_was_away_is_told_to_the_first_who_asks(node: Node) -> None:
    _volume, vm, info = await served(node)
    await node.end()
    os.kill(info.backend_pid, signal.SIGKILL)
    await wait_until(lambda: not node.workers())
    await node.start()

    async with watching(node) as events:
        assert (await next_event(events)).vm_id == vm
    assert not Path(info.export_path).exists()
    assert node.workers() == []


async def test_a_storage_daemon_that_nobody_wants_any_more_is_just_cleaned_up(node: Node) -> None:
    """stord died between the wish to detach and the detach; the storage daemon died too."""
    volume, vm, info = await served(node)
    await node.end()
    async with Store.open(node.layout.database("stord"), MIGRATIONS) as store:
        records = await Records.load(store)
        row = records.attachments[volume, vm]
        await records.put_attachment(msgspec.structs.replace(row, wanted=False))
    os.kill(info.backend_pid, signal.SIGKILL)
    await node.start()

    assert await node.sessions() == []
    assert node.run_files() == []
    async with node.client() as client:
        assert (await client.call(wire.STORD_HEALTH, Empty())).status == "healthy"


async def test_after_a_boot_attachments_are_void_and_nothing_starts_until_it_is_asked_for(
    node: Node,
) -> None:
    volume, vm, info = await served(node)
    await node.end()
    os.kill(info.backend_pid, signal.SIGKILL)
    await wait_until(lambda: not node.workers())
    async with Store.open(node.layout.database("stord"), MIGRATIONS) as store:
        records = await Records.load(store)
        row = records.backends[vm]
        await records.put_backend(msgspec.structs.replace(row, boot_id="the boot before"))

    await node.start()

    assert node.workers() == []
    assert await state(node, vm) is wire.BackendState.ABSENT
    assert (await node.get(volume)).attached_to == ""
    assert (node.layout.volume(volume) / "disk.raw").stat().st_uid == 0
    with pytest.raises(FailedPrecondition, match="booted since"):
        await node.recover(vm)
    assert (await node.attach(volume, IDS.uid(), slot=1)).backend is wire.BackendState.SERVING
    await node.detach(volume, vm)
    assert (await node.attach(volume, (await node.get(volume)).attached_to, slot=1)).backend_pid


async def test_after_a_boot_the_same_vm_attaches_again(node: Node) -> None:
    volume, vm, info = await served(node)
    await node.end()
    os.kill(info.backend_pid, signal.SIGKILL)
    async with Store.open(node.layout.database("stord"), MIGRATIONS) as store:
        records = await Records.load(store)
        row = records.backends[vm]
        await records.put_backend(msgspec.structs.replace(row, boot_id="the boot before"))
    await node.start()

    again = await node.attach(volume, vm)

    assert again.export_path == info.export_path
    with VhostDisk(Path(again.export_path)) as disk:
        assert disk.size_bytes == 16 * MIB


@pytest.mark.slow
async def test_a_hung_storage_daemon_is_a_typed_error_within_the_deadline(node: Node) -> None:
    volume, vm, info = await served(node)
    os.kill(info.backend_pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineExceeded, match="storage daemon"):
            await node.attach(volume, vm)
        assert Path(info.export_path).exists()
    finally:
        os.kill(info.backend_pid, signal.SIGCONT)
    assert (await node.attach(volume, vm)).backend is wire.BackendState.SERVING


async def test_a_storage_daemon_that_hangs_three_times_is_killed_and_told_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process, since nobody wants to wait for the real deadlines."""
    monkeypatch.setattr(keeper, "PULSE_S", 0.05)
    monkeypatch.setattr(monitor, "CALL_TIMEOUT_S", 0.2)
    async with open_node(start=False) as node, anyio.create_task_group() as tasks:
        config = configuration.load(node.config)
        prepare(node.layout)
        tasks.start_soon(serve, config, node.layout)
        await wait_until(node.layout.socket("stord").exists)
        ready = await wait_until(lambda: served_soon(node))
        assert ready is not None
        volume, vm, info = ready
        async with watching(node) as events:
            os.kill(info.backend_pid, signal.SIGSTOP)
            lost = await next_event(events)
        assert (lost.kind, lost.vm_id) == ("backend_lost", vm)
        assert not Path(info.export_path).exists()
        assert node.workers() == []
        await node.recover(vm)
        await node.detach(volume, vm)
        tasks.cancel_scope.cancel()


async def served_soon(node: Node) -> tuple[str, str, wire.AttachmentInfo] | None:
    try:
        return await served(node)
    except Unavailable:
        return None  # it is still reading its records


async def test_a_hung_storage_daemon_does_not_keep_its_vm_from_the_last_detach(node: Node) -> None:
    volume, vm, info = await served(node)
    os.kill(info.backend_pid, signal.SIGSTOP)

    await node.detach(volume, vm)

    assert node.workers() == []
    assert node.run_files() == []


async def test_a_second_stord_is_refused_and_the_first_one_goes_on(node: Node) -> None:
    first = node.process
    node.process = None
    await node.start(failpoints="stord.never=off")
    try:
        assert await node.ended() == 5
        assert "is locked by process" in node.log.read_text()
    finally:
        node.process = first
    async with node.client() as client:
        hello = await client.call(HELLO, HelloRequest())
    assert (hello.daemon, hello.state, hello.pid) == ("stord", "ready", node.pid)
    assert hello.instance == node.layout.instance


async def test_a_socket_that_cannot_be_made_ends_stord_with_one_line_and_a_code() -> None:
    async with open_node(start=False) as node:
        node.layout.socket("stord").mkdir(parents=True)

        await node.start(failpoints="stord.never=off")

        assert await node.ended() == 5
        (line,) = node.log.read_text().splitlines()
        assert msgspec.json.decode(line)["event"] == "failed"


async def listens(node: Node) -> bool:
    try:
        async with node.client():
            return True
    except Unavailable:
        return False


async def test_a_signal_during_recovery_is_obeyed_at_once(node: Node) -> None:
    _volume, _vm, info = await served(node)
    await node.end()
    os.kill(info.backend_pid, signal.SIGSTOP)
    starting = node.begin()
    await wait_until(lambda: listens(node))
    async with node.client() as client:
        hello = await client.call(HELLO, HelloRequest())
        with pytest.raises(Unavailable, match="recovering"):
            await client.call(wire.LIST_VOLUMES, ListPage())
    assert hello.state == "recovering"

    with anyio.fail_after(2):
        assert await node.end(signal.SIGTERM) == 0
    assert starting.read() == b""
    starting.close()
    assert len(node.workers()) == 1
