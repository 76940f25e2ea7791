"""SIGKILL of the agent at the steps of a rebuild and of a clone, on a real node with real disks.

The VMM is the shipped fake. An agent that is armed with a failpoint dies there, and the next one
finishes the work: the VM never lacks a root disk, a clone is whole, and nothing is left over.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.live_node import LiveNode, live_node, need, wait_for

pytestmark = [pytest.mark.root, need()]

LONG = bool(os.environ.get("CHV_LONG"))
SEED = 20_261_201
HEAD = "apiVersion: compute.chv.dev/v1alpha1"
MANIFEST = f"""
{HEAD}
kind: Image
metadata: {{name: tiny}}
spec: {{builtin: tiny}}
---
{HEAD}
kind: Volume
metadata: {{name: root}}
spec: {{size: 64Mi, format: raw, source: {{image: tiny}}}}
---
{HEAD}
kind: VirtualMachine
metadata: {{name: web}}
spec:
  memory: 64Mi
  boot: {{image: tiny}}
  disks: [{{name: root, volume: root}}]
"""
OPEN = ("agent.volume.open.before", "agent.volume.open.after")
REBUILD_POINTS = [
    *OPEN,
    *(
        f"agent.vm.{name}.{moment}"
        for name in ("stop", "cleanup", "detach_volume", "forget", "swap_root", "attach_volume")
        for moment in ("before", "after")
    ),
    *(
        f"agent.vm.{name}.{moment}"
        for name in ("spawn", "drop_root")
        for moment in ("before", "after")
    ),
]
CLONE_POINTS = ["agent.snapshot.take.before", "agent.snapshot.take.after", *OPEN]


def chosen(points: list[str], count: int) -> list[str]:
    return points if LONG else sorted(random.Random(SEED).sample(points, count))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        path = tmp_path_factory.mktemp("manifests") / "web.yaml"
        path.write_text(MANIFEST)
        running.cli("apply", "-f", str(path), "--wait")
        yield running


def volumes(node: LiveNode) -> dict[str, str]:
    listed = json.loads(node.cli("get", "volume", "-o", "json").stdout)
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in listed}


def kill_at(node: LiveNode, point: str, *verb: str) -> None:
    """Ask for a verb, let the agent die at a point of it, and start the next agent."""
    node.restart(f"{point}=1*kill")
    node.cli(*verb, "--no-wait", check=False)
    node.await_agent_death()
    node.restart()


@pytest.mark.parametrize(
    "point", [*chosen(REBUILD_POINTS[:-4], 1), "agent.vm.swap_root.after"]
)  # fmt: skip
def test_kill_in_rebuild_converges_to_one_vm_with_a_new_root_disk(
    node: LiveNode, point: str
) -> None:
    wait_for(lambda: node.status("web")["phase"] == "Running", 30, "a running VM")
    before = volumes(node)
    assert set(before) == {"root"}
    kill_at(node, point, "rebuild", "web", "--yes")
    wait_for(lambda: set(volumes(node)) == {"root"}, 60, "one root disk")
    wait_for(lambda: volumes(node) != before, 60, "another root disk")
    wait_for(lambda: node.status("web")["phase"] == "Running", 60, "a running VM")
    assert len(node.workers("vmm")) == 1
    wait_for(lambda: len(list(images(node))) == 1, 30, "the former disk's bytes are gone")


def images(node: LiveNode) -> Iterator[Path]:
    """Return the directories of volumes."""
    yield from (node.dev.layout.state / "volumes").iterdir()


@pytest.mark.parametrize("point", chosen(CLONE_POINTS, 1))
def test_kill_in_clone_converges_to_two_whole_vms(node: LiveNode, point: str) -> None:
    wait_for(lambda: node.status("web")["phase"] == "Running", 30, "a running VM")
    kill_at(node, point, "clone", "web", "two")
    wait_for(lambda: node.status("two")["phase"] == "Running", 60, "a running clone")
    assert set(volumes(node)) == {"root", "two-root"}
    assert len(node.workers("vmm")) == 2
    node.cli("delete", "vm", "two")
    node.cli("delete", "volume", "two-root")
    wait_for(lambda: node.cli("get", "snapshot", "two-source", check=False).returncode == 4, 60, "the snapshot is gone")  # fmt: skip  # noqa: E501
    assert set(volumes(node)) == {"root"}
