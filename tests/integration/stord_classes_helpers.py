"""What the tests of the volume classes share: loop devices, NBD and iSCSI servers, all ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
from anyio.abc import SocketAttribute, SocketStream

from chv.common.rpc import Client
from chv.common.wire import stord as wire
from tests.helpers import wait_until
from tests.integration.stord_helpers import IDS, MIB, Node, meta
from tests.integration.tiny_vm import free_port

SIZE_BYTES = 16 * MIB


def spec(class_name: str, size_bytes: int = SIZE_BYTES, **options: Any) -> wire.VolumeBackend:
    """Describe a raw volume of a class."""
    options.setdefault("format", wire.VolumeFormat.RAW)
    return wire.VolumeBackend(
        class_name=wire.VolumeClass(class_name), size_bytes=size_bytes, **options
    )


def block(device: Path, **options: Any) -> wire.VolumeBackend:
    """Describe a volume that is a device."""
    return spec("block", block=wire.BlockDevice(device=str(device)), **options)


async def open_class(
    node: Node, volume_id: str, backend: wire.VolumeBackend, generation: int = 1
) -> wire.VolumeInfo:
    """Open a volume of any class."""
    request = wire.OpenVolume(meta=meta(generation), volume_id=volume_id, backend=backend)
    async with node.client() as client:
        return await _open(client, request)


async def _open(client: Client, request: wire.OpenVolume) -> wire.VolumeInfo:
    return await client.call(wire.OPEN_VOLUME, request)


@contextmanager
def loop_device(file: Path, size_bytes: int = SIZE_BYTES, *options: str) -> Iterator[Path]:
    """Make a file a block device."""
    with file.open("ab") as stream:
        stream.truncate(size_bytes)
    argv = ["losetup", "--find", "--show", *options, str(file)]
    device = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
    try:
        yield Path(device)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@contextmanager
def partition(device: Path, start: int, sectors: int) -> Iterator[Path]:
    """Tell the kernel of a partition; its node is made by us where nobody else makes it."""
    subprocess.run(["addpart", str(device), "1", f"{start}", f"{sectors}"], check=True)
    node = Path(f"{device}p1")
    made = not node.exists()
    if made:
        major, minor = Path(f"/sys/class/block/{node.name}/dev").read_text().split(":")
        os.mknod(node, stat.S_IFBLK | 0o660, os.makedev(int(major), int(minor)))
    try:
        yield node
    finally:
        if made:
            node.unlink(missing_ok=True)
        subprocess.run(["delpart", str(device), "1"], check=True)


def enlarge(device: Path, file: Path, size_bytes: int) -> None:
    """Let the file behind a loop device grow, and tell the kernel."""
    with file.open("ab") as stream:
        stream.truncate(size_bytes)
    subprocess.run(["losetup", "--set-capacity", str(device)], check=True)


@asynccontextmanager
async def nbd_server(
    file: Path, where: int | Path, *, export: str = "vol", clients: int = 8
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Serve a file by qemu-nbd on a port of the loopback address or on a Unix socket."""
    if not file.exists():
        with file.open("wb") as stream:
            stream.truncate(SIZE_BYTES)
    address = (
        ["-k", str(where)] if isinstance(where, Path) else ["-b", "127.0.0.1", "-p", f"{where}"]
    )
    argv = ["qemu-nbd", "-f", "raw", "-x", export, "-e", f"{clients}", "-t", *address, str(file)]
    process = _started(argv)
    try:
        await wait_until(lambda: _listens(where), what="the NBD server")
        yield process
    finally:
        process.kill()
        process.wait()


def _listens(where: int | Path) -> bool:
    family = socket.AF_UNIX if isinstance(where, Path) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        address = str(where) if isinstance(where, Path) else ("127.0.0.1", where)
        return probe.connect_ex(address) == 0


@contextmanager
def silent_server() -> Iterator[int]:
    """Accept connections on a port and never say a word."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(8)
        yield listener.getsockname()[1]


@asynccontextmanager
async def relay(port: int, forwards: int) -> AsyncIterator[int]:
    """Pass the first connections on to a port; later ones are accepted and get no answer."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    seen = 0

    async def serve(client: SocketStream) -> None:
        nonlocal seen
        seen += 1
        async with client:
            if seen > forwards:
                await anyio.sleep_forever()
            async with (
                await anyio.connect_tcp("127.0.0.1", port) as server,
                anyio.create_task_group() as copying,
            ):
                copying.start_soon(_copy, client, server, copying.cancel_scope)
                copying.start_soon(_copy, server, client, copying.cancel_scope)

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield listener.extra(SocketAttribute.local_port)
        tasks.cancel_scope.cancel()


async def _copy(source: SocketStream, target: SocketStream, ended: anyio.CancelScope) -> None:
    with contextlib.suppress(anyio.BrokenResourceError):
        async for data in source:
            await target.send(data)
    ended.cancel()


@asynccontextmanager
async def iscsi_target(directory: Path, name: str) -> AsyncIterator[int]:
    """Export a file by a tgtd of our own as LUN 1 of a target; yield its port."""
    file = directory / "lun"
    with file.open("ab") as stream:
        stream.truncate(max(stream.tell(), SIZE_BYTES))
    port = free_port()
    control = port % 32000  # tgtadm takes it for a short integer
    process = _started(["tgtd", "-f", "-C", f"{control}", "--iscsi", f"portal=127.0.0.1:{port}"])
    try:
        new = ["--op", "new", "--mode", "target", "--tid", "1", "-T", name]
        await wait_until(lambda: _tgtadm(control, *new), what="tgtd")
        lun = ["--op", "new", "--mode", "logicalunit", "--tid", "1", "--lun", "1"]
        assert _tgtadm(control, *lun, "-b", str(file))
        assert _tgtadm(control, "--op", "bind", "--mode", "target", "--tid", "1", "-I", "127.0.0.1")
        yield port
    finally:
        process.kill()
        process.wait()
        Path(f"/var/run/tgtd/socket.{control}").unlink(missing_ok=True)
        Path(f"/var/run/tgtd/socket.{control}.lock").unlink(missing_ok=True)


def _tgtadm(control: int, *argv: str) -> bool:
    command = ["tgtadm", "-C", str(control), "--lld", "iscsi", *argv]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def has(*programs: str) -> bool:
    """Tell whether all programs are installed."""
    return all(shutil.which(program) for program in programs)


CEPH_CONF = """[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{port}
mon initial members = a
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
osd pool default size = 1
osd pool default min size = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon data avail crit = 1
ms bind msgr2 = false
osd objectstore = memstore
memstore device bytes = 1073741824
mon data = {directory}/mon
osd data = {directory}/osd
keyring = {directory}/keyring
log file = {directory}/$name.log
run dir = {directory}
admin socket = {directory}/$name.asok
pid file =
"""
CEPH_POOL = "vms"


@contextmanager
def ceph_cluster(directory: Path) -> Iterator[Path]:
    """Run one monitor and one storage daemon in memory; yield the configuration's path."""
    conf = Path("/etc/ceph") / f"{directory.name}.conf"
    fsid, osd_uid, port = IDS.uid(), IDS.uid(), free_port()
    conf.parent.mkdir(exist_ok=True)
    conf.write_text(CEPH_CONF.format(fsid=fsid, port=port, directory=directory))
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        _ceph_keys(directory)
        at = f"[v1:127.0.0.1:{port}]"
        _do("monmaptool", "--create", "--addv", "a", at, "--fsid", fsid, f"{directory}/monmap")
        keyring, monmap = f"{directory}/keyring", f"{directory}/monmap"
        mon, osd = (
            ("ceph-mon", "-c", f"{conf}", "-i", "a"),
            ("ceph-osd", "-c", f"{conf}", "-i", "0"),
        )
        _do(*mon, "--mkfs", "--monmap", monmap, "--keyring", keyring)
        daemons.append(_started([*mon, "-f"]))
        _do("ceph", "-c", f"{conf}", "auth", "import", "-i", keyring)
        _do("ceph", "-c", f"{conf}", "osd", "new", osd_uid, "0")
        (directory / "osd").mkdir()
        _do(*osd, "--mkfs", "--no-mon-config", "--osd-uuid", osd_uid)
        daemons.append(_started([*osd, "-f"]))
        _do("ceph", "-c", f"{conf}", "osd", "pool", "create", CEPH_POOL, "8")
        _do("rbd", "-c", f"{conf}", "pool", "init", CEPH_POOL)
        yield conf
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait()
        conf.unlink()


def _ceph_keys(directory: Path) -> None:
    keyring = f"{directory}/keyring"
    for name, *capabilities in (
        ("mon.", "mon", "allow *"),
        ("client.admin", "mon", "allow *", "osd", "allow *"),
        ("client.chv", "mon", "profile rbd", "osd", "profile rbd"),
        ("osd.0", "mon", "allow profile osd", "osd", "allow *"),
    ):
        create = [] if Path(keyring).exists() else ["--create-keyring"]
        pairs = zip(capabilities[::2], capabilities[1::2], strict=True)
        caps = [part for kind, allowed in pairs for part in ("--cap", kind, allowed)]
        _do("ceph-authtool", *create, keyring, "--gen-key", "-n", name, *caps)


def _do(*argv: str) -> None:
    subprocess.run(argv, check=True, capture_output=True, timeout=60)


def _started(argv: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
