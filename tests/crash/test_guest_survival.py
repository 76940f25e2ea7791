"""Each daemon is killed again and again under a running VM: the VMM stays, the node comes back.

With the fake VMM; in the long run also under a real guest that ticks and writes, which must not
miss a beat nor lose a record that was acknowledged to it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from chv.probe.events import Beat, Boot
from tests.integration.live_node import DAEMONS, GUEST, LiveNode, live_node, need, wait_for
from tests.probe_node import ProbeNode, probe_node, vm, volume
from tests.probe_records import GuestLog
from tests.sampling import LONG

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(3600), need()]
KILLS = 50 if LONG else 2  # of each daemon
BACK_S = 30.0  # what RELIABILITY asks for is 10 s, on a machine with nothing else to do


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake") as running:
        running.apply(GUEST)
        yield running


def comes_back(node: LiveNode, daemon: str) -> None:
    """Kill a daemon; wait until another one serves. The agent is started by `chv up`."""
    before = node.daemon_pid(daemon)
    node.kill(daemon)
    if daemon == "agent":
        node.up()
    wait_for(lambda: node.daemon_pid(daemon) != before, BACK_S, f"another {daemon}")
    node.await_state("TenantReady", timeout_s=BACK_S)


@pytest.mark.parametrize("daemon", DAEMONS)
def test_vmm_is_the_same_process_after_every_kill(node: LiveNode, daemon: str) -> None:
    node.await_state("TenantReady", timeout_s=BACK_S)
    workers = {kind: node.workers(kind) for kind in ("vmm", "qsd", "proxy", "dnsmasq")}
    assert len(workers["vmm"]) == 1
    for _ in range(KILLS):
        comes_back(node, daemon)
        assert {kind: node.workers(kind) for kind in workers} == workers
    wait_for(lambda: node.status("guest")["phase"] == "Running", BACK_S, "a running VM")


@pytest.fixture(scope="module")
def writing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProbeNode]:
    if not LONG:
        pytest.skip("a real guest: in the long run")
    with probe_node("qemu", tmp_path_factory.mktemp("probe")) as running:
        command = "disk=writer,depth=1,every=10"
        running.apply(volume("data"), vm("qemu", command, disks=("data",), networks=("lan",)))
        yield running


@pytest.mark.parametrize("daemon", DAEMONS)
def test_guest_ticks_and_writes_on_through_every_kill(writing: ProbeNode, daemon: str) -> None:
    node = writing.node
    log = GuestLog(node.dev.layout.vm_state(node.get("vm", "p")["metadata"]["uid"]))
    vmms = node.workers("vmm")
    boots = len(log.all(Boot))
    for _ in range(KILLS):
        beats = len(log.all(Beat))
        comes_back(node, daemon)
        log.await_progress(20)
        wait_for(lambda: len(log.all(Beat)) > beats, BACK_S, "a beat of the guest")  # noqa: B023
        assert node.workers("vmm") == vmms
    assert len(log.all(Boot)) == boots
    assert log.trouble() == []
    assert log.hung() == 0
