"""One behaviour suite for every VMM driver: the in-process fake, the fake process, real QEMU.

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
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import anyio
import msgspec
import pytest
from anyio.abc import SocketStream

from chv.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    OutcomeUnknown,
    Unavailable,
)
from chv.common.ids import Ids
from chv.common.layout import Layout
from chv.common.process import PlainProvider, SpawnSpec, WorkerRecord, terminate, wait_gone
from chv.common.process.child import Child, start_child
from chv.common.process.spec import Program
from chv.vmm import fake_driver, in_process
from chv.vmm.driver import DiskConfig, NicConfig, VmmConfig, VmmDriver, VmmState
from chv.vmm.fake_driver import FakeDriver, FakeDriverBase
from chv.vmm.in_process import InProcessVmms
from chv.vmm.qemu import qmp
from chv.vmm.qemu.driver import QemuDriver
from tests.helpers import wait_until

READY = b"chv-guest: ready"
# 16-bit code at 0x7c00: enable PWRBTN in PM1_EN (0x602), print the text at the end to 0x3f8, then
# for ever: echo a letter from 0x3f8 and obey it (i = ignore the button, p = pvpanic (0x505),
# r = reset (0xcf9), o = off); on PWRBTN in PM1_STS (0x600): off, which is SLP_EN with type S5 to
# PM1_CNT (0x604).
BOOT_SECTOR = (
    bytes.fromhex(
        "faba0206b80001efbe5e0081c6007c31db8edbac84c07406baf803eeebf5bafd03eca8017422baf803ec"
        "ee3c697501433c707506ba0505b001ee3c727506baf90cb006ee3c6f740d85db75d2ba0006eda9000174"
        "c9ba0406b80020efebc0"
    )
    + READY
    + b"\r\n\0"
).ljust(510, b"\0") + b"\x55\xaa"
TUNSETIFF, TUNGETIFF = 0x400454CA, 0x800454D2
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
LETTERS = {"ignore_button": b"i", "panic": b"p", "reboot": b"r", "power_off": b"o"}


class Rig(Protocol):
    """One VM under test and the world around it."""

    driver: VmmDriver
    runtime_dir: Path

    async def launch(self, *, disk: bool = False) -> None:
        """Start the VMM; with `disk` on a vhost-user disk named `root`."""

    def another_driver(self) -> VmmDriver:
        """Return a driver with no memory, as after a restart of the agent."""

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
        self.nics: dict[str, int] = {}

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
            memory_bytes=64 << 20,
            accelerator="tcg",
            disks=(file, root) if disk else (file,),
            nics=tuple(NicConfig(id=name, mac="52:54:00:12:34:56") for name in self.nics),
            runtime_dir=str(self.runtime_dir),
        )

    async def launch(self, *, disk: bool = False) -> None:
        if disk:
            await self.start_backend()
        config = self.config(disk=disk)
        uid = self.layout.vmm_uid(0)
        self.runtime_dir.mkdir(mode=0o700)
        os.chown(self.runtime_dir, uid, uid)
        if disk:
            os.chown(self.export, uid, uid)
        launch = self.driver.launch(config)
        spec = SpawnSpec(
            worker_id=config.worker_id,
            argv=launch.argv,
            environment=launch.environment,
            uid=uid,
            gid=uid,
            groups=launch.groups,
            log_path=str(self.base / "vmm.log"),
            fds={launch.nic_fds[name]: fd for name, fd in self.nics.items()},
        )
        self.record = await self.provider.spawn(spec)
        self.stack.push_async_callback(terminate, self.record, grace_s=0)
        try:
            await wait_until(self._answers)
        except AssertionError:
            pytest.fail(f"no VMM: {(self.base / 'vmm.log').read_text()}")
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
            if action == "ignore_button":
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
        raw = f"driver=file,node-name=n,filename={self.image},read-only=on,locking=off"
        export = f"vhost-user-blk,id=e,node-name=n,addr.type=unix,addr.path={self.export}"
        argv = ("qemu-storage-daemon", "--blockdev", raw, "--export", export)
        self.backend = await start_child(Program(argv=argv))
        await wait_until(self.export.exists, what="storage daemon")
        self.export.chmod(0o666)

    async def end_backend(self) -> None:
        if self.backend is not None and self.backend.returncode is None:
            await self.backend.terminate(grace_s=0)


class InProcessRig:
    """A VMM without a process."""

    def __init__(self) -> None:
        self.vmms = InProcessVmms()
        self.driver: VmmDriver = self.vmms
        self.runtime_dir = Path("/nowhere")
        self.worker_id = Layout("vmmtst").worker_id("vmm", Ids().uid(), "0")

    async def launch(self, *, disk: bool = False) -> None:
        uid = Ids().uid()
        disks = (DiskConfig(id="root", kind="vhost-user-blk", path="/s"),) if disk else ()
        config = VmmConfig(
            vm_id=uid,
            uuid=uid,
            name="contract",
            worker_id=self.worker_id,
            cpus=1,
            memory_bytes=64 << 20,
            disks=disks,
            runtime_dir=str(self.runtime_dir),
        )
        self.vmms.start(self.vmms.launch(config).argv)
        self.vmm = self.vmms.at(self.runtime_dir)

    def another_driver(self) -> VmmDriver:
        return self.vmms

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
    driver: VmmDriver = QemuDriver() if kind == "qemu" else FakeDriver()
    assert (await driver.probe(None)).usable
    with open_directory() as base:
        async with AsyncExitStack() as stack:
            rig = ProcessRig(driver, base, stack)
            stack.push_async_callback(rig.end_backend)
            yield rig
            await driver.close(rig.runtime_dir)


KINDS = [
    "in_process",
    pytest.param("fake_process", marks=pytest.mark.root),
    pytest.param("qemu", marks=pytest.mark.root),
]


@pytest.fixture(params=KINDS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with open_rig(request.param) as made:
        yield made


@pytest.fixture
async def running(rig: Rig) -> Rig:
    """A rig whose guest has booted."""
    await rig.launch()
    await rig.driver.boot(rig.runtime_dir)
    await rig.ready()
    return rig


@pytest.fixture
def short_deadline(monkeypatch: pytest.MonkeyPatch) -> float:
    """Let drivers give up sooner than in production."""
    for module, name in ((qmp, "COMMAND_S_MAX"), (fake_driver, "CALL_S_MAX")):
        monkeypatch.setattr(module, name, 0.5)
    monkeypatch.setattr(in_process, "CALL_S_MAX", 0.5)
    return 0.5


async def state(rig: Rig) -> VmmState:
    return (await rig.driver.observe(rig.runtime_dir)).state


async def becomes(rig: Rig, expected: VmmState) -> None:
    async def there() -> bool:
        return await state(rig) is expected

    await wait_until(there, timeout_s=10, what=f"state {expected}")


async def test_a_started_vmm_is_created_and_its_guest_runs_only_after_boot(rig: Rig) -> None:
    await rig.launch()
    assert await state(rig) is VmmState.CREATED
    await rig.driver.boot(rig.runtime_dir)
    assert await state(rig) is VmmState.RUNNING
    await rig.ready()


async def test_an_observation_says_where_it_comes_from(running: Rig) -> None:
    seen = await running.driver.observe(running.runtime_dir)
    assert "running" in seen.evidence
    assert seen.version


async def test_boot_of_a_running_vm_has_no_effect(running: Rig) -> None:
    await running.driver.boot(running.runtime_dir)
    assert await state(running) is VmmState.RUNNING


async def test_pause_and_resume_take_effect_and_may_be_repeated(running: Rig) -> None:
    for _ in range(2):
        await running.driver.pause(running.runtime_dir)
        assert await state(running) is VmmState.PAUSED
    for _ in range(2):
        await running.driver.resume(running.runtime_dir)
        assert await state(running) is VmmState.RUNNING


async def test_what_the_state_does_not_allow_is_refused_and_changes_nothing(rig: Rig) -> None:
    await rig.launch()
    with pytest.raises(FailedPrecondition, match="created"):
        await rig.driver.pause(rig.runtime_dir)
    with pytest.raises(FailedPrecondition, match="created"):
        await rig.driver.power_button(rig.runtime_dir)
    assert await state(rig) is VmmState.CREATED


async def test_boot_of_a_paused_vm_is_refused(running: Rig) -> None:
    await running.driver.pause(running.runtime_dir)
    with pytest.raises(FailedPrecondition, match="paused"):
        await running.driver.boot(running.runtime_dir)
    assert await state(running) is VmmState.PAUSED


async def test_reset_of_a_running_vm_boots_the_guest_again(running: Rig) -> None:
    await running.driver.reset(running.runtime_dir)
    assert await state(running) is VmmState.RUNNING
    await running.ready()


async def test_reset_of_a_paused_vm_leaves_it_created_until_resume(running: Rig) -> None:
    await running.driver.pause(running.runtime_dir)
    await running.driver.reset(running.runtime_dir)
    assert await state(running) is VmmState.CREATED
    await running.driver.resume(running.runtime_dir)
    assert await state(running) is VmmState.RUNNING
    await running.ready()


async def test_the_power_button_shuts_a_guest_down_and_the_vmm_stays(running: Rig) -> None:
    await running.driver.power_button(running.runtime_dir)
    await becomes(running, VmmState.SHUTDOWN)
    seen = await running.driver.observe(running.runtime_dir)
    assert seen.reason == "guest-shutdown"
    await running.driver.power_button(running.runtime_dir)
    assert await state(running) is VmmState.SHUTDOWN


async def test_a_guest_that_ignores_the_power_button_goes_on(running: Rig) -> None:
    await running.guest("ignore_button")
    await running.driver.power_button(running.runtime_dir)
    await running.guest("reboot")  # the next thing it does: by then it has seen the button
    await running.ready()
    assert await state(running) is VmmState.RUNNING


async def test_a_guest_that_powered_off_runs_again_after_reset_and_boot(running: Rig) -> None:
    await running.guest("power_off")
    await becomes(running, VmmState.SHUTDOWN)
    with pytest.raises(FailedPrecondition, match="shutdown"):
        await running.driver.boot(running.runtime_dir)
    with pytest.raises(FailedPrecondition, match="shutdown"):
        await running.driver.resume(running.runtime_dir)
    await running.driver.reset(running.runtime_dir)
    assert await state(running) is VmmState.CREATED
    await running.driver.boot(running.runtime_dir)
    await running.ready()


async def test_a_panic_is_told_and_ends_with_reset(running: Rig) -> None:
    await running.guest("panic")
    await becomes(running, VmmState.PANICKED)
    await running.driver.reset(running.runtime_dir)
    await running.driver.boot(running.runtime_dir)
    await running.ready()


async def test_a_guest_that_reboots_itself_stays_running(running: Rig) -> None:
    await running.guest("reboot")
    await running.ready()
    assert await state(running) is VmmState.RUNNING


async def test_quit_ends_the_vmm_and_then_nobody_answers(running: Rig) -> None:
    await running.driver.quit(running.runtime_dir)
    await running.gone()
    with pytest.raises(Unavailable):
        await running.driver.observe(running.runtime_dir)
    with pytest.raises(Unavailable):
        await running.driver.quit(running.runtime_dir)


async def test_a_killed_vmm_is_unavailable_for_reads_and_changes(running: Rig) -> None:
    running.send(signal.SIGKILL)
    await running.gone()
    with anyio.fail_after(2):
        with pytest.raises(Unavailable):
            await running.driver.observe(running.runtime_dir)
        with pytest.raises(Unavailable):
            await running.driver.pause(running.runtime_dir)


async def test_a_driver_whose_connection_was_closed_connects_again(running: Rig) -> None:
    await running.driver.close(running.runtime_dir)
    await running.driver.close(running.runtime_dir)
    assert await state(running) is VmmState.RUNNING


async def test_a_second_driver_takes_over_when_the_first_is_gone(
    running: Rig, short_deadline: float
) -> None:
    second = running.another_driver()
    try:
        seen = await second.observe(running.runtime_dir)
    except (Unavailable, DeadlineExceeded):
        pass  # QEMU serves one client; the wait was bounded
    else:
        assert seen.state is VmmState.RUNNING
    await running.driver.close(running.runtime_dir)
    await second.pause(running.runtime_dir)
    assert (await second.observe(running.runtime_dir)).state is VmmState.PAUSED
    await second.close(running.runtime_dir)


async def test_many_calls_at_once_on_one_vm_all_get_their_answer(running: Rig) -> None:
    states: list[VmmState] = []

    async def look() -> None:
        states.append(await state(running))

    async with anyio.create_task_group() as callers:
        for _ in range(50):
            callers.start_soon(look)
    assert states == [VmmState.RUNNING] * 50


async def test_a_cancelled_call_leaves_the_monitor_usable(running: Rig) -> None:
    running.send(signal.SIGSTOP)
    with anyio.move_on_after(0.05) as scope:
        await running.driver.observe(running.runtime_dir)
    running.send(signal.SIGCONT)
    assert scope.cancelled_caught
    assert await state(running) is VmmState.RUNNING


async def test_a_hung_vmm_costs_a_bounded_time_and_recovers(
    running: Rig, short_deadline: float
) -> None:
    running.send(signal.SIGSTOP)
    try:
        with anyio.fail_after(short_deadline * 4):
            with pytest.raises((DeadlineExceeded, Unavailable)):
                await running.driver.observe(running.runtime_dir)
            with pytest.raises((DeadlineExceeded, OutcomeUnknown)):
                await running.driver.pause(running.runtime_dir)
    finally:
        running.send(signal.SIGCONT)
    await running.driver.resume(running.runtime_dir)
    assert await state(running) is VmmState.RUNNING


async def test_a_fresh_driver_meets_a_hung_vmm_in_bounded_time(
    running: Rig, short_deadline: float
) -> None:
    await running.driver.close(running.runtime_dir)
    running.send(signal.SIGSTOP)
    try:
        for _ in range(4):
            with (
                anyio.fail_after(short_deadline * 2),
                pytest.raises((DeadlineExceeded, Unavailable)),
            ):
                await running.another_driver().observe(running.runtime_dir)
    finally:
        running.send(signal.SIGCONT)

    async def answers_again() -> bool:
        with suppress(Unavailable):  # until QEMU has taken leave of those who gave up
            return await state(running) is VmmState.RUNNING
        return False

    await wait_until(answers_again)


async def test_a_vm_that_was_never_started_is_unavailable(rig: Rig) -> None:
    with pytest.raises(Unavailable):
        await rig.driver.observe(rig.runtime_dir)


async def test_a_guest_boots_again_from_a_storage_daemon_that_came_back(rig: Rig) -> None:
    await rig.launch(disk=True)
    await rig.driver.await_disks(rig.runtime_dir, ("root",))
    await rig.driver.boot(rig.runtime_dir)
    await rig.ready()

    rig.stop_backend()
    await rig.driver.pause(rig.runtime_dir)
    with anyio.move_on_after(0.3) as too_early:
        await rig.driver.await_disks(rig.runtime_dir, ("root",))
    assert too_early.cancelled_caught

    await rig.start_backend()
    with anyio.fail_after(10):
        await rig.driver.await_disks(rig.runtime_dir, ("root",))
    await rig.driver.reset(rig.runtime_dir)
    await rig.driver.resume(rig.runtime_dir)
    await rig.ready()


async def test_waiting_for_a_disk_that_the_vm_does_not_have_is_an_error(running: Rig) -> None:
    with pytest.raises(NotFound, match="ghost"):
        await running.driver.await_disks(running.runtime_dir, ("ghost",))


@pytest.mark.root
@pytest.mark.parametrize("kind", ["fake_process", "qemu"])
async def test_a_vmm_process_has_its_own_uid_and_no_capabilities(kind: str) -> None:
    async with open_rig(kind) as made:
        assert isinstance(made, ProcessRig)
        await made.launch()
        assert made.record is not None
        lines = Path(f"/proc/{made.record.pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        uid = str(made.layout.vmm_uid(0))
        assert status["Uid"].split() == [uid] * 4
        assert status["Groups"].strip() in ("", uid)
        assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
        if kind == "qemu":
            assert status["Seccomp"] == "2"
        assert msgspec.to_builtins(made.provider.adopt(made.record).verdict) == "alive"


@contextmanager
def open_tap() -> Iterator[int]:
    """A tap that vanishes with its descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH14x", b"chvtst%d", flags))
        yield fd
    finally:
        os.close(fd)


@pytest.mark.root
@pytest.mark.parametrize("kind", ["fake_process", "qemu"])
async def test_a_nic_is_an_inherited_descriptor_that_the_vmm_holds(kind: str) -> None:
    if not os.access("/dev/net/tun", os.W_OK):
        pytest.skip("no /dev/net/tun")
    async with open_rig(kind) as made:
        assert isinstance(made, ProcessRig)
        with open_tap() as tap:
            made.nics = {"net0": tap}
            await made.launch()
            name = fcntl.ioctl(tap, TUNGETIFF, bytes(32))[:16].rstrip(b"\0").decode()
        assert made.record is not None
        held = Path(f"/proc/{made.record.pid}/fdinfo/10").read_text()
        assert f"iff:\t{name}" in held
        made.send(signal.SIGKILL)
        await made.gone()
        await wait_until(lambda: name not in [link for _, link in socket.if_nameindex()])
