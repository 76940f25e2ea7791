"""Groups, exposures and IPv6 on the real thing: examples/two-tier.yaml and its two guests."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from chv.common.wire.manifest import load_documents
from chv.host import devnode
from tests.helpers import taps_of
from tests.integration.live_node import ROOT, CommandFailed, LiveNode, live_node, need, wait_for

pytestmark = [pytest.mark.root, need("qemu-system-x86_64")]

TWO_TIER = ROOT / "examples" / "two-tier.yaml"
HOST_ADDRESS = "198.18.0.2"


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_TEST_BUILD="1") as running:
        running.cli("apply", "-f", str(TWO_TIER), "--wait")
        for name in ("web", "db"):
            running.cli("wait", f"vm/{name}", "--for", "SSHReady", "--timeout", "120s")
            serve(running, name, 5432, 5433, 8080)
        yield running
        running.cli("delete", "-f", str(TWO_TIER), "--ignore-not-found")
        instance = running.dev.layout.instance
        assert [p.name for p in Path("/run/netns").glob(f"chv-{instance}-*")] == []
        for kind in ("sg", "exposure", "network", "vm"):
            assert json.loads(running.cli("get", kind, "-o", "json").stdout) == []


def serve(node: LiveNode, vm: str, *ports: int) -> None:
    """Answer every connection with the guest's name."""
    servers = (f"nc -ll -p {port} -e hostname </dev/null >/dev/null 2>&1 &" for port in ports)
    node.ssh(vm, " ".join(servers))


def manifest(kind: str, name: str) -> dict[str, Any]:
    documents = load_documents(TWO_TIER.read_text())
    return next(d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name))


def apply(node: LiveNode, tmp_path: Path, *documents: dict[str, Any]) -> None:
    path = tmp_path / "change.yaml"
    path.write_text(yaml.safe_dump_all(documents))
    node.cli("apply", "-f", str(path), "--wait", "--timeout", "30s")


def ask(node: LiveNode, vm: str, target: str, port: int) -> str:
    """Return what a guest hears from an address, '' where nothing."""
    done = node.ssh(vm, f"nc -w 2 {target} {port} </dev/null", check=False)
    return done.stdout.strip()


def from_outside(node: LiveNode, port: int = 80) -> str:
    sandbox = node.dev.sandbox
    assert sandbox is not None
    code = (
        "import socket\n"
        f"try: print(socket.create_connection(('{HOST_ADDRESS}', {port}), 2).recv(99).decode())\n"
        "except ConnectionRefusedError: print('refused')\n"
        "except OSError: print('nothing')\n"
    )
    done = subprocess.run(
        ["ip", "netns", "exec", sandbox.wan, sys.executable, "-c", code],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip()


def vmm_pid(node: LiveNode, vm: str) -> int:
    return int(node.status(vm)["vmm"]["pid"])


def targets(node: LiveNode) -> dict[str, str]:
    status = node.get("exposure", "site")["status"]
    return {each["virtualMachine"]: each["state"] for each in status.get("targets", [])}


def test_a_group_lets_its_port_through_and_nothing_else(node: LiveNode) -> None:
    assert ask(node, "web", "db", 5432) == "db"
    assert ask(node, "web", "db", 5433) == ""
    assert ask(node, "db", "web", 5432) == ""  # one way only
    listed = node.cli("get", "sg").stdout
    assert "TCP 5432 sg/web" in listed
    assert node.get("sg", "db")["status"]["members"] == 1


def test_a_rule_changes_at_once_under_running_guests(node: LiveNode, tmp_path: Path) -> None:
    pids = {name: vmm_pid(node, name) for name in ("web", "db")}
    wider = {name: manifest("SecurityGroup", name) for name in ("web", "db")}
    wider["web"]["spec"]["egress"][0]["ports"] = ["5432-5433"]
    wider["db"]["spec"]["ingress"][0]["ports"] = ["5432-5433"]
    apply(node, tmp_path, *wider.values())
    assert ask(node, "web", "db", 5433) == "db"
    apply(node, tmp_path, manifest("SecurityGroup", "web"), manifest("SecurityGroup", "db"))
    assert ask(node, "web", "db", 5433) == ""
    assert ask(node, "web", "db", 5432) == "db"
    assert {name: vmm_pid(node, name) for name in pids} == pids


def test_membership_and_rate_change_under_a_running_guest(node: LiveNode, tmp_path: Path) -> None:
    pid = vmm_pid(node, "web")
    alone = manifest("VirtualMachine", "web")
    alone["spec"]["interfaces"][0]["securityGroups"] = []
    alone["spec"]["interfaces"][0]["bandwidth"] = {"egress": "50Mbit", "ingress": "50Mbit"}
    apply(node, tmp_path, alone)
    assert ask(node, "web", "db", 5432) == ""  # no member of what db lets in
    apply(node, tmp_path, manifest("VirtualMachine", "web"))
    assert ask(node, "web", "db", 5432) == "db"
    assert vmm_pid(node, "web") == pid
    other = manifest("VirtualMachine", "web")
    other["spec"]["interfaces"][0]["address"] = "10.8.0.77"
    with pytest.raises(CommandFailed, match="FAILED_PRECONDITION"):
        apply(node, tmp_path, other)


def test_guest_has_the_ipv6_address_of_its_record(node: LiveNode) -> None:
    address = node.status("web")["interfaces"][0]["address6"]
    assert address.startswith("fd00:8::")
    shown = node.ssh("web", "ip -6 -o addr show dev eth0").stdout
    assert f"{address}/128" in shown
    assert node.ssh("web", "ping -c 1 -W 5 fd00:8::1").returncode == 0


def test_names_of_the_network_resolve(node: LiveNode) -> None:
    assert "10.8.0.250" in node.ssh("web", "nslookup docs.shop.default.internal").stdout


def test_exposure_is_reached_from_outside_and_from_guests(node: LiveNode) -> None:
    node.cli("wait", "exposure/site", "--for", "Ready", "--timeout", "30s")
    assert from_outside(node) == "web"
    assert ask(node, "db", HOST_ADDRESS, 80) == "web"
    assert ask(node, "web", HOST_ADDRESS, 80) == "web"  # itself
    assert "1/1" in node.cli("get", "exposure").stdout


def test_metadata_tells_a_guest_about_itself(node: LiveNode) -> None:
    told = json.loads(node.ssh("web", "wget -qO- http://169.254.169.254/chv/v1.json").stdout)
    assert told["name"] == "web"
    assert "PRIVATE" not in json.dumps(told)


def test_killed_daemons_change_nothing_for_guests(node: LiveNode) -> None:
    operations = node.cli("ops", "ls").stdout.count("op-")
    node.kill("agent", "nwd")
    assert from_outside(node) == "web"
    node.up()
    node.await_state("TenantReady")
    assert from_outside(node) == "web"
    assert ask(node, "web", "db", 5432) == "db"
    assert ask(node, "web", "db", 5433) == ""
    assert node.cli("ops", "ls").stdout.count("op-") == operations


def on_both(network: str = "back") -> tuple[dict[str, Any], dict[str, Any]]:
    """The web server with a second interface, and the network of it."""
    back = {**manifest("Network", "shop"), "metadata": {"name": network}}
    back["spec"] = {"subnet": "10.9.0.0/24"}
    web = manifest("VirtualMachine", "web")
    web["spec"]["interfaces"].append({"name": "eth1", "network": network, "queues": 2})
    return back, web


def has_back(node: LiveNode) -> bool:
    """Tell whether guest, node and status have the second interface, or all of them do not."""
    seen = node.ssh("web", "ip -4 -o addr show; ip link").stdout
    shown = [each["name"] for each in node.status("web")["interfaces"]]
    there = {"eth1" in shown, "10.9.0." in seen, "eth1" in seen, bool(back_taps(node))}
    assert len(there) == 1, (seen, shown)
    return there.pop()


def back_taps(node: LiveNode) -> list[str]:
    """Return the ports that the bridges of namespaces on 10.9.0.0/24 have."""
    found = []
    for netns in Path("/run/netns").glob(f"chv-{node.dev.layout.instance}-*"):
        run = ["ip", "-n", netns.name, "-o"]
        addresses = subprocess.run([*run, "addr"], capture_output=True, text=True, check=True)
        if " 10.9.0.1/24 " in addresses.stdout:
            links = subprocess.run(
                [*run, "link", "show", "type", "tun"], capture_output=True, text=True, check=True
            )
            found += links.stdout.splitlines()
    return found


def back_becomes(node: LiveNode, present: bool) -> None:
    def there() -> bool:
        try:
            return has_back(node) is present
        except AssertionError:
            return False  # on its way

    wait_for(there, 30, f"second interface: {present}")


def test_an_interface_comes_and_goes_under_a_running_guest(node: LiveNode, tmp_path: Path) -> None:
    pid = vmm_pid(node, "web")
    back, both = on_both()
    apply(node, tmp_path, back, both)
    back_becomes(node, True)  # the guest asks for its address by DHCP
    assert node.ssh("web", "ping -c 1 -W 5 -I eth1 10.9.0.1").returncode == 0
    assert len(taps_of(pid)) == 3  # two queues more
    assert ask(node, "web", "db", 5432) == "db"
    assert node.condition("web", "RestartRequired")["status"] == "False"
    apply(node, tmp_path, manifest("VirtualMachine", "web"))
    back_becomes(node, False)
    for point, wanted in (
        ("agent.vmm.add_nic.tap_open", both),
        ("agent.vm.remove_nic_record.before", manifest("VirtualMachine", "web")),
    ):
        restart(node, f"{point}=1*kill")
        with pytest.raises(CommandFailed):
            apply(node, tmp_path, wanted)
        wait_for(lambda: devnode.agent_process(node.dev) is None, 30, "its death")
        restart(node)
        back_becomes(node, wanted is both)
    node.cli("delete", "network", "back")
    assert vmm_pid(node, "web") == pid
    assert ask(node, "web", "db", 5432) == "db"


def test_the_interface_that_a_guest_booted_with_is_unplugged_too(
    node: LiveNode, tmp_path: Path
) -> None:
    pid, before = vmm_pid(node, "db"), node.status("db")["interfaces"][0]["address"]
    assert ask(node, "web", before, 5432) == "db"
    bare = manifest("VirtualMachine", "db")
    bare["spec"]["interfaces"] = []
    apply(node, tmp_path, bare)
    assert "interfaces" not in node.status("db")
    assert ask(node, "web", before, 5432) == ""
    apply(node, tmp_path, manifest("VirtualMachine", "db"))
    wait_for(lambda: node.ssh("db", "hostname").stdout.strip() == "db", 30, "ssh of db")
    # Not by its name: the tiny guest has the IPv6 address of this interface at its next start.
    assert ask(node, "web", node.status("db")["interfaces"][0]["address"], 5432) == "db"
    assert vmm_pid(node, "db") == pid


def restart(node: LiveNode, failpoints: str = "") -> None:
    if devnode.agent_process(node.dev) is not None:
        node.down()
    node.cli("up", "--dir", str(node.directory), check=False, env={"CHV_FAILPOINTS": failpoints})


def test_exposure_fails_over_when_a_guest_stops(node: LiveNode, tmp_path: Path) -> None:
    both = manifest("Exposure", "site")
    both["spec"]["targets"].append({"virtualMachine": "db"})
    apply(node, tmp_path, both)
    wait_for(lambda: targets(node) == {"web": "healthy", "db": "healthy"}, 15, "both healthy")
    assert {from_outside(node) for _ in range(4)} == {"web", "db"}
    node.cli("stop", "web", "--force")
    stopped = time.monotonic()
    wait_for(lambda: {from_outside(node) for _ in range(3)} == {"db"}, 15, "db alone answers")
    assert time.monotonic() - stopped < 12
    wait_for(lambda: targets(node) == {"web": "unhealthy", "db": "healthy"}, 12, "the status")
    apply(node, tmp_path, manifest("Exposure", "site"))
    assert from_outside(node) == "refused"  # nobody is left: at once, not after a time-out


def test_what_is_used_is_not_deleted_and_a_deleted_target_is_absent(node: LiveNode) -> None:
    for kind, name in (("sg", "web"), ("network", "shop")):
        done = node.cli("delete", kind, name, check=False)
        assert done.returncode == 5, done.stderr
        assert "IN_USE" in done.stderr
    node.cli("delete", "vm", "web")
    wait_for(lambda: targets(node) == {"web": "absent"}, 12, "an absent target")
    node.cli("delete", "sg", "web")
    condition = node.get("sg", "db")["status"]["conditions"][0]
    assert condition["status"] == "True"
    assert "web" in condition["message"]


def nobodys(name: str, address: str) -> dict[str, Any]:
    """An exposure without targets."""
    spec = {**manifest("Exposure", "site")["spec"], "addresses": [address], "port": 8099}
    spec["targets"] = []
    return {**manifest("Exposure", "site"), "metadata": {"name": name}, "spec": spec}


def ready(node: LiveNode, name: str) -> dict[str, Any]:
    conditions = node.get("exposure", name)["status"].get("conditions", [])
    return next((each for each in conditions if each["type"] == "Ready"), {})


def test_an_address_that_is_nobodys_is_refused_at_apply(node: LiveNode, tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"spec\.addresses\[0\].*203\.0\.113\.9"):
        apply(node, tmp_path, nobodys("nobodys", "203.0.113.9"))
    assert [each["metadata"]["name"] for each in listed(node, "exposure")] == ["site"]


def test_an_exposure_follows_an_address_that_comes_and_goes(node: LiveNode, tmp_path: Path) -> None:
    sandbox = node.dev.sandbox
    assert sandbox is not None
    address, link = "198.18.0.77", "up0"

    def change(verb: str) -> None:
        command = ["ip", "-n", sandbox.host, "address", verb, f"{address}/24", "dev", link]
        subprocess.run(command, check=True)

    change("add")
    try:
        wanted = nobodys("moving", address)
        wait_for(lambda: applied(node, tmp_path, wanted), 30, "the address is the node's")
        change("delete")
        wait_for(lambda: address in ready(node, "moving")["message"], 30, "the loss is told of")
        # Told to nwd again, it is refused for good; only the address itself brings it back.
        wanted["spec"]["sources"] = ["10.0.0.0/8"]
        assert not applied(node, tmp_path, wanted)
        assert node.get("exposure", "moving")["status"]["phase"] == "Failed"
        change("add")
        wait_for(lambda: ready(node, "moving")["reason"] == "NoHealthyTarget", 30, "it is back")
    finally:
        node.cli("delete", "exposure", "moving", "--ignore-not-found")
        subprocess.run(
            ["ip", "-n", sandbox.host, "address", "delete", f"{address}/24", "dev", link],
            check=False,
        )


def applied(node: LiveNode, tmp_path: Path, document: dict[str, Any]) -> bool:
    try:
        apply(node, tmp_path, document)
    except CommandFailed:
        return False
    return True


def listed(node: LiveNode, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(node.cli("get", kind, "-o", "json").stdout)
    return found
