"""Encrypted volumes for real: what the guest writes is not on the disk, and the key is nowhere."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from chv.common.errors import ChvError, FailedPrecondition, NotFound, PermissionDenied
from chv.common.wire import stord as wire
from tests.helpers import wait_until
from tests.integration.stord_helpers import IDS, MIB, Node, meta, needs_qsd, open_node
from tests.integration.vhost_client import VhostDisk
from tests.sampling import paired, sampled

pytestmark = [pytest.mark.root, needs_qsd]
FORMATS = ("raw", "qcow2")
KEY = b"correct-horse-battery-staple-0123456789"
OTHER = b"a-key-that-opens-nothing-at-all-9876543"
TEXT = b"plain text of the guest " * 170 + b"end of the text!"  # 4096 bytes


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with open_node(start=False) as node:
        node.add_key("default/disk", KEY)
        node.add_key("default/other", OTHER)
        await node.start()
        yield node


def files_below(*roots: Path) -> list[Path]:
    return [path for root in roots for path in root.rglob("*") if path.is_file()]


def seen_in_processes(value: bytes) -> list[str]:
    """Every argv and environment of this machine that has the value."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                if value in (entry / name).read_bytes():
                    found.append(f"{entry}/{name}")
            except OSError:
                continue
    return found


def seen_in_files(node: Node, value: bytes) -> list[Path]:
    """Every file of the node but the key itself that has the value."""
    root = node.config.parent
    paths = files_below(root)
    return [
        path
        for path in paths
        if not path.is_relative_to(node.layout.keys) and value in path.read_bytes()
    ]


@pytest.mark.parametrize("format", sampled(FORMATS, 1, seed=1))
async def test_what_the_guest_writes_is_readable_to_it_alone(node: Node, format: str) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    info = await node.open(volume, format=format, key="default/disk")
    assert info.size_bytes == 16 * MIB
    attached = await node.attach(volume, vm)
    with VhostDisk(Path(attached.export_path)) as disk:
        assert disk.size_bytes == 16 * MIB
        assert disk.write(8, TEXT) == 0
        disk.flush()
    await node.detach(volume, vm)
    assert seen_in_files(node, b"plain text of the guest") == []
    attached = await node.attach(volume, vm)
    with VhostDisk(Path(attached.export_path)) as disk:
        assert disk.read(8, len(TEXT)) == TEXT


@pytest.mark.parametrize("format", FORMATS)
async def test_the_key_is_in_no_argument_environment_file_log_or_store(
    node: Node, format: str
) -> None:
    seen: list[str] = []
    volume, vm = IDS.uid(), IDS.uid()

    async def look() -> None:
        while True:
            seen.extend(await anyio.to_thread.run_sync(seen_in_processes, KEY))

    async with anyio.create_task_group() as watching:
        watching.start_soon(look)
        await node.open(volume, format=format, key="default/disk")
        attached = await node.attach(volume, vm)
        with VhostDisk(Path(attached.export_path)) as disk:
            assert disk.write(0, TEXT) == 0
        assert seen_in_files(node, KEY) == []
        await node.detach(volume, vm)
        watching.cancel_scope.cancel()
    assert seen == []
    assert seen_in_files(node, KEY) == []
    assert KEY not in node.log.read_bytes()


@pytest.mark.parametrize("format", FORMATS)
async def test_a_key_that_does_not_open_the_volume_is_named(node: Node, format: str) -> None:
    volume = IDS.uid()
    await node.open(volume, format=format, key="default/disk")
    node.add_key("default/disk", OTHER)
    with pytest.raises(PermissionDenied, match="the key default/disk does not open volume"):
        await node.attach(volume, IDS.uid())
    node.add_key("default/disk", KEY)
    await node.attach(volume, IDS.uid())


@pytest.mark.parametrize("mode", [0o644, 0o660])
async def test_a_key_file_that_others_may_read_is_not_used(node: Node, mode: int) -> None:
    (node.layout.keys / "default/disk").chmod(mode)
    volume = IDS.uid()
    with pytest.raises(PermissionDenied, match="default/disk"):
        await node.open(volume, key="default/disk")
    assert node.volume_names() == []


async def test_a_key_that_is_not_there_is_named_and_nothing_is_made(node: Node) -> None:
    with pytest.raises(NotFound, match="default/absent"):
        await node.open(IDS.uid(), key="default/absent")
    assert node.volume_names() == []


@pytest.mark.parametrize("format", sampled(FORMATS, 1, seed=2))
async def test_an_encrypted_volume_grows_with_its_data(node: Node, format: str) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format=format, key="default/disk")
    attached = await node.attach(volume, vm)
    with VhostDisk(Path(attached.export_path)) as disk:
        assert disk.write(8, TEXT) == 0
        disk.flush()
    await node.detach(volume, vm)
    info = await node.open(
        volume, format=format, key="default/disk", size_bytes=32 * MIB, generation=2
    )
    assert info.size_bytes == 32 * MIB
    attached = await node.attach(volume, vm, generation=2)
    with VhostDisk(Path(attached.export_path)) as disk:
        assert disk.size_bytes == 32 * MIB
        assert disk.read(8, len(TEXT)) == TEXT
        assert disk.write(32 * MIB // 512 - 8, TEXT) == 0


@pytest.mark.parametrize("format", sampled(FORMATS, 1, seed=1))
async def test_an_encrypted_volume_starts_as_its_image(node: Node, format: str) -> None:
    data = os.urandom(2 * MIB)
    volume = IDS.uid()
    await node.open(volume, format=format, key="default/disk", source=node.image(data))

    async def is_open() -> bool:  # deriving the key takes its time on a busy machine
        return (await node.get(volume)).state == "open"

    await wait_until(is_open, timeout_s=60)
    attached = await node.attach(volume, IDS.uid())
    with VhostDisk(Path(attached.export_path)) as disk:
        for offset in range(0, 2 * MIB, 512 * 1024):
            assert disk.read(offset // 512, 512 * 1024) == data[offset : offset + 512 * 1024]
        if format == "qcow2":  # raw: what nobody wrote reads as the decryption of zeros
            assert disk.read(2 * MIB // 512, 65536) == bytes(65536)
        assert disk.write(0, TEXT) == 0
    assert not any(
        TEXT[:64] in path.read_bytes() for path in files_below(node.layout.volume(volume))
    )


@pytest.mark.parametrize(("format", "attached"), paired(FORMATS, [True, False]))
async def test_a_rotated_key_opens_the_volume_and_the_old_one_does_not(
    node: Node, format: str, attached: bool
) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format=format, key="default/disk")
    info = await node.attach(volume, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.write(8, TEXT) == 0
        disk.flush()
    if not attached:
        await node.detach(volume, vm)
    for generation, key in ((2, "default/other"), (3, "default/disk"), (4, "default/other")):
        await node.open(volume, format=format, key=key, generation=generation)
    if attached:
        with VhostDisk(Path(info.export_path)) as disk:
            assert disk.read(8, len(TEXT)) == TEXT
            assert disk.write(16, TEXT) == 0
        await node.detach(volume, vm, generation=4)
    node.add_key("default/disk", b"nobody needs the old key any more")
    info = await node.attach(volume, vm, generation=4)
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.read(8, len(TEXT)) == TEXT
    await node.detach(volume, vm, generation=4)
    node.add_key("default/other", KEY)
    with pytest.raises(PermissionDenied, match="does not open"):
        await node.attach(volume, vm, generation=4)


async def test_a_rotation_reaches_every_layer(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, format="qcow2", key="default/disk")
    info = await node.attach(volume, vm)
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.write(8, TEXT) == 0
        disk.flush()
    snapshot = wire.CreateSnapshot(
        meta=meta(), snapshot_id=IDS.uid(), volume_ids=[volume], vm_id=vm
    )
    async with node.client() as client:
        await client.call(wire.CREATE_SNAPSHOT, snapshot)
    with pytest.raises(FailedPrecondition, match="frozen layers"):
        await node.open(volume, format="qcow2", key="default/other", generation=2)
    await node.detach(volume, vm)
    await node.open(volume, format="qcow2", key="default/other", generation=2)
    node.add_key("default/disk", b"nobody needs the old key any more")
    info = await node.attach(volume, vm, generation=2)
    with VhostDisk(Path(info.export_path)) as disk:
        assert disk.read(8, len(TEXT)) == TEXT


async def test_a_rotation_to_a_key_that_is_not_there_changes_nothing(node: Node) -> None:
    volume = IDS.uid()
    await node.open(volume, key="default/disk")
    with pytest.raises(NotFound, match="default/absent"):
        await node.open(volume, key="default/absent", generation=2)
    assert (await node.get(volume)).generation == 1
    await node.attach(volume, IDS.uid())


async def test_a_damaged_header_is_data_loss_that_names_the_file(node: Node) -> None:
    volume = IDS.uid()
    await node.open(volume, key="default/disk")
    disk = node.layout.volume(volume) / "disk.raw"
    with disk.open("r+b") as file:
        file.write(bytes(4096))
    info = await node.get(volume)
    assert info.state == "broken"
    assert "disk.raw" in info.last_error
    with pytest.raises(ChvError, match="LUKS"):
        await node.attach(volume, IDS.uid())


async def test_the_key_is_gone_from_the_storage_daemon_right_after_the_open(node: Node) -> None:
    volume, vm = IDS.uid(), IDS.uid()
    await node.open(volume, key="default/disk")
    await node.attach(volume, vm)
    (worker,) = node.workers()
    # The derived key is there of course; the passphrase has gone with its object.
    assert KEY not in memory_of(worker.pid)


def memory_of(pid: int) -> bytes:
    """What of the writable memory of a process can be read."""
    data = b""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, permissions = line.split()[:2]
            start, end = (int(number, 16) for number in span.split("-"))
            if "rw" in permissions and end - start < 64 * MIB:
                try:
                    memory.seek(start)
                    data += memory.read(end - start)
                except OSError:
                    continue
    return data
