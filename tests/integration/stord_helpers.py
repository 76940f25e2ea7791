"""What the tests of stord share: a real daemon of an instance of its own, gone for certain."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest

from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import CgroupProvider, FoundWorker, choose_provider, scan, wait_gone
from chv.common.rpc import Client, connect
from chv.common.wire import stord as wire
from chv.common.wire.types import CENSUS, CallMeta, CensusItem, Done, Empty, ListPage
from chv.stord import growth
from tests.leftovers import scratch

IDS = Ids()
MIB = 1 << 20
needs_qsd = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("qemu-storage-daemon") is None,
    reason="needs root and qemu-storage-daemon",
)


def qsd_version() -> str:
    """Return the version of this machine's storage daemon; empty where there is none."""
    if (binary := shutil.which("qemu-storage-daemon")) is None:
        return ""
    said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
    return said.stdout.split()[2]


def qsd_major() -> int:
    """Return its major version; 0 where there is none."""
    return int(qsd_version().partition(".")[0] or 0)


tells_new_sizes = pytest.mark.skipif(
    qsd_major() < growth.MAJOR_MIN,
    reason=f"needs a storage daemon of QEMU {growth.MAJOR_MIN}, which tells its clients news;"
    f" here is {qsd_major()}",
)


class Node:
    """One instance: its directories, its stord process, shorthand for its calls."""

    def __init__(self, root: Path, *, state: Path | None = None, storage: str = "") -> None:
        self.layout = Layout(IDS.instance(), root / "run", state or root / "state")
        self.config = root / "chv.toml"
        if "proxy" not in storage:  # its tests are its own; the others are about losses
            storage += '\nproxy = "off"'
        if "space_critical_bytes" not in storage:  # small test disks are full by the default
            storage += "\nspace_critical_bytes = 0"
        self.config.write_text(
            f'[node]\ninstance = "{self.layout.instance}"\n'
            f'run_dir = "{self.layout.run_root}"\nstate_dir = "{self.layout.state_root}"\n'
            f'log_level = "debug"\n[storage]\n{storage}\n'
        )
        self.log = root / "stord.log"
        self.process: subprocess.Popen[bytes] | None = None

    async def start(self, failpoints: str = "", failpoints_log: Path | None = None) -> None:
        """Start stord and wait until it is ready, or has ended."""
        await anyio.to_thread.run_sync(self._start, failpoints, failpoints_log)

    def _start(self, failpoints: str, failpoints_log: Path | None) -> None:
        with self.begin(failpoints, failpoints_log) as ready:
            assert ready.read() == b"ready\n" or failpoints, self.log.read_text()[-2000:]

    def begin(self, failpoints: str = "", failpoints_log: Path | None = None) -> io.BufferedReader:
        """Start stord; return where it says that it is ready."""
        reader, writer = os.pipe()
        environment = {**os.environ, "CHV_READY_FD": str(writer)}
        if failpoints:
            environment |= {"CHV_TEST_BUILD": "1", "CHV_FAILPOINTS": failpoints}
        if failpoints_log is not None:
            environment["CHV_FAILPOINTS_LOG"] = str(failpoints_log)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "chv.stord", "--config", str(self.config)],
                env=environment,
                pass_fds=[writer],
                stderr=log,
            )
        os.close(writer)
        return os.fdopen(reader, "rb")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    async def end(self, number: int = signal.SIGKILL) -> int:
        """Signal stord and return its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return await self.ended()

    async def ended(self) -> int:
        """Wait until stord has ended by itself."""
        assert self.process is not None
        return await anyio.to_thread.run_sync(self.process.wait, 20)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with connect(self.layout.socket("stord")) as client:
            yield client

    async def open(
        self,
        volume_id: str,
        *,
        format: str = "raw",
        size_bytes: int = 16 * MIB,
        source: wire.VolumeSource | None = None,
        generation: int = 1,
        key: str = "",
        pool: str = "",
        backup: wire.BackupSource | None = None,
    ) -> wire.VolumeInfo:
        request = wire.OpenVolume(
            meta=meta(generation),
            volume_id=volume_id,
            backend=wire.VolumeBackend(
                class_name=wire.VolumeClass.FILE,
                format=wire.VolumeFormat(format),
                size_bytes=size_bytes,
                pool=pool,
                source=source,
                backup=backup,
                encryption=wire.Encryption(key=key) if key else None,
            ),
        )
        async with self.client() as client:
            return await client.call(wire.OPEN_VOLUME, request)

    def add_key(self, name: str, value: bytes) -> None:
        """Put an encryption key where the node's keys are."""
        path = self.layout.keys / name
        for directory in (self.layout.state_root, self.layout.state):
            directory.mkdir(exist_ok=True, mode=0o711)
        for directory in (self.layout.keys, path.parent):
            directory.mkdir(exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        path.write_bytes(value)

    async def job(self, job_id: str) -> wire.JobInfo:
        """Return a job once it has ended."""
        with anyio.fail_after(60):
            while True:
                async with self.client() as client:
                    info = await client.call(wire.GET_JOB, wire.JobRef(job_id=job_id))
                if info.state is not wire.JobState.RUNNING:
                    return info
                await anyio.sleep(0.05)

    async def ensure(
        self,
        volume_id: str,
        generation: int = 1,
        client: wire.VmmClient = wire.VmmClient.NONE,
        **fields: Any,
    ) -> wire.VolumeInfo:
        """OpenVolume with any fields of the backend; a small raw file where nothing is said."""
        backend: dict[str, Any] = {
            "class_name": wire.VolumeClass.FILE,
            "format": wire.VolumeFormat.RAW,
            "size_bytes": 16 * MIB,
        } | fields
        request = wire.OpenVolume(
            meta=meta(generation),
            volume_id=volume_id,
            backend=wire.VolumeBackend(**backend),
            client=client,
        )
        async with self.client() as connection:
            return await connection.call(wire.OPEN_VOLUME, request)

    async def attach(
        self,
        volume_id: str,
        vm_id: str,
        *,
        slot: int = 0,
        read_only: bool = False,
        generation: int = 1,
    ) -> wire.AttachmentInfo:
        request = wire.AttachVolumeToVm(
            meta=meta(generation),
            volume_id=volume_id,
            vm_id=vm_id,
            storage_uid=self.layout.storage_uid(slot),
            vm_gid=self.layout.vmm_uid(slot),
            read_only=read_only,
        )
        async with self.client() as client:
            return await client.call(wire.ATTACH_VOLUME, request)

    async def attach_all(
        self, volume_ids: list[str], vm_id: str, *, slot: int = 0, generation: int = 1
    ) -> dict[str, wire.AttachOutcome]:
        """Attach several in one call; return what became of each."""
        request = wire.AttachVolumesToVm(
            meta=meta(),
            vm_id=vm_id,
            storage_uid=self.layout.storage_uid(slot),
            vm_gid=self.layout.vmm_uid(slot),
            volumes=[
                wire.VolumeToAttach(volume_id=each, generation=generation) for each in volume_ids
            ],
        )
        async with self.client() as client:
            reply = await client.call(wire.ATTACH_VOLUMES, request)
        return {each.volume_id: each for each in reply.outcomes}

    async def restart(self, vm_id: str, operation_id: str = "") -> wire.VmBackendInfo:
        """Replace the storage daemon under the VM."""
        call = meta()
        if operation_id:
            call = msgspec.structs.replace(call, operation_id=operation_id)
        request = wire.RestartVmBackend(meta=call, vm_id=vm_id)
        async with self.client() as client:
            return await client.call(wire.RESTART_VM_BACKEND, request)

    async def detach(self, volume_id: str, vm_id: str, generation: int = 1) -> Done:
        request = wire.DetachVolumeFromVm(meta=meta(generation), volume_id=volume_id, vm_id=vm_id)
        async with self.client() as client:
            return await client.call(wire.DETACH_VOLUME, request)

    async def delete(self, volume_id: str, generation: int = 1) -> Done:
        async with self.client() as client:
            return await client.call(
                wire.DELETE_VOLUME, wire.VolumeRef(meta=meta(generation), volume_id=volume_id)
            )

    async def close(self, volume_id: str, generation: int = 1) -> Done:
        async with self.client() as client:
            return await client.call(
                wire.CLOSE_VOLUME, wire.VolumeRef(meta=meta(generation), volume_id=volume_id)
            )

    async def recover(self, vm_id: str) -> wire.VmBackendInfo:
        async with self.client() as client:
            return await client.call(
                wire.RECOVER_VM_BACKEND, wire.RecoverVmBackend(meta=meta(), vm_id=vm_id)
            )

    async def get(self, volume_id: str) -> wire.VolumeInfo:
        async with self.client() as client:
            return await client.call(wire.GET_VOLUME, wire.GetVolume(volume_id=volume_id))

    async def volumes(self) -> list[wire.VolumeInfo]:
        async with self.client() as client:
            return (await client.call(wire.LIST_VOLUMES, ListPage())).volumes

    async def sessions(self) -> list[wire.VmBackendInfo]:
        async with self.client() as client:
            return (await client.call(wire.LIST_SESSIONS, ListPage())).sessions

    async def census(self) -> list[CensusItem]:
        async with self.client() as client:
            return (await client.call(CENSUS, Empty())).items

    # --- what the machine shows
    def workers(self) -> list[FoundWorker]:
        return scan(self.layout.worker_prefix)

    def run_files(self) -> list[str]:
        """Everything below `vm/`."""
        return sorted(str(path.relative_to(self.layout.vms)) for path in self.layout.vms.rglob("*"))

    def volume_names(self) -> list[str]:
        directory = self.layout.volume("x").parent
        return sorted(path.name for path in directory.glob("*"))

    def has_cgroups(self) -> bool:
        return isinstance(choose_provider(self.layout), CgroupProvider)

    def cgroups(self) -> list[str]:
        """The leaves of this instance's workers, where the provider makes any."""
        provider = choose_provider(self.layout)
        if not isinstance(provider, CgroupProvider):
            return []
        return sorted(path.name for path in provider.base.iterdir() if path.is_dir())

    def image(self, data: bytes) -> wire.VolumeSource:
        """Put a raw image where the node's images are."""
        sha256 = hashlib.sha256(data).hexdigest()
        path = self.layout.image(sha256)
        for directory in reversed(path.parents):
            directory.mkdir(exist_ok=True, mode=0o755)
        path.write_bytes(data)
        path.chmod(0o644)
        return wire.VolumeSource(path=str(path), sha256=sha256, format=wire.VolumeFormat.RAW)

    async def cleanup(self) -> None:
        """Leave nothing of this instance on the machine."""
        if self.process is not None and self.process.poll() is None:
            await self.end()
        provider = choose_provider(self.layout)
        for worker in self.workers():
            await provider.kill(worker.record(), signal.SIGKILL)
            await wait_gone(worker.record())
        await provider.retire()


def meta(generation: int = 1) -> CallMeta:
    return CallMeta(operation_id=IDS.operation(), generation=generation)


def shell(*argv: str | Path) -> None:
    """Run a tool that a test needs beside stord."""
    subprocess.run([str(item) for item in argv], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def mounted_tmpfs(directory: Path, size: str) -> Iterator[None]:
    directory.mkdir(parents=True)
    shell("mount", "-t", "tmpfs", "-o", f"size={size}", "none", directory)
    try:
        yield
    finally:
        shell("umount", directory)


@contextmanager
def short_root() -> Iterator[Path]:
    """A directory with a short path: socket paths have 107 bytes."""
    root = scratch("/run")
    root.chmod(0o711)
    try:
        yield root
    finally:
        shutil.rmtree(root)


@asynccontextmanager
async def open_node(*, storage: str = "", start: bool = True) -> AsyncIterator[Node]:
    """A node whose stord runs."""
    with short_root() as root:
        node = Node(root, storage=storage)
        try:
            if start:
                await node.start()
            yield node
        finally:
            with anyio.CancelScope(shield=True):
                await node.cleanup()
