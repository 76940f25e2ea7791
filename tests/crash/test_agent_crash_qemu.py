"""SIGKILL of the agent at steps of create and delete while a real QEMU guest is being made.

The same convergence as with the fake, at the moments where a real VMM makes the difference: its
process exists and nobody knows, it is known and has not booted, it has been told to end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.crash.test_agent_crash_points import (
    assert_nothing_left,
    manifest,
)
from tests.integration.live_node import LiveNode, live_node, need, wait_for

pytestmark = [pytest.mark.root, need("qemu-system-x86_64")]

MANIFEST = """
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {name: disk}
spec: {size: 128Mi, source: {image: tiny}}
---
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: victim}
spec:
  memory: 192Mi
  boot: {image: tiny}
  shutdownTimeout: 10s
  disks: [{name: data, volume: disk}]
  interfaces: [{name: eth0, network: lan}]
"""
BASE = """
apiVersion: compute.chv.dev/v1alpha1
kind: Image
metadata: {name: tiny}
spec: {builtin: tiny}
---
apiVersion: compute.chv.dev/v1alpha1
kind: Network
metadata: {name: lan}
spec: {subnet: 10.9.0.0/24}
"""
CREATE_POINTS = (
    "agent.vm.spawn_process.after",
    "agent.vm.attach_volume.after",
    "agent.vm.boot.before",
    "agent.vm.boot.after",
)
DELETE_POINTS = (
    "agent.vm.stop.before",
    "agent.vm.cleanup.before",
    "agent.vm.detach_volume.after",
)
IN_CI = 1  # of each; the long run takes all


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNode]:
    with live_node(CHV_TEST_BUILD="1") as running:
        directory = tmp_path_factory.mktemp("manifests")
        (directory / "vm.yaml").write_text(MANIFEST)
        (directory / "base.yaml").write_text(BASE)
        running.environment["MANIFESTS"] = str(directory)
        running.cli("apply", "-f", str(directory / "base.yaml"), "--wait")
        yield running


def chosen(points: tuple[str, ...]) -> tuple[str, ...]:
    return points if os.environ.get("CHV_LONG") else points[:IN_CI]


@pytest.mark.parametrize("point", chosen(CREATE_POINTS))
def test_kill_in_create_converges_to_a_guest_that_answers(node: LiveNode, point: str) -> None:
    node.restart(f"{point}=1*kill")
    node.cli("apply", "-f", manifest(node), check=False)
    node.await_agent_death()
    before = node.workers("vmm")
    node.restart()
    node.cli("wait", "vm/victim", "--for", "SSHReady", "--timeout", "120s")
    after = node.workers("vmm")
    assert len(after) == 1
    assert not before or before == after, "a VMM that lived was replaced"
    assert node.ssh("victim", "echo alive").stdout == "alive\n"
    node.cli("delete", "-f", manifest(node))
    assert_nothing_left(node)


@pytest.mark.parametrize("point", chosen(DELETE_POINTS))
def test_kill_in_delete_converges_to_nothing(node: LiveNode, point: str) -> None:
    node.restart()
    node.cli("apply", "-f", manifest(node), "--wait")
    node.restart(f"{point}=1*kill")
    node.cli("delete", "vm", "victim", "--no-wait", check=False)
    node.await_agent_death()
    node.restart()
    wait_for(lambda: node.cli("get", "vm", "victim", check=False).returncode == 4, 60, "gone")
    node.cli("delete", "volume", "disk")
    assert_nothing_left(node)
