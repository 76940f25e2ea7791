"""SIGKILL of the agent around each effect on a network, group or exposure, on a real node.

The next agent finishes what was asked for: nwd has each object once, in the form that is wanted,
and after the deletion nothing is left.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from chv.agent.network.exposures import FAILPOINTS as EXPOSURE_POINTS
from chv.agent.network.groups import FAILPOINTS as GROUP_POINTS
from chv.agent.network.reconciler import FAILPOINTS as NETWORK_POINTS
from tests.integration.live_node import LiveNode, live_node, need, wait_for

pytestmark = [pytest.mark.root, need()]

POINTS = sorted((*NETWORK_POINTS, *GROUP_POINTS, *EXPOSURE_POINTS))
LONG = bool(os.environ.get("CHV_LONG"))
CHOSEN = POINTS if LONG else sorted(random.Random(11).sample(POINTS, 2))
KINDS = {"network": "lan", "sg": "web", "exposure": "site"}
MANIFEST = """
apiVersion: compute.chv.dev/v1alpha1
kind: Network
metadata: {name: lan}
spec: {subnet: 10.9.0.0/24}
---
apiVersion: compute.chv.dev/v1alpha1
kind: SecurityGroup
metadata: {name: web}
spec:
  ingress: [{protocol: TCP, ports: ["80"], securityGroups: [web]}]
---
apiVersion: compute.chv.dev/v1alpha1
kind: Exposure
metadata: {name: site}
spec:
  network: lan
  addresses: [198.18.0.2]
  port: 80
  sources: ["0.0.0.0/0"]
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        path = tmp_path_factory.mktemp("manifests") / "all.yaml"
        path.write_text(MANIFEST)
        running.environment["MANIFEST"] = str(path)
        yield running


def settled(node: LiveNode) -> bool:
    """An exposure without a healthy target is not Ready, yet it stands: its operation is over."""
    for kind, name in KINDS.items():
        status = node.get(kind, name)["status"]
        if status["phase"] not in ("Ready", "Degraded"):
            return False
    return "op-" not in node.cli("ops", "ls", "--active").stdout


def gone(node: LiveNode) -> bool:
    codes = [node.cli("get", kind, name, check=False).returncode for kind, name in KINDS.items()]
    return codes == [4, 4, 4]


@pytest.mark.parametrize("point", CHOSEN)
def test_kill_converges_to_what_was_asked_for(node: LiveNode, point: str) -> None:
    path = node.environment["MANIFEST"]
    deleting = ".delete." in point
    if deleting:
        node.restart()
        node.cli("apply", "-f", path)
        wait_for(lambda: settled(node), 30, "everything made")
    node.restart(f"{point}=1*kill")
    if deleting:
        for kind in ("exposure", "sg", "network"):
            node.cli("delete", kind, KINDS[kind], "--no-wait", check=False)
    else:
        node.cli("apply", "-f", path, check=False)
    node.await_agent_death()
    node.restart()
    if not deleting:
        wait_for(lambda: settled(node), 30, "everything made")
    wait_for(lambda: deleted(node), 30, "everything gone")
    instance = node.dev.layout.instance
    assert [p.name for p in Path("/run/netns").glob(f"chv-{instance}-*")] == []


def deleted(node: LiveNode) -> bool:
    """Ask again: what was refused while the agent died was never asked for."""
    node.cli("delete", "-f", node.environment["MANIFEST"], "--ignore-not-found", check=False)
    return gone(node)
