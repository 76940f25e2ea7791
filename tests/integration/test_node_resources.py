"""A node's inventory, what fits on it and what it refuses, by the CLI on a real node."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chv.common.process.providers import find_hierarchy
from tests.integration.live_node import LiveNode, live_node, need

pytestmark = [pytest.mark.root, need()]
GIB = 1 << 30
VM = """
apiVersion: compute.chv.dev/v1alpha1
kind: Image
metadata: {name: tiny}
spec: {builtin: tiny}
---
apiVersion: compute.chv.dev/v1alpha1
kind: VirtualMachine
metadata: {name: NAME}
spec: {memory: MEMORY, boot: {image: tiny}}
"""


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        yield running


def inventory(node: LiveNode) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(node.cli("node", "inventory", "--json").stdout)
    return found


def apply(node: LiveNode, path: Path, name: str, memory: str) -> tuple[int, str]:
    path.write_text(VM.replace("NAME", name).replace("MEMORY", memory))
    done = node.cli("apply", "-f", str(path), "--wait", check=False)
    return done.returncode, done.stderr


def test_the_inventory_is_what_the_kernel_says(node: LiveNode) -> None:
    found = inventory(node)
    total = Path("/proc/meminfo").read_text().splitlines()[0].split()[1]
    assert found["memory"]["total_bytes"] == int(total) << 10
    assert found["kernel"] == os.uname().release
    assert found["cpu"]["threads"] == Path("/proc/cpuinfo").read_text().count("processor\t")
    state = next(place for place in found["places"] if place["purpose"] == "state")
    assert state["path"] == node.node_status()["state_dir"]
    assert state["free_bytes"] and state["type"]
    programs = {each["name"]: each for each in found["programs"]}
    for name in ("qemu-storage-daemon", "qemu-img", "dnsmasq"):
        assert len(programs[name]["sha256"]) == 64 and programs[name]["version"]
    assert {each["name"] for each in found["features"]} >= {"netns", "tun"}
    text = node.cli("node", "inventory").stdout
    assert found["kernel"] in text and "committed to" in text


def test_it_is_kept_for_a_while_and_looked_at_again_when_asked(node: LiveNode) -> None:
    first = inventory(node)
    assert inventory(node)["gathered_at"] == first["gathered_at"]
    fresh = json.loads(node.cli("node", "inventory", "--fresh", "--json").stdout)
    assert fresh["gathered_at"] > first["gathered_at"]


def test_limits_of_vms_are_claimed_only_where_the_controllers_are(node: LiveNode) -> None:
    hierarchy = find_hierarchy()
    there = (hierarchy / "cgroup.controllers").read_text().split() if hierarchy else []
    limits = inventory(node)["cgroup"]["limits"]
    if "memory" not in there:
        assert limits.startswith("unsupported: ")


def test_what_cannot_fit_is_refused_and_the_rest_is_counted(node: LiveNode, tmp_path: Path) -> None:
    code, words = apply(node, tmp_path / "big.yaml", "big", "1Ti")
    assert code == 8
    assert "RESOURCE_EXHAUSTED: VirtualMachine default/big: spec.memory" in words
    assert "is left" in words and "limits.memory_overcommit" in words
    before = inventory(node)["commitment"]
    assert apply(node, tmp_path / "small.yaml", "small", "64Mi")[0] == 0
    after = inventory(node)["commitment"]
    assert after["vms"] == before["vms"] + 1
    grown = after["memory_bytes"] - before["memory_bytes"]
    assert grown == (64 << 20) + after["overhead_bytes"] - before["overhead_bytes"]
    node.cli("delete", "vm", "small")
    assert inventory(node)["commitment"] == before


def test_fit_tells_what_binds_and_its_exit_code_whether_all_fit(
    node: LiveNode, tmp_path: Path
) -> None:
    done = node.cli("fit", "2x(1c,64Mi,16Mi,net=lan)", "--json")
    (group,) = json.loads(done.stdout)["groups"]
    assert (group["asked"], group["fits"], group["lacking"]) == (2, 2, {})
    needs = {need["resource"]: need for need in group["needs"]}
    assert needs["ports of network default/lan"]["left"] == 1023
    assert needs["memory"]["per_vm"] > 64 << 20

    done = node.cli("fit", "2x(1c,1Ti)", check=False)
    assert done.returncode == 8
    assert "0 of 2 fit" in done.stdout and "memory binds first" in done.stdout

    done = node.cli("fit", "2x(1c,4)", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "memory: '4' has no unit (write 4Mi)" in done.stderr

    file = tmp_path / "vm.yaml"
    file.write_text(VM.replace("NAME", "web").replace("MEMORY", "128Mi"))
    assert node.cli("fit", "--vm", str(file), "--count", "3").stdout.startswith("3 of 3 fit")


def test_what_is_committed_is_a_metric(node: LiveNode) -> None:
    import socket

    path = Path(node.node_status()["run_dir"]) / "api" / "metrics.sock"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = b"".join(iter(lambda: connection.recv(65536), b""))
    capacity = inventory(node)["commitment"]["capacity_bytes"]
    assert f"chv_node_memory_capacity_bytes {capacity}".encode() in data
    assert b"chv_node_memory_committed_bytes 0" in data
