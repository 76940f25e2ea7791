"""The host boots under a node: what ran runs again, once, in its order; what stood still stays so.

Real daemons, storage and networks; the VMM is the shipped fake. Also at moments in the middle of a
start and of a stop, and with an agent that is killed while a VM crashes again and again.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from tests.integration.host_boot import reboot
from tests.integration.live_node import LiveNode, live_node, need, wait_for
from tests.sampling import sampled

pytestmark = [pytest.mark.root, need()]

MANIFEST = """
apiVersion: compute.chv.dev/v1alpha1
kind: Network
metadata: {name: net}
spec: {subnet: 10.77.0.0/24}
---
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {name: disk}
spec: {size: 16Mi, format: raw}
---
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: web}
spec:
  memory: 64Mi
  disks: [{name: data, volume: disk}]
  interfaces: [{name: net, network: net}]
---
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: first}
spec: {memory: 64Mi, boot: {image: tiny}, startPriority: 10, startDelay: 1s}
---
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: by-hand}
spec: {memory: 64Mi, boot: {image: tiny}, runStrategy: Manual}
---
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: halted}
spec: {memory: 64Mi, boot: {image: tiny}, runStrategy: Halted}
---
apiVersion: compute.chv.dev/v1alpha1
kind: Image
metadata: {name: tiny}
spec: {builtin: tiny}
"""
RESTARTS_MAX = 3
MIDDLES = (
    *(f"agent.vm.{step}" for step in ("attach_volume.after", "attach_nic.after", "boot.before")),
    *(f"agent.vm.spawn_{part}" for part in ("process.before", "record.before", "record.after")),
)
STOPS = ("agent.vm.stop_acpi.before", "agent.vm.forget.before", "agent.vm.cleanup.after")
PHASES = {"web": "Running", "first": "Running", "by-hand": "Stopped", "halted": "Stopped"}


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        config = running.dev.config_path  # read again by the agent of the next boot
        text = config.read_text()
        assert "restarts_max = 5" in text
        config.write_text(text.replace("restarts_max = 5", f"restarts_max = {RESTARTS_MAX}"))
        running.apply(MANIFEST)
        yield running  # afterwards nothing of it may be left


def phases(node: LiveNode) -> dict[str, str]:
    return {name: str(node.status(name)["phase"]) for name in PHASES}


def settled(node: LiveNode) -> None:
    """Wait until everything is as the run strategies say; not before this boot's agent looked."""
    wait_for(lambda: len(node.workers("vmm")) == 2 and phases(node) == PHASES, 40, str(PHASES))


def test_after_a_boot_each_vm_is_as_its_run_strategy_says(node: LiveNode) -> None:
    node.cli("start", "by-hand")
    before, pids = node.status("web"), node.workers("vmm")
    assert len(pids) == 3
    reboot(node)
    settled(node)
    after = node.status("web")
    assert after["restarts"] == before.get("restarts", 0) + 1
    assert after.get("crashLoopSince", "") == ""
    assert "HostReboot" in after["lastStop"]
    assert "HostReboot" in node.status("by-hand")["lastStop"]
    for field in ("address", "mac"):
        assert after["interfaces"][0][field] == before["interfaces"][0][field]
    assert pids.keys().isdisjoint(node.workers("vmm"))
    started = {name: node.status(name)["vmm"]["startedAt"] for name in ("first", "web")}
    assert started["first"] < started["web"]


@pytest.mark.parametrize("point", sampled(MIDDLES, 1, seed=5))
def test_power_is_cut_in_the_middle_of_a_start(node: LiveNode, point: str) -> None:
    node.cli("stop", "web", "--force")
    node.restart(f"{point}=1*kill")
    node.cli("start", "web", "--no-wait", check=False)
    node.await_agent_death()
    reboot(node)
    settled(node)


@pytest.mark.parametrize("point", sampled(STOPS, 1, seed=5))
def test_power_is_cut_in_the_middle_of_a_stop(node: LiveNode, point: str) -> None:
    node.restart(f"{point}=1*kill")
    node.cli("stop", "web", "--no-wait", check=False)
    node.await_agent_death()
    reboot(node)
    wait_for(lambda: node.status("web")["phase"] == "Stopped", 30, "a stopped VM")
    assert len(node.workers("vmm")) == 1
    node.cli("start", "web")
    settled(node)


def test_restarts_stay_within_their_cap_whoever_counts(node: LiveNode) -> None:
    """A VMM that dies at once, and an agent that is killed between each crash and its restart."""
    settled(node)
    seen: set[str] = set()
    restarts = node.status("web").get("restarts", 0)
    for _ in range(12):
        if _gave_up(node):
            break
        found = wait_for(lambda: _vmm(node) or _gave_up(node), 40, "another VMM, or none any more")
        if found is True:
            break
        seen.add(found)
        with contextlib.suppress(ProcessLookupError):
            os.kill(node.workers("vmm")[found], signal.SIGKILL)
        if len(seen) % 2:
            node.kill("agent")
            node.await_agent_death()
            node.up()
    wait_for(lambda: _gave_up(node), 20, "that it is given up")
    assert node.status("web").get("restarts", 0) - restarts == RESTARTS_MAX
    assert node.status("web")["crashLoopSince"]
    node.cli("start", "web")
    settled(node)


def _vmm(node: LiveNode) -> str:
    """Return the worker id of web's VMM that runs."""
    short = node.get("vm", "web")["metadata"]["uid"].replace("-", "")[:10]
    return next((each for each in node.workers("vmm") if f":{short}" in each), "")


def _gave_up(node: LiveNode) -> bool:
    return bool(node.condition("web", "VMMRunning")["reason"] == "GivenUp")
