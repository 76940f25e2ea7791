"""A real Cloud Hypervisor under its driver, with the probe guest: `World` makes VMs and back ends.

Skips, and says why, where there is no program or no /dev/kvm. What it is like under the contract
that all VMMs are held to is in `vmm_rig_probe`.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import SocketStream

from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import PlainProvider, SpawnSpec, WorkerRecord, terminate, wait_gone
from chv.common.process.child import Child, start_child
from chv.common.process.spec import Program
from chv.vmm.cloud_hypervisor.driver import CloudHypervisorDriver
from chv.vmm.driver import DiskConfig, NicConfig, VmmConfig, VmmDriver, VmmState
from chv.vmm.handing import handed_over
from tests.helpers import wait_until

PROBE = Path(__file__).parents[1] / "chv" / "probe" / "probe.elf"
STOCK, TOLERANT = "CHV_CLOUD_HYPERVISOR", "CHV_CLOUD_HYPERVISOR_TOLERANT"


def binary_of(variable: str = STOCK) -> str:
    """Return the binary a developer named, or PATH's; skip where there is none."""
    found, is_stock = os.environ.get(variable, ""), variable == STOCK
    if not found and is_stock:
        found = shutil.which("cloud-hypervisor") or ""
    if not found:
        elsewhere = ", nor is one in PATH" if is_stock else ""
        pytest.skip(f"no Cloud Hypervisor: {variable} names none{elsewhere}")
    if os.geteuid() != 0:
        pytest.skip("needs root: VMMs run under uids of their own")
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        pytest.skip("Cloud Hypervisor needs /dev/kvm")
    return found


async def spawn(
    provider: PlainProvider, driver: VmmDriver, config: VmmConfig, *, uid: int, **more: Any
) -> WorkerRecord:
    """Start a VMM as the agent does: root makes what it inherits."""
    launch = driver.launch(config)
    base = Path(config.runtime_dir).parent
    with handed_over(launch) as fds:
        return await provider.spawn(
            SpawnSpec(
                worker_id=config.worker_id,
                argv=more.pop("argv", launch.argv),
                environment=launch.environment | more.pop("environment", {}),
                cwd=launch.cwd,
                fds=fds,
                uid=uid,
                gid=uid,
                groups=launch.groups,
                log_path=str(more.pop("log_path", base / "vmm.log")),
                own_devices=more.pop("own_devices", _devices(launch.private_kvm)),
            )
        )


def _devices(private_kvm: object) -> tuple[str, ...]:
    return ("/dev/kvm",) if private_kvm else ()


def with_seccomp(argv: Sequence[str], mode: str) -> tuple[str, ...]:
    """A glibc build's own filter ends the thread that moves a VM: "log" lets it live."""
    return tuple(mode if word == "true" else word for word in argv)


def make_directories(*directories: Path, uid: int) -> None:
    """Make them, the VM's own."""
    for directory in directories:
        directory.mkdir(mode=0o700)
        os.chown(directory, uid, uid)


@dataclass
class Vm:
    """One VMM process, its VM under `driver`."""

    driver: CloudHypervisorDriver
    base: Path
    config: VmmConfig
    record: WorkerRecord | None = None
    serial: SocketStream | None = None
    heard: bytearray = field(default_factory=bytearray)

    @property
    def dir(self) -> Path:
        return Path(self.config.runtime_dir)

    @property
    def pid(self) -> int:
        assert self.record is not None
        return self.record.pid

    async def state(self) -> VmmState:
        return (await self.driver.observe(self.dir)).state

    async def becomes(self, expected: VmmState) -> None:
        async def there() -> bool:
            return await self.state() is expected

        await wait_until(there, timeout_s=10, what=f"state {expected}")

    async def create(self, nic_fds: Mapping[str, Sequence[int]] | None = None) -> None:
        await self.driver.create(self.dir, self.config, nic_fds or {})
        self.serial = await anyio.connect_unix(self.driver.serial_socket(self.dir))

    async def start(self, nic_fds: Mapping[str, Sequence[int]] | None = None) -> None:
        await self.create(nic_fds)
        await self.driver.boot(self.dir)
        await self.says(b"ready ")

    async def hear(self) -> None:
        """Connect to the serial port again: the VMM makes it anew at each reset."""
        await self.hang_up()
        self.serial = await anyio.connect_unix(self.driver.serial_socket(self.dir))

    async def hang_up(self) -> None:
        """Leave nothing unread: the VMM's serial thread would end of it."""
        if self.serial is None:
            return
        with anyio.fail_after(5), suppress(anyio.EndOfStream, anyio.BrokenResourceError, OSError):
            await self.serial.send_eof()
            while True:
                await self.serial.receive()
        await self.serial.aclose()
        self.serial = None
        self.heard.clear()

    async def says(self, text: bytes, timeout_s: float = 10) -> bytes:
        """Return what the guest printed up to `text`, which is taken out."""
        assert self.serial is not None
        with anyio.move_on_after(timeout_s):
            while text not in self.heard:
                self.heard += await self.serial.receive()
            end = self.heard.index(text) + len(text)
            said = bytes(self.heard[:end])
            del self.heard[:end]
            return said
        raise AssertionError(f"no {text!r} in {bytes(self.heard)[-2000:]!r}")

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def gone(self, timeout_s: float = 10) -> None:
        assert self.record is not None
        with anyio.fail_after(timeout_s):
            await wait_gone(self.record)

    def log(self) -> str:
        return (self.base / "vmm.log").read_text()


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    """A directory that the VM's uid may pass through, and everything in it, gone afterwards."""
    base = Path(tempfile.mkdtemp(prefix="chv-ch-"))
    base.chmod(0o711)
    try:
        async with AsyncExitStack() as stack:
            yield World(base, stack)
    finally:
        shutil.rmtree(base)


class World:
    """Makes VMs and back ends; ends them."""

    def __init__(self, base: Path, stack: AsyncExitStack) -> None:
        self.base = base
        self.stack = stack
        self.layout = Layout(Ids().instance(), run_root=base / "r", state_root=base / "s")
        self.provider = PlainProvider(self.layout)
        self.uid = self.layout.vmm_uid(0)

    async def vm(
        self,
        name: str = "a",
        *,
        binary: str = "",
        cmdline: str = "",
        disks: tuple[DiskConfig, ...] = (),
        nics: tuple[NicConfig, ...] = (),
        seccomp: str = "true",
        **more: object,
    ) -> Vm:
        """Spawn a VMM that has no VM yet."""
        driver = CloudHypervisorDriver((binary or binary_of(),))
        home = self.base / name
        uid = Ids().uid()
        config = VmmConfig(
            vm_id=uid,
            uuid=uid,
            name=name,
            worker_id=self.layout.worker_id("vmm", uid, Ids().nonce()),
            cpus=1,
            memory_bytes=64 << 20,
            kernel=str(self.guest()),
            cmdline=cmdline,
            disks=disks,
            nics=nics,
            runtime_dir=str(home / "vmm"),
            save_dir=str(home / "save"),
        )
        config = msgspec.structs.replace(config, **more)
        home.mkdir(mode=0o711)
        make_directories(home / "vmm", home / "save", uid=self.uid)
        vm = Vm(driver, home, config)
        await self.spawn(vm, seccomp=seccomp)
        return vm

    async def spawn(self, vm: Vm, *, seccomp: str = "true") -> None:
        """Start its VMM."""
        argv = with_seccomp(vm.driver.launch(vm.config).argv, seccomp)
        vm.record = await spawn(self.provider, vm.driver, vm.config, uid=self.uid, argv=argv)
        self.stack.push_async_callback(self._end, vm)
        self.stack.push_async_callback(terminate, vm.record, grace_s=0)

    async def _end(self, vm: Vm) -> None:
        if vm.serial is not None:
            await vm.serial.aclose()
        await vm.driver.close(vm.dir)

    def guest(self) -> Path:
        """Return the probe guest where the VM's uid can read it."""
        found = Path(os.environ.get("CHV_TEST_PROBE_GUEST", "") or PROBE)
        if not found.exists():
            pytest.skip(f"no probe guest at {found}")
        copy = self.base / "probe.elf"
        if not copy.exists():
            shutil.copy(found, copy)
            copy.chmod(0o644)
        return copy

    async def serve(self, name: str) -> tuple[DiskConfig, Child]:
        """Serve an empty disk of 8 MiB."""
        if shutil.which("qemu-storage-daemon") is None:
            pytest.skip("qemu-storage-daemon is not installed")
        path, image = self.base / f"{name}.sock", self.base / f"{name}.raw"
        with image.open("ab") as file:
            file.truncate(8 << 20)
        ready = path.with_suffix(".pid")
        ready.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raw = f"driver=file,node-name=n,filename={image},locking=off"
        export = f"vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path={path},writable=on"
        argv = ("qemu-storage-daemon", "--blockdev", raw, "--export", export)
        child = await start_child(Program(argv=(*argv, "--pidfile", str(ready))))
        self.stack.push_async_callback(child.terminate, grace_s=0)
        await wait_until(ready.exists, what="storage daemon")
        path.chmod(0o666)
        return DiskConfig(id=name, kind="vhost-user-blk", path=str(path)), child


__all__ = [
    *("STOCK", "TOLERANT", "Vm", "World", "binary_of", "make_directories", "open_world", "spawn"),
    "with_seccomp",
]
