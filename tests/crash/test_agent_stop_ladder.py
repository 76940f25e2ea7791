"""SIGKILL of the agent at each rung of the stop ladder, on a real node with a stubborn guest.

The next agent goes on at the rung that is due by then, and says which one worked.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.integration.live_node import LiveNode, live_node, need, wait_for
from tests.sampling import sampled

pytestmark = [pytest.mark.root, need()]

VM = """
apiVersion: compute.chv.dev/v1alpha1
kind: Image
metadata: {name: tiny}
spec: {builtin: tiny}
---
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: victim}
spec: {memory: 64Mi, boot: {image: tiny}, shutdownTimeout: 6s}
"""
CASES = (
    ("acpi", False, "term"),
    ("term", False, "term"),
    ("term", True, "kill"),
    ("kill", True, "kill"),
)


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    stubborn = '{"ignore_button": true}'
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1", CHV_FAKE=stubborn) as running:
        running.apply(VM)
        yield running


@pytest.mark.parametrize(("rung", "stands", "worked"), sampled(CASES, 1, seed=3))
def test_kill_at_a_rung_is_followed_by_the_rung_that_is_due(
    node: LiveNode, rung: str, stands: bool, worked: str
) -> None:
    node.restart()
    node.cli("start", "victim")
    ((_, pid),) = node.workers("vmm").items()
    node.restart(f"agent.vm.stop_{rung}.before=1*kill")
    if stands:  # it hears no TERM
        os.kill(pid, signal.SIGSTOP)
    node.cli("stop", "victim", "--no-wait", check=False)
    node.await_agent_death()
    node.restart()
    wait_for(lambda: node.status("victim")["phase"] == "Stopped", 40, "a stopped VM")
    assert node.workers("vmm") == {}
    told = node.status("victim")["lastStop"]
    # Where the next agent comes after the deadline, TERM has had its time.
    assert told.partition(" (")[0].endswith((f"by {worked}", "by kill")), told
