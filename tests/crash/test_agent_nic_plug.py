"""SIGKILL of the agent at every step of plugging and unplugging a NIC of a running VM.

Real daemons and network; the VMM is the shipped fake, which holds its taps. The next agent finishes
the work: the VM keeps its VMM, nwd and the VMM have the same NICs, and nothing of others is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import taps_of
from tests.integration.live_node import LiveNode, live_node, need, wait_for
from tests.sampling import sampled

pytestmark = [pytest.mark.root, need()]

PARTS = """
apiVersion: compute.chv.dev/v1alpha1
kind: Network
metadata: {name: one}
spec: {subnet: 10.9.0.0/24}
---
apiVersion: compute.chv.dev/v1alpha1
kind: Network
metadata: {name: two}
spec: {subnet: 10.9.1.0/24}
---
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {name: disk}
spec: {size: 64Mi, format: raw}
"""
VM = """
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: victim}
spec:
  memory: 64Mi
  disks: [{name: data, volume: disk}]
  interfaces: [INTERFACES]
"""
FIRST, SECOND = "{name: eth0, network: one}", "{name: eth1, network: two, queues: 2}"
PLUG = ("vm.attach_nic.before", "vm.attach_nic.after", "vm.add_nic.before",
        "vm.add_nic_effect.before", "vmm.add_nic.tap_open", "vm.add_nic.after")  # fmt: skip
UNPLUG = ("vm.remove_nic.before", "vm.remove_nic_record.before", "vm.remove_nic.after",
          "vm.detach_nic.before", "vm.detach_nic.after")  # fmt: skip


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        directory = tmp_path_factory.mktemp("manifests")
        running.environment["MANIFESTS"] = str(directory)
        (directory / "parts.yaml").write_text(PARTS)
        running.cli("apply", "-f", str(directory / "parts.yaml"), "--wait")
        running.cli("apply", "-f", manifest(running, FIRST), "--wait")
        yield running
        running.cli("delete", "vm", "victim")
        running.cli("delete", "-f", str(directory / "parts.yaml"))


def manifest(node: LiveNode, *interfaces: str) -> str:
    path = Path(node.environment["MANIFESTS"]) / "vm.yaml"
    path.write_text(VM.replace("INTERFACES", ", ".join(interfaces)))
    return str(path)


def taps(node: LiveNode) -> int:
    """Return how many descriptors of taps the VMM holds."""
    (pid,) = node.workers("vmm").values()
    return len(taps_of(pid))


def has(node: LiveNode, names: list[str], tap_fds: int) -> bool:
    """Tell whether VM, nwd and VMM agree on these interfaces."""
    status = node.status("victim")
    shown = [each["name"] for each in status.get("interfaces", [])]
    ready = next(each for each in status["conditions"] if each["type"] == "NetworkReady")
    two = node.get("network", "two")["status"].get("nics", 0)
    whole = ready["status"] == "True" and two == len(names) - 1
    return shown == names and whole and taps(node) == tap_fds


@pytest.mark.parametrize("point", [*sampled(PLUG, 1, seed=1), *sampled(UNPLUG, 1, seed=1)])
def test_kill_in_a_change_of_nics_converges(node: LiveNode, point: str) -> None:
    (before,) = node.workers("vmm").values()
    start, wanted = ([FIRST], [FIRST, SECOND]) if point in PLUG else ([FIRST, SECOND], [FIRST])
    node.cli("apply", "-f", manifest(node, *start), "--wait")
    node.restart(f"agent.{point}=1*kill")
    node.cli("apply", "-f", manifest(node, *wanted), check=False)
    node.await_agent_death()
    node.restart()
    names, fds = (["eth0", "eth1"], 3) if point in PLUG else (["eth0"], 1)
    wait_for(lambda: has(node, names, fds), 30, f"{names}")
    assert list(node.workers("vmm").values()) == [before], "the VMM was replaced"
