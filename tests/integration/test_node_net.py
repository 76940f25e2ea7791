"""`chv net` as a user has it: a running guest, real packets, pipes and terminals."""

from __future__ import annotations

import json
import os
import pty
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.live_node import HELLO, ROOT, LiveNode, live_node, need, wait_for

pytestmark = [pytest.mark.root, pytest.mark.slow, need("qemu-system-x86_64")]
PCAP_HEADER_BYTES = 24
GROUP = """\
---
apiVersion: compute.chv.dev/v1alpha1
kind: SecurityGroup
metadata:
  name: web
spec:
  logDropped: true
  egress:
    - protocol: ICMP
      cidrs: ["0.0.0.0/0"]
      log: true
    - protocol: TCP
      ports: ["80"]
      cidrs: ["0.0.0.0/0"]
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNode]:
    manifest = tmp_path_factory.mktemp("net") / "net.yaml"
    interface = "    - name: eth0\n      network: lan\n"
    text = HELLO.read_text()
    assert interface in text
    text = text.replace(interface, f"{interface}      securityGroups: [web]\n") + GROUP
    manifest.write_text(text)
    with live_node() as running:
        running.cli("apply", "-f", str(manifest), "--wait")
        running.cli("wait", "vm/hello", "--for", "SSHReady", "--timeout", "120s")
        yield running
        running.cli("delete", "-f", str(manifest))


def test_an_explanation_names_the_group_that_denies(node: LiveNode) -> None:
    printed = node.cli("net", "explain", "hello", "1.1.1.1:443").stdout
    first = printed.splitlines()[0]
    assert first == (
        "dropped: no rule of its security groups (web) allows egress tcp 443 to 1.1.1.1"
    )
    allowed = json.loads(node.cli("net", "explain", "hello", "1.1.1.1:80", "-o", "json").stdout)
    assert "rule egress[1] of security group web" in allowed["decided_by"] + json.dumps(
        allowed["steps"]
    )
    assert allowed["verdict"] in ("forwarded", "unknown"), "the rules let it leave the network"


def test_a_vm_is_found_by_its_name_and_a_foreign_name_is_refused(node: LiveNode) -> None:
    itself = node.cli("net", "explain", "hello", "hello:80").stdout
    address = node.status("hello")["interfaces"][0]["address"]
    assert f"hello is {address}, says VM hello, interface eth0" in itself
    failed = node.cli("net", "explain", "hello", "nobody.invalid:80", check=False)
    assert failed.returncode != 0
    assert "nobody.invalid" in failed.stderr or "DNS" in failed.stderr
    evil = node.cli("net", "explain", "hello", "a\x1b[31m\n:80", check=False)
    assert evil.returncode == 2
    assert "\x1b" not in evil.stderr


def test_a_log_tells_what_was_allowed_and_what_was_dropped(node: LiveNode) -> None:
    node.ssh("hello", "ping -c 1 -W 1 198.51.100.9; nc -w 1 198.51.100.9 22", check=False)

    def lines() -> list[str]:
        found = node.cli("net", "log", "lan", "--vm", "hello").stdout.splitlines()
        is_whole = any("icmp" in each for each in found) and any(":22 " in each for each in found)
        return found if is_whole else []

    found = wait_for(lines, 10, "both packets in the log")
    allowed = next(each for each in found if " icmp " in each)
    assert "allowed egress  hello/eth0" in allowed
    assert "(group web egress[0])" in allowed
    dropped = next(each for each in found if "198.51.100.9:22 " in each)
    assert "dropped egress  hello/eth0 tcp" in dropped
    assert dropped.endswith("(group web)")


def test_a_log_is_followed_over_a_restart_of_the_network_daemon(
    node: LiveNode, tmp_path: Path
) -> None:
    target = tmp_path / "log"
    with target.open("wb") as out:
        follower = subprocess.Popen(
            [sys.executable, "-m", "chv.cli", "net", "log", "lan", "-f", "--tail", "0"],
            stdout=out, cwd=ROOT, env=os.environ | node._socket(),
        )  # fmt: skip
        try:
            for number in (31, 32):
                address = f"198.51.100.{number}"
                wait_for(lambda: _pinged(node, target, address), 20, f"{address} in the log")  # noqa: B023
                node.kill("nwd")
                node.await_state("TenantReady")
            assert follower.poll() is None
        finally:
            follower.terminate()
            follower.wait(10)


def _pinged(node: LiveNode, target: Path, address: str) -> bool:
    node.ssh("hello", f"ping -c 1 -W 1 {address}", check=False)
    return f"-> {address} (group web egress[0])" in target.read_text()


def test_a_capture_is_a_pcap_of_both_ways(node: LiveNode, tmp_path: Path) -> None:
    target = tmp_path / "frames.pcap"
    command = [sys.executable, "-m", "chv.cli", "net", "capture", "hello"]
    environment = os.environ | node._socket()
    with target.open("wb") as out:
        capture = subprocess.Popen(
            [*command, "--duration", "60s", "--count", "60"],
            stdout=out, stderr=subprocess.PIPE, cwd=ROOT, env=environment,
        )  # fmt: skip
        try:
            wait_for(lambda: target.stat().st_size >= PCAP_HEADER_BYTES, 10, "the header at once")
            node.kill("nwd")
            gateway = node.status("hello")["interfaces"][0]["address"].rpartition(".")[0] + ".1"
            node.await_state("TenantReady")
            node.ssh("hello", f"ping -c 3 {gateway}", check=False)
            wait_for(lambda: _echoes(target.read_bytes()) == {0, 8}, 20, "a ping and its answer")
        finally:
            capture.terminate()
            capture.wait(10)


def _echoes(data: bytes) -> set[int]:
    """Return the types of the ICMP messages in a pcap that is read as far as it is whole."""
    assert struct.unpack_from("=I", data)[0] == 0xA1B2C3D4
    offset, found = PCAP_HEADER_BYTES, set()
    while offset + 16 <= len(data):
        length = struct.unpack_from("=I", data, offset + 8)[0]
        frame = data[offset + 16 : offset + 16 + length]
        if len(frame) > 34 and frame[12:14] == b"\x08\x00" and frame[23] == 1:
            found.add(frame[34])
        offset += 16 + length
    return found


def test_frames_are_not_written_to_a_terminal(node: LiveNode) -> None:
    leader, follower = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "chv.cli", "net", "capture", "hello"],
            stdout=follower, stderr=subprocess.PIPE, text=True, timeout=30, check=False,
            cwd=ROOT, env=os.environ | node._socket(),
        )  # fmt: skip
    finally:
        os.close(follower)
        os.close(leader)
    assert done.returncode == 2
    assert "-w FILE" in done.stderr


def test_statistics_name_the_reason_of_drops(node: LiveNode) -> None:
    node.await_state("TenantReady")
    node.cli("net", "explain", "hello", "1.1.1.1:443")
    for target in ("hello", "vm/hello", "network/lan", "lan"):
        reply = json.loads(node.cli("net", "stats", target, "-o", "json").stdout)
        assert [each["vm"] for each in reply["nics"]] == ["hello"]
    stats = reply["nics"][0]["stats"]
    assert stats["rx_packets"] > 0
    assert stats["tx_packets"] > 0
    assert stats["drops"]["not_allowed"] >= 1
    assert "not_allowed" in node.cli("net", "stats").stdout
    assert node.cli("net", "stats", "nobody", check=False).returncode == 4
