"""Faults of the daemons on a real node: hung, storming, console lost, two at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chv.agent.condition_vm import DAEMON_S
from chv.common.files import FileLock
from tests.integration.live_node import GUEST, ROOT, LiveNode, live_node, need, wait_for
from tests.integration.test_node_silence import LATE_S, hung, silent_and_back

pytestmark = [pytest.mark.root, need()]


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake") as running:
        running.apply(GUEST)
        yield running


@pytest.mark.parametrize(
    ("name", "object_", "conditions"),
    [
        ("stord", "volume/disk", ("VolumesReady", "StorageLost")),
        ("nwd", "network/net", ("NetworkReady",)),
    ],
)
def test_what_a_hung_daemon_knows_is_unknown_and_its_return_heals_the_node(
    node: LiveNode, name: str, object_: str, conditions: tuple[str, ...]
) -> None:
    node.await_state("TenantReady")
    vmms = node.workers("vmm")
    pid = node.daemon_pid(name)
    limit = f"{DAEMON_S + LATE_S:g}s"
    with hung(pid):
        begun = time.monotonic()
        node.await_state("Degraded", timeout_s=10)
        assert time.monotonic() - begun < 8  # 5 s and what a loaded machine adds
        for condition in conditions:
            node.cli("wait", "vm/guest", "--for", f"{condition}=Unknown", "--timeout", limit)
        node.cli("wait", object_, "--for", "Ready=Unknown", "--timeout", limit)
        assert node.condition("guest", "VMMRunning")["status"] == "True"
        assert "Running" in node.cli("get", "vm").stdout
    node.cli("wait", "node", "--for", "TenantReady")
    assert node.daemon_pid(name) == pid
    assert node.workers("vmm") == vmms
    for condition in conditions:
        wanted = f"{condition}=False" if condition == "StorageLost" else condition
        node.cli("wait", "vm/guest", "--for", wanted)
    node.cli("wait", object_, "--for", "Ready")


def test_a_hung_vmm_is_unknown_and_goes_on_as_it_was(node: LiveNode) -> None:
    silent_and_back(node, "guest")


def test_the_conditions_of_the_node_can_be_waited_for(node: LiveNode) -> None:
    assert node.cli("wait", "node", "--for", "TenantReady").stdout == "node TenantReady\n"
    node.cli("wait", "node", "--for", "state=TenantReady")
    node.cli("wait", "node", "--for", "SchedulingPaused=False")
    for kind in ("HostReady", "StorageReady", "NetworkReady", "StoreHealthy", "AdoptionDone"):
        node.cli("wait", "node", "--for", kind)
    late = node.cli("wait", "node", "--for", "HostReady=False", "--timeout", "1s", check=False)
    assert late.returncode == 9
    assert "HostReady is True (ChecksPassed)" in late.stderr
    slip = node.cli("wait", "node", "--for", "Tenantready", check=False)
    assert slip.returncode == 2
    assert "AdoptionDone, SchedulingPaused, " in slip.stderr
    node.cli("node", "maintenance", "--reason", "a look inside")
    down = node.cli("wait", "node", "--for", "TenantReady", check=False)
    assert down.returncode == 6
    assert "chv node resume" in down.stderr
    node.cli("wait", "node", "--for", "state=Maintenance")
    node.cli("node", "resume")
    node.cli("wait", "node", "--for", "TenantReady")
    node.cli("wait", "vm/guest", "--for", "VMMRunning")


def test_what_is_said_of_an_object_has_its_age(node: LiveNode) -> None:
    node.cli("wait", "vm/guest", "--for", "VMMRunning")
    assert 0 <= node.get("vm", "guest")["status"]["observedAgeSeconds"] < 60


def test_vm_is_stopped_at_once_while_the_storage_service_hangs(node: LiveNode) -> None:
    node.await_state("TenantReady")
    pid = node.daemon_pid("stord")
    os.kill(pid, signal.SIGSTOP)
    try:
        node.await_state("Degraded", timeout_s=10)
        node.cli("stop", "guest", "--force", "--no-wait")
        # A question to the hung daemon would be waited for 10 s before the VMM is touched.
        wait_for(lambda: not node.workers("vmm"), timeout_s=5, what="the VMM to end")
    finally:
        with contextlib.suppress(ProcessLookupError):  # the agent replaces it after a while
            os.kill(pid, signal.SIGCONT)
    node.await_state("TenantReady")
    node.cli("start", "guest")


def test_degraded_node_refuses_creation_and_says_what_is_missing(node: LiveNode) -> None:
    pid = node.daemon_pid("nwd")
    os.kill(pid, signal.SIGSTOP)
    try:
        node.await_state("Degraded", timeout_s=10)
        done = node.cli("start", "guest", check=False)
        assert done.returncode == 6
        assert "NetworkReady" in done.stderr
    finally:
        os.kill(pid, signal.SIGCONT)
    node.await_state("TenantReady")


def test_console_holder_is_started_again_and_records_on(node: LiveNode) -> None:
    before = node.workers("console")
    (pid,) = before.values()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: set(node.workers("console")) - set(before), 15, "a new console holder")
    vm_uid = node.get("vm", "guest")["metadata"]["uid"]
    log = node.dev.layout.vm_state(vm_uid) / "console.log"
    wait_for(lambda: log.read_text().count("console attached") >= 2, 40, "the line attached again")


def test_restart_storm_fails_the_node_until_an_operator_resets_it(node: LiveNode) -> None:
    vmms = node.workers("vmm")
    # Held before the kill: whatever nwd is started next finds its lock taken and ends at once.
    pid = node.daemon_pid("nwd")
    os.kill(pid, signal.SIGKILL)
    lock = node.dev.layout.lock("nwd")
    wait_for(lambda: take(lock), 10, "the lock of nwd")
    try:
        node.await_state("Failed", timeout_s=60)
        status = node.node_status()
        assert "nwd" in status["transitions"][-1]
        assert node.cli("stop", "guest", check=False).returncode == 6
    finally:
        release(lock)
    node.cli("node", "reset", "--reason", "the lock is free")
    node.await_state("TenantReady", timeout_s=30)
    shown = node.cli("ops", "ls", "--kind", "node", "--verb", "reset_node").stdout
    assert "the lock is free" in shown and "Succeeded" in shown
    assert node.cli("node", "reset", check=False).returncode == 6
    assert node.workers("vmm") == vmms


HELD: dict[Path, object] = {}


def take(path: Path) -> bool:
    """Hold a daemon's lock in this process; False while another one has it."""
    from chv.common.errors import Conflict

    holder = FileLock.acquire(path)
    try:
        holder.__enter__()
    except Conflict:
        return False
    HELD[path] = holder
    return True


def release(path: Path) -> None:
    holder = HELD.pop(path, None)
    if holder is not None:
        holder.__exit__(None, None, None)  # type: ignore[attr-defined]


def test_second_agent_on_the_same_node_is_refused(node: LiveNode) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "chv.agent", "--config", str(node.dev.config_path)],
        capture_output=True, text=True, timeout=30, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 5
    assert "CONFLICT" in done.stderr
    assert node.node_status()["state"] == "TenantReady"


def test_up_of_a_running_node_changes_nothing(node: LiveNode) -> None:
    pid = node.daemon_pid("agent")
    node.up()
    assert node.daemon_pid("agent") == pid


def test_down_leaves_the_vms_and_up_adopts_them(node: LiveNode) -> None:
    vmms = node.workers("vmm")
    assert vmms
    node.down()
    assert node.workers("vmm") == vmms
    node.up()
    assert node.workers("vmm") == vmms
    assert node.status("guest")["phase"] == "Running"


def test_host_reboot_brings_the_vm_back_from_the_store(node: LiveNode) -> None:
    """All of the instance in memory is gone; the boot id is the one thing that cannot be faked
    here, so this shows the harder half: the world vanished and the records say otherwise.
    """
    dev = node.dev
    before = node.workers("vmm")
    node.kill("agent")
    wait_for(lambda: not pids_of(node), 10, "the end of all three daemons")
    for kind in ("vmm", "qsd", "proxy", "dnsmasq", "console"):
        for pid in node.workers(kind).values():
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(node.workers(k) for k in ("vmm", "qsd")), 10, "the workers' end")
    subprocess.run(["rm", "-rf", str(dev.layout.run)], check=True)
    assert dev.sandbox is not None
    for netns in (dev.sandbox.host, dev.sandbox.wan):
        subprocess.run(["ip", "netns", "delete", netns], check=True)
    node.up()
    wait_for(lambda: set(node.workers("vmm")) - set(before), 40, "a new VMM")
    wait_for(lambda: node.status("guest")["phase"] == "Running", 30, "a running VM")
    assert len(node.workers("vmm")) == 1


def pids_of(node: LiveNode) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            text = entry.read_bytes()
        except OSError:
            continue
        if str(node.directory).encode() in text and b"--config" in text:
            found.append(int(entry.parent.name))
    return found


def test_hung_console_holder_is_replaced_and_vms_start_again(node: LiveNode) -> None:
    node.await_state("TenantReady")
    ((worker_id, pid),) = node.workers("console").items()
    vmms = node.workers("vmm")
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: node.workers("console").keys() - {worker_id}, 45, "another holder")
        assert worker_id not in node.workers("console")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    assert node.workers("vmm") == vmms
    node.cli("restart", "guest", "--force", "--timeout", "30s")


def test_lost_store_of_a_daemon_is_named_in_the_state_of_the_node() -> None:
    with live_node(CHV_VMM="fake") as node:
        node.down()
        for path in node.dev.layout.state.glob("nwd.db*"):
            if path.suffix != ".reserve":
                os.truncate(path, 0)
        refused = node.cli("up", "--dir", str(node.directory), check=False)
        status = node.node_status()
        node.dev.layout.database("nwd").with_name("nwd.db.reserve").unlink()  # start anew
    assert refused.returncode != 0
    assert status["state"] == "Failed"
    assert "exit code 11 (DATA_LOSS" in status["transitions"][-1]
