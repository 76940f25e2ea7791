"""What a NIC's manifest asks for, as the guest meets it: queues, rates, metadata."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chv.nwd.kernel import netns
from tests.integration.live_node import HELLO, LiveNode, live_node, need

pytestmark = [pytest.mark.root, pytest.mark.slow, need("qemu-system-x86_64")]
RATE_BPS = 8_000_000
SENT_BYTES, WARM_UP_BYTES = 4_000_000, 500_000
FRAME_BYTES, PAYLOAD_BYTES = 1464, 1398  # at an MTU of 1450, with TCP's timestamps
WAN_ADDRESS, PORT = "198.18.0.1", 8081
WIDE = """\
    - name: eth0
      network: lan
      queues: 2
      bandwidth:
        egress: 8Mbit
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNode]:
    manifest = tmp_path_factory.mktemp("nics") / "wide.yaml"
    text = HELLO.read_text().replace("  cpus: 1", "  cpus: 2")
    text = text.replace("    - name: eth0\n      network: lan\n", WIDE)
    text = text.replace("  subnet: 10.7.0.0/24", "  metadata: true\n  subnet: 10.7.0.0/24")
    assert "queues: 2" in text
    assert "metadata: true" in text
    manifest.write_text(text)
    with live_node() as running:
        running.cli("apply", "-f", str(manifest), "--wait")
        running.cli("wait", "vm/hello", "--for", "SSHReady", "--timeout", "120s")
        yield running
        running.cli("delete", "-f", str(manifest))


def test_the_guest_has_the_queues_that_it_asked_for(node: LiveNode) -> None:
    found = node.ssh("hello", "ls /sys/class/net/eth0/queues").stdout.split()
    assert sorted(found) == ["rx-0", "rx-1", "tx-0", "tx-1"]
    command = Path(f"/proc/{node.status('hello')['vmm']['pid']}/cmdline").read_bytes()
    assert b"mq=on,vectors=6" in command


def test_what_the_guest_sends_is_held_to_its_rate(node: LiveNode) -> None:
    """Also where its kernel leaves it to us to cut a stream into frames."""
    sandbox = node.dev.sandbox
    assert sandbox is not None
    server = netns.call_in(
        netns.path_of(sandbox.wan), lambda: socket.create_server((WAN_ADDRESS, PORT))
    )
    with server, ThreadPoolExecutor(1) as pool:
        server.settimeout(60)
        measured = pool.submit(rate_of_one, server)
        node.ssh("hello", f"head -c {SENT_BYTES} /dev/zero | nc {WAN_ADDRESS} {PORT}")
        assert abs(measured.result() * FRAME_BYTES / PAYLOAD_BYTES / RATE_BPS - 1) < 0.1


def rate_of_one(server: socket.socket) -> float:
    """Take one connection and return its rate once it has begun to be held back."""
    with server.accept()[0] as connection:
        connection.settimeout(60)
        received, start = 0, 0.0
        while block := connection.recv(1 << 16):
            if start:
                received += len(block)
                last = time.monotonic()
            elif (seen := received + len(block)) > WARM_UP_BYTES:
                received, start = 0, time.monotonic()
            else:
                received = seen
        return received * 8 / (last - start)


def test_the_guest_reads_what_it_is(node: LiveNode) -> None:
    text = node.ssh("hello", "wget -q -O - http://169.254.169.254/chv/v1.json").stdout
    tree = json.loads(text)
    assert (tree["name"], tree["namespace"], tree["hostname"]) == ("hello", "default", "hello")
    address = node.status("hello")["interfaces"][0]["address"]
    assert tree["interfaces"][0]["addresses"] == [f"{address}/24"]
