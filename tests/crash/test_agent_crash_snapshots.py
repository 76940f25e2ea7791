"""SIGKILL of the agent at each step of saving a whole VM, of bringing it back and of forgetting it.

On QEMU, and on the Cloud Hypervisor that `CHV_CLOUD_HYPERVISOR_TOLERANT` names. The guest's own
beats tell whether it went on, went back, or was booted anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from chv.agent.snapshot import whole
from chv.agent.vm import restoring
from chv.probe.device_events import Acked
from chv.probe.events import Beat, Boot
from chv.probe.lines import parse_line
from tests.crash.test_agent_crash_points import assert_nothing_left
from tests.integration.live_node import need, wait_for
from tests.probe_node import ProbeNode, saving_node, vm, volume
from tests.sampling import LONG, sampled

pytestmark = [pytest.mark.root, need()]

WRITER = "disk=writer,every=20,seed=7,window=512 net=off"
REMOVE = "agent.vm_snapshot.remove"
SAVE = tuple(point for point in whole.FAILPOINTS if point != REMOVE)
# All is there; `disks` is not recorded as taken yet, the next agent finds it out.
TAKEN = tuple(f"agent.vm_snapshot.{name}" for name in ("disks", "taken", "resumed"))
IN_CI = 1  # of saving and of bringing back; the long run takes all


@pytest.fixture(scope="module", params=["qemu", "tolerant"])
def probes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProbeNode]:
    with saving_node(
        request.param, tmp_path_factory.mktemp("saved"), CHV_TEST_BUILD="1"
    ) as running:
        yield running


@pytest.fixture
def writing(probes: ProbeNode) -> Iterator[ProbeNode]:
    """A guest that writes; afterwards nothing of it nor of its snapshot is left."""
    probes.node.restart()
    probes.apply(volume("data"), vm(probes.vmm, WRITER, disks=("data",)))
    probes.await_event(Acked)
    probes.await_event(Beat)
    yield probes
    probes.node.cli("delete", "vmsnap", "s", "--ignore-not-found")
    probes.node.cli("delete", "vm", "p", "--ignore-not-found")
    probes.node.cli("delete", "volume", "data", "--ignore-not-found")
    assert _kept(probes) == []
    assert_nothing_left(probes.node)


def _kept(probes: ProbeNode) -> list[Path]:
    return sorted(probes.node.dev.layout.vm_snapshots.glob("*"))


def _said(probes: ProbeNode) -> tuple[int, list[int]]:
    """Return how often the guest was booted, and all of its beats."""
    lines = probes.node.cli("logs", "vm/p", "--tail", "10000").stdout.splitlines()
    events = [parse_line(line.partition("Z ")[2]) for line in lines]
    boots = sum(isinstance(event, Boot) for event in events)
    return boots, [event.n for event in events if isinstance(event, Beat)]


def _await_beats(probes: ProbeNode) -> None:
    count = len(_said(probes)[1])
    wait_for(lambda: len(_said(probes)[1]) > count + 1, 30, "the guest to run on")


def _save(probes: ProbeNode, *more: str, check: bool = True) -> None:
    probes.node.cli("snapshot", "create", "s", "--vm", "p", "--memory", *more, check=check)


def _phase(probes: ProbeNode) -> str:
    return str(probes.node.get("vmsnap", "s").get("status", {}).get("phase", ""))


@pytest.mark.parametrize("point", sampled(SAVE, IN_CI, seed=1))
def test_kill_in_saving_ends_whole_or_failed_and_the_guest_runs_on(
    writing: ProbeNode, point: str
) -> None:
    vmms, boots = writing.node.workers("vmm"), _said(writing)[0]
    writing.node.restart(f"{point}=1*kill")
    _save(writing, "--no-wait", check=False)
    writing.node.await_agent_death()
    writing.node.restart()
    wait_for(lambda: _phase(writing) in ("Ready", "Failed"), 30, "a decision")
    ready = _phase(writing) == "Ready"
    assert ready == (point in TAKEN)
    _await_beats(writing)
    assert writing.node.workers("vmm") == vmms, "the VMM was kept"
    assert _said(writing)[0] == boots, "it was not booted"
    if not ready:
        wait_for(lambda: _kept(writing) == [], 30, "nothing to be left")


@pytest.mark.parametrize("point", sampled(restoring.FAILPOINTS, IN_CI, seed=2))
def test_kill_in_restoring_converges_to_the_guest_gone_back_once(
    writing: ProbeNode, point: str
) -> None:
    _save(writing)
    _await_beats(writing)
    boots = _said(writing)[0]
    writing.node.restart(f"{point}=1*kill")
    writing.node.cli("restore", "p", "--snapshot", "s", "--force", check=False)
    writing.node.await_agent_death()
    writing.node.restart()
    wait_for(lambda: writing.node.status("p").get("phase") == "Running", 60, "a running VM")
    _await_beats(writing)
    after, beats = _said(writing)
    assert after == boots, "it was not booted"
    assert sum(other <= one for one, other in pairwise(beats)) == 1, "it went back once"
    assert len(writing.node.workers("vmm")) == 1


@pytest.mark.skipif(not LONG, reason="in the long run alone: CHV_LONG=1")
def test_kill_in_forgetting_converges_to_nothing_kept(writing: ProbeNode) -> None:
    _save(writing)
    vmms = writing.node.workers("vmm")
    writing.node.restart(f"{REMOVE}=1*kill")
    writing.node.cli("delete", "vmsnap", "s", "--no-wait", check=False)
    writing.node.await_agent_death()
    writing.node.restart()
    wait_for(
        lambda: writing.node.cli("get", "vmsnap", "s", check=False).returncode == 4, 30, "gone"
    )
    assert _kept(writing) == []
    assert writing.node.workers("vmm") == vmms, "the VMM was kept"
