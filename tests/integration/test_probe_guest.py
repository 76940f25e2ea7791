"""The probe guest for real: on QEMU with TCG always, on Cloud Hypervisor where there is one."""

from __future__ import annotations

import signal
import struct
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, Protocol

import pytest

from chv.probe.device_events import (
    Acked,
    Disk,
    DiskDone,
    DiskPlanned,
    DiskRefused,
    DiskReset,
    DiskResize,
    DiskResumed,
    DiskStall,
    Records,
)  # fmt: skip
from chv.probe.events import (
    Beat,
    Boot,
    Button,
    ButtonSet,
    Done,
    End,
    EndFailed,
    Fault,
    InputRefused,
    Pong,
    Ready,
)  # fmt: skip
from chv.probe.events import (
    Machine as MachineLine,
)
from chv.probe.image import DiskPlan, ProbeCommand
from tests import probe_rig as rig

MIB = 1 << 20
SECTOR = 512


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


@pytest.fixture
def image(tmp_path: Path) -> Path:
    path = tmp_path / "disk.raw"
    with path.open("wb") as file:
        file.truncate(8 * MIB)
    return path


class Booter(Protocol):
    """Boots the probe on one VMM, with one disk named vol-a if there is an image."""

    async def __call__(self, command: ProbeCommand, image: Path | None = None) -> rig.Machine: ...


@pytest.fixture(params=["qemu", "cloud-hypervisor"])
async def boot(
    request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path
) -> AsyncIterator[Booter]:
    async def on_qemu(command: ProbeCommand, image: Path | None = None) -> rig.Machine:
        return await rig.qemu(
            stack, tmp_path, command, *(rig.disk(image, "vol-a") if image else ())
        )

    async def on_cloud_hypervisor(command: ProbeCommand, image: Path | None = None) -> rig.Machine:
        disks = (
            [{"path": str(image), "id": "vol-a", "serial": "vol-a", "image_type": "Raw"}]
            if image
            else []
        )
        return await rig.cloud_hypervisor(stack, tmp_path, command, disks=disks)

    yield on_qemu if request.param == "qemu" else on_cloud_hypervisor


# ---- life ----


async def test_it_speaks_at_once_and_turns_itself_off(boot: Booter) -> None:
    machine = await boot(ProbeCommand(end="off"))
    assert (await machine.serial.wait(Boot)).protocol == 1
    assert 60 * MIB < (await machine.serial.wait(MachineLine)).memory <= 64 * MIB
    done = await machine.serial.wait(Done)
    assert (done.ok, done.passed, done.failed) == (True, 0, 0)
    assert (await machine.serial.wait(End)).how == "off"
    assert await machine.exit() == 0


async def test_it_beats_and_answers_on_its_serial_port(boot: Booter) -> None:
    machine = await boot(ProbeCommand(beat_ms=50))
    await machine.serial.wait(Beat, 3)
    machine.serial.type("ping=hello nonsense")
    assert (await machine.serial.wait(Pong)).token == "hello"
    assert (await machine.serial.wait(InputRefused)).text == "nonsense"


async def test_a_reboot_is_a_second_first_line(boot: Booter) -> None:
    machine = await boot(ProbeCommand())
    await machine.serial.wait(Ready)
    if isinstance(machine, rig.CloudHypervisor):  # it makes its serial socket anew
        machine.put("vm.reboot")
        machine.serial = rig.Serial(await rig.connected(machine.control.parent / "serial"))
        await machine.serial.wait(Boot)
    else:
        machine.serial.type("reboot")
        await machine.serial.wait(Boot, 2)


async def test_the_power_button_is_reported_and_turns_it_off(boot: Booter) -> None:
    machine = await boot(ProbeCommand())
    await machine.serial.wait(Ready)
    press(machine)
    await machine.serial.wait(Button)
    assert await machine.exit() == 0


async def test_the_power_button_may_be_ignored(boot: Booter) -> None:
    machine = await boot(ProbeCommand(button="stay", beat_ms=50))
    await machine.serial.wait(Ready)
    press(machine)
    await machine.serial.wait(Button)
    seen = len(machine.serial.all(Beat))
    await machine.serial.wait(Beat, seen + 3)


async def test_what_the_button_does_can_be_changed_while_it_runs(boot: Booter) -> None:
    machine = await boot(ProbeCommand(beat_ms=50))
    await machine.serial.wait(Ready)
    machine.serial.type("\0button=nonsense \0button=stay")
    assert (await machine.serial.wait(ButtonSet)).how == "stay"
    assert (await machine.serial.wait(InputRefused)).text == "button=nonsense"
    press(machine)
    await machine.serial.wait(Button)
    await machine.serial.wait(Beat, len(machine.serial.all(Beat)) + 3)
    machine.serial.type("button=off")
    await machine.serial.wait(ButtonSet, 2)
    press(machine)
    assert await machine.exit() == 0


async def test_a_panic_without_a_device_to_tell_it_to_has_failed(boot: Booter) -> None:
    machine = await boot(ProbeCommand())
    await machine.serial.wait(Ready)
    machine.serial.type("panic")
    assert (await machine.serial.wait(EndFailed)).how == "panic"


async def test_a_panic_is_told_to_qemus_device(stack: ExitStack, tmp_path: Path) -> None:
    more = ("-device", "pvpanic", "-action", "panic=exit-failure")
    machine = await rig.qemu(stack, tmp_path, ProbeCommand(), *more)
    await machine.serial.wait(Ready)
    machine.serial.type("panic")
    assert await machine.exit() != 0
    assert (await machine.serial.wait(End)).how == "panic"


async def test_a_guest_that_halts_says_nothing_more(boot: Booter) -> None:
    machine = await boot(ProbeCommand(beat_ms=20))
    await machine.serial.wait(Beat)
    machine.serial.type("halt")
    await machine.serial.wait(End)
    seen = len(machine.serial.all(Beat))
    machine.serial.type("ping")
    with pytest.raises(AssertionError):
        await machine.serial.wait(Pong, timeout_s=0.5)
    assert len(machine.serial.all(Beat)) == seen
    assert machine.process.poll() is None


async def test_a_fault_is_a_line_and_not_a_reset(boot: Booter) -> None:
    machine = await boot(ProbeCommand(end="fault"))
    fault = await machine.serial.wait(Fault)
    assert (fault.vector, fault.cr2) == (14, "0x7fffffff000")


async def test_a_triple_fault_resets_the_machine(boot: Booter) -> None:
    machine = await boot(ProbeCommand())
    await machine.serial.wait(Ready)
    machine.serial.type("triple")
    if isinstance(machine, rig.CloudHypervisor):
        await machine.serial.wait(End)
        machine.serial = rig.Serial(await rig.connected(machine.control.parent / "serial"))
        await machine.serial.wait(Boot)
    else:
        await machine.serial.wait(Boot, 2)


def press(machine: rig.Machine) -> None:
    if isinstance(machine, rig.CloudHypervisor):
        machine.put("vm.power-button")
    elif isinstance(machine, rig.Qemu):
        machine.ask("system_powerdown")


# ---- disks ----


async def test_a_disk_is_described_and_checked(boot: Booter, image: Path) -> None:
    plan = DiskPlan(kind="check", sectors=40, seed=7, depth=4)
    machine = await boot(ProbeCommand(disks=(plan,), end="off"), image)
    disk = await machine.serial.wait(Disk)
    assert (disk.sectors, disk.ro, disk.flush) == (8 * MIB // SECTOR, False, True)
    done = await machine.serial.wait(DiskDone)
    assert (done.ok, done.sectors, done.bad, done.errors) == (True, 40, 0, 0)
    assert await machine.exit() == 0
    assert image.read_bytes()[64 * SECTOR :][: 40 * SECTOR] == pattern(7, 64, 40)


def pattern(seed: int, first: int, count: int) -> bytes:
    sectors = range(first, first + count)
    stamps = [(seed + sector * 0x9E3779B97F4A7C15) & (2**64 - 1) for sector in sectors]
    return b"".join(struct.pack("<Q", stamp) * 64 for stamp in stamps)


async def test_a_disk_that_holds_something_else_is_found_out(boot: Booter, image: Path) -> None:
    data = bytearray(pattern(7, 64, 40))
    data[9 * SECTOR + 100] ^= 1
    with image.open("r+b") as file:
        file.seek(64 * SECTOR)
        file.write(data)
    plan = DiskPlan(kind="verify", disk="0", sectors=40, seed=7, depth=3)
    machine = await boot(ProbeCommand(disks=(plan,)), image)
    done = await machine.serial.wait(DiskDone)
    assert (done.ok, done.bad, done.first_bad) == (False, 1, 73)
    assert not (await machine.serial.wait(Done)).ok


async def test_a_read_only_disk_is_not_written(
    stack: ExitStack, tmp_path: Path, image: Path
) -> None:
    arguments = [*rig.disk(image, "vol-a")]
    arguments[1] += ",read-only=on"
    arguments[3] += ",read-only=on"
    command = ProbeCommand(disks=(DiskPlan(kind="check"),))
    machine = await rig.qemu(stack, tmp_path, command, *arguments)
    assert (await machine.serial.wait(Disk)).ro
    assert (await machine.serial.wait(DiskRefused)).reason == "read-only"


@pytest.mark.parametrize("depth", [1, 32])
async def test_every_acknowledged_record_is_on_the_disk(
    boot: Booter, image: Path, depth: int
) -> None:
    plan = DiskPlan(kind="writer", disk="vol-a" if depth == 1 else "", depth=depth, window=50,
                    seed=99, every=7)  # fmt: skip
    machine = await boot(ProbeCommand(disks=(plan,)), image)
    planned = await machine.serial.wait(DiskPlanned)
    assert (planned.depth, planned.seed) == (depth, 99)
    await machine.serial.wait(Acked, 12)
    machine.process.kill()
    machine.process.wait()
    acked = max(event.seq for event in machine.serial.all(Acked))
    assert missing(image, acked, window=50, seed=99) == []


def missing(image: Path, acked: int, window: int, seed: int) -> list[int]:
    """Return the acknowledged records that are neither there nor overwritten by a later one."""
    data, lost = image.read_bytes(), []
    for seq in range(max(1, acked - window + 1), acked + 1):
        at = (64 + seq % window) * SECTOR
        quads = struct.unpack("<64Q", data[at : at + SECTOR])
        sound = quads[:2] == (0x43455245424F5250, seed) and sum(quads[:63]) % 2**64 == quads[63]
        if not sound or quads[2] < seq:
            lost.append(seq)
    return lost


async def test_the_guest_itself_misses_a_lost_record(boot: Booter, image: Path) -> None:
    plan = DiskPlan(kind="writer", window=40, seed=5, depth=4)
    machine = await boot(ProbeCommand(disks=(plan,)), image)
    await machine.serial.wait(Acked, 60)
    machine.serial.type("disk=none")
    machine.serial.type("ping")
    await machine.serial.wait(Pong)
    acked = max(event.seq for event in machine.serial.all(Acked))
    read = DiskPlan(kind="records", window=40, seed=5, acked=acked)
    machine.serial.type(read.word())
    records = await machine.serial.wait(Records)
    assert (records.ok, records.valid, records.lost, records.bad) == (True, 40, 0, 0)
    assert records.newest >= acked
    place = 64 + acked % 40
    with image.open("r+b") as file:
        file.seek(place * SECTOR + 200)
        file.write(b"damage")
    machine.serial.type(read.word())
    records = await machine.serial.wait(Records, 2)
    assert not records.ok
    assert (records.bad, records.first_bad, records.lost) == (1, place, 1)
    assert records.first_lost == acked


async def test_a_disk_that_grows_is_seen(boot: Booter, image: Path) -> None:
    machine = await boot(ProbeCommand(), image)
    await machine.serial.wait(Disk)
    if isinstance(machine, rig.CloudHypervisor):
        machine.put("vm.resize-disk", {"id": "vol-a", "desired_size": 16 * MIB})
    elif isinstance(machine, rig.Qemu):
        machine.ask("block_resize", **{"node-name": "vol-a", "size": 16 * MIB})
    grown = await machine.serial.wait(DiskResize)
    assert (grown.sectors, grown.was) == (16 * MIB // SECTOR, 8 * MIB // SECTOR)


class Exported(NamedTuple):
    """A VM whose disk is a storage daemon's."""

    machine: rig.Machine
    daemon: subprocess.Popen[bytes]


BootExported = Callable[[ProbeCommand], Awaitable[Exported]]


@pytest.fixture(params=["qemu", "cloud-hypervisor"])
def boot_exported(
    request: pytest.FixtureRequest, stack: ExitStack, tmp_path: Path, image: Path
) -> BootExported:
    place = f"{tmp_path}/blk"
    argv = [
        "qemu-storage-daemon", "--blockdev", f"driver=file,node-name=f,filename={image}",
        "--blockdev", "driver=raw,node-name=d,file=f", "--export",
        f"type=vhost-user-blk,id=e,node-name=d,writable=on,addr.type=unix,addr.path={place}",
    ]  # fmt: skip
    chardev = f"socket,id=c,path={place}"
    device = "vhost-user-blk-pci,chardev=c,num-queues=1,bus=port0"
    disk = {"vhost_user": True, "vhost_socket": place, "num_queues": 1, "queue_size": 128}

    async def booted(command: ProbeCommand) -> Exported:
        if request.param != "qemu":
            rig.cloud_hypervisor_binary()
        daemon = stack.enter_context(rig.started(argv, tmp_path / "storage.log"))
        (await rig.connected(tmp_path / "blk")).close()
        machine: rig.Machine
        if request.param == "qemu":
            arguments = ("-chardev", chardev, "-device", device)
            machine = await rig.qemu(stack, tmp_path, command, *arguments)
        else:
            machine = await rig.cloud_hypervisor(stack, tmp_path, command, disks=[disk])
        return Exported(machine, daemon)

    return booted


async def test_a_storage_daemons_disk_is_checked(boot_exported: BootExported) -> None:
    plan = DiskPlan(kind="check", sectors=16, depth=8)
    machine, _ = await boot_exported(ProbeCommand(disks=(plan,)))
    assert (await machine.serial.wait(DiskDone)).ok


async def test_a_disk_that_does_not_answer_is_reported_and_waited_for(
    boot_exported: BootExported,
) -> None:
    machine, daemon = await boot_exported(ProbeCommand(disks=(DiskPlan(kind="writer"),)))
    await machine.serial.wait(Acked, 3)
    daemon.send_signal(signal.SIGSTOP)
    stall = await machine.serial.wait(DiskStall)
    assert stall.waited_us >= 2_000_000
    daemon.send_signal(signal.SIGCONT)
    assert (await machine.serial.wait(DiskResumed)).seq == stall.seq
    seen = len(machine.serial.all(Acked))
    await machine.serial.wait(Acked, seen + 3)


async def test_a_reset_sends_again_what_was_under_way(boot: Booter, image: Path) -> None:
    plan = DiskPlan(kind="writer", depth=4, window=100, seed=3)
    machine = await boot(ProbeCommand(disks=(plan,)), image)
    await machine.serial.wait(Acked, 3)
    machine.serial.type("disk.0=reset")
    assert (await machine.serial.wait(DiskReset)).ok
    seen = len(machine.serial.all(Acked))
    await machine.serial.wait(Acked, seen + 10)
    machine.process.kill()
    machine.process.wait()
    acked = max(event.seq for event in machine.serial.all(Acked))
    assert missing(image, acked, window=100, seed=3) == []
