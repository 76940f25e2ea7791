"""Drain, maintenance and resume on a real node with the fake VMM, and kills of the agent there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from chv.agent.draining import FAILPOINTS
from tests.integration.live_node import LiveNode, live_node, need, wait_for
from tests.sampling import sampled

pytestmark = [pytest.mark.root, need()]

VM = """
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {name: NAME}
spec: {size: 16Mi, format: raw}
---
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: NAME}
spec:
  memory: 64Mi
  runStrategy: Always
  shutdownTimeout: 5s
  disks: [{name: data, volume: NAME}]
---
"""
NAMES = ("one", "two")
KILLED = sampled([point for point in FAILPOINTS if "scheduling" not in point], 3, seed=7)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        directory = tmp_path_factory.mktemp("manifests")
        (directory / "vms.yaml").write_text("".join(VM.replace("NAME", name) for name in NAMES))
        (directory / "late.yaml").write_text(VM.replace("NAME", "late"))
        running.environment["MANIFESTS"] = str(directory)
        running.cli("apply", "-f", str(directory / "vms.yaml"), "--wait")
        yield running


def state(node: LiveNode) -> str:
    return str(node.node_status()["state"])


def all_run(node: LiveNode) -> bool:
    return all(node.status(name)["phase"] == "Running" for name in NAMES)


def serve(node: LiveNode) -> None:
    """Whatever an earlier test left: the node serves, and both VMs run."""
    if node.node_status()["hold"] is not None:
        node.cli("node", "drain", "--cancel", check=False)
        node.cli("node", "resume", check=False)
    node.await_state("TenantReady")
    wait_for(lambda: all_run(node), 30, "both VMs")


def test_drained_node_keeps_its_vms_down_over_a_kill_and_says_who_and_why(node: LiveNode) -> None:
    generation = node.get("vm", "one")["metadata"]["generation"]
    node.cli("node", "drain", "--reason", "firmware")
    status = json.loads(node.cli("node", "status", "--json").stdout)
    assert status["state"] == "Maintenance"
    assert status["hold"]["reason"] == "firmware" and "uid=0" in status["hold"]["requester"]
    assert status["hold"]["since"]
    assert node.workers("vmm") == {}
    node.kill("agent")
    node.await_agent_death()
    node.restart()
    assert state(node) == "Maintenance"
    shown = node.cli("node", "status").stdout
    assert "maintenance for" in shown and "firmware" in shown
    refused = node.cli(
        "apply", "-f", str(Path(node.environment["MANIFESTS"]) / "late.yaml"), check=False
    )
    assert refused.returncode == 6
    assert "Maintenance" in refused.stderr and "chv node resume" in refused.stderr
    assert "firmware" in node.cli("start", "one", check=False).stderr
    assert node.condition("one", "VMMRunning")["reason"] == "HeldByNode"
    found = node.get("vm", "one")
    assert found["metadata"]["generation"] == generation
    assert found["spec"]["runStrategy"] == "Always"
    assert node.workers("vmm") == {}
    node.cli("node", "resume")
    wait_for(lambda: all_run(node), 30, "both VMs")


def test_paused_scheduling_is_a_condition_that_outlives_the_agent(node: LiveNode) -> None:
    serve(node)
    late = str(Path(node.environment["MANIFESTS"]) / "late.yaml")
    node.cli("node", "pause-scheduling", "--reason", "slow disk")
    node.restart()
    found = next(c for c in node.node_status()["conditions"] if c["type"] == "SchedulingPaused")
    assert found["status"] == "True" and "slow disk" in found["message"]
    assert "resume-scheduling" in node.cli("apply", "-f", late, check=False).stderr
    node.cli("restart", "one")
    node.cli("node", "resume-scheduling")
    node.cli("apply", "-f", late, "--dry-run")


def test_node_is_its_own_control_plane_and_has_nothing_to_force(node: LiveNode) -> None:
    serve(node)
    found = next(c for c in node.node_status()["conditions"] if c["type"] == "UpstreamConnected")
    assert (found["status"], found["reason"]) == ("True", "Embedded")
    node.cli("wait", "node", "--for", "UpstreamConnected")
    forced = node.cli("delete", "vm", "one", "--force", "--reason", "test", check=False)
    assert "UNSUPPORTED" in forced.stderr and "own control plane" in forced.stderr
    assert node.status("one")["phase"] == "Running"


VERBS = {
    "drain": ("node", "drain", "--no-wait"),
    "drained": ("node", "drain", "--no-wait"),
    "maintenance": ("node", "maintenance", "--reason", "test", "--no-wait"),
    "cancel_drain": ("node", "drain", "--cancel", "--no-wait"),
    "resume": ("node", "resume", "--no-wait"),
}


@pytest.mark.parametrize("point", KILLED)
def test_kill_at_a_durable_step_leaves_the_node_before_or_after_it(
    node: LiveNode, point: str
) -> None:
    verb, moment = point.split(".")[2:]
    serve(node)
    if verb == "resume":
        node.cli("node", "drain")
    # A drain that is to be cancelled has to be under way: none of its VMs is told to stop.
    held = ";agent.vm.stop.before=hang" if verb == "cancel_drain" else ""
    node.restart(f"agent.node.{verb}.{moment}=1*kill{held}")
    if verb == "cancel_drain":
        node.cli("node", "drain", "--no-wait")
        assert state(node) == "Draining"
    node.cli(*VERBS[verb], check=False)
    node.await_agent_death()
    node.restart()
    expected = {
        "drain": {"before": False, "after": True},
        "maintenance": {"before": False, "after": True},
        "drained": {"before": True, "after": True},
        "cancel_drain": {"before": True, "after": False},
        "resume": {"before": True, "after": False},
    }[verb][moment]
    if expected:
        node.await_state("Maintenance")
        assert node.workers("vmm") == {}
    else:
        node.await_state("TenantReady")
        wait_for(lambda: all_run(node), 30, "both VMs")
        assert len(node.workers("vmm")) == len(NAMES)
