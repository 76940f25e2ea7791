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


def test_a_hung_daemon_and_what_it_does_to_the_node_are_events(node: LiveNode) -> None:
    """After the test above, in which nwd was stopped."""
    told = [json.loads(line) for line in node.cli("events", "--json").stdout.splitlines()]
    of_nwd = [each["reason"] for each in told if (each["kind"], each["name"]) == ("Daemon", "nwd")]
    assert of_nwd[:3] == ["DaemonUp", "DaemonHung", "DaemonUp"]
    states = [each["data"]["to"] for each in told if each["reason"] == "NodeState"]
    assert "Degraded" in states
    assert states[-1] == "TenantReady"
    assert [each["seq"] for each in told] == list(range(1, len(told) + 1))
    warnings = node.cli("events", "node", "--type", "Warning").stdout
    assert "NetworkReady lost" in warnings
    assert "OperationSucceeded  create: running" in node.cli("describe", "vm", "guest").stdout


def test_lines_of_one_operation_come_from_all_three_daemons(node: LiveNode) -> None:
    operations = json.loads(node.cli("ops", "ls", "--kind", "vm", "-o", "json").stdout)
    created = next(each["id"] for each in operations if each["verb"] == "create")
    shown = json.loads(node.cli("ops", "show", created, "--logs", "-o", "json").stdout)
    assert {each["daemon"] for each in shown["logs"]} == {"agent", "stord", "nwd"}
    assert {each["operation_id"] for each in shown["logs"]} == {created}
    times = [each["time"] for each in shown["logs"]]
    assert times == sorted(times)
    for name in ("agent", "stord", "nwd"):
        lines = node.cli("logs", f"daemon/{name}", "--operation", created).stdout.splitlines()
        assert lines
        for line in map(json.loads, lines):
            assert line["daemon"] == name
            assert {"time", "level", "pid", "event"} <= line.keys()


def test_metrics_go_over_tcp_where_that_is_configured(node: LiveNode) -> None:
    path = node.dev.config_path
    text = path.read_text()
    assert '[metrics]\nlisten = ""' in text
    node.down()
    path.write_text(text.replace('[metrics]\nlisten = ""', '[metrics]\nlisten = "0.0.0.0:9177"'))
    refused = node.cli("up", "--dir", str(node.directory), check=False)
    assert refused.returncode == 2
    assert "is not a loopback address" in refused.stderr
    path.write_text(text.replace('[metrics]\nlisten = ""', '[metrics]\nlisten = "127.0.0.1:9177"'))
    node.up()
    inside = ["nsenter", "-t", str(node.daemon_pid("agent")), "-n"]
    done = subprocess.run(
        [*inside, "curl", "-sSf", "--max-time", "5", "http://127.0.0.1:9177/metrics"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert 'chv_node_state{state="TenantReady"}' in done.stdout
