"""The agent's daemons on a real node: hung ones replaced, others restarted on purpose."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live_node import GUEST, ROOT, LiveNode, live_node, need, wait_for

pytestmark = [pytest.mark.root, need()]


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        running.apply(GUEST)
        yield running


def restarts(node: LiveNode) -> dict[str, int]:
    return {each["name"]: each["restarts"] for each in node.node_status()["daemons"]}


def test_hung_daemons_are_replaced_and_the_vmm_goes_on(node: LiveNode) -> None:
    """Both at once: the one is found as the other is, and it takes the time of one."""
    vmms, before = node.workers("vmm"), restarts(node)
    pids = {name: node.daemon_pid(name) for name in ("stord", "nwd")}
    for pid in pids.values():
        os.kill(pid, signal.SIGSTOP)
    node.await_state("Degraded", timeout_s=15)
    assert {each["state"] for each in node.node_status()["daemons"]} >= {"hung"}
    assert all(node.daemon_pid(name) == pid for name, pid in pids.items())  # told, not ended yet
    old = {0, *pids.values()}
    wait_for(lambda: not old & {node.daemon_pid(name) for name in pids}, 60, "others")
    node.await_state("TenantReady", timeout_s=30)
    assert restarts(node) == {name: count + 1 for name, count in before.items()}
    assert node.workers("vmm") == vmms
    assert node.status("guest")["phase"] == "Running"


@pytest.mark.parametrize("name", ["stord", "nwd"])
def test_restart_on_purpose_is_no_alarm(node: LiveNode, name: str) -> None:
    node.await_state("TenantReady")
    vmms, before, status = node.workers("vmm"), restarts(node), node.node_status()
    pid = node.daemon_pid(name)
    done = node.cli("daemon", "restart", name, "--reason", "another version")
    after = node.node_status()
    assert done.stdout.startswith(f"{name} restarted: pid {pid} -> {node.daemon_pid(name)}")
    assert node.daemon_pid(name) != pid
    assert after["transitions"] == status["transitions"]
    assert is_older(status, after)
    assert restarts(node) == before
    assert node.workers("vmm") == vmms


def is_older(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether each condition has stood since before."""
    stood = {(each["type"], each["status"], each["since"]) for each in before["conditions"]}
    return stood == {(each["type"], each["status"], each["since"]) for each in after["conditions"]}


def test_work_goes_on_over_a_restart_on_purpose(node: LiveNode) -> None:
    """It waits, and nothing of it fails."""
    for name in ("stord", "nwd"):
        node.cli("restart", "guest", "--force", "--no-wait")
        node.cli("daemon", "restart", name)
        wait_for(lambda: not operations(node, "--active"), 30, "the end of all operations")
    ended = [each for each in operations(node) if each["verb"] == "restart"]
    assert [each["state"] for each in ended] == ["Succeeded", "Succeeded"], ended
    assert node.status("guest")["phase"] == "Running"


def operations(node: LiveNode, *arguments: str) -> list[dict[str, Any]]:
    found = json.loads(node.cli("ops", *arguments, "-o", "json").stdout)
    listed: list[dict[str, Any]] = found if isinstance(found, list) else found["operations"]
    return listed


def test_restarted_console_holder_has_its_lines_again(node: LiveNode) -> None:
    vmms, before = node.workers("vmm"), node.workers("console")
    vm_uid = node.get("vm", "guest")["metadata"]["uid"]
    log = node.dev.layout.vm_state(vm_uid) / "console.log"
    attached = log.read_text().count("console attached")
    node.cli("daemon", "restart", "console")
    (worker_id,) = node.workers("console")
    assert worker_id not in before
    wait_for(lambda: log.read_text().count("console attached") > attached, 20, "its line")
    listed = json.loads(node.cli("daemon", "list", "--json").stdout)["daemons"]
    assert {each["name"]: each["state"] for each in listed} == dict.fromkeys(
        ("stord", "nwd", "console"), "ready"
    )
    assert node.workers("vmm") == vmms


def test_log_of_a_daemon_is_followed_over_its_restart(node: LiveNode) -> None:
    command = [sys.executable, "-m", "chv.cli", "logs", "daemon/stord", "--follow", "--tail", "1"]
    environment = os.environ | {"CHV_SOCKET": str(node.dev.socket)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as following:
        assert following.stdout is not None
        try:
            assert following.stdout.readline().startswith("{")  # it follows from here on
            node.cli("daemon", "restart", "stord")
            events = (json.loads(line)["event"] for line in following.stdout)
            assert "ready" in events
        finally:
            following.kill()


def test_each_daemon_is_given_the_configuration_of_the_agent(node: LiveNode) -> None:
    for name in ("stord", "nwd"):
        argv = Path(f"/proc/{node.daemon_pid(name)}/cmdline").read_bytes().split(b"\0")
        assert argv[-3:-1] == [b"--config", str(node.dev.config_path).encode()]
