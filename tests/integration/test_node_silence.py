"""A VMM that hangs, a guest that reboots, one that panics: seen on both VMMs."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chv.agent.condition_vm import MONITOR_S
from chv.probe.events import Boot, Ready
from tests.integration.console_viewer import viewer
from tests.integration.live_node import LiveNode, need, wait_for
from tests.probe_node import VMMS, ProbeNode, probe_node, vm

pytestmark = [pytest.mark.root, pytest.mark.slow, need()]
LATE_S = 10.0  # what a loaded machine adds to a deadline of ours


@contextmanager
def hung(pid: int) -> Iterator[None]:
    """Stop a process for a while, and only that."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def silent_and_back(node: LiveNode, name: str) -> None:
    """Let the VMM of a VM hang, and go on."""
    ((worker, pid),) = node.workers("vmm").items()
    node.cli("wait", f"vm/{name}", "--for", "VMMRunning")
    with hung(pid):
        limit = f"{MONITOR_S + LATE_S:g}s"
        node.cli("wait", f"vm/{name}", "--for", "VMMRunning=Unknown", "--timeout", limit)
        shown = node.condition(name, "VMMRunning")
        assert shown["reason"] == "MonitorSilent"
        assert node.condition(name, "Paused")["status"] == "Unknown"
        assert node.status(name)["phase"] == "Unknown"
        known = shown["lastProbeTime"]
        why = node.cli("why", f"vm/{name}").stdout
        assert "MonitorSilent" in why
        # It is asked again, and what is not known does not become younger by that.
        node.cli("wait", f"vm/{name}", "--for", "Paused=Unknown")
        assert node.condition(name, "VMMRunning")["lastProbeTime"] == known
        refused = node.cli(
            "wait", f"vm/{name}", "--for", "VMMRunning", "--timeout", "1s", check=False
        )
        assert refused.returncode == 9
        assert "MonitorSilent" in refused.stderr
    node.cli("wait", f"vm/{name}", "--for", "VMMRunning", "--timeout", f"{MONITOR_S + LATE_S:g}s")
    assert node.workers("vmm") == {worker: pid}
    assert node.status(name).get("restarts", 0) == 0
    assert node.condition(name, "VMMRunning")["lastProbeTime"] > known


@pytest.mark.parametrize("vmm", VMMS)
def test_silence_reboots_and_panics_of_a_guest_are_seen(vmm: str, tmp_path: Path) -> None:
    with probe_node(vmm, tmp_path) as probes:
        probes.apply(vm(vmm, "net=off"))
        probes.await_event(Ready)
        probes.node.cli("wait", "vm/p", "--for", "GuestBooted")
        silent_and_back(probes.node, "p")
        reboots_are_counted(probes)
        a_panic_is_a_crash(probes)
        probes.node.cli("delete", "vm", "p")


def reboots_are_counted(probes: ProbeNode) -> None:
    node, vmms = probes.node, probes.node.workers("vmm")
    boots = len(probes.events(Boot))
    with viewer(node, name="p") as terminal:
        terminal.type(b"reboot\r")
        probes.await_event(Boot, more_than=boots)
    wait_for(lambda: node.status("p")["vmm"].get("guestReboots") == 1, 15, "the reboot told")
    assert node.status("p")["vmm"]["guestRebootedAt"]
    node.cli("wait", "vm/p", "--for", "GuestBooted")
    heard = node.condition("p", "GuestBooted")["evidence"]
    assert f"serial: {node.status('p')['vmm']['startedAt']}" < heard
    boots = len(probes.events(Boot))
    node.cli("reset", "p")
    probes.await_event(Boot, more_than=boots)
    node.cli("wait", "vm/p", "--for", "GuestBooted")
    assert node.status("p")["vmm"]["guestReboots"] == 1
    assert node.workers("vmm") == vmms


def a_panic_is_a_crash(probes: ProbeNode) -> None:
    node, before = probes.node, probes.node.workers("vmm")
    ready = len(probes.events(Ready))
    with viewer(node, name="p") as terminal:
        terminal.type(b"panic\r")
        wait_for(lambda: node.status("p").get("restarts") == 1, 30, "a restart")
    probes.await_event(Ready, more_than=ready)
    assert "GuestPanicked" in node.status("p")["lastStop"]
    assert not set(node.workers("vmm").values()) & set(before.values())
    assert node.status("p")["vmm"].get("guestReboots", 0) == 0
