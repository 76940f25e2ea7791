"""A VM's whole life through `chv` on both VMMs, with the probe as its guest: the same assertions.

What is asserted comes from the guest's own words wherever it can: a step that the agent calls done
is believed when the guest says so too.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from benchmarks.overhead import own_bytes
from chv.probe.device_events import Device, DeviceGone, Disk, Lease
from chv.probe.events import Beat, Boot, Button, Ready
from tests.integration.live_node import need, wait_for
from tests.probe_node import VMMS, ProbeNode, probe_node, vm, volume

pytestmark = [pytest.mark.root, pytest.mark.slow, need()]
COMMAND = "disk=none net=dhcp"


@pytest.fixture(scope="module", params=VMMS)
def probes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProbeNode]:
    with probe_node(request.param, tmp_path_factory.mktemp("probe")) as running:
        yield running


@pytest.fixture
def running(probes: ProbeNode) -> Iterator[ProbeNode]:
    """A VM with a disk and a NIC whose guest is up; afterwards it is gone, and so are its parts."""
    probes.apply(volume("data"), vm(probes.vmm, COMMAND, disks=("data",), networks=("lan",)))
    probes.await_event(Lease)
    yield probes
    probes.node.cli("delete", "vm", "p", "--ignore-not-found")
    for name in ("data", "more"):
        probes.node.cli("delete", "volume", name, "--ignore-not-found")
    assert probes.node.workers("vmm") == {}
    assert probes.node.workers("qsd") == {}


def test_a_probe_boots_with_its_disk_and_gets_the_address_that_the_vm_is_shown_with(
    running: ProbeNode,
) -> None:
    status = running.node.status("p")
    assert status["vmm"]["name"] == running.vmm
    wait_for(lambda: running.node.status("p")["vmm"].get("seccomp") == "filtered", 10, "filters")
    assert running.events(Lease)[-1].addr == status["interfaces"][0]["address"]
    sizes = {disk.sectors * 512 for disk in running.events(Disk)}
    assert 64 << 20 in sizes
    written = [disk for disk in running.events(Disk) if disk.sectors * 512 == 64 << 20]
    assert all(disk.wce for disk in written), "the guest would not flush"
    running.node.cli("wait", "vm/p", "--for", "GuestBooted", "--timeout", "20s")


def test_what_is_around_the_guest_is_within_what_is_counted_for_it(running: ProbeNode) -> None:
    shown = running.node.cli("node", "inventory", "--json").stdout
    bound = json.loads(shown)["commitment"]["overhead_bytes"]
    kinds = ("vmm", "qsd", "proxy")
    pids = [pid for kind in kinds for pid in running.node.workers(kind).values()]
    taken = sum(own_bytes(pid) for pid in pids)
    assert len(pids) >= 2
    assert taken < bound < 10 * taken


def test_pause_stands_still_and_resume_goes_on_where_it_stood(running: ProbeNode) -> None:
    running.await_event(Beat)
    running.node.cli("pause", "p")
    assert running.node.status("p")["phase"] == "Paused"
    stood = running.events(Beat)[-1].n
    wait_for(lambda: running.node.condition("p", "Paused")["status"] == "True", 10, "Paused")
    running.node.kill("agent")
    running.node.up()
    assert running.events(Beat)[-1].n == stood
    running.node.cli("resume", "p")
    wait_for(lambda: running.events(Beat)[-1].n > stood, 20, "a beat after the resume")
    assert len(running.events(Boot)) == 1


def test_reset_boots_the_guest_again_in_the_same_vmm(running: ProbeNode) -> None:
    vmms = running.node.workers("vmm")
    running.node.cli("reset", "p")
    running.await_event(Boot, more_than=1)
    running.await_event(Lease, more_than=1)
    assert running.node.workers("vmm") == vmms


def test_a_disk_and_a_nic_come_and_go_under_the_running_guest(running: ProbeNode) -> None:
    there = len(running.events(Device))
    spec = vm(running.vmm, COMMAND, disks=("data", "more"), networks=("lan", "lan"))
    running.apply(volume("more", "32Mi"), spec)
    running.await_event(Device, more_than=there + 1)
    wait_for(
        lambda: any(disk.sectors * 512 == 32 << 20 for disk in running.events(Disk)),
        20,
        "the guest's word on the disk",
    )
    running.apply(vm(running.vmm, COMMAND, disks=("data",), networks=("lan",)))
    running.await_event(DeviceGone, more_than=1)
    assert len(running.events(Boot)) == 1
    running.node.cli("delete", "volume", "more")


def test_stop_presses_the_button_and_the_guest_says_so(running: ProbeNode) -> None:
    said = running.node.cli("stop", "p")
    assert "acpi" in said.stdout + said.stderr
    assert running.events(Button)
    assert running.node.workers("vmm") == {}
    running.node.cli("start", "p")
    running.await_event(Ready, more_than=1)


def test_a_killed_vmm_is_started_again_and_told(running: ProbeNode) -> None:
    ((_, pid),) = running.node.workers("vmm").items()
    os.kill(pid, signal.SIGKILL)
    running.await_event(Boot, more_than=1)
    wait_for(lambda: running.node.status("p")["phase"] == "Running", 20, "Running")
    assert "Crash" in running.node.status("p")["lastStop"]


def test_a_vm_outlives_the_death_of_all_daemons(running: ProbeNode) -> None:
    vmms, beats = running.node.workers("vmm"), running.await_event(Beat).n
    running.node.kill("agent", "stord", "nwd")
    running.node.up()
    wait_for(lambda: running.events(Beat)[-1].n > beats + 1, 30, "the guest's heart beats on")
    assert running.node.workers("vmm") == vmms
    assert len(running.events(Boot)) == 1
