"""Metrics on a real node with the fake VMM, also while a daemon hangs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from tests.integration.live_node import GUEST, LiveNode, live_node, need, wait_for

pytestmark = [pytest.mark.root, need()]

VM = '{namespace="default",name="guest"'


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        running.apply(GUEST)
        yield running


def scrape(node: LiveNode) -> str:
    path = str(node.dev.layout.socket("metrics"))
    done = subprocess.run(
        ["curl", "-sSf", "--max-time", "5", "--unix-socket", path, "http://chv/metrics"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout


def test_a_running_vm_is_counted(node: LiveNode) -> None:
    received = f'kubevirt_vmi_network_receive_bytes_total{VM},interface="net"}}'
    wait_for(lambda: received in scrape(node), 20, "the NIC's counters")
    wait_for(lambda: "chv_volume_size_bytes" in scrape(node), 20, "what stord counts")
    lines = scrape(node).splitlines()
    assert f'chv_volume_size_bytes{{namespace="default",name="disk"}} {16 << 20}' in lines
    assert f"kubevirt_vmi_memory_domain_bytes{VM}}} {64 << 20}" in lines
    assert any(line.startswith(f"kubevirt_vmi_memory_resident_bytes{VM}}} ") for line in lines)
    assert 'chv_node_state{state="TenantReady"} 1' in lines
    assert 'chv_daemon_up{daemon="stord"} 1' in lines
    assert f'chv_vm_condition{VM},type="VMMRunning"}} 1' in lines
    ended = 'chv_operation_phase_seconds_count{verb="create",phase="Done"} 1'
    assert ended in lines


def test_a_hung_daemon_loses_its_series_and_no_scrape_waits(node: LiveNode) -> None:
    pid = node.daemon_pid("nwd")
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(lambda: 'chv_daemon_up{daemon="nwd"} 0' in scrape(node), 20, "nwd is down")
        assert f"kubevirt_vmi_memory_resident_bytes{VM}}}" in scrape(node)
    finally:
        with contextlib.suppress(ProcessLookupError):  # its supervisor may have been faster
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: 'chv_daemon_up{daemon="nwd"} 1' in scrape(node), 30, "nwd is back")


@pytest.mark.parametrize("daemon", ["stord", "nwd"])
def test_daemons_log_the_operation_of_a_mutating_call(node: LiveNode, daemon: str) -> None:
    operations = json.loads(node.cli("ops", "ls", "-o", "json").stdout)
    known = {each["id"] for each in operations}
    text = (node.dev.layout.logs / f"{daemon}.log").read_text()
    logged = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    calls = [each for each in logged if each["event"] == "rpc.done"]
    assert calls
    assert {each["operation_id"] for each in calls} <= known
    assert all(each["outcome"] for each in calls)
