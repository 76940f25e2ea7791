"""How a VM ends, who asked for it and its run strategy, on real VMMs: what follows, as documented.

The whole table is in `tests/unit/agent/test_agent_parts.py`; here the VMMs say themselves how their
guest ended. And a boot of the host under a guest whose memory was saved before.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import pairwise

import pytest

from chv.probe.device_events import Acked
from chv.probe.events import Beat, Boot, Ready
from chv.probe.lines import parse_line
from tests.integration.console_viewer import viewer
from tests.integration.host_boot import reboot
from tests.integration.live_node import need, wait_for
from tests.probe_node import ProbeNode, saving_node, vm, volume
from tests.sampling import sampled

pytestmark = [pytest.mark.root, pytest.mark.slow, need()]
COMMAND = "disk=none net=off"
CASES = (
    ("off", "Always", "Running", "GuestShutdown"),
    ("off", "RerunOnFailure", "Stopped", "GuestShutdown"),
    ("off", "Manual", "Stopped", "GuestShutdown"),
    ("kill", "RerunOnFailure", "Running", "Crash"),
    ("kill", "Manual", "Stopped", "Crash"),
    ("panic", "Manual", "Stopped", "Panic"),
    ("stop", "Always", "Stopped", "stopped by acpi"),
)
WRITER = "disk=writer,every=20,seed=7,window=512 net=off"


@pytest.fixture(scope="module", params=["qemu", "tolerant"])
def probes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProbeNode]:
    directory = tmp_path_factory.mktemp("ends")
    with saving_node(request.param, directory, CHV_TEST_BUILD="1") as running:
        yield running


def started(probes: ProbeNode, strategy: str) -> None:
    probes.apply(vm(probes.vmm, COMMAND, spec=f"  runStrategy: {strategy}"))
    if strategy == "Manual":
        probes.node.cli("start", "p")
    probes.await_event(Ready)


def ends(probes: ProbeNode, how: str) -> None:
    if how == "kill":
        ((_, pid),) = probes.node.workers("vmm").items()
        os.kill(pid, signal.SIGKILL)
    elif how == "stop":
        probes.node.cli("stop", "p")
    else:
        with viewer(probes.node, name="p") as terminal:
            terminal.type(f"{how}\r".encode())
            wait_for(lambda: probes.node.status("p").get("lastStop"), 30, "the end")


@pytest.mark.parametrize(("how", "strategy", "phase", "words"), sampled(CASES, 2, seed=4))
def test_what_follows_from_an_end(
    probes: ProbeNode, how: str, strategy: str, phase: str, words: str
) -> None:
    started(probes, strategy)
    before = probes.node.workers("vmm")
    ends(probes, how)

    def so() -> bool:
        status = probes.node.status("p")
        changed = probes.node.workers("vmm") != before
        return changed and status["phase"] == phase and words in status.get("lastStop", "")

    wait_for(so, 40, f"{phase} after {how}: {words}")
    wanted = "Halted" if how in ("off", "stop") and phase == "Stopped" else strategy
    assert probes.node.get("vm", "p")["spec"].get("runStrategy", "RerunOnFailure") == wanted
    assert probes.node.status("p").get("restarts", 0) == int(phase == "Running")
    probes.node.cli("start", "p")
    probes.await_event(Ready, more_than=1)
    probes.node.cli("delete", "vm", "p")
    assert probes.node.workers("vmm") == {}


def test_a_paused_vm_is_let_run_to_be_asked(probes: ProbeNode) -> None:
    started(probes, "RerunOnFailure")
    probes.node.cli("pause", "p")
    said = probes.node.cli("stop", "p")
    assert "acpi" in said.stdout + said.stderr
    probes.node.cli("delete", "vm", "p")


def test_a_guest_that_was_saved_goes_on_after_a_boot_of_the_host(probes: ProbeNode) -> None:
    probes.apply(volume("data"), vm(probes.vmm, WRITER, disks=("data",)))
    probes.await_event(Acked)
    probes.await_event(Beat)
    probes.node.cli("snapshot", "create", "s", "--vm", "p", "--memory")
    saved_at = beats(probes)[-1]
    wait_for(lambda: beats(probes)[-1] > saved_at + 2, 30, "the guest to run on")
    reboot(probes.node)
    wait_for(lambda: boots(probes) == 2, 60, "another boot of the guest")
    wait_for(lambda: probes.node.status("p")["phase"] == "Running", 20, "Running")
    assert "HostReboot" in probes.node.status("p")["lastStop"]
    probes.node.cli("restore", "p", "--snapshot", "s", "--force")
    wait_for(lambda: beats(probes)[-1] >= saved_at, 30, "beats from where it was saved")
    assert boots(probes) == 2, "it was not booted"
    assert len([one for one, other in pairwise(beats(probes)) if other <= one]) == 1
    probes.node.cli("delete", "vmsnap", "s")
    probes.node.cli("delete", "vm", "p")
    probes.node.cli("delete", "volume", "data")


def said(probes: ProbeNode) -> list[object]:
    lines = probes.node.cli("logs", "vm/p", "--tail", "10000").stdout.splitlines()
    return [parse_line(line.partition("Z ")[2]) for line in lines]


def beats(probes: ProbeNode) -> list[int]:
    return [event.n for event in said(probes) if isinstance(event, Beat)]


def boots(probes: ProbeNode) -> int:
    return sum(isinstance(event, Boot) for event in said(probes))
