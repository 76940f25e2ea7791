"""Disks of a running VM on the real thing: QEMU, the tiny guest, qemu-guest-agent in it.

One guest serves every test; each leaves it with its first disk alone. The guest agent is the
machine's own program, copied into the guest with its libraries.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chv.host import devnode
from tests.integration.live_node import ROOT, LiveNode, live_node, need, wait_for
from tests.integration.stord_helpers import tells_new_sizes

pytestmark = [pytest.mark.root, need("qemu-system-x86_64")]

BASE = """
apiVersion: compute.chv.dev/v1alpha1
kind: Image
metadata: {name: tiny}
spec: {builtin: tiny}
---
apiVersion: compute.chv.dev/v1alpha1
kind: Network
metadata: {name: lan}
spec: {subnet: 10.7.0.0/24}
---
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {name: data}
spec: {format: qcow2, size: 256Mi, source: {image: tiny}}
---
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {name: more}
spec: {format: raw, size: 64Mi}
"""
VM = """
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: guest}
spec:
  memory: 256Mi
  boot: {image: tiny}
  disks: [DISKS]
  interfaces: [{name: eth0, network: lan}]
"""
SNAPSHOT = """
apiVersion: compute.chv.dev/v1alpha1
kind: VolumeSnapshot
metadata: {name: NAME}
spec: {virtualMachine: guest, freeze: 20s}
"""
FIRST = "{name: data, volume: data}"
SECOND = "{name: more, volume: more}"
MIB = 1 << 20
GUEST_AGENT = "/usr/sbin/qemu-ga"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNode]:
    with live_node(CHV_TEST_BUILD="1") as running:
        running.environment["MANIFESTS"] = str(tmp_path_factory.mktemp("manifests"))
        apply(running, BASE + "---" + VM.replace("DISKS", FIRST))
        running.cli("wait", "vm/guest", "--for", "SSHReady", "--timeout", "170s")
        yield running


def apply(node: LiveNode, text: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    path = Path(node.environment["MANIFESTS"]) / "some.yaml"
    path.write_text(text)
    return node.cli("apply", "-f", str(path), "--wait", check=check)


def with_disks(node: LiveNode, *disks: str) -> None:
    apply(node, VM.replace("DISKS", ", ".join(disks)))


def sizes(node: LiveNode) -> list[int]:
    """Return what the guest itself says of its disks in MiB, but for the seed."""
    said = node.ssh("guest", "cat /sys/block/vd*/size").stdout.split()
    return sorted(int(sectors) * 512 // MIB for sectors in said if int(sectors) * 512 >= 16 * MIB)


def await_sizes(node: LiveNode, wanted: list[int]) -> None:
    wait_for(lambda: sizes(node) == wanted, 60, f"disks of {wanted} MiB")


def device_of(node: LiveNode, size_mib: int) -> str:
    sectors = size_mib * MIB // 512
    found = node.ssh("guest", f"cd /sys/block; grep -l '^{sectors}$' vd*/size").stdout
    return f"/dev/{found.split('/')[0]}"


def vmm_pid(node: LiveNode) -> int:
    return int(node.status("guest")["vmm"]["pid"])


def test_disk_is_plugged_under_a_running_guest_and_unplugged_again(node: LiveNode) -> None:
    pid, boot = vmm_pid(node), node.ssh("guest", "cat /proc/sys/kernel/random/boot_id").stdout
    with_disks(node, FIRST, SECOND)
    wait_for(lambda: sizes(node) == [64, 256], 15, "the disk in the guest")
    device = device_of(node, 64)
    cache = node.ssh("guest", f"cat /sys/block/{device[5:]}/cache_type").stdout
    assert cache == "write back\n"
    node.ssh("guest", f"echo written under a running VM | dd of={device} conv=fsync")
    assert node.get("volume", "more")["status"]["attachedTo"] == "default/guest"
    assert node.condition("guest", "VolumesReady")["status"] == "True"
    with_disks(node, FIRST)
    assert sizes(node) == [256]
    assert node.get("volume", "more")["status"]["phase"] == "Ready"
    with_disks(node, FIRST, SECOND)
    wait_for(lambda: sizes(node) == [64, 256], 15, "the disk once more")
    read = node.ssh("guest", f"head -n 1 {device_of(node, 64)}").stdout
    assert read == "written under a running VM\n"
    with_disks(node, FIRST)
    assert vmm_pid(node) == pid
    assert node.ssh("guest", "cat /proc/sys/kernel/random/boot_id").stdout == boot


def test_first_disk_is_unplugged_and_plugged_like_any_other(node: LiveNode) -> None:
    node.ssh("guest", "umount /data")
    with_disks(node, SECOND)
    assert sizes(node) == [64]
    with_disks(node, FIRST)
    wait_for(lambda: sizes(node) == [256], 15, "the first disk")
    node.ssh("guest", f"mount -t ext4 {device_of(node, 256)} /data")


def test_growth_is_seen_by_the_guest_at_once_only_where_it_is_asked_for(node: LiveNode) -> None:
    with_disks(node, FIRST, SECOND)
    wait_for(lambda: sizes(node) == [64, 256], 15, "the disk in the guest")
    pid = vmm_pid(node)
    device = device_of(node, 64)
    node.ssh("guest", f"echo before it grew | dd of={device} conv=fsync")
    node.cli("volume", "grow", "more", "96Mi", "--now")
    wait_for(lambda: sizes(node) == [96, 256], 30, "the larger disk")
    assert node.ssh("guest", f"head -n 1 {device_of(node, 96)}").stdout == "before it grew\n"
    volume = node.get("volume", "more")["status"]
    assert volume["sizeBytes"] == 96 * MIB
    assert "pendingSizeBytes" not in volume
    assert vmm_pid(node) == pid
    with_disks(node, FIRST)


@tells_new_sizes
def test_growth_reaches_a_running_guest_by_itself_where_its_vmm_can_be_told(node: LiveNode) -> None:
    with_disks(node, FIRST, SECOND)
    before = node.get("volume", "more")["status"]["sizeBytes"] // MIB
    wait_for(lambda: sizes(node) == [before, 256], 15, "the disk in the guest")
    pid = vmm_pid(node)
    device = device_of(node, before)
    node.ssh("guest", f"(while [ ! -e /tmp/end ]; do date | dd of={device} conv=fsync || echo bad"
             " >> /tmp/failed; done > /dev/null 2>&1 &)")  # fmt: skip
    told = node.cli("volume", "grow", "more", f"{before + 32}Mi").stdout
    wait_for(lambda: sizes(node) == [before + 32, 256], 15, "the larger disk")
    beyond = f"{device} bs=1M seek={before + 16} conv=fsync"
    node.ssh("guest", f"dd if=/dev/zero of={beyond} count=1; touch /tmp/end; ! cat /tmp/failed")
    assert "next start" not in told
    assert "pendingSizeBytes" not in node.get("volume", "more")["status"]
    assert device_of(node, before + 32) == device
    assert vmm_pid(node) == pid
    with_disks(node, FIRST)


def test_kill_of_the_agent_in_the_middle_of_a_plug_leaves_one_disk(node: LiveNode) -> None:
    more = node.get("volume", "more")["status"]["sizeBytes"] // MIB
    for point, disks, seen in (
        ("add_disk_effect.before", (FIRST, SECOND), [more, 256]),
        ("remove_disk_record.before", (FIRST,), [256]),
    ):
        restart(node, f"agent.vm.{point}=1*kill")
        path = Path(node.environment["MANIFESTS"]) / "some.yaml"
        path.write_text(VM.replace("DISKS", ", ".join(disks)))
        node.cli("apply", "-f", str(path), check=False)
        wait_for(lambda: devnode.agent_process(node.dev) is None, 30, "its death")
        restart(node)
        await_sizes(node, seen)
    assert node.get("volume", "more")["status"]["phase"] == "Ready"


def restart(node: LiveNode, failpoints: str = "") -> None:
    """Bring the agent up, armed; it may die of the failpoint before it is even ready."""
    if devnode.agent_process(node.dev) is not None:
        node.down()
    node.cli("up", "--dir", str(node.directory), check=False, env={"CHV_FAILPOINTS": failpoints})


def test_lost_storage_daemon_is_told_and_the_vm_was_reset_in_time(node: LiveNode) -> None:
    pid = vmm_pid(node)
    (daemon,) = node.workers("qsd").values()
    begun = time.monotonic()
    os.kill(daemon, signal.SIGKILL)
    lost = wait_for(
        lambda: (c := node.condition("guest", "StorageLost"))["reason"] == "Recovered" and c,
        30,
        "the recovery",
    )
    assert time.monotonic() - begun < 12  # the CLI itself takes a second of it on a busy machine
    assert "was reset" in lost["message"]
    assert vmm_pid(node) == pid
    node.cli("wait", "vm/guest", "--for", "SSHReady", "--timeout", "170s")
    wait_for(lambda: sizes(node) == [256], 60, "the guest after its reset")


def without_space(node: LiveNode, *, critical_bytes: int) -> None:
    """Move the threshold instead of filling the machine's file system."""
    path = node.directory / "node.toml"
    line = "space_critical_bytes = "
    lines = [
        f"{line}{critical_bytes}" if each.startswith(line) else each
        for each in path.read_text().splitlines()
    ]
    path.write_text("\n".join(lines) + "\n")
    restart(node)
    node.await_state("TenantReady")


def await_paused(node: LiveNode, status: str, reason: str) -> None:
    def there() -> bool:
        paused = node.condition("guest", "Paused")
        return (paused["status"], paused["reason"]) == (status, reason)

    wait_for(there, 30, f"Paused={status} {reason}")


def test_vm_stands_still_while_there_is_no_space_over_a_restart_of_the_agent(
    node: LiveNode,
) -> None:
    pid = vmm_pid(node)
    without_space(node, critical_bytes=10**15)
    await_paused(node, "True", "StorageSpace")
    assert node.status("guest")["phase"] == "Paused"
    node.kill("agent")
    restart(node)
    node.await_state("TenantReady")
    await_paused(node, "True", "StorageSpace")
    without_space(node, critical_bytes=1000)
    await_paused(node, "False", "VcpusRun")
    node.ssh("guest", "echo goes on >/data/proof && sync")
    assert vmm_pid(node) == pid


# --- the guest agent


@pytest.fixture(scope="module")
def agent_in_guest(node: LiveNode) -> LiveNode:
    """Copy the machine's qemu-ga with its libraries into the guest and start it."""
    if shutil.which(GUEST_AGENT) is None:
        pytest.skip(f"no {GUEST_AGENT}")
    told = subprocess.run(["ldd", GUEST_AGENT], capture_output=True, text=True, check=True)
    words = [word for line in told.stdout.splitlines() for word in line.split()]
    files = [GUEST_AGENT, *sorted({word for word in words if word.startswith("/")})]
    archive = subprocess.run(
        ["tar", "-chzf", "-", "--transform", "s,.*/,,", *files], capture_output=True, check=True
    )
    unpack = "mkdir -p /run/ga && tar -xzf - -C /run/ga"
    subprocess.run(
        [sys.executable, "-m", "chv.cli", "ssh", "guest", "--", unpack],
        input=archive.stdout, check=True, cwd=ROOT, timeout=120,
        env=os.environ | node._socket(),
    )  # fmt: skip
    start_agent(node)
    return node


def start_agent(node: LiveNode) -> None:
    line = "/dev/virtio-ports/org.qemu.guest_agent.0"
    # No udev in the tiny guest: the port is found by its name.
    node.ssh(
        "guest",
        "mkdir -p /dev/virtio-ports /run/ga/state; "
        "port=$(grep -l guest_agent /sys/class/virtio-ports/*/name); "
        f"ln -sf /dev/$(basename $(dirname $port)) {line}; "
        "cd /run/ga && LD_LIBRARY_PATH=. ./ld-linux-x86-64.so.2 ./qemu-ga "
        f"-m virtio-serial -p {line} -t /run/ga/state -f /run/ga/pid -l /run/ga/log -v -d "
        "</dev/null >/dev/null 2>&1",
    )


def snapshot(node: LiveNode, name: str, *, check: bool = True) -> dict[str, object]:
    apply(node, SNAPSHOT.replace("NAME", name), check=check)
    found: dict[str, object] = node.get("snapshot", name)["status"]
    return found


def guest_writes(node: LiveNode) -> None:
    node.ssh("guest", "echo thawed >/data/thawed && sync")


def test_snapshot_is_taken_of_a_frozen_guest_which_then_goes_on(
    agent_in_guest: LiveNode,
) -> None:
    node = agent_in_guest
    assert node.ssh("guest", "grep -c /data /proc/mounts").stdout == "1\n"
    status = snapshot(node, "still")
    assert (status["phase"], status["consistency"]) == ("Ready", "FileSystem")
    # While it is frozen the agent writes no log, so that the thaw shows only in what follows.
    assert "guest-fsfreeze-freeze" in node.ssh("guest", "grep -a fsfreeze /run/ga/log").stdout
    guest_writes(node)


@pytest.mark.parametrize("point", ["freeze.before", "freeze.after"])
def test_dead_agent_leaves_no_guest_frozen(agent_in_guest: LiveNode, point: str) -> None:
    node = agent_in_guest
    name = f"cut-{point.replace('.', '-')}"
    restart(node, f"agent.vm.{point}=1*kill")
    path = Path(node.environment["MANIFESTS"]) / "some.yaml"
    path.write_text(SNAPSHOT.replace("NAME", name))
    node.cli("apply", "-f", str(path), check=False)
    wait_for(lambda: devnode.agent_process(node.dev) is None, 30, "its death")
    restart(node)
    node.await_state("TenantReady")
    guest_writes(node)
    node.cli("delete", "snapshot", name, check=False)
