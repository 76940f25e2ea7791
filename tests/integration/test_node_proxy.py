"""A whole node: a guest with a raw disk notices nothing of the death of its storage workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live_node import LiveNode, live_node, need, wait_for

pytestmark = [pytest.mark.root, pytest.mark.slow, need("qemu-system-x86_64")]
WORLD = """
apiVersion: compute.chv.dev/v1alpha1
kind: Image
metadata: {name: tiny}
spec: {builtin: tiny}
---
apiVersion: compute.chv.dev/v1alpha1
kind: Network
metadata: {name: lan}
spec: {subnet: 10.7.0.0/24}
---
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {name: data}
spec: {format: raw, size: 256Mi, source: {image: tiny}}
---
apiVersion: compute.chv.dev/v1alpha1
kind: Volume
metadata: {name: more}
spec: {format: raw, size: 16Mi}
---
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: guest}
spec:
  memory: 256Mi
  boot: {image: tiny}
  disks: [{name: data, volume: data}, {name: more, volume: more}]
  interfaces: [{name: eth0, network: lan}]
"""
WRITER = """
cat > /tmp/write <<'END'
i=0
while [ ! -e /tmp/stop ]; do
  i=$((i + 1))
  { echo $i > /data/proof && sync && [ "$(cat /data/proof)" = $i ]; } || echo $i >> /tmp/bad
  echo $i > /tmp/count.new && mv /tmp/count.new /tmp/count
done
END
(sh /tmp/write > /dev/null 2>&1 &)
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveNode]:
    manifest = tmp_path_factory.mktemp("manifests") / "world.yaml"
    manifest.write_text(WORLD)
    with live_node() as running:
        running.cli("apply", "-f", str(manifest), "--wait")
        running.cli("wait", "vm/guest", "--for", "SSHReady", "--timeout", "170s")
        yield running


def disk(node: LiveNode) -> dict[str, Any]:
    found: dict[str, Any] = node.status("guest")["disks"][0]
    return found


def written(node: LiveNode) -> int:
    return int(node.ssh("guest", "cat /tmp/count").stdout)


def await_progress(node: LiveNode) -> None:
    goal = written(node) + 3
    wait_for(lambda: written(node) >= goal, 60, "writes go on")


def test_raw_disk_of_a_vm_is_kept_through_deaths_of_its_workers_and_is_told(
    node: LiveNode,
) -> None:
    assert disk(node)["crashClass"] == "keep_vm"
    assert disk(node)["proxy"] is True
    vmms = node.workers("vmm")
    boot = node.ssh("guest", "cat /proc/sys/kernel/random/boot_id").stdout
    node.ssh("guest", WRITER)
    await_progress(node)

    for kind in ("qsd", "proxy"):
        old = node.workers(kind)
        os.kill(next(iter(old.values())), signal.SIGKILL)
        wait_for(lambda k=kind, o=set(old): set(node.workers(k)) - o, 20, f"another {kind}")  # type: ignore[misc]
        await_progress(node)
    node.kill("stord")
    ((name, pid),) = node.workers("qsd").items()
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: set(node.workers("qsd")) - {name}, 30, "another storage daemon")
    await_progress(node)

    assert node.ssh("guest", "cat /tmp/bad", check=False).stdout == ""
    assert node.workers("vmm") == vmms
    assert node.ssh("guest", "cat /proc/sys/kernel/random/boot_id").stdout == boot
    told = wait_for(
        lambda: (c := node.condition("guest", "StorageLost"))["reason"] == "Kept" and c,
        30,
        "what the VM says of it",
    )
    assert told["status"] == "False"
    assert "the VM kept" in told["message"]
    assert node.condition("guest", "VolumesReady")["status"] == "True"


def test_storage_daemon_is_replaced_by_the_operators_word_and_the_guest_writes_on(
    node: LiveNode,
) -> None:
    told, old = node.condition("guest", "StorageLost"), node.workers("qsd")
    vmms, proxies = node.workers("vmm"), node.workers("proxy")
    assert len(proxies) == 2

    said = node.cli("storage", "restart", "guest").stderr

    ((_name, pid),) = node.workers("qsd").items()
    assert pid not in old.values()
    assert f"(pid {pid}) follows" in said
    assert "2 disks are connected again" in said
    await_progress(node)
    assert node.ssh("guest", "cat /tmp/bad", check=False).stdout == ""
    assert (node.workers("vmm"), node.workers("proxy")) == (vmms, proxies)
    now = node.condition("guest", "StorageLost")
    assert {**now, "lastProbeTime": told["lastProbeTime"]} == told


def test_nothing_of_the_proxy_is_left_when_the_vm_is_stopped(node: LiveNode) -> None:
    node.cli("stop", "guest")
    wait_for(lambda: node.status("guest")["phase"] == "Stopped", 60, "the stop")
    wait_for(lambda: not node.workers("proxy"), 20, "the end of the proxy")
    assert not node.workers("qsd")
    assert not list(Path(node.dev.layout.logs).glob("proxy-*"))
