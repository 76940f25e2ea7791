"""SIGKILL of the agent around each effect on a volume or snapshot, on a real node.

Whatever was asked for is finished by the next agent, once: a snapshot is there and not taken
again, a backup has one number, a moved volume is at one place, and in the end nothing is left.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chv.agent.snapshot.reconciler import FAILPOINTS as SNAPSHOT_POINTS
from chv.agent.volume.reconciler import FAILPOINTS as VOLUME_POINTS
from tests.integration.live_node import LiveNode, live_node, need, wait_for

pytestmark = [pytest.mark.root, need("qemu-img")]

POINTS = sorted((*SNAPSHOT_POINTS, *VOLUME_POINTS))
LONG = bool(os.environ.get("CHV_LONG"))
CHOSEN = POINTS if LONG else sorted(random.Random(7).sample(POINTS, 2))
VOLUME = """
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {name: disk}
spec: {size: 16Mi, format: raw, pool: 'POOL'}
"""


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with (
        tempfile.TemporaryDirectory(prefix="chv-pool-") as pool,
        live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running,
    ):
        Path(pool).chmod(0o711)
        running.down()
        path = running.directory / "node.toml"
        lines = [line for line in path.read_text().splitlines() if not line.startswith("pools")]
        lines.insert(lines.index("[storage]") + 1, f'pools = {{fast = "{pool}"}}')
        path.write_text("\n".join(lines) + "\n")
        yield running
        running.up()


def apply(node: LiveNode, pool: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(VOLUME.replace("POOL", pool))
        file.flush()
        node.cli("apply", "-f", file.name, "--wait", check=False)


def gone(node: LiveNode, kind: str, name: str) -> bool:
    return node.cli("get", kind, name, check=False).returncode == 4


def status(node: LiveNode, kind: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = node.get(kind, name)["status"]
    return found


def ask(node: LiveNode, what: str) -> None:
    """Do what makes the agent come by the point."""
    match what:
        case "open":
            apply(node, "")
        case "close" | "delete":
            node.cli("delete", "volume", "disk", check=False)
        case "move":
            apply(node, "fast")
        case "verb":
            node.cli("volume", "check", "disk", check=False)
        case "take":
            node.cli("snapshot", "create", "snap", "--volume", "disk", check=False)
        case "drop":
            node.cli("snapshot", "rm", "snap", check=False)


def finished(node: LiveNode, what: str) -> bool:
    """Tell whether what was asked for has been done."""
    match what:
        case "open":
            return bool(status(node, "volume", "disk")["phase"] == "Ready")
        case "close" | "delete":
            return gone(node, "volume", "disk")
        case "move":
            return "chv-pool-" in str(status(node, "volume", "disk")["location"])
        case "take":
            return bool(status(node, "snapshot", "snap")["phase"] == "Ready")
        case "drop":
            return gone(node, "snapshot", "snap")
        case _:
            shown = json.loads(node.cli("ops", "ls", "-o", "json").stdout)
            checks = [each for each in shown if each["verb"] == "check"]
            return bool(checks and checks[0]["state"] == "Succeeded")


@pytest.mark.parametrize("point", CHOSEN)
def test_kill_at_an_effect_converges_and_leaves_nothing(node: LiveNode, point: str) -> None:
    _, kind, what, _ = point.split(".")
    if (kind, what) == ("snapshot", "delete"):
        what = "drop"
    node.restart()
    if what != "open":
        apply(node, "")
    if what == "drop":
        node.cli("snapshot", "create", "snap", "--volume", "disk")
    node.restart(f"{point}=1*kill")
    ask(node, what)
    node.await_agent_death()
    node.restart()
    wait_for(lambda: finished(node, what), 40, f"the end of {what}")
    if what == "take":
        assert len(status(node, "volume", "disk").get("snapshots", [])) == 1
        node.cli("snapshot", "rm", "snap")
    if not gone(node, "volume", "disk"):
        node.cli("delete", "volume", "disk")
    volumes = node.dev.layout.state / "volumes"
    assert [path.name for path in volumes.iterdir()] == []
