"""SIGKILL of the agent while an image is taken in and while it is removed: whole, or gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.live_node import LiveNode, live_node, need, wait_for
from tests.sampling import sampled

pytestmark = [pytest.mark.root, need()]

POINTS = (
    "agent.image.import.before",
    "agent.image.import.after",
    "agent.image.remove.before",
    "agent.image.remove.after",
)
IMAGE = """
apiVersion: compute.chv.dev/v1alpha1
kind: Image
metadata: {name: probe}
spec: {builtin: probe}
"""


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        yield running


@pytest.mark.parametrize("point", sampled(POINTS, 1, seed=3))
def test_kill_while_an_image_comes_or_goes_leaves_it_whole_or_nothing(
    node: LiveNode, point: str
) -> None:
    removes = ".remove." in point
    if removes:
        node.apply(IMAGE)
    node.restart(f"{point}=1*kill")
    if removes:
        node.cli("delete", "image", "probe", "--no-wait", check=False)
    else:
        apply(node)
    node.await_agent_death()
    node.restart()
    if not removes:
        apply(node)
        wait_for(lambda: node.get("image", "probe")["status"]["phase"] == "Ready", 30, "an image")
        node.cli("delete", "image", "probe")
    wait_for(lambda: node.cli("get", "image", "probe", check=False).returncode == 4, 30, "gone")
    left = [path for path in node.dev.layout.images.rglob("*") if path.is_file()]
    assert left == []


def apply(node: LiveNode) -> None:
    """Apply, whatever becomes of the agent meanwhile."""
    path = node.directory / "image.yaml"
    path.write_text(IMAGE)
    node.cli("apply", "-f", str(path), check=False)
