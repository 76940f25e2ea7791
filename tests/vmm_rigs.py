"""One VM under test for each kind of VMM: the in-process fake, the fake process, real QEMU,
Cloud Hypervisor and its double.

The guest of real QEMU is a boot sector that prints a line, heeds the power button and obeys
single letters on the serial port, so that it is up in a fraction of a second.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import struct
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol

import anyio
import msgspec
import pytest
from anyio.abc import SocketStream

from chv.common.errors import (
    Unavailable,
)
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import PlainProvider, SpawnSpec, WorkerRecord, terminate, wait_gone
from chv.common.process.child import Child, start_child
from chv.common.process.spec import Program
from chv.vmm.driver import DiskConfig, NicConfig, VmmConfig, VmmDriver, VmmState
from chv.vmm.fake_driver import FakeDriver, FakeDriverBase
from chv.vmm.in_process import InProcessVmms
from chv.vmm.qemu.driver import QemuDriver
from tests.helpers import wait_until

KINDS = [
    "in_process",
    pytest.param("fake_process", marks=pytest.mark.root),
    pytest.param("qemu", marks=pytest.mark.root),
    pytest.param("cloud_hypervisor_double", marks=pytest.mark.root),
    pytest.param("cloud_hypervisor", marks=pytest.mark.root),
]
# A developer's build that takes snapshots on every KVM stands in for the real one where needed.
MOVING = [*KINDS, pytest.param("cloud_hypervisor_tolerant", marks=pytest.mark.root)]
PROCESSES = ["fake_process", "qemu", "cloud_hypervisor_double", "cloud_hypervisor"]
READY = b"chv-guest: ready"
# 16-bit code at 0x7c00: enable PWRBTN in PM1_EN (0x602), print the text at the end to 0x3f8, then
# for ever: echo a letter from 0x3f8 and obey it (i = ignore the button, c = cling to disks, l = let
# go of them, p = pvpanic (0x505), r = reset (0xcf9), o = off); unless it clings, eject what each
# of the hot-plug controller's buses (0xcd0) is asked for (0xcc4, 0xcc8); on PWRBTN in PM1_STS
# (0x600): off, which is SLP_EN with type S5 to PM1_CNT (0x604).
BOOT_SECTOR = (
    bytes.fromhex(
        "faba0206b80001ef31db31ed8edbbe847cac84c07406baf803eeebf5bafd03eca801742dbaf803ecee3c"
        "697501433c637501453c6c750231ed3c707506ba0505b001ee3c727506baf90cb006ee3c6f742a85ed75"
        "19b11f660fb6c1bad00c66efbac40c66edbac80c66effec979e985db75aaba0006eda9000174a1ba0406"
        "b80020efeb98"
    )
    + READY
    + b"\r\n\0"
).ljust(510, b"\0") + b"\x55\xaa"
TUNSETIFF, TUNGETIFF = 0x400454CA, 0x800454D2
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
LETTERS = {
    "ignore_button": b"i", "panic": b"p", "reboot": b"r", "power_off": b"o", "cling": b"c",
    "let_go": b"l",
}  # fmt: skip


class Rig(Protocol):
    """One VM under test and the world around it."""

    driver: VmmDriver
    runtime_dir: Path

    async def launch(self, *, disk: bool = False) -> None:
        """Start the VMM; with `disk` on a vhost-user disk named `root`."""

    def another_driver(self) -> VmmDriver:
        """Return a driver with no memory, as after a restart of the agent."""

    async def spare_disk(self) -> DiskConfig:
        """Return a disk named `spare` that is served and not plugged."""

    async def guest(self, action: str) -> None:
        """Let the guest do something on its own."""

    async def ready(self) -> None:
        """Return once the guest has come up since the last call."""

    def send(self, number: int) -> None:
        """Signal the VMM."""

    async def gone(self) -> None:
        """Return once the VMM has ended."""

    def stop_backend(self) -> None:
        """Kill the storage daemon and take its socket away."""

    async def start_backend(self) -> None:
        """Start the storage daemon on the same path."""

    def save_to(self) -> Path:
        """Return an empty directory that the VMM may write snapshots and dumps to."""

    async def start_again(self, snapshot: Path) -> None:
        """End the VMM and start another, from a snapshot."""

    async def empty_twin(self) -> Rig:
        """Return a rig whose VMM has no VM yet and may receive this one's."""


class ProcessRig:
    """A VMM in a process of its own with its own uid."""

    def __init__(self, driver: VmmDriver, base: Path, stack: AsyncExitStack) -> None:
        self.driver = driver
        self.layout = Layout("vmmtst", run_root=base / "r", state_root=base / "s")
        self.provider = PlainProvider(self.layout)
        self.base = base
        self.runtime_dir = base / Ids().nonce()
        self.image = base / "boot.img"
        self.export = base / "root.sock"
        self.record: WorkerRecord | None = None
        self.backend: Child | None = None
        self.serial: SocketStream | None = None
        self.stack = stack
        self.kept_root = False
        self.nics: dict[str, int] = {}
        self.vm_config: VmmConfig | None = None

    def config(self, *, disk: bool) -> VmmConfig:
        uid = Ids().uid()
        file = DiskConfig(
            id="seed", kind="file", path=str(self.image), read_only=True, boot_index=2 - disk * 2
        )
        root = DiskConfig(id="root", kind="vhost-user-blk", path=str(self.export), boot_index=1)
        return VmmConfig(
            vm_id=uid,
            uuid=uid,
            name="contract",
            worker_id=self.layout.worker_id("vmm", uid, Ids().nonce()),
            cpus=1,
            cpus_max=4,
            memory_bytes=128 << 20,
            memory_max_bytes=512 << 20,
            accelerator="tcg",
            disks=(file, root) if disk else (file,),
            nics=tuple(
                NicConfig(id=name, mac="52:54:00:12:34:56", on_port=True) for name in self.nics
            ),
            runtime_dir=str(self.runtime_dir),
        )

    async def launch(self, *, disk: bool = False) -> None:
        if disk:
            await self.start_backend()
        config = self.vm_config = self.config(disk=disk)
        self._make_directory()
        if disk:
            os.chown(self.export, self.layout.vmm_uid(0), self.layout.vmm_uid(0))
        await self.spawn(config)
        await self.hear()

    def _make_directory(self) -> None:
        self.runtime_dir.mkdir(mode=0o700)
        os.chown(self.runtime_dir, self.layout.vmm_uid(0), self.layout.vmm_uid(0))

    async def spawn(self, config: VmmConfig) -> None:
        """Start the VMM."""
        uid = self.layout.vmm_uid(0)
        launch = self.driver.launch(config)
        self.kept_root = launch.keep_root
        spec = SpawnSpec(
            worker_id=config.worker_id,
            argv=launch.argv,
            environment=launch.environment,
            cwd=launch.cwd,
            uid=0 if launch.keep_root else uid,
            gid=0 if launch.keep_root else uid,
            groups=launch.groups,
            log_path=str(self.base / "vmm.log"),
            fds={launch.nic_fds[name][0]: fd for name, fd in self.nics.items()},
        )
        self.record = await self.provider.spawn(spec)
        self.stack.push_async_callback(terminate, self.record, grace_s=0)
        try:
            await wait_until(self._answers)
        except AssertionError:
            pytest.fail(f"no VMM: {(self.base / 'vmm.log').read_text()}")

    async def hear(self) -> None:
        """Connect to the serial port."""
        self.serial = await anyio.connect_unix(self.driver.serial_socket(self.runtime_dir))
        self.stack.push_async_callback(self.serial.aclose)

    async def _answers(self) -> bool:
        try:
            await self.driver.observe(self.runtime_dir)
        except Unavailable:
            return False
        return True

    def another_driver(self) -> VmmDriver:
        return type(self.driver)()

    async def guest(self, action: str) -> None:
        if isinstance(self.driver, FakeDriverBase):
            await self.driver.guest(self.runtime_dir, action)
        else:
            assert self.serial is not None
            await self.serial.send(LETTERS[action])
            if action in ("ignore_button", "cling", "let_go"):
                with anyio.fail_after(10):
                    while LETTERS[action] not in await self.serial.receive():
                        pass  # until the echo: from there on it does

    async def ready(self) -> None:
        assert self.serial is not None
        seen = b""
        with anyio.fail_after(20):
            while READY not in seen:
                seen += await self.serial.receive()

    def send(self, number: int) -> None:
        assert self.record is not None
        os.kill(self.record.pid, number)

    async def gone(self) -> None:
        assert self.record is not None
        with anyio.fail_after(10):
            await wait_gone(self.record)

    def stop_backend(self) -> None:
        assert self.backend is not None
        self.export.unlink()
        self.backend.kill_group()
        self.backend.reap()

    async def start_backend(self) -> None:
        self.backend = await self._serve(self.export)

    async def _serve(self, path: Path) -> Child:
        raw = f"driver=file,node-name=n,filename={self.image},read-only=on,locking=off"
        export = f"vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path={path}"
        ready = path.with_suffix(".pid")  # written when it listens; the path is there before
        ready.unlink(missing_ok=True)
        argv = ("qemu-storage-daemon", "--blockdev", raw, "--export", export)
        child = await start_child(Program(argv=(*argv, "--pidfile", str(ready))))
        await wait_until(ready.exists, what="storage daemon")
        path.chmod(0o666)
        return child

    async def spare_disk(self) -> DiskConfig:
        path = self.base / "spare.sock"
        child = await self._serve(path)
        self.stack.push_async_callback(child.terminate, grace_s=0)
        return DiskConfig(id="spare", kind="vhost-user-blk", path=str(path))

    def save_to(self) -> Path:
        directory = self.base / "saved"
        directory.mkdir(mode=0o700)
        os.chown(directory, self.layout.vmm_uid(0), self.layout.vmm_uid(0))
        return directory

    async def start_again(self, snapshot: Path) -> None:
        assert self.record is not None and self.vm_config is not None
        await terminate(self.record, grace_s=0)
        await self.driver.close(self.runtime_dir)
        for path in self.runtime_dir.iterdir():
            path.unlink()
        config = self.renamed(restore_dir=str(snapshot))
        await self.spawn(config)
        await self.driver.create(self.runtime_dir, config, {})
        await self.hear()

    def renamed(self, **changes: object) -> VmmConfig:
        """Return the VM's configuration for another process."""
        assert self.vm_config is not None
        worker_id = self.layout.worker_id("vmm", self.vm_config.vm_id, Ids().nonce())
        return msgspec.structs.replace(self.vm_config, worker_id=worker_id, **changes)

    async def empty_twin(self) -> Rig:
        twin = ProcessRig(self.another_driver(), self.base, self.stack)
        twin._make_directory()
        twin.vm_config = self.renamed(runtime_dir=str(twin.runtime_dir), incoming=True)
        await twin.spawn(twin.vm_config)
        await twin.hear()
        return twin

    async def end_backend(self) -> None:
        if self.backend is not None and self.backend.returncode is None:
            await self.backend.terminate(grace_s=0)


class InProcessRig:
    """A VMM without a process."""

    def __init__(self, vmms: InProcessVmms | None = None, runtime_dir: str = "/nowhere") -> None:
        self.vmms = vmms or InProcessVmms()
        self.driver: VmmDriver = self.vmms
        self.runtime_dir = Path(runtime_dir)
        self.worker_id = Layout("vmmtst").worker_id("vmm", Ids().uid(), "0")
        self.vm_config: VmmConfig | None = None

    async def launch(self, *, disk: bool = False) -> None:
        uid = Ids().uid()
        disks = (DiskConfig(id="root", kind="vhost-user-blk", path="/s"),) if disk else ()
        config = VmmConfig(
            vm_id=uid,
            uuid=uid,
            name="contract",
            worker_id=self.worker_id,
            cpus=1,
            cpus_max=4,
            memory_bytes=128 << 20,
            memory_max_bytes=512 << 20,
            disks=disks,
            runtime_dir=str(self.runtime_dir),
        )
        self.spawn(config)

    def spawn(self, config: VmmConfig) -> None:
        """Start the VMM."""
        self.vm_config = config
        self.vmms.start(self.vmms.launch(config).argv)
        self.vmm = self.vmms.at(self.runtime_dir)

    def another_driver(self) -> VmmDriver:
        return self.vmms

    async def spare_disk(self) -> DiskConfig:
        return DiskConfig(id="spare", kind="vhost-user-blk", path="/spare")

    async def guest(self, action: str) -> None:
        await self.vmms.guest(self.runtime_dir, action)

    async def ready(self) -> None:
        assert self.vmm.vm.state is VmmState.RUNNING

    def send(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.vmms.kill(self.worker_id)
        elif number == signal.SIGSTOP:
            self.vmm.freeze()
        else:
            self.vmm.thaw()

    async def gone(self) -> None:
        with anyio.fail_after(1):
            await self.vmms.wait_gone(self.worker_id)

    def stop_backend(self) -> None:
        self.vmm.vm.disks["root"] = False

    async def start_backend(self) -> None:
        self.vmm.vm.disks["root"] = True

    def save_to(self) -> Path:
        return Path("/nowhere/saved")

    async def start_again(self, snapshot: Path) -> None:
        assert self.vm_config is not None
        self.vmms.kill(self.worker_id)
        config = msgspec.structs.replace(self.vm_config, restore_dir=str(snapshot))
        self.spawn(config)
        await self.driver.create(self.runtime_dir, config, {})

    async def empty_twin(self) -> Rig:
        assert self.vm_config is not None
        twin = InProcessRig(self.vmms, "/elsewhere")
        config = msgspec.structs.replace(
            self.vm_config,
            worker_id=twin.worker_id,
            runtime_dir=str(twin.runtime_dir),
            incoming=True,
        )
        twin.spawn(config)
        return twin


@contextmanager
def open_directory() -> Iterator[Path]:
    """Make a directory that the VM's uid may pass through; pytest's own are 0700."""
    base = Path(tempfile.mkdtemp(prefix="chv-vmm-"))
    base.chmod(0o711)
    (base / "boot.img").write_bytes(BOOT_SECTOR.ljust(1 << 20, b"\0"))
    (base / "boot.img").chmod(0o644)
    try:
        yield base
    finally:
        shutil.rmtree(base)


@asynccontextmanager
async def open_rig(kind: str) -> AsyncIterator[Rig]:
    if kind == "in_process":
        yield InProcessRig()
        return
    if os.geteuid() != 0:
        pytest.skip("needs root: VMMs run under uids of their own")
    if kind == "qemu" and shutil.which("qemu-system-x86_64") is None:
        pytest.skip("qemu-system-x86_64 is not installed")
    with open_directory() as base:
        async with AsyncExitStack() as stack:
            rig = await _process_rig(kind, base, stack)
            stack.push_async_callback(rig.end_backend)
            yield rig
            await rig.driver.close(rig.runtime_dir)


async def _process_rig(kind: str, base: Path, stack: AsyncExitStack) -> ProcessRig:
    if kind.startswith("cloud_hypervisor"):
        from tests import vmm_rig_probe  # which is built on this module

        return vmm_rig_probe.make(kind, base, stack)
    driver: VmmDriver = QemuDriver() if kind == "qemu" else FakeDriver()
    assert (await driver.probe(None)).usable
    return ProcessRig(driver, base, stack)


@contextmanager
def open_tap() -> Iterator[int]:
    """A tap that vanishes with its descriptor; its link is up, as of those that nwd makes."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", b"chvtst%d", flags))
        set_link(fd, IFF_UP)
        yield fd
    finally:
        os.close(fd)


def set_link(tap: int, flags: int) -> None:
    """Set a tap's link up (IFF_UP) or down (0)."""
    name = fcntl.ioctl(tap, TUNGETIFF, bytes(40))[:16]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", name, flags))
