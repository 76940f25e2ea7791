"""`chv clone` on a real node with the fake VMM: real disks, real NICs, two VMs that differ."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.live_node import LiveNode, live_node, need

pytestmark = [pytest.mark.root, need("qemu-img")]

HEAD = "apiVersion: compute.chv.dev/v1alpha1\n"
BASE = f"""{HEAD}kind: Image
metadata: {{name: tiny}}
spec: {{builtin: tiny}}
---
{HEAD}kind: Network
metadata: {{name: lan}}
spec: {{subnet: 10.7.0.0/24}}
---
{HEAD}kind: Volume
metadata: {{name: root}}
spec: {{format: qcow2, size: 256Mi, source: {{image: tiny}}}}
---
{HEAD}kind: VirtualMachine
metadata: {{name: web}}
spec:
  memory: 256Mi
  boot: {{image: tiny}}
  disks: [{{name: root, volume: root}}]
  interfaces: [{{name: eth0, network: lan, mac: "52:54:00:00:00:07"}}]
"""


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(BASE)
            file.flush()
            running.cli("apply", "-f", file.name, "--wait")
        yield running


def got(node: LiveNode, kind: str, name: str) -> Any:
    return json.loads(node.cli("get", kind, name, "-o", "json").stdout)


def test_clones_run_beside_their_source_with_another_mac_and_address(node: LiveNode) -> None:
    linked = node.cli("clone", "web", "two")
    assert "not copied: mac 52:54:00:00:00:07 of interface eth0" in linked.stdout + linked.stderr
    node.cli("clone", "web", "three", "--full")
    seen = [got(node, "vm", name)["status"] for name in ("web", "two", "three")]
    assert [each["phase"] for each in seen] == ["Running"] * 3
    for field in ("mac", "address"):
        assert len({each["interfaces"][0][field] for each in seen}) == 3
    assert len({each["sshHostKey"] for each in seen}) == 3
    refused = node.cli("delete", "volume", "root", check=False)
    assert refused.returncode == 5
