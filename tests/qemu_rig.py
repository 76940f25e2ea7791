"""Real QEMUs under our driver, each with the probe guest and a uid of its own."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import msgspec
import pytest

from chv.common.errors import Unavailable
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import PlainProvider, SpawnSpec, WorkerRecord, terminate, wait_gone
from chv.common.process.child import Child, start_child
from chv.common.process.spec import Program
from chv.probe.image import ELF_PATH
from chv.vmm.driver import DiskConfig, VmmConfig, VmmState
from chv.vmm.kvm import KVM_DEVICE
from chv.vmm.qemu.driver import QemuDriver
from tests.helpers import wait_until
from tests.probe_rig import Serial, connected

MIB = 1 << 20
Taps = Mapping[str, Sequence[int]]


@dataclass
class Vm:
    """One QEMU, its VM under `driver`."""

    driver: QemuDriver
    home: Path
    config: VmmConfig
    record: WorkerRecord | None = None
    _serial: Serial | None = None

    @property
    def dir(self) -> Path:
        return Path(self.config.runtime_dir)

    @property
    def save(self) -> Path:
        return Path(self.config.save_dir)

    @property
    def serial(self) -> Serial:
        assert self._serial is not None
        return self._serial

    @property
    def pid(self) -> int:
        assert self.record is not None
        return self.record.pid

    async def state(self) -> VmmState:
        return (await self.driver.observe(self.dir)).state

    async def hear(self) -> Serial:
        self._serial = Serial(await connected(self.driver.serial_socket(self.dir)))
        return self._serial

    async def start(self) -> Serial:
        serial = await self.hear()
        await self.driver.boot(self.dir)
        return serial

    async def gone(self) -> None:
        assert self.record is not None
        await wait_gone(self.record)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def log(self) -> str:
        return (self.home / "vmm.log").read_text()


class World:
    """Makes VMs and back ends; ends them."""

    def __init__(self, base: Path, stack: AsyncExitStack) -> None:
        self.base = base
        self.stack = stack
        self.layout = Layout(Ids().instance(), run_root=base / "r", state_root=base / "s")
        self.provider = PlainProvider(self.layout)
        self.uid = self.layout.vmm_uid(0)

    async def vm(self, name: str = "a", taps: Taps | None = None, **more: object) -> Vm:
        """Start a QEMU; `taps`: of its NICs."""
        uid = Ids().uid()
        home = self.base / name
        config = VmmConfig(
            vm_id=uid,
            uuid=uid,
            name=name,
            worker_id=self.layout.worker_id("vmm", uid, Ids().nonce()),
            cpus=1,
            memory_bytes=64 * MIB,
            accelerator="tcg",
            kernel=str(self.guest()),
            runtime_dir=str(home / "vmm"),
            save_dir=str(home / "save"),
        )
        return await self._make(home, msgspec.structs.replace(config, **more), taps or {})

    async def _make(self, home: Path, config: VmmConfig, taps: Taps) -> Vm:
        home.mkdir(mode=0o711)
        for path in (home / "vmm", home / "save"):
            path.mkdir(mode=0o700)
            os.chown(path, self.uid, self.uid)
        vm = Vm(QemuDriver(), home, config)
        await self._spawn(vm, taps)
        return vm

    async def again(self, name: str, like: Vm, **changes: object) -> Vm:
        """Start a QEMU for the VM of another one."""
        home = self.base / name
        config = msgspec.structs.replace(
            like.config,
            worker_id=self.layout.worker_id("vmm", like.config.vm_id, Ids().nonce()),
            runtime_dir=str(home / "vmm"),
            save_dir=str(home / "save"),
        )
        return await self._make(home, msgspec.structs.replace(config, **changes), {})

    async def move(self, vm: Vm, twin: Vm) -> None:
        """Hand a VM over to another QEMU."""
        socket = twin.home / "move.sock"
        async with anyio.create_task_group() as group:
            group.start_soon(twin.driver.receive, twin.dir, twin.config, {}, socket)
            await wait_until(socket.exists, what="receiver")
            await vm.driver.send(vm.dir, socket)
        assert not socket.exists()

    async def _spawn(self, vm: Vm, taps: Taps) -> None:
        launch = vm.driver.launch(vm.config)
        fds = {
            number: fd
            for name, numbers in launch.nic_fds.items()
            for number, fd in zip(numbers, taps[name], strict=True)
        }
        spec = SpawnSpec(
            worker_id=vm.config.worker_id,
            argv=launch.argv,
            environment=launch.environment,
            uid=self.uid,
            gid=self.uid,
            groups=launch.groups,
            fds=fds,
            own_devices=(str(KVM_DEVICE),) if launch.private_kvm else (),
            log_path=str(vm.home / "vmm.log"),
        )
        vm.record = await self.provider.spawn(spec)
        self.stack.push_async_callback(vm.driver.close, vm.dir)
        self.stack.push_async_callback(terminate, vm.record, grace_s=0)

        async def answers() -> bool:
            try:
                await vm.driver.observe(vm.dir)
            except Unavailable:
                return False
            return True

        try:
            await wait_until(answers, what="monitor")
        except AssertionError:
            pytest.fail(f"no QEMU: {vm.log()}")

    def guest(self) -> Path:
        """Return the probe guest where the VM's uid can read it."""
        copy = self.base / "probe.elf"
        if not copy.exists():
            shutil.copy(ELF_PATH, copy)
            copy.chmod(0o644)
        return copy

    async def serve(self, name: str, exports: int = 1) -> tuple[list[DiskConfig], Child]:
        """Serve a disk of 8 MiB, by one back end to so many VMMs at once."""
        image, ready = self.base / f"{name}.raw", self.base / f"{name}.pid"
        with image.open("ab") as file:
            file.truncate(8 * MIB)
        ready.unlink(missing_ok=True)
        paths = [self.base / f"{name}-{number}.sock" for number in range(exports)]
        argv = ["qemu-storage-daemon", "--pidfile", str(ready)]
        argv += ["--blockdev", f"driver=file,node-name=n,filename={image},locking=off"]
        for number, path in enumerate(paths):
            path.unlink(missing_ok=True)
            argv += ["--export", f"vhost-user-blk,id=e{number},node-name=n,writable=on,"
                     f"addr.type=unix,addr.path={path}"]  # fmt: skip
        child = await start_child(Program(argv=tuple(argv)))
        self.stack.push_async_callback(child.terminate, grace_s=0)
        await wait_until(ready.exists, what="storage daemon")
        for path in paths:
            path.chmod(0o666)
        return [DiskConfig(id=name, kind="vhost-user-blk", path=str(path)) for path in paths], child


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    """A directory that the VM's uid may pass through, and everything in it, gone afterwards."""
    if os.geteuid() != 0:
        pytest.skip("needs root: VMMs run under uids of their own")
    for program in ("qemu-system-x86_64", "qemu-storage-daemon"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    base = Path(tempfile.mkdtemp(prefix="chv-qemu-"))
    base.chmod(0o711)
    try:
        async with AsyncExitStack() as stack:
            yield World(base, stack)
    finally:
        shutil.rmtree(base)
