"""`chv verify` on live nodes: it passes on both VMMs, and says what is broken when it is broken."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import sabotage
from tests.integration.live_node import ROOT, LiveNode, need, wait_for
from tests.probe_node import (
    VMMS,
    ProbeNode,
    cloud_hypervisor,
    probe_node,
    skip_without,
    vm,
    volume,
)

TRIES = 4
pytestmark = [pytest.mark.root, pytest.mark.slow, need()]
KINDS = ("vm", "volume", "network", "sg", "image")
NODE = {
    *("node", "kvm", "vmm", "serial", "machine", "disk", "disk-cache", "dhcp", "gateway", "dns"),
    *("firewall-open", "firewall-closed", "metadata", "uplink", "button", "start", "reset"),
    "left-behind",
}


@pytest.fixture(scope="module", params=VMMS)
def probes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProbeNode]:
    with probe_node(request.param, tmp_path_factory.mktemp("verify")) as running:
        yield running


def verify(probes: ProbeNode, *arguments: str) -> dict[str, Any]:
    """Return the report, once nothing of the run is left on the node."""
    vmm = () if "-f" in arguments else ("--vmm", probes.vmm)
    done = probes.node.cli("verify", *arguments, *vmm, "--json", check=False)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode == 0) is report["ok"], report
    assert left_on(probes.node) == []
    return report


def left_on(node: LiveNode) -> list[str]:
    found = []
    for kind in KINDS:
        listed = json.loads(node.cli("get", kind, "-A", "-o", "json").stdout or "[]")
        found += [item["metadata"]["name"] for item in listed]
    return [name for name in found if name.startswith("verify-")]


def failures(report: dict[str, Any]) -> dict[str, str]:
    return {check["id"]: check["message"] for check in report["checks"] if not check["ok"]}


def passed(report: dict[str, Any]) -> dict[str, str]:
    return {check["id"]: check["message"] for check in report["checks"] if check["ok"]}


def test_a_node_is_proven_whole_and_nothing_is_left(probes: ProbeNode) -> None:
    started = time.monotonic()
    report = verify(probes)
    assert failures(report) == {}
    assert set(passed(report)) == NODE
    assert report["vmm"].startswith(probes.vmm)
    assert all(set(check) == {"id", "ok", "ms", "message"} for check in report["checks"])
    print(f"verify of a node on {probes.vmm}: {time.monotonic() - started:.1f} s")


def test_a_network_of_the_user_is_tried_beside_his_vms(probes: ProbeNode) -> None:
    probes.apply(vm(probes.vmm, "net=dhcp", networks=("lan",)))
    report = verify(probes, "network", "lan")
    assert failures(report) == {}
    assert {"dhcp", "dns", "gateway", "firewall-open", "firewall-closed"} <= set(passed(report))
    assert probes.node.status("p")["phase"] == "Running"
    probes.node.cli("delete", "vm", "p")


def digest(probes: ProbeNode, name: str) -> str:
    uid = probes.node.get("volume", name)["metadata"]["uid"]
    directory = probes.node.dev.layout.volume(uid)
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    assert files
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def test_a_volume_is_read_and_only_its_like_is_written(probes: ProbeNode) -> None:
    probes.apply(volume("data"))
    before = digest(probes, "data")
    report = verify(probes, "volume", "data")
    assert failures(report) == {}
    assert "data, read-only: 64 sectors read" in passed(report)["disk-read"]
    assert "beside data" in passed(report)["disk"]
    assert digest(probes, "data") == before
    probes.node.cli("delete", "volume", "data")


def test_a_volume_in_use_is_not_touched_and_that_is_said(probes: ProbeNode) -> None:
    probes.apply(volume("data"), vm(probes.vmm, "disk=none", disks=("data",)))
    report = verify(probes, "volume", "data")
    assert failures(report) == {}
    assert "in use by p: its own data was not touched" in passed(report)["not-proven"]
    assert "disk-read" not in passed(report)
    probes.node.cli("delete", "vm", "p")
    probes.node.cli("delete", "volume", "data")


def test_a_vm_definition_is_tried_as_a_copy_with_empty_volumes(
    probes: ProbeNode, tmp_path: Path
) -> None:
    path = tmp_path / "vm.yaml"
    spec = "  cpus: 2\n"
    text = vm(probes.vmm, "", disks=("data",), networks=("lan",), spec=spec)
    path.write_text(volume("data", "8Gi", format="qcow2") + "---" + text)
    report = verify(probes, "-f", str(path))
    assert failures(report) == {}
    assert passed(report)["machine"].startswith("2 CPUs")
    assert "like data" in passed(report)["disk"]
    assert probes.node.cli("get", "vm", "p", check=False).returncode != 0


def start(probes: ProbeNode) -> subprocess.Popen[str]:
    """Start a run and return it once its VM runs."""
    running = subprocess.Popen(
        [sys.executable, "-m", "chv.cli", "--socket", str(probes.node.dev.socket),
         "verify", "--vmm", probes.vmm],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    wait_for(lambda: probes.node.workers("vmm"), 30, "the VM of the run")
    return running


def test_an_interrupted_run_takes_its_things_away(probes: ProbeNode) -> None:
    running = start(probes)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert left_on(probes.node) == []
    assert probes.node.workers("vmm") == {}


def test_the_next_run_removes_what_a_killed_one_left(probes: ProbeNode) -> None:
    running = start(probes)
    running.kill()
    running.communicate(timeout=60)
    assert left_on(probes.node) != []
    assert failures(verify(probes)) == {}
    assert probes.node.workers("vmm") == {}


# --- broken on purpose


def test_a_dhcp_server_that_stands_is_named(probes: ProbeNode) -> None:
    with sabotage.broken(probes.node, sabotage.dhcp_stands):
        failed = failures(verify(probes))
    assert "got no lease within" in failed["dhcp"]
    assert "DHCP server (dnsmasq)" in failed["dhcp"]
    assert "chv logs daemon/nwd" in failed["dhcp"]
    assert "not tried, eth0 has no lease" in failed["gateway"]


def test_a_dns_server_that_cannot_be_reached_is_named(probes: ProbeNode) -> None:
    drop = "chain i { type filter hook input priority -300; udp dport 53 drop; }"
    with sabotage.broken(probes.node, sabotage.rules(drop)):
        failed = failures(verify(probes))
    assert set(failed) == {"dns"}
    assert "no answer within" in failed["dns"]
    assert "DNS server (dnsmasq)" in failed["dns"]


def test_a_rule_that_keeps_guests_from_what_a_group_allows_is_named(probes: ProbeNode) -> None:
    drop = "chain f { type filter hook forward priority -300; ip daddr 192.0.2.11 drop; }"
    with sabotage.broken(probes.node, sabotage.rules(drop)):
        failed = failures(verify(probes))
    assert "a rule lets pings in to eth0, and they come: no" in failed["firewall-open"]
    assert "a firewall rule drops what is allowed" in failed["firewall-open"]
    assert "firewall-closed" not in failed


def test_a_port_that_should_be_closed_and_answers_is_named(probes: ProbeNode) -> None:
    failed: dict[str, str] = {}
    with sabotage.broken(probes.node, sabotage.opened):
        for _ in range(TRIES):  # nwd puts the rules right within a moment: the guest must ask in it
            failed = failed or failures(verify(probes))
    assert set(failed) == {"firewall-closed"}
    assert (
        "TCP port 9 of the gateway is closed: no, eth1 got a refusal" in failed["firewall-closed"]
    )
    assert "rules are not in force" in failed["firewall-closed"]


def test_an_uplink_that_drops_is_named(probes: ProbeNode) -> None:
    drop = "chain f { type filter hook forward priority -300; ip daddr 198.18.0.0/24 drop; }"
    with sabotage.broken(probes.node, sabotage.rules(drop)):
        failed = failures(verify(probes))
    assert set(failed) == {"uplink"}
    assert "chv doctor" in failed["uplink"]


def test_a_flush_that_fails_is_named(probes: ProbeNode) -> None:
    with sabotage.broken(probes.node, sabotage.flush_fails):
        failed = failures(verify(probes))
    assert "a flush failed with status 1" in failed["disk"]
    assert "does not keep data" in failed["disk"]
    assert "chv logs daemon/stord" in failed["disk"]


HIDE = 'mount --bind "$0" /dev/kvm && exec "$@"'


def without_kvm(tmp_path: Path, *arguments: str, **environment: str) -> dict[str, Any]:
    """Run `chv verify` where /dev/kvm is no device, in a mount namespace of its own."""
    (tmp_path / "nothing").touch()
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", HIDE, str(tmp_path / "nothing"),
         sys.executable, "-m", "chv.cli", *arguments, "--json"],
        capture_output=True, text=True, check=False, timeout=120, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_kvm_that_is_gone_is_named_where_it_is_needed(probes: ProbeNode, tmp_path: Path) -> None:
    if not Path("/dev/kvm").exists():
        pytest.skip("no /dev/kvm that could be hidden")
    socket = ("--socket", str(probes.node.dev.socket))
    report = without_kvm(tmp_path, *socket, "verify", "--vmm", probes.vmm)
    if probes.vmm == "qemu":
        assert failures(report) == {}, "it emulates"
        return
    assert "Cloud Hypervisor cannot run here: /dev/kvm is not a device" in failures(report)["kvm"]
    assert "chv doctor" in failures(report)["kvm"]
    assert left_on(probes.node) == []


ALONE = 'mount -t tmpfs none /run/chv && cd "$0" && exec "$@"'


@pytest.mark.parametrize("vmm", VMMS)
def test_without_an_agent_host_and_vmm_are_proven_and_that_is_said(
    vmm: str, tmp_path: Path
) -> None:
    skip_without(vmm)
    Path("/run/chv").mkdir(exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if key != "CHV_SOCKET"}
    environment |= {"PYTHONPATH": str(ROOT), "CHV_CLOUD_HYPERVISOR": cloud_hypervisor()}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", ALONE, str(tmp_path),
         sys.executable, "-m", "chv.cli", "verify", "--vmm", vmm, "--json"],
        capture_output=True, text=True, check=False, timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert set(passed(report)) == {"kvm", "vmm", "agent"}
    assert report["vmm"].startswith(vmm)
    assert "storage and network were not tried" in passed(report)["agent"]
