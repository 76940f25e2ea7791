"""What a NIC's manifest asks for, as the guest meets it: queues, rates, metadata."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.live_node import HELLO, LiveNode, live_node, need

pytestmark = [pytest.mark.root, pytest.mark.slow, need("qemu-system-x86_64")]
RATE_BPS = 8_000_000
SENT_BYTES = 3_000_000
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
    start = time.monotonic()
    done = node.ssh("hello", f"head -c {SENT_BYTES} /dev/zero | tr '\\0' x")
    took_s = time.monotonic() - start
    assert len(done.stdout) == SENT_BYTES
    assert took_s > 0.85 * SENT_BYTES * 8 / RATE_BPS


def test_the_guest_reads_what_it_is(node: LiveNode) -> None:
    text = node.ssh("hello", "wget -q -O - http://169.254.169.254/chv/v1.json").stdout
    tree = json.loads(text)
    assert (tree["name"], tree["namespace"], tree["hostname"]) == ("hello", "default", "hello")
    address = node.status("hello")["interfaces"][0]["address"]
    assert tree["interfaces"][0]["addresses"] == [f"{address}/24"]
