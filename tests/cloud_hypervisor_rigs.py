"""Cloud Hypervisor under the VMM contract: the real one with the probe guest, and its double."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path

import msgspec
import pytest

from chv.common.errors import Unavailable
from chv.common.ids import Ids
from chv.common.process import SpawnSpec, terminate
from chv.vmm.cloud_hypervisor.driver import CloudHypervisorDriver
from chv.vmm.driver import Launch, VmmConfig, VmmDriver
from tests.helpers import wait_until
from tests.vmm_rigs import ProcessRig, Rig

ROOT = Path(__file__).parents[1]
PROBE = ROOT / "chv" / "probe" / "probe.elf"
READY = b" ready virtio="
WORDS = {"reboot": b"reboot", "power_off": b"off"}  # that the probe knows, and so the double
MORE = {"ignore_button": b"ignore", "panic": b"panic", "cling": b"cling", "let_go": b"let_go"}
ANSWERS = {"ignore_button": b"ignores ", "cling": b"clings ", "let_go": b"clings "}
VARIABLES = {
    "cloud_hypervisor": "CHV_CLOUD_HYPERVISOR",
    "cloud_hypervisor_tolerant": "CHV_CLOUD_HYPERVISOR_TOLERANT",
}


class CloudHypervisorRig(ProcessRig):
    """Its own directory has the one of the VM's uid in it, and what root keeps beside that."""

    def __init__(self, kind: str, driver: VmmDriver, base: Path, stack: AsyncExitStack) -> None:
        super().__init__(driver, base, stack)
        self.kind = kind
        self.home = self.runtime_dir
        self.runtime_dir = self.home / "vmm"
        self.save_dir = self.home / "save"
        self.viewer: socket.socket | None = None
        self.heard = b""
        self.switches: dict[str, object] = {}
        self.vm_config: VmmConfig | None = None
        self.logs_seccomp = kind == "cloud_hypervisor_tolerant"

    @property
    def is_double(self) -> bool:
        return self.kind.endswith("_double")

    def config(self, *, disk: bool) -> VmmConfig:
        kernel = self.base / "probe.elf"
        shutil.copy(PROBE, kernel)
        kernel.chmod(0o644)
        base = super().config(disk=disk)
        disks = tuple(each for each in base.disks if each.kind != "file")
        return msgspec.structs.replace(
            base,
            accelerator="kvm",
            disks=disks,
            kernel=str(kernel),
            cmdline="beat=200",  # what a full socket holds back goes on with the next line
            runtime_dir=str(self.runtime_dir),
            save_dir=str(self.save_dir),
            cpus_max=4,
            memory_bytes=128 << 20,
            memory_max_bytes=512 << 20,
        )

    async def launch(self, *, disk: bool = False) -> None:
        uid = self.layout.vmm_uid(0)
        if disk:
            await self.start_backend()
            os.chown(self.export, uid, uid)
        self.home.mkdir(mode=0o711)
        for directory in (self.runtime_dir, self.save_dir):
            directory.mkdir(mode=0o700)
            os.chown(directory, uid, uid)
        config = self.vm_config = self.config(disk=disk)
        await self.spawn(config)
        nics = {name: (fd,) for name, fd in self.nics.items()}
        await self.driver.create(self.runtime_dir, config, nics)

    async def spawn(self, config: VmmConfig) -> None:
        """Start the VMM, without a VM."""
        launch = self.driver.launch(config)
        self.kept_root = self.is_double and not _everybody_reads(ROOT)
        uid = 0 if self.kept_root else self.layout.vmm_uid(0)
        with ExitStack() as opened:
            fds = _inherited(launch, opened)
            self.record = await self.provider.spawn(
                SpawnSpec(
                    worker_id=config.worker_id,
                    argv=self._argv(launch),
                    environment=launch.environment | self._environment(),
                    cwd=str(ROOT) if self.is_double else "/",
                    fds=fds,
                    uid=uid,
                    gid=uid,
                    groups=launch.groups,
                    own_devices=self._devices(launch),
                    log_path=str(self.base / "vmm.log"),
                )
            )
        self.stack.push_async_callback(terminate, self.record, grace_s=0)
        self.stack.callback(self.hang_up)
        try:
            await wait_until(self._answers)
        except AssertionError:
            pytest.fail(f"no VMM: {(self.base / 'vmm.log').read_text()}")

    def _argv(self, launch: Launch) -> tuple[str, ...]:
        if self.logs_seccomp:  # a glibc build's own filter ends the thread that moves a VM
            return tuple("log" if word == "true" else word for word in launch.argv)
        if self.is_double:
            program = (sys.executable, "-S", "-m", "tests.doubles.cloud_hypervisor")
            return (*program, *launch.argv[1:])
        return launch.argv

    def _environment(self) -> dict[str, str]:
        return {"CHV_DOUBLE": json.dumps(self.switches)} if self.is_double else {}

    def _devices(self, launch: Launch) -> tuple[str, ...]:
        return ("/dev/kvm",) if launch.private_kvm and not self.is_double else ()

    async def _answers(self) -> bool:
        try:
            await self.driver.observe(self.runtime_dir)
        except Unavailable:
            return False
        return True

    def send(self, number: int) -> None:
        """Signal the VMM; of a process with many threads, not every one stops at once."""
        super().send(number)
        if number == signal.SIGSTOP:
            assert self.record is not None
            tasks = Path(f"/proc/{self.record.pid}/task")
            while not all(_stands(task / "stat") for task in tasks.iterdir()):
                time.sleep(0.001)

    def save_to(self) -> Path:
        directory = self.save_dir / "snapshot"
        directory.mkdir(mode=0o700)
        os.chown(directory, self.layout.vmm_uid(0), self.layout.vmm_uid(0))
        return directory

    async def start_again(self, snapshot: Path) -> None:
        assert self.record is not None and self.vm_config is not None
        await terminate(self.record, grace_s=0)
        await self.driver.close(self.runtime_dir)
        self.hang_up()
        for path in (self.driver.serial_socket(self.runtime_dir), *self._kept()):
            path.unlink(missing_ok=True)
        worker_id = self.layout.worker_id("vmm", self.vm_config.vm_id, Ids().nonce())
        config = msgspec.structs.replace(
            self.vm_config, restore_dir=str(snapshot), worker_id=worker_id
        )
        await self.spawn(config)
        await self.driver.create(self.runtime_dir, config, {})

    def _kept(self) -> tuple[Path, ...]:
        return self.driver.kept_files(self.runtime_dir)

    async def empty_twin(self) -> Rig:
        assert self.vm_config is not None
        twin = type(self)(self.kind, self.another_driver(), self.base, self.stack)
        twin.home.mkdir(mode=0o711)
        for directory in (twin.runtime_dir, twin.save_dir):
            directory.mkdir(mode=0o700)
            os.chown(directory, self.layout.vmm_uid(0), self.layout.vmm_uid(0))
        twin.vm_config = msgspec.structs.replace(
            self.vm_config,
            runtime_dir=str(twin.runtime_dir),
            worker_id=self.layout.worker_id("vmm", self.vm_config.vm_id, Ids().nonce()),
            binary=self.driver.launch(self.vm_config).argv[0],
        )
        await twin.spawn(twin.vm_config)
        return twin

    def another_driver(self) -> VmmDriver:
        return CloudHypervisorDriver()

    async def guest(self, action: str) -> None:
        if action not in WORDS and not self.is_double:
            pytest.skip(f"the probe guest does not know how to {action.replace('_', ' ')}")
        word = (WORDS | MORE)[action]
        await wait_until(lambda: self._type(b"\n" + word + b"\n"), what="serial port")
        if action in ANSWERS:
            await wait_until(lambda: self._hears(ANSWERS[action]), what=action)

    async def ready(self) -> None:
        await wait_until(lambda: self._hears(READY), timeout_s=20, what="guest")

    def _hears(self, text: bytes) -> bool:
        """Take `text` out of what was heard; hear on where it is not there yet."""
        if text not in self.heard:
            self._hear()
        _, found, rest = self.heard.partition(text)
        if found:
            self.heard = rest
        return bool(found)

    def _type(self, words: bytes) -> bool:
        self._hear()
        if self.viewer is None:
            return False
        with suppress(BrokenPipeError):
            self.viewer.sendall(words)
            return True
        return False

    def _hear(self) -> None:
        """Read what is there; a VMM hangs up at each boot, and is connected to again."""
        if self.viewer is None:
            viewer = socket.socket(socket.AF_UNIX)
            try:
                viewer.connect(str(self.driver.serial_socket(self.runtime_dir)))
            except OSError:
                viewer.close()
                return
            viewer.setblocking(False)
            self.viewer = viewer
        with suppress(BlockingIOError):
            while True:
                try:
                    data = self.viewer.recv(65536)
                except ConnectionResetError:
                    data = b""
                if not data:
                    self.hang_up()
                    return
                self.heard += data

    def hang_up(self) -> None:
        if self.viewer is not None:
            self.viewer.close()
            self.viewer = None


def _inherited(launch: Launch, opened: ExitStack) -> dict[int, int]:
    """Make what the VMM inherits, as the agent does."""
    fds = {}
    for number, path in launch.listeners.items():
        listener = opened.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(path)
        Path(path).chmod(0o600)
        listener.listen(8)
        fds[number] = listener.fileno()
    for number, path in launch.appended.items():
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        fds[number] = os.open(path, flags, 0o600)
        opened.callback(os.close, fds[number])
    return fds


def _stands(stat: Path) -> bool:
    return stat.read_text().rpartition(")")[2].split()[0] in "Tt"


def _everybody_reads(path: Path) -> bool:
    return all(each.stat().st_mode & 0o001 for each in (path, *path.parents))


def make(kind: str, base: Path, stack: AsyncExitStack) -> CloudHypervisorRig:
    """Return a rig of a kind, or skip."""
    if kind.endswith("_double"):
        return CloudHypervisorRig(kind, CloudHypervisorDriver(("cloud-hypervisor",)), base, stack)
    variable = VARIABLES[kind]
    binary = os.environ.get(variable, "") or (
        shutil.which("cloud-hypervisor") if kind == "cloud_hypervisor" else ""
    )
    if not binary:
        pytest.skip(f"no Cloud Hypervisor: {variable} names none")
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        pytest.skip("Cloud Hypervisor needs /dev/kvm")
    return CloudHypervisorRig(kind, CloudHypervisorDriver((binary,)), base, stack)
