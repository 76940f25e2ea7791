"""Small parts of stord: graph, qcow2 header, errors of QEMU, locks, events, run directory."""

from __future__ import annotations

import errno
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from chv.common.errors import (
    ChvError,
    Internal,
    InUse,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
)
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.wire.stord import CrashClass, Limits, Rate, StorageEvent
from chv.stord import qcow2
from chv.stord.backends import disk_files
from chv.stord.events import QUEUE_EVENTS_MAX, Events
from chv.stord.exports import RunDirectory
from chv.stord.locks import KeyedLocks
from chv.stord.qsd import graph
from chv.stord.qsd.monitor import translate

VOLUME = "0123abcd-1111-2222-3333-444455556666"
VM = "89ab0123-1111-2222-3333-444455556666"


# --- the block graph
def layer(path: str, format: str = "raw", number: int = 0, **options: Any) -> graph.LayerNode:
    protocol = graph.Protocol(
        driver="file", options={"filename": path}, **({"aio": "native"} | options)
    )
    return graph.LayerNode(number=number, format=format, protocol=protocol)


def file_node(name: str, path: str) -> graph.Node:
    return {
        "driver": "file",
        "node-name": f"{name}-0123abcd11",
        "filename": path,
        "aio": "native",
        "cache": {"direct": True},
        "discard": "unmap",
    }


def test_every_layer_of_a_disk_discards_and_nothing_is_probed() -> None:
    disk = graph.Disk(
        volume_id=VOLUME,
        below=(layer("/i/abc"),),
        own=(layer("/v/disk.qcow2", "qcow2"), layer("/v/layer-2.qcow2", "qcow2", 2)),
    )

    node = graph.chain(disk)

    assert node == {
        "driver": "qcow2",
        "node-name": "f2-0123abcd11",
        "discard": "unmap",
        "file": file_node("p2", "/v/layer-2.qcow2"),
        "backing": {
            "driver": "qcow2",
            "node-name": "f0-0123abcd11",
            "discard": "unmap",
            "read-only": True,
            "file": file_node("p0", "/v/disk.qcow2"),
            "backing": {
                "driver": "raw",
                "node-name": "b0-0123abcd11",
                "discard": "unmap",
                "read-only": True,
                "file": file_node("i0", "/i/abc"),
            },
        },
    }


def test_a_qcow2_without_an_image_follows_no_backing_file_of_its_header() -> None:
    node = graph.chain(graph.Disk(volume_id=VOLUME, own=(layer("/v/d", "qcow2"),), read_only=True))

    assert node["backing"] is None
    assert node["read-only"] is True


def test_nodes_leave_from_the_top_down_and_the_lock_last() -> None:
    names = ["l", "p0", "f0", "f2", "t", "b0", "f11", "i0"]
    present = frozenset(f"{name}-0123abcd11" for name in names) | {"f0-ffffffffff"}

    order = [name.partition("-")[0] for name in graph.removal_order(present, VOLUME)]

    assert order[:4] == ["t", "f11", "f2", "f0"]
    assert order[-1] == "l"
    assert len(order) == len(names)


def test_limits_survive_the_way_to_the_storage_daemon_and_back() -> None:
    limits = Limits(
        iops_total=Rate(limit=100, burst=500, burst_s=10),
        bps_read=Rate(limit=1 << 20),
        iops_size_bytes=4096,
    )

    arguments = graph.limits_arguments(limits)

    assert len(arguments) == 19
    assert graph.limits_from({key: int(str(value)) for key, value in arguments.items()}) == limits


def test_a_volume_is_free_at_once_though_a_forked_child_still_has_the_open_file(
    tmp_path: Path,
) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    with disk_files.exclusively(lock):
        ours = next(
            int(link.name)
            for link in Path("/proc/self/fd").iterdir()
            if link.resolve() == lock.resolve()
        )
        shared = os.dup(ours)  # as fork does: one open file, two descriptors
        with pytest.raises(InUse), disk_files.exclusively(lock):
            pass
    try:
        with disk_files.exclusively(lock):
            pass
    finally:
        os.close(shared)


@pytest.mark.parametrize(
    ("aio", "direct", "used"),
    [("native", True, "native"), ("native", False, "threads"), ("io_uring", False, "io_uring")],
)
def test_native_aio_gives_way_to_threads_where_there_is_no_direct_io(
    aio: str, direct: bool, used: str
) -> None:
    disk = graph.Disk(volume_id=VOLUME, own=(layer("/v/d", aio=aio, direct=direct),))

    file = graph.chain(disk)["file"]

    assert isinstance(file, dict)
    assert (file["aio"], file["cache"]) == (used, {"direct": direct})


def test_a_file_system_that_refuses_direct_io_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "disk"
    path.write_bytes(b"")
    assert disk_files.takes_direct(path)
    real = os.open

    def refuse(name: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(name, flags)

    monkeypatch.setattr(os, "open", refuse)

    assert not disk_files.takes_direct(path)


# --- qcow2 headers
def header(version: int = 3, backing: int = 0, features: int = 0, size: int = 1 << 20) -> bytes:
    fixed = struct.pack(">4sIQIIQ", b"QFI\xfb", version, backing, 0, 16, size)
    return fixed.ljust(72, b"\0") + struct.pack(">Q", features).ljust(32, b"\0")


def test_a_plain_header_gives_the_size() -> None:
    assert qcow2.parse(header(), "x") == qcow2.Header(1 << 20, False, False, False)
    assert qcow2.parse(header(version=2, features=4), "x") == qcow2.Header(
        1 << 20, False, False, False
    )


def test_references_and_damage_are_reported() -> None:
    assert qcow2.parse(header(backing=112), "x").has_backing
    assert qcow2.parse(header(features=4), "x").has_external_data
    assert qcow2.parse(header(features=2), "x").corrupt


@pytest.mark.parametrize(
    "data", [b"", b"QFI\xfb", b"raw data" * 20, header(version=1), header(size=2**61)]
)
def test_what_is_no_qcow2_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument):
        qcow2.parse(data, "image")


# --- errors of QEMU
@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('Failed to get "write" lock', InUse),
        ('Failed to get shared "write" lock', InUse),
        ("Could not open '/i': Permission denied", PermissionDenied),
        ("Could not open '/i': No such file or directory", NotFound),
        ("Export 'e1' is not found", NotFound),
        (
            "Unable to use native AIO: failed to create linux AIO context:"
            " Resource temporarily unavailable",
            ResourceExhausted,
        ),
        ("Duplicate nodes with node-name='o'", Internal),
    ],
)
def test_the_text_of_qemu_becomes_one_of_our_errors(text: str, error: type[ChvError]) -> None:
    translated = translate("blockdev-add", text)

    assert type(translated) is error
    assert text in translated.message


# --- locks
async def test_a_name_is_held_by_one_at_a_time_and_forgotten_afterwards() -> None:
    locks, inside, most = KeyedLocks(), 0, 0

    async def work() -> None:
        nonlocal inside, most
        async with locks.hold("a"):
            inside += 1
            most = max(most, inside)
            await anyio.lowlevel.checkpoint()
            inside -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(work)

    assert most == 1
    assert not locks.busy("a")


async def test_a_cancelled_waiter_does_not_spoil_the_lock() -> None:
    locks = KeyedLocks()

    async def wait() -> None:
        async with locks.hold("a"):
            raise AssertionError

    async with locks.hold("a"):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert locks.busy("a")

    async with locks.hold("a"):
        pass
    assert not locks.busy("a")


# --- events
def event(message: str) -> StorageEvent:
    return StorageEvent(
        kind="backend_lost", vm_id=VM, crash_class=CrashClass.RESET_VM, message=message
    )


async def test_a_slow_watcher_is_cut_off_and_gets_no_gap_before_its_end() -> None:
    events = Events()
    with events.subscribe() as slow, events.subscribe() as quick:
        for number in range(QUEUE_EVENTS_MAX + 1):
            events.publish(event(str(number)))
            assert (await quick.receive()).message == str(number)

        seen = [item.message async for item in slow]

    assert seen == [str(number) for number in range(QUEUE_EVENTS_MAX)]


async def test_a_watcher_that_left_is_forgotten() -> None:
    events = Events()
    with events.subscribe():
        pass

    events.publish(event("x"))


# --- the run directory
@pytest.fixture
def run() -> Iterator[RunDirectory]:
    with tempfile.TemporaryDirectory(prefix="chv-test-", dir="/run") as root:
        yield RunDirectory(Layout(Ids().instance(), Path(root)), VM)


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    layout = Layout("abcdef", Path("/run") / ("x" * 70))

    with pytest.raises(InvalidArgument, match="107"):
        RunDirectory(layout, VM).check(VOLUME, "01234567")
    RunDirectory(Layout("abcdef"), VM).check(VOLUME, "01234567")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
class TestPublish:
    """What a hostile storage daemon may put in place of its socket."""

    UID = 12345

    def test_its_own_socket_is_published(self, run: RunDirectory) -> None:
        run.prepare(self.UID, self.UID + 1)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(run.unprimed(VOLUME)))
        os.chown(run.unprimed(VOLUME), self.UID, self.UID)

        run.publish(VOLUME, self.UID, self.UID + 1)

        status = run.export(VOLUME).lstat()
        assert (status.st_uid, status.st_gid) == (self.UID, self.UID + 1)
        assert status.st_mode & 0o777 == 0o660
        assert run.published([VOLUME]) == {VOLUME}
        run.unpublish(VOLUME)
        run.remove()
        assert not run.path.exists()

    @pytest.mark.parametrize("kind", ["link", "file", "socket of root"])
    def test_anything_else_is_refused_and_not_touched(self, run: RunDirectory, kind: str) -> None:
        run.prepare(self.UID, self.UID + 1)
        target = run.path / "target"
        target.write_text("secret")
        if kind == "link":
            run.unprimed(VOLUME).symlink_to(target)
        elif kind == "file":
            run.unprimed(VOLUME).hardlink_to(target)
        else:
            with socket.socket(socket.AF_UNIX) as server:
                server.bind(str(run.unprimed(VOLUME)))

        with pytest.raises(Internal, match="not a socket of its own"):
            run.publish(VOLUME, self.UID, self.UID + 1)

        assert target.stat().st_uid == 0
        assert run.published([VOLUME]) == frozenset()
