"""SIGKILL of the agent before and after every step of VM create and VM delete, on a real node.

Real daemons, storage and network; the VMM is the shipped fake. At each point an agent that is armed
with a failpoint dies there, and the next one has to finish the work: at most one VMM lives, a
VMM that lived is not replaced, and after the delete nothing is left.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from chv.agent.vm.journal import FAILPOINTS
from tests.integration.live_node import LiveNode, live_node, need, wait_for

pytestmark = [pytest.mark.root, need()]

LONG = bool(os.environ.get("CHV_LONG"))
SEED = 20_261_130
SAMPLE = 3  # of the points, in CI; the long run takes all of them
MANIFEST = """
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {name: disk}
spec: {size: 64Mi, format: raw}
---
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: victim}
spec:
  memory: 64Mi
  disks: [{name: data, volume: disk}]
  interfaces: [{name: eth0, network: lan}]
"""
# Two volumes are attached together, by a step of its own.
TWO_DISKS = """---
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {name: more}
spec: {size: 64Mi, format: raw}
---
""" + MANIFEST.replace("volume: disk}", "volume: disk}, {name: more, volume: more}")
NETWORK = """
apiVersion: compute.chv.dev/v1alpha1
kind: Network
metadata: {name: lan}
spec: {subnet: 10.9.0.0/24}
"""
# Steps that a plain create or delete of a healthy VM never takes.
NOT_HERE = (
    "adopt",
    "mark_recovering",
    "pause",
    "recover_backend",
    "await_disks",
    "reset",
    "resume",
    "add_disk",
    "add_disk_effect",
    "remove_disk",
    "remove_disk_record",
    "add_nic",
    "add_nic_effect",
    "remove_nic",
    "remove_nic_record",
    "freeze",
    "thaw",
    "halt",
    "restart_storage",
    "set_cpus",
    "set_memory",
    "restore_disks",
    "run_restored",
    "withdraw",
    "swap_root",
    "drop_root",
    "abandon_rebuild",
    "stop_quit",
    "stop_term",
    "stop_kill",
)
DELETING = ("stop", "stop_acpi", "cleanup", "detach_volume", "forget", "detach_nic", "remove_files",
            "finish_delete")  # fmt: skip


def step_of(point: str) -> str:
    return point.split(".")[2] if point else ""


POINTS = [point for point in FAILPOINTS if step_of(point) not in NOT_HERE]
CREATE_POINTS = [point for point in POINTS if step_of(point) not in DELETING]
DELETE_POINTS = [point for point in POINTS if step_of(point) in DELETING]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        directory = tmp_path_factory.mktemp("manifests")
        (directory / "vm.yaml").write_text(MANIFEST)
        (directory / "two.yaml").write_text(TWO_DISKS)
        (directory / "network.yaml").write_text(NETWORK)
        running.environment["MANIFESTS"] = str(directory)
        running.cli("apply", "-f", str(directory / "network.yaml"), "--wait")
        yield running


def manifest(node: LiveNode, point: str = "") -> str:
    name = "two.yaml" if step_of(point) == "attach_volumes" else "vm.yaml"
    return str(Path(node.environment["MANIFESTS"]) / name)


def chosen(points: list[str]) -> list[str]:
    if LONG:
        return points
    return sorted(random.Random(SEED).sample(points, min(SAMPLE, len(points))))


def test_no_step_is_left_out_of_create_and_delete() -> None:
    assert {step_of(point) for point in FAILPOINTS} == (
        {step_of(point) for point in POINTS} | set(NOT_HERE)
    )


@pytest.mark.parametrize("point", chosen(CREATE_POINTS))
def test_kill_in_create_converges_to_one_running_vm(node: LiveNode, point: str) -> None:
    node.restart(f"{point}=1*kill")
    node.cli("apply", "-f", manifest(node, point), check=False)
    node.await_agent_death()
    assert len(node.workers("vmm")) <= 1
    before = node.workers("vmm")
    node.restart()
    wait_for(lambda: node.status("victim")["phase"] == "Running", 30, "a running VM")
    after = node.workers("vmm")
    assert len(after) == 1
    assert not before or before == after, "a VMM that lived was replaced"
    node.cli("delete", "-f", manifest(node, point))
    assert_nothing_left(node)


@pytest.mark.parametrize("point", chosen(DELETE_POINTS))
def test_kill_in_delete_converges_to_nothing(node: LiveNode, point: str) -> None:
    node.restart()
    node.cli("apply", "-f", manifest(node), "--wait")
    wait_for(lambda: node.status("victim")["phase"] == "Running", 30, "a running VM")
    node.restart(f"{point}=1*kill")
    node.cli("delete", "vm", "victim", "--no-wait", check=False)
    node.await_agent_death()
    node.restart()
    wait_for(lambda: node.cli("get", "vm", "victim", check=False).returncode == 4, 30, "gone")
    node.cli("delete", "volume", "disk")
    assert_nothing_left(node)


def assert_nothing_left(node: LiveNode) -> None:
    layout = node.dev.layout
    assert node.workers("vmm") == {}
    assert node.workers("qsd") == {}
    for directory in (layout.vms, layout.state / "vms", layout.state / "volumes"):
        if directory.exists():
            assert [path.name for path in directory.iterdir()] == [], directory
