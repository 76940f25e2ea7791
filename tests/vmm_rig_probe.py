"""Cloud Hypervisor, and its double, as one VM under the VMM contract; its guest is the probe."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from chv.common.errors import Unavailable
from chv.common.ids import Ids
from chv.common.process import terminate
from chv.vmm.cloud_hypervisor.driver import CloudHypervisorDriver
from chv.vmm.driver import VmmConfig, VmmDriver
from tests.cloud_hypervisor_rig import (
    PROBE,
    STOCK,
    TOLERANT,
    binary_of,
    make_directories,
    spawn,
    with_seccomp,
)
from tests.helpers import wait_until
from tests.vmm_rigs import ProcessRig, Rig

ROOT = Path(__file__).parents[1]
VARIABLES = {"cloud_hypervisor": STOCK, "cloud_hypervisor_tolerant": TOLERANT}
READY = b" ready virtio="
# What a rig's guest is asked to do, in the probe's words, and what it says to that.
WORDS = {
    "reboot": (b"reboot", b""),
    "power_off": (b"off", b""),
    "panic": (b"panic", b""),
    "ignore_button": (b"button=stay", b" button-set how=stay"),
    "cling": (b"cling", b" clings devices=1"),
    "let_go": (b"let_go", b" clings devices=0"),
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
        make_directories(self.runtime_dir, self.save_dir, uid=uid)
        config = self.vm_config = self.config(disk=disk)
        await self.spawn(config)
        nics = {name: (fd,) for name, fd in self.nics.items()}
        await self.driver.create(self.runtime_dir, config, nics)

    async def spawn(self, config: VmmConfig) -> None:
        """Start the VMM, without a VM."""
        self.kept_root = self.is_double and not _everybody_reads(ROOT)
        uid = 0 if self.kept_root else self.layout.vmm_uid(0)
        more = self._as_double(config) if self.is_double else {}
        if self.kind == "cloud_hypervisor_tolerant":
            more = {"argv": with_seccomp(self.driver.launch(config).argv, "log")}
        log_path = self.base / "vmm.log"
        self.record = await spawn(
            self.provider, self.driver, config, uid=uid, log_path=log_path, **more
        )
        self.stack.push_async_callback(terminate, self.record, grace_s=0)
        self.stack.callback(self.hang_up)
        try:
            await wait_until(self._answers)
        except AssertionError:
            pytest.fail(f"no VMM: {log_path.read_text()}")

    def _as_double(self, config: VmmConfig) -> dict[str, Any]:
        program = (sys.executable, "-S", "-m", "tests.doubles.cloud_hypervisor")
        return {
            "argv": (*program, *self.driver.launch(config).argv[1:]),
            "environment": {"CHV_DOUBLE": json.dumps(self.switches), "PYTHONPATH": str(ROOT)},
            "own_devices": (),
        }

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
                os.sched_yield()

    def save_to(self) -> Path:
        directory = self.save_dir / "snapshot"
        make_directories(directory, uid=self.layout.vmm_uid(0))
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
        make_directories(twin.runtime_dir, twin.save_dir, uid=self.layout.vmm_uid(0))
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
        word, answer = WORDS[action]
        await wait_until(lambda: self._type(b"\n" + word + b"\n"), what="serial port")
        if answer:
            await wait_until(lambda: self._hears(answer), what=action)

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


def _stands(stat: Path) -> bool:
    return stat.read_text().rpartition(")")[2].split()[0] in "Tt"


def _everybody_reads(path: Path) -> bool:
    return all(each.stat().st_mode & 0o001 for each in (path, *path.parents))


def make(kind: str, base: Path, stack: AsyncExitStack) -> CloudHypervisorRig:
    """Return a rig of a kind, or skip."""
    binary = "cloud-hypervisor" if kind.endswith("_double") else binary_of(VARIABLES[kind])
    return CloudHypervisorRig(kind, CloudHypervisorDriver((binary,)), base, stack)
