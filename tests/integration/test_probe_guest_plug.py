"""What comes and goes under the probe guest: disks, NICs, processors, memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from chv.probe.device_events import Clings, Device, DeviceGone, Disk, DiskDone, Lease, Nic
from chv.probe.events import Beat, CpuAdded, CpuRemoved, Cpus, Machine, MemoryAdded, Ready
from chv.probe.image import DiskPlan, ProbeCommand
from tests import probe_network
from tests import probe_rig as rig
from tests.helpers import wait_until

MIB = 1 << 20


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


async def test_a_disk_comes_and_goes_on_cloud_hypervisor(
    stack: ExitStack, tmp_path: Path, image: Path
) -> None:
    command = ProbeCommand(disks=(DiskPlan(kind="check", sectors=8),))
    machine = await rig.cloud_hypervisor(stack, tmp_path, command)
    await machine.serial.wait(Ready)
    for turn in (1, 2):
        config = {"path": str(image), "id": "hot", "serial": "hot", "image_type": "Raw"}
        machine.put("vm.add-disk", config)
        assert (await machine.serial.wait(DiskDone, turn)).ok
        assert [device for device in machine.serial.all(Device) if device.hot]
        machine.put("vm.remove-device", {"id": "hot"})
        assert (await machine.serial.wait(DeviceGone, turn)).how == "requested"
        # The guest says so before the VMM has let go of the name.
        await wait_until(lambda: '"hot"' not in machine.get("vm.info"), what="the name is free")


async def test_a_disk_that_is_clung_to_goes_later_on_cloud_hypervisor(
    stack: ExitStack, tmp_path: Path, image: Path
) -> None:
    machine = await rig.cloud_hypervisor(stack, tmp_path, ProbeCommand(beat_ms=50))
    await machine.serial.wait(Ready)
    machine.put("vm.add-disk", {"path": str(image), "id": "hot", "image_type": "Raw"})
    await machine.serial.wait(Disk)
    await holds_on(machine)
    machine.put("vm.remove-device", {"id": "hot"})
    await lets_go_when_told(machine)


@pytest.mark.parametrize("native", [False, True], ids=["acpi", "native"])
async def test_a_disk_that_is_clung_to_goes_later_on_qemu(
    stack: ExitStack, tmp_path: Path, image: Path, native: bool
) -> None:
    switch = f"ICH9-LPC.acpi-pci-hotplug-with-bridge-support={'off' if native else 'on'}"
    command = ProbeCommand(beat_ms=50)
    machine = await rig.qemu(stack, tmp_path, command, "-global", switch)
    await machine.serial.wait(Ready)
    machine.plug_disk("hot", image, port=1)
    await machine.serial.wait(Disk)
    await holds_on(machine)
    machine.unplug("hot")
    await lets_go_when_told(machine)
    await wait_until(lambda: plugged(machine, "hot") is False, what="the slot is empty")


async def holds_on(machine: rig.Machine) -> None:
    machine.serial.type("cling")
    assert (await machine.serial.wait(Clings)).devices


async def lets_go_when_told(machine: rig.Machine) -> None:
    """Ten beats are long for a guest that looks ten times a second."""
    await machine.serial.wait(Beat, len(machine.serial.all(Beat)) + 10)
    assert not machine.serial.all(DeviceGone)
    machine.serial.type("let_go")
    await machine.serial.wait(DeviceGone)


@pytest.mark.parametrize("native", [False, True], ids=["acpi", "native"])
async def test_a_disk_comes_and_goes_on_qemu(
    stack: ExitStack, tmp_path: Path, image: Path, native: bool
) -> None:
    switch = "off" if native else "on"
    machine = await rig.qemu(
        stack, tmp_path, ProbeCommand(disks=(DiskPlan(kind="check", disk="hot", sectors=8),)),
        "-global", f"ICH9-LPC.acpi-pci-hotplug-with-bridge-support={switch}",
    )  # fmt: skip
    await machine.serial.wait(Ready)
    for turn in (1, 2):
        machine.plug_disk("hot", image, port=turn)
        assert (await machine.serial.wait(DiskDone, turn)).ok
        machine.unplug("hot")
        gone = await machine.serial.wait(DeviceGone, turn)
        assert gone.how == ("requested" if native else "vanished")
        await wait_until(lambda: plugged(machine, "hot") is False, what="the slot is empty")


def plugged(machine: rig.Qemu, name: str) -> bool:
    return name in {item["name"] for item in machine.ask("qom-list", path="/machine/peripheral")}


async def test_processors_and_memory_come_on_qemu(stack: ExitStack, tmp_path: Path) -> None:
    machine = await rig.qemu(stack, tmp_path, ProbeCommand())
    assert (await machine.serial.wait(Machine)).cpus_max == 4
    await machine.serial.wait(Ready)
    place = {"socket-id": 1, "core-id": 0, "thread-id": 0, "die-id": 0}
    machine.ask("device_add", driver="max-x86_64-cpu", id="cpu1", **place)
    assert (await machine.serial.wait(CpuAdded)).id == 1
    assert (await machine.serial.wait(Cpus)).present == 2
    machine.ask("object-add", **{"qom-type": "memory-backend-ram", "id": "m1", "size": 128 * MIB})
    machine.ask("device_add", driver="pc-dimm", id="dimm1", memdev="m1")
    assert (await machine.serial.wait(MemoryAdded)).size == 128 * MIB


async def test_processors_come_and_go_and_memory_comes_on_cloud_hypervisor(
    stack: ExitStack, tmp_path: Path
) -> None:
    machine = await rig.cloud_hypervisor(stack, tmp_path, ProbeCommand())
    await machine.serial.wait(Ready)
    machine.put("vm.resize", {"desired_vcpus": 2})
    assert (await machine.serial.wait(CpuAdded)).id == 1
    assert (await machine.serial.wait(Cpus)).present == 2
    machine.put("vm.resize", {"desired_vcpus": 1})
    assert (await machine.serial.wait(CpuRemoved)).id == 1
    assert (await machine.serial.wait(Cpus, 2)).present == 1
    machine.put("vm.resize", {"desired_ram": 192 * MIB})
    assert (await machine.serial.wait(MemoryAdded)).size == 128 * MIB


async def test_a_nic_comes_and_goes_on_qemu(stack: ExitStack, tmp_path: Path) -> None:
    machine = await rig.qemu(stack, tmp_path, ProbeCommand())
    await machine.serial.wait(Ready)
    machine.ask("netdev_add", type="user", id="net")
    machine.ask("device_add", driver="virtio-net-pci", id="nic", netdev="net", bus="port2",
                romfile="", mac="52:54:00:00:00:07")  # fmt: skip
    assert (await machine.serial.wait(Nic)).mac == "52:54:00:00:00:07"
    machine.unplug("nic")
    assert (await machine.serial.wait(DeviceGone)).type == 1


@pytest.mark.root
async def test_a_nic_comes_and_goes_on_cloud_hypervisor(stack: ExitStack, tmp_path: Path) -> None:
    machine = await rig.cloud_hypervisor(stack, tmp_path, ProbeCommand())
    await machine.serial.wait(Ready)
    nic = {"id": "hot", "mac": "52:54:00:00:00:07", "num_queues": 2}
    with probe_network.opened(tmp_path, "10.98.0") as tap:
        machine.put("vm.add-net", nic, fds=[tap])
        assert (await machine.serial.wait(Nic)).mac == nic["mac"]
        assert (await machine.serial.wait(Lease)).addr.startswith("10.98.0.")
        machine.put("vm.remove-device", {"id": "hot"})
        gone = await machine.serial.wait(DeviceGone)
        assert (gone.type, gone.how) == (1, "requested")
