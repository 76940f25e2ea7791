"""The main job on the real thing: QEMU, qemu-storage-daemon, namespaces, dnsmasq, nftables.

One node with the README's manifests serves every test here; what a test kills, it brings back.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.live_node import (
    DAEMONS,
    HELLO,
    ROOT,
    TWO_TENANTS,
    LiveNode,
    live_node,
    need,
    wait_for,
)

pytestmark = [pytest.mark.root, need("qemu-system-x86_64")]


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node() as running:
        running.cli("apply", "-f", str(HELLO), "-f", str(TWO_TENANTS), "--wait")
        for name, namespace in (("hello", "default"), ("neighbour", "default"),
                                ("stranger", "other")):  # fmt: skip
            running.cli("wait", f"vm/{name}", "-n", namespace, "--for", "SSHReady",
                        "--timeout", "120s")  # fmt: skip
        yield running
        # Deleting the manifests is part of the job: what the purge then finds must be nothing.
        running.cli("delete", "-f", str(TWO_TENANTS))
        running.cli("delete", "-f", str(HELLO))
        assert running.workers("vmm") == {}
        assert running.workers("qsd") == {}
        assert running.workers("dnsmasq") == {}
        instance = running.dev.layout.instance
        assert [p.name for p in Path("/run/netns").glob(f"chv-{instance}-*")] == []
        layout = running.dev.layout
        assert [p.name for p in layout.vms.iterdir()] == []
        leftovers = [p for p in (layout.state / "volumes", layout.state / "vms") if p.exists()]
        assert [str(entry) for path in leftovers for entry in path.iterdir()] == []


def address(node: LiveNode, vm: str, namespace: str = "default") -> str:
    return str(node.status(vm, namespace)["interfaces"][0]["address"])


def test_guest_runs_the_kernel_of_its_image(node: LiveNode) -> None:
    assert node.ssh("hello", "uname -a").stdout.startswith("Linux hello ")


def test_remote_exit_code_passes_through(node: LiveNode) -> None:
    assert node.ssh("hello", "exit 7", check=False).returncode == 7


def test_disk_is_our_vhost_user_export_and_write_back(node: LiveNode) -> None:
    export = node.status("hello")["disks"][0]["export"]
    scheme, _, path = export.partition(":")
    assert scheme == "vhost-user-blk"
    assert Path(path).is_socket()
    # The guest's own word for what it believes of its disk: both, seed disk aside.
    found = node.ssh("hello", "cat /sys/block/vd*/cache_type").stdout.split("\n")
    assert "write back" in found
    command = Path(f"/proc/{vmm_pid(node, 'hello')}/cmdline").read_bytes()
    assert path.encode() in command


def vmm_pid(node: LiveNode, vm: str, namespace: str = "default") -> int:
    return int(node.status(vm, namespace)["vmm"]["pid"])


def test_data_written_to_the_volume_is_in_the_volume(node: LiveNode) -> None:
    node.ssh("hello", "echo kept > /data/proof && sync")
    assert node.ssh("hello", "cat /data/proof").stdout == "kept\n"


def test_address_came_by_dhcp_from_the_record(node: LiveNode) -> None:
    shown = node.ssh("hello", "ip -4 -o addr show dev eth0").stdout
    assert f"{address(node, 'hello')}/24" in shown


def test_name_of_another_vm_resolves_and_answers(node: LiveNode) -> None:
    found = node.ssh("hello", "ping -c 1 -W 5 neighbour").stdout
    assert address(node, "neighbour") in found


def test_nat_reaches_the_uplink_and_shows_it_the_node_only(node: LiveNode) -> None:
    sandbox = node.dev.sandbox
    assert sandbox is not None
    server = subprocess.Popen(
        ["ip", "netns", "exec", sandbox.wan, sys.executable, "-c", SERVER],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "listening\n"
        said = node.ssh("hello", "nc 198.18.0.1 8080 < /dev/null").stdout
        assert said.strip() == "198.18.0.2"
    finally:
        server.kill()
        server.wait()


SERVER = """
import socket
server = socket.create_server(("198.18.0.1", 8080))
print("listening", flush=True)
connection, peer = server.accept()
connection.sendall(peer[0].encode() + b"\\n")
connection.close()
"""


def test_uplink_cannot_open_a_connection_to_a_guest(node: LiveNode) -> None:
    sandbox = node.dev.sandbox
    assert sandbox is not None
    target = address(node, "hello")
    route = ["ip", "-n", sandbox.wan, "route", "replace", "10.7.0.0/24", "via", "198.18.0.2"]
    subprocess.run(route, check=True)
    try:
        for port in (22, 80):
            assert connect_from(sandbox.wan, target, port) != "connected"
        # The control: the node itself is reached by the same means, or the test proves nothing.
        assert connect_from(sandbox.wan, "198.18.0.2", 22) == "refused"
    finally:
        subprocess.run(["ip", "-n", sandbox.wan, "route", "del", "10.7.0.0/24"], check=True)


def connect_from(netns: str, target: str, port: int) -> str:
    code = (
        "import socket\n"
        f"try: socket.create_connection(('{target}', {port}), timeout=2); print('connected')\n"
        "except ConnectionRefusedError: print('refused')\n"
        "except OSError: print('nothing')\n"
    )
    done = subprocess.run(
        ["ip", "netns", "exec", netns, sys.executable, "-c", code],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def test_second_tenant_has_the_same_subnet_and_cannot_reach_the_first(node: LiveNode) -> None:
    ours, theirs = address(node, "neighbour"), address(node, "stranger", "other")
    assert node.ssh("stranger", "hostname", "other").stdout == "stranger\n"
    # Same subnet: an address of the first tenant is, to the second, its own or nobody.
    for target in {address(node, "hello"), ours} - {theirs}:
        done = node.ssh("stranger", f"ping -c 1 -W 2 {target}", "other", check=False)
        assert done.returncode != 0, done.stdout
    assert node.ssh("stranger", "nslookup hello", "other", check=False).returncode != 0


def test_vmm_and_storage_daemon_run_under_uids_of_their_own(node: LiveNode) -> None:
    uids = {}
    for kind in ("vmm", "qsd"):
        for worker_id, pid in node.workers(kind).items():
            status = Path(f"/proc/{pid}/status").read_text()
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            uids[worker_id] = set(fields["Uid"].split())
            assert fields["CapEff"].strip("0\n") == "", worker_id
            assert fields["NoNewPrivs"] == "1", worker_id
    assert len(uids) == 5  # three VMMs, two storage daemons
    assert all(len(owned) == 1 and owned != {"0"} for owned in uids.values())
    assert len(set.union(*uids.values())) == len(uids)


def test_no_worker_inherits_an_environment(node: LiveNode) -> None:
    for kind in ("vmm", "qsd", "dnsmasq"):
        for pid in node.workers(kind).values():
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"RUST_" not in environment
            assert b"CHV_" not in environment


def test_conditions_carry_evidence(node: LiveNode) -> None:
    for kind in ("VolumesReady", "NetworkReady", "VMMRunning", "GuestBooted", "SSHReady"):
        found = node.condition("hello", kind)
        assert found["status"] == "True", found
        assert found["evidence"], found
    assert "SSH-2.0-" in node.condition("hello", "SSHReady")["evidence"]


def test_serial_console_is_recorded(node: LiveNode) -> None:
    assert "chv-guest: ready" in node.cli("logs", "vm/hello").stdout


class Stream:
    """A guest that counts, over `chv ssh`, five times a second."""

    def __init__(self, node: LiveNode) -> None:
        environment = os.environ | {"CHV_SOCKET": str(node.dev.socket)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "chv.cli", "ssh", "hello", "--",
             "i=0; while :; do echo $i; i=$((i+1)); sleep 0.2; done"],
            stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip
        self.next = 0

    def read(self, count: int) -> None:
        """Read numbers; each must be the successor of the last."""
        assert self.process.stdout is not None
        for _ in range(count):
            assert self.process.stdout.readline() == f"{self.next}\n"
            self.next += 1

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.mark.parametrize("killed", [("agent",), ("stord",), ("nwd",), DAEMONS])
def test_kill_of_daemons_touches_no_guest(node: LiveNode, killed: tuple[str, ...]) -> None:
    pids = {name: vmm_pid(node, name) for name in ("hello", "neighbour")}
    workers = {kind: node.workers(kind) for kind in ("vmm", "qsd", "dnsmasq", "console")}
    stream = Stream(node)
    try:
        stream.read(3)
        node.kill(*killed)
        stream.read(10)
        node.up()
        node.await_state("TenantReady")
        stream.read(3)
    finally:
        stream.close()
    assert {name: vmm_pid(node, name) for name in pids} == pids
    assert {kind: node.workers(kind) for kind in workers} == workers
    assert node.ssh("hello", "cat /data/proof").stdout == "kept\n"
    assert node.status("hello").get("restarts", 0) == 0


def test_second_pass_after_adoption_does_nothing(node: LiveNode) -> None:
    before = [op["id"] for op in operations(node)]
    resource_version = node.get("vm", "hello")["metadata"]["resourceVersion"]
    node.kill(*DAEMONS)
    node.up()
    node.await_state("TenantReady")
    time.sleep(2)
    assert [op["id"] for op in operations(node)] == before
    assert node.get("vm", "hello")["metadata"]["resourceVersion"] == resource_version


def operations(node: LiveNode) -> list[dict[str, str]]:
    import json

    found: list[dict[str, str]] = json.loads(node.cli("ops", "ls", "-o", "json").stdout)
    return found


def test_lost_storage_daemon_resets_the_guest_and_keeps_its_vmm(node: LiveNode) -> None:
    pid = vmm_pid(node, "hello")
    boot = node.ssh("hello", "cat /proc/sys/kernel/random/boot_id").stdout
    vm_uid = node.get("vm", "hello")["metadata"]["uid"].replace("-", "")[:10]
    storage = next(p for w, p in node.workers("qsd").items() if f":{vm_uid}:" in w)
    os.kill(storage, 9)

    def rebooted() -> bool:
        done = node.ssh("hello", "cat /proc/sys/kernel/random/boot_id", check=False)
        return done.returncode == 0 and done.stdout != boot

    wait_for(rebooted, 60, "a new boot of the guest")
    assert vmm_pid(node, "hello") == pid
    assert node.ssh("hello", "cat /data/proof").stdout == "kept\n"
    assert "write back" in node.ssh("hello", "cat /sys/block/vd*/cache_type").stdout
    assert node.condition("hello", "StorageLost")["message"]


def test_stop_asks_the_guest_and_start_brings_it_back(node: LiveNode) -> None:
    before = address(node, "neighbour")
    stopped = node.cli("stop", "neighbour", "--reason", "test")
    assert "done" in stopped.stderr
    assert node.status("neighbour")["phase"] == "Stopped"
    assert node.get("vm", "neighbour")["spec"]["runStrategy"] == "Halted"
    node.cli("start", "neighbour")
    node.cli("wait", "vm/neighbour", "--for", "SSHReady", "--timeout", "120s")
    assert address(node, "neighbour") == before


def test_reset_keeps_the_vmm_and_boots_the_guest_anew(node: LiveNode) -> None:
    pid = vmm_pid(node, "neighbour")
    boot = node.ssh("neighbour", "cat /proc/sys/kernel/random/boot_id").stdout
    node.cli("reset", "neighbour")

    def rebooted() -> bool:
        done = node.ssh("neighbour", "cat /proc/sys/kernel/random/boot_id", check=False)
        return done.returncode == 0 and done.stdout != boot

    wait_for(rebooted, 60, "a new boot of the guest")
    assert vmm_pid(node, "neighbour") == pid


def test_killed_vmm_is_restarted_once_and_counted(node: LiveNode) -> None:
    pid = vmm_pid(node, "neighbour")
    restarts = node.status("neighbour").get("restarts", 0)
    os.kill(pid, 9)
    wait_for(lambda: vmm_pid(node, "neighbour") not in (0, pid), 30, "a new VMM")
    node.cli("wait", "vm/neighbour", "--for", "SSHReady", "--timeout", "120s")
    assert node.status("neighbour").get("restarts", 0) == restarts + 1


def test_get_and_describe_show_the_vm(node: LiveNode) -> None:
    assert "Running" in node.cli("get", "vm").stdout
    described = node.cli("describe", "vm", "hello").stdout
    assert "Conditions" in described
    assert "SSH-2.0-" in described


def test_network_in_use_is_not_deleted(node: LiveNode) -> None:
    done = node.cli("delete", "network", "lan", check=False)
    assert done.returncode == 5
    assert "IN_USE" in done.stderr
    assert "hello" in done.stderr
