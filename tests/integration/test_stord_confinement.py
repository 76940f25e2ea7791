"""What a storage daemon of ours can reach, tried from within it over its monitor."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from chv.common.config import StorageConfig
from chv.common.errors import ChvError, FailedPrecondition
from chv.common.files import ensure_dir
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import (
    SpawnSpec,
    WorkerRecord,
    choose_provider,
    landlock_abi,
    run,
    terminate,
)
from chv.common.wire import stord as wire
from chv.stord.confinement import Touched, storage_daemon_rules, tool_rules
from chv.stord.qsd import graph
from chv.stord.qsd.monitor import Monitor, open_monitor
from tests.integration.stord_helpers import Node, meta, needs_qsd, open_node
from tests.leftovers import scratch

pytestmark = [
    pytest.mark.root,
    needs_qsd,
    pytest.mark.skipif(landlock_abi() == 0, reason="the kernel has no Landlock"),
]
VM = "00000000-0000-4000-8000-00000000c0f1"
MIB = 1 << 20


class Place:
    """A node's directories with one volume and one image, and files that are none of its."""

    def __init__(self, root: Path) -> None:
        self.layout = Layout(Ids().instance(), root / "run", root / "state")
        self.uid = self.layout.storage_uid(7)
        for path, mode in ((root, 0o711), (self.layout.run, 0o711), (self.layout.state, 0o711)):
            ensure_dir(path, mode=mode, uid=-1, gid=-1)
        ensure_dir(self.layout.vms, mode=0o711)
        ensure_dir(self.layout.vm(VM), mode=0o711)
        ensure_dir(self.layout.qsd(VM), mode=0o700, uid=self.uid, gid=self.uid)
        self.volume = self._file(self.layout.volume(VM) / "disk.raw", 0o600, self.uid)
        self.image = self._file(self.layout.image("a" * 64), 0o444, 0)
        self.pool = self._file(root / "pool" / "disk.raw", 0o600, self.uid)
        # The uid may do everything here; the rules alone say no.
        self.stranger = self._file(root / "elsewhere" / "disk.raw", 0o666, self.uid)
        self.seed = self._file(self.layout.vm_state(VM) / "seed.iso", 0o644, 0)

    @staticmethod
    def _file(path: Path, mode: int, uid: int) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in (path.parent, path.parent.parent):
            parent.chmod(0o711)
        path.write_bytes(bytes(MIB))
        path.chmod(mode)
        os.chown(path, uid, uid)
        return path


@pytest.fixture
def place() -> Iterator[Place]:
    root = scratch()
    yield Place(root)
    shutil.rmtree(root)


@asynccontextmanager
async def storage_daemon(
    place: Place, *, network: bool = False, devices: bool = False
) -> AsyncIterator[tuple[Monitor, WorkerRecord]]:
    layout = place.layout
    storage = StorageConfig(
        pools={"p": str(place.pool.parent)}, allowed_devices=["/dev/loop*"] if devices else []
    )
    worker_id = layout.worker_id("qsd", VM, "abcdef")
    monitor, pid_file = layout.qsd(VM) / "m.qmp", layout.qsd(VM) / f"{worker_id}.pid"
    provider = choose_provider(layout)
    worker = await provider.spawn(
        SpawnSpec(
            worker_id=worker_id,
            argv=tuple(graph.argv(monitor, pid_file)),
            uid=place.uid,
            gid=place.uid,
            umask=0o177,
            empty_netns=not network,
            landlock=storage_daemon_rules(layout, storage, VM, graph.BINARY, network=network),
        )
    )
    try:
        async with open_monitor(monitor, place.uid) as opened:
            yield opened, worker
    finally:
        await terminate(worker, grace_s=3.0)
        await provider.cleanup(worker)
        await provider.sweep()


def node_of(path: Path | str, name: str = "n", *, read_only: bool = False) -> graph.Node:
    file: graph.Node = {
        "driver": "file",
        "filename": str(path),
        "node-name": f"p-{name}",
        "read-only": read_only,
    }
    return {"driver": "raw", "node-name": name, "file": file, "read-only": read_only}


async def test_its_own_places_are_open_and_everything_else_is_closed(place: Place) -> None:
    async with storage_daemon(place) as (monitor, _worker):
        await monitor.add_node(node_of(place.volume, "volume"))
        await monitor.add_node(node_of(place.pool, "pool"))
        await monitor.add_node(node_of(place.image, "image", read_only=True))
        for path in ("/etc/passwd", "/etc/hostname", place.seed, place.stranger, "/proc/version"):
            with pytest.raises(ChvError, match="Permission denied"):
                await monitor.add_node(node_of(path, "no", read_only=True))
        with pytest.raises(ChvError):  # an image is for reading
            await monitor.add_node(node_of(place.image, "no"))


async def test_a_volume_made_after_the_start_can_be_attached(place: Place) -> None:
    async with storage_daemon(place) as (monitor, _worker):
        late = Place._file(place.layout.volume(Ids().uid()) / "disk.raw", 0o600, place.uid)
        await monitor.add_node(node_of(late))


async def test_it_makes_no_file_outside_of_its_own_directory(place: Place) -> None:
    async with storage_daemon(place) as (monitor, _worker):
        beside = place.stranger.with_name("new.raw")
        beside.parent.chmod(0o777)
        make: graph.Node = {
            "job-id": "j",
            "options": {"driver": "file", "filename": str(beside), "size": MIB},
        }
        await monitor.call("blockdev-create", make)
        assert await failure_of(monitor, "j") != ""
        assert not beside.exists()


async def failure_of(monitor: Monitor, job_id: str) -> str:
    """Return how a job ended; empty: well."""
    while True:
        for job in await monitor.call("query-jobs"):  # type: ignore[attr-defined]
            if job["id"] == job_id and job["status"] == "concluded":
                return str(job.get("error", ""))


async def test_uid_capabilities_and_the_network_are_taken(place: Place) -> None:
    async with storage_daemon(place) as (_monitor, worker):
        status = Path(f"/proc/{worker.pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert set(fields["Uid"].split()) == {str(place.uid)}
        for capabilities in ("CapEff", "CapPrm", "CapBnd", "CapAmb"):
            assert int(fields[capabilities], 16) == 0
        assert fields["NoNewPrivs"] == "1"
        own = Path("/proc/self/ns/net").readlink()
        assert Path(f"/proc/{worker.pid}/ns/net").readlink() != own


async def test_without_a_network_no_server_is_reached_and_with_one_it_is(place: Place) -> None:
    port = free_port()
    nbd: graph.Node = {
        "driver": "nbd",
        "node-name": "n",
        "export": "e",
        "read-only": True,
        "server": {"type": "inet", "host": "127.0.0.1", "port": str(port)},
    }
    with nbd_server(place.stranger, port):
        async with storage_daemon(place, network=True) as (monitor, _worker):
            await monitor.add_node(nbd)
        async with storage_daemon(place) as (monitor, _worker):
            with pytest.raises(ChvError, match="unreachable"):
                await monitor.add_node(nbd)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def nbd_server(path: Path, port: int, *, writable: bool = False) -> Iterator[None]:
    argv = [
        "qemu-nbd",
        *([] if writable else ["-r"]),
        "-f",
        "raw",
        "-t",
        "-e",
        "8",
        "-b",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    process = subprocess.Popen([*argv, "-x", "e", str(path)])
    try:
        deadline = time.monotonic() + 10
        while f":{port:04X} " not in Path("/proc/net/tcp").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


async def test_devices_are_closed_where_the_node_allows_none(place: Place) -> None:
    loop = subprocess.run(
        ["losetup", "--find", "--show", str(place.stranger)],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    device: graph.Node = {"driver": "host_device", "filename": loop, "node-name": "n"}
    before = Path(loop).stat()
    try:
        os.chown(loop, place.uid, place.uid)
        async with storage_daemon(place) as (monitor, _worker):
            with pytest.raises(ChvError, match="Permission denied"):
                await monitor.add_node(device)
        async with storage_daemon(place, devices=True) as (monitor, _worker):
            await monitor.add_node(device)
    finally:
        os.chown(loop, before.st_uid, before.st_gid)
        subprocess.run(["losetup", "--detach", loop], check=True)


async def image_tool(place: Place, *arguments: str, owns: tuple[Path, ...] = ()) -> str:
    done = await run(
        ("qemu-img", *arguments),
        timeout_s=20,
        uid=place.uid,
        gid=place.uid,
        check=False,
        empty_netns=True,
        landlock=tool_rules(place.layout, "qemu-img", Touched(owns=owns)),
    )
    return "" if done.returncode == 0 else done.stderr.decode()


async def test_a_tool_reaches_the_files_of_its_call_and_no_others(place: Place) -> None:
    qcow2 = place.volume.with_name("disk.qcow2")
    Place._file(qcow2, 0o600, place.uid)
    make = ("create", "-f", "qcow2", str(qcow2), "1M")
    assert await image_tool(place, *make, owns=(qcow2,)) == ""
    assert await image_tool(place, "check", str(qcow2), owns=(qcow2,)) == ""
    assert "Permission denied" in await image_tool(place, "check", "-f", "raw", str(place.stranger))
    evil = ("rebase", "-u", "-F", "raw", "-b", "/etc/passwd", str(qcow2))
    subprocess.run(["qemu-img", *evil], check=True)
    copied = await image_tool(place, "convert", "-O", "raw", str(qcow2), "/dev/null", owns=(qcow2,))
    assert "/etc/passwd" in copied
    assert "Permission denied" in copied


async def open_remote(node: Node, port: int) -> str:
    volume_id = Ids().uid()
    place = wire.NbdPlace(host="127.0.0.1", port=port, export="e")
    backend = wire.VolumeBackend(
        class_name=wire.VolumeClass.NBD,
        format=wire.VolumeFormat.RAW,
        size_bytes=MIB,
        nbd=place,
    )
    request = wire.OpenVolume(meta=meta(1), volume_id=volume_id, backend=backend)
    async with node.client() as client:
        assert (await client.call(wire.OPEN_VOLUME, request)).network
    return volume_id


async def attach(node: Node, volume_id: str, vm_id: str, *, network: bool) -> wire.AttachmentInfo:
    request = wire.AttachVolumeToVm(
        meta=meta(1),
        volume_id=volume_id,
        vm_id=vm_id,
        storage_uid=node.layout.storage_uid(1),
        vm_gid=node.layout.vmm_uid(1),
        network=network,
    )
    async with node.client() as client:
        return await client.call(wire.ATTACH_VOLUME, request)


def network_of(pid: int | str) -> Path:
    return Path(f"/proc/{pid}/ns/net").readlink()


async def test_a_vm_of_local_disks_has_no_network_and_takes_no_remote_disk_later(
    place: Place,
) -> None:
    port = free_port()
    with nbd_server(place.stranger, port, writable=True):
        async with open_node(storage=f'remotes = ["nbd://127.0.0.1:{port}"]') as node:
            local, vm = Ids().uid(), Ids().uid()
            assert not (await node.open(local)).network
            served = await attach(node, local, vm, network=False)
            assert network_of(served.backend_pid) != network_of("self")
            remote = await open_remote(node, port)
            with pytest.raises(FailedPrecondition, match="without one") as caught:
                await attach(node, remote, vm, network=False)
            assert "stop the VM" in caught.value.hint
            await node.detach(local, vm)
            served = await attach(node, local, vm, network=True)
            assert network_of(served.backend_pid) == network_of("self")
            both = await attach(node, remote, vm, network=True)
            assert both.backend_pid == served.backend_pid
            await node.detach(remote, vm)
            await node.detach(local, vm)
