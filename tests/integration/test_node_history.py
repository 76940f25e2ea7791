"""History, diff, rollback and why on a live node, across a kill of its agent."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live_node import LiveNode, live_node, need

pytestmark = [pytest.mark.root, need("qemu-system-x86_64")]

BASE = """
apiVersion: compute.chv.dev/v1alpha1
kind: Image
metadata: {name: tiny}
spec: {builtin: tiny}
---
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: web, labels: {tier: front}}
spec: {memory: MEMORY, boot: {image: tiny}}
"""
BROKEN = """
apiVersion: compute.chv.dev/v1alpha1
kind: Image
metadata: {name: lost}
spec: {kernel: {path: /nowhere/at/all, sha256: "SUM"}}
---
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: broken}
spec: {boot: {image: lost}}
""".replace("SUM", "0" * 64)


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_TEST_BUILD="1") as running:
        yield running


def apply(
    node: LiveNode, directory: Path, text: str, *more: str
) -> subprocess.CompletedProcess[str]:
    path = directory / "some.yaml"
    path.write_text(text)
    return node.cli("apply", "-f", str(path), *more)


def why(node: LiveNode, target: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node.cli("why", target, "-o", "json").stdout)
    return found


def test_a_vm_goes_back_to_what_it_was_and_the_history_outlives_its_agent(
    node: LiveNode, tmp_path: Path
) -> None:
    apply(node, tmp_path, BASE.replace("MEMORY", "128Mi"), "--wait", "--reason", "first")
    apply(node, tmp_path, BASE.replace("MEMORY", "160Mi"), "--wait", "--reason", "more memory")
    compared = node.cli("diff", "vm/web@1", "vm/web@2", check=False)
    assert compared.returncode == 1
    assert "-  memory: 128Mi\n+  memory: 160Mi" in compared.stdout
    assert node.cli("diff", "vm/web@2").stdout == ""
    node.kill("agent")
    node.await_agent_death()
    node.up()
    node.await_state("TenantReady")
    done = node.cli("rollback", "vm/web", "--to", "1", "--reason", "it was enough")
    assert "configured, generation 3" in done.stdout
    assert node.cli("diff", "vm/web@1", "vm/web@3").stdout == ""
    assert node.get("vm", "web")["spec"]["memory"] == "128Mi"
    rows = json.loads(node.cli("history", "vm/web", "-o", "json").stdout)["generations"]
    assert [row["generation"] for row in rows] == [3, 2, 1]
    assert rows[0]["reason"] == "rollback to generation 1: it was enough"
    assert all(row["requester"].startswith("cli:") for row in rows)


def test_why_is_a_line_for_what_is_well_and_leads_to_what_is_not(
    node: LiveNode, tmp_path: Path
) -> None:
    node.cli("stop", "web", "--force")
    well = why(node, "vm/web")
    assert well["as_wanted"]
    assert len(node.cli("why", "vm/web").stdout.splitlines()) == 1
    apply(node, tmp_path, BROKEN)
    node.cli("wait", "image/lost", "--for", "phase=Failed", check=False)
    found = why(node, "vm/broken")
    assert not found["as_wanted"]
    assert [each["name"] for each in found["obstacles"]] == ["lost"]
    assert "chv why image/lost" in found["fixes"]
    image = why(node, "image/lost")
    assert "/nowhere/at/all" in json.dumps([image["verdict"], image["conditions"]])
    node.cli("delete", "vm", "broken")
    node.cli("delete", "image", "lost")
