"""SIGKILL of the agent before and after each step of create, plug and delete on the real VMM.

Cloud Hypervisor is the VMM that is started empty and given its VM in a second step, so there are
moments that QEMU does not have: a process without a VM, a VM without its NICs, one not booted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from chv.probe.device_events import DeviceGone, Disk, Lease
from tests.crash.test_agent_crash_points import assert_nothing_left
from tests.integration.live_node import need, wait_for
from tests.probe_node import ProbeNode, probe_node, vm, volume

pytestmark = [pytest.mark.root, need()]

VMM = "cloud-hypervisor"
COMMAND = "disk=none net=dhcp"
CREATE = (
    *("create", "spawn_process", "boot", "spawn_record", "spawn", "attach_console", "attach_nic"),
    *("attach_volume", "seed", "prepare", "select_vmm"),
)
DELETE = ("stop", "cleanup", "detach_volume", "forget", "detach_nic", "remove_files")
PLUG = ("agent.vm.add_disk_effect.before", "agent.vm.add_disk.before", "agent.vm.add_disk.after")
UNPLUG = ("agent.vm.remove_disk_record.before", "agent.vm.remove_disk.before")
IN_CI = 2  # of each; the long run takes all


def both(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"agent.vm.{name}.{moment}" for name in names for moment in ("after", "before"))


def chosen(points: tuple[str, ...]) -> tuple[str, ...]:
    return points if os.environ.get("CHV_LONG") else points[:IN_CI]


def wanted(*disks: str) -> str:
    return vm(VMM, COMMAND, disks=disks, networks=("lan",))


@pytest.fixture(scope="module")
def probes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProbeNode]:
    directory = tmp_path_factory.mktemp("probe")
    with probe_node(VMM, directory, CHV_TEST_BUILD="1") as running:
        yield running


def ends(probes: ProbeNode) -> None:
    probes.node.cli("delete", "vm", "p", "--ignore-not-found")
    for name in ("data", "more"):
        probes.node.cli("delete", "volume", name, "--ignore-not-found")
    assert_nothing_left(probes.node)


@pytest.mark.parametrize("point", chosen(("agent.vmm.create.taps_open", *both(CREATE))))
def test_kill_in_create_converges_to_a_guest_with_disk_and_address(
    probes: ProbeNode, point: str
) -> None:
    probes.node.restart(f"{point}=1*kill")
    probes.apply(volume("data"), wanted("data"), check=False)
    probes.node.await_agent_death()
    before = probes.node.workers("vmm")
    probes.node.restart()
    probes.node.cli("wait", "vm/p", "--for", "GuestBooted", "--timeout", "60s")
    address = probes.node.status("p")["interfaces"][0]["address"]
    wait_for(lambda: probes.events(Lease)[-1:] and probes.events(Lease)[-1].addr == address, 20,
             "the lease")  # fmt: skip
    assert any(disk.sectors * 512 == 64 << 20 for disk in probes.events(Disk))
    after = probes.node.workers("vmm")
    assert len(after) == 1
    assert not before or before == after, "a VMM that lived was replaced"
    ends(probes)


@pytest.mark.parametrize("point", chosen((*PLUG, *UNPLUG)))
def test_kill_in_plug_and_unplug_converges_to_what_is_wanted(probes: ProbeNode, point: str) -> None:
    probes.node.restart()
    probes.apply(volume("data"), volume("more", "32Mi"), wanted("data"))
    vmms = probes.node.workers("vmm")
    if point in UNPLUG:
        probes.apply(wanted("data", "more"))
    probes.node.restart(f"{point}=1*kill")
    change = wanted("data") if point in UNPLUG else wanted("data", "more")
    probes.apply(change, check=False)
    probes.node.await_agent_death()
    probes.node.restart()

    def settled() -> bool:
        seen = any(disk.sectors * 512 == 32 << 20 for disk in probes.events(Disk))
        gone = bool(probes.events(DeviceGone))
        return seen and gone == (point in UNPLUG)

    wait_for(settled, 30, "the guest's word on the disk")
    assert probes.node.workers("vmm") == vmms
    ends(probes)


@pytest.mark.parametrize("point", chosen(both(DELETE)))
def test_kill_in_delete_converges_to_nothing(probes: ProbeNode, point: str) -> None:
    probes.node.restart()
    probes.apply(volume("data"), wanted("data"))
    probes.node.restart(f"{point}=1*kill")
    probes.node.cli("delete", "vm", "p", "--no-wait", check=False)
    probes.node.await_agent_death()
    probes.node.restart()
    wait_for(lambda: probes.node.cli("get", "vm", "p", check=False).returncode == 4, 60, "gone")
    ends(probes)
