"""Volumes, snapshots, verbs and keys as a user has them: the CLI, a real node, a real guest.

One node serves every test. What needs no guest comes first; the guest's tests share one VM.
"""

from __future__ import annotations

import json
import re
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live_node import ROOT, LiveNode, live_node, need, wait_for
from tests.leftovers import scratch

pytestmark = [pytest.mark.root, need("qemu-system-x86_64", "qemu-img")]

STORAGE = ROOT / "examples" / "storage.yaml"
HEAD = "apiVersion: compute.chv.dev/v1alpha1\n"
BASE = f"""{HEAD}kind: Image
metadata: {{name: tiny}}
spec: {{builtin: tiny}}
---
{HEAD}kind: Network
metadata: {{name: lan}}
spec: {{subnet: 10.7.0.0/24}}
---
{HEAD}kind: Volume
metadata: {{name: root}}
spec: {{format: qcow2, size: 256Mi, source: {{image: tiny}}}}
---
{HEAD}kind: VirtualMachine
metadata: {{name: guest}}
spec:
  memory: 256Mi
  boot: {{image: tiny}}
  disks: [{{name: root, volume: root}}]
  interfaces: [{{name: eth0, network: lan}}]
"""


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    """A node whose configuration names a pool and a place for backups."""
    places = scratch()
    try:
        yield from _node_with(places)
    finally:
        subprocess.run(["rm", "-r", str(places)], check=True)


def _node_with(places: Path) -> Iterator[LiveNode]:
    places.chmod(0o711)
    for name in ("pool", "backups"):
        (places / name).mkdir(mode=0o711)
    with live_node() as running:
        running.down()
        path = running.directory / "node.toml"
        text = re.sub(r"(?m)^(pools|backup_paths)\b.*\n", "", path.read_text())
        more = f'pools = {{fast = "{places}/pool"}}\nbackup_paths = ["{places}/backups"]\n'
        assert "[storage]\n" in text
        path.write_text(text.replace("[storage]\n", f"[storage]\n{more}"))
        running.up()
        running.environment["PLACES"] = str(places)
        yield running
        for kind in ("VirtualMachine", "VolumeSnapshot"):
            for item in listed(running, kind):
                running.cli("delete", kind, item["metadata"]["name"])


def listed(node: LiveNode, kind: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(node.cli("get", kind, "-o", "json").stdout or "[]")
    return found


def places(node: LiveNode, name: str) -> Path:
    return Path(node.environment["PLACES"]) / name


def apply(node: LiveNode, text: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        return node.cli("apply", "-f", file.name, "--wait", check=check)


def volume(name: str, spec: str) -> str:
    return f"{HEAD}kind: Volume\nmetadata: {{name: {name}}}\nspec: {{{spec}}}\n"


def of(node: LiveNode, name: str, kind: str = "volume") -> dict[str, Any]:
    status: dict[str, Any] = node.get(kind, name)["status"]
    return status


# --- without a guest


def test_example_of_the_documentation_works_and_goes_away_again(node: LiveNode) -> None:
    node.cli("apply", "-f", str(STORAGE), "--wait")
    assert of(node, "data")["limits"]["iopsTotal"] == {
        "limit": 2000, "burst": 4000, "burstSeconds": 10
    }  # fmt: skip
    assert of(node, "data-before", "snapshot")["phase"] == "Ready"
    assert of(node, "data-copy")["phase"] == "Ready"
    refusal = node.cli("snapshot", "rm", "data-before", check=False)
    assert refusal.returncode == 5
    assert "Volume default/data-copy" in refusal.stderr
    refusal = node.cli("delete", "volume", "data", check=False)
    assert "VolumeSnapshot default/data-before" in refusal.stderr
    node.cli("delete", "-f", str(STORAGE))
    assert listed(node, "volume") == listed(node, "snapshot") == []


def test_growth_limits_and_check_of_a_volume_at_rest(node: LiveNode) -> None:
    apply(node, volume("plain", "size: 16Mi, format: qcow2"))
    node.cli("volume", "grow", "plain", "32Mi")
    assert of(node, "plain")["sizeBytes"] == 32 << 20
    assert of(node, "plain")["sizeApplied"] == "Detached"
    assert "only grows" in node.cli("volume", "grow", "plain", "16Mi", check=False).stderr
    node.cli("volume", "limit", "plain", "--iops-read", "100:200:5", "--bandwidth-write", "8Mi")
    assert node.get("volume", "plain")["spec"]["limits"] == {
        "iopsRead": {"limit": 100, "burst": 200, "burstSeconds": 5},
        "bandwidthWrite": {"limit": "8Mi"},
    }
    done = node.cli("volume", "check", "plain")
    assert "0 errors" in done.stderr
    assert "0 errors" in node.cli("volume", "repair", "plain").stderr
    kinds = {job["kind"] for job in json.loads(node.cli("storage", "jobs", "-o", "json").stdout)}
    assert {"check", "repair"} <= kinds
    shown = json.loads(node.cli("storage", "metrics", "-o", "json").stdout)
    assert [each["size_bytes"] for each in shown["volumes"]] == [32 << 20]
    assert "plain" in node.cli("storage", "status").stdout
    node.cli("delete", "volume", "plain")


def test_volume_moves_to_another_pool_and_back_with_its_bytes(node: LiveNode) -> None:
    apply(node, volume("mover", "size: 16Mi, format: raw"))
    first = Path(of(node, "mover")["location"])
    with first.open("r+b") as stream:
        stream.write(b"moved with me")
    node.cli("volume", "move", "mover", "--pool", "fast")
    second = Path(of(node, "mover")["location"])
    assert second.is_relative_to(places(node, "pool"))
    assert second.read_bytes()[:13] == b"moved with me"
    assert not first.exists()
    node.cli("volume", "move", "mover", "--pool", "", "--format", "qcow2")
    assert "format" not in node.get("volume", "mover")["spec"]  # qcow2 goes without saying
    assert not second.exists()
    node.cli("delete", "volume", "mover")


def test_backup_is_a_source_of_volumes_whatever_became_of_the_first(node: LiveNode) -> None:
    apply(node, volume("kept", "size: 16Mi, format: raw"))
    with Path(of(node, "kept")["location"]).open("r+b") as stream:
        stream.write(b"worth a backup")
    target = places(node, "backups") / "kept"
    target.mkdir(mode=0o700)
    done = node.cli("volume", "backup", "kept", "--target", str(target))
    assert "number 1" in done.stderr
    refusal = node.cli("volume", "backup", "kept", "--target", "/root", check=False)
    assert refusal.returncode in (6, 77)
    node.cli("delete", "volume", "kept")
    apply(node, volume("again", f"size: 16Mi, format: raw, source: {{backup: {target}}}"))
    assert Path(of(node, "again")["location"]).read_bytes()[:14] == b"worth a backup"
    node.cli("delete", "volume", "again")


def test_key_is_made_used_rotated_and_destroyed_only_when_it_is_free(node: LiveNode) -> None:
    for name in ("first", "second"):
        node.cli("key", "create", name)
    keys = node.dev.layout.keys / "default"
    secret = (keys / "first").read_text()
    assert stat.S_IMODE((keys / "first").stat().st_mode) == 0o600
    assert node.cli("key", "create", "first", check=False).returncode == 5
    apply(node, volume("closed", "size: 16Mi, format: raw, encryption: {key: first}"))
    assert of(node, "closed")["encrypted"] is True
    header = Path(of(node, "closed")["location"]).read_bytes()[:4]
    assert header == b"LUKS"
    assert "closed" in node.cli("key", "rm", "first", check=False).stderr
    node.cli("volume", "rekey", "closed", "second", "--timeout", "60s")
    wait_for(lambda: of(node, "closed")["encryptionKey"] == "second", 30, "the second key")
    node.cli("key", "rm", "first")
    assert node.cli("key", "rm", "second", check=False).returncode == 5
    node.cli("delete", "volume", "closed")
    node.cli("key", "rm", "second")
    assert json.loads(node.cli("key", "ls", "-o", "json").stdout) == []
    state = node.dev.layout.state
    found = [path for path in state.rglob("*") if path.is_file() and path.stat().st_size < 1 << 24]
    assert [str(path) for path in found if secret.encode() in path.read_bytes()] == []


def test_key_from_standard_input_is_taken_as_it_is(node: LiveNode) -> None:
    done = subprocess.run(
        ["sh", "-c", f"printf 'a passphrase of mine' | {_chv(node)} key create given --from -"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (node.dev.layout.keys / "default" / "given").read_text() == "a passphrase of mine"
    node.cli("key", "rm", "given")


def _chv(node: LiveNode) -> str:
    import sys

    return f"CHV_SOCKET={node.dev.socket} {sys.executable} -m chv.cli"


# --- with a guest


@pytest.fixture(scope="module")
def guest(node: LiveNode) -> LiveNode:
    apply(node, BASE)
    node.cli("wait", "vm/guest", "--for", "SSHReady", "--timeout", "170s")
    return node


def test_limits_of_a_running_vm_are_what_its_storage_daemon_says(guest: LiveNode) -> None:
    guest.cli("volume", "limit", "root", "--iops-total", "500:1000:3")
    limits = of(guest, "root")["limits"]
    assert limits["iopsTotal"] == {"limit": 500, "burst": 1000, "burstSeconds": 3}
    guest.cli("volume", "limit", "root", "--none")
    assert of(guest, "root").get("limits", {}) == {}


def test_check_of_a_disk_in_use_says_what_to_stop(guest: LiveNode) -> None:
    refusal = guest.cli("volume", "check", "root", check=False)
    assert refusal.returncode == 6
    assert "chv stop guest" in refusal.stderr


def test_snapshot_under_a_running_guest_is_restored_while_it_is_stopped(guest: LiveNode) -> None:
    guest.ssh("guest", "echo before > /data/file && sync")
    guest.cli("snapshot", "create", "calm", "--vm", "guest")
    assert of(guest, "calm", "snapshot")["consistency"] == "Crash"
    guest.ssh("guest", "echo after > /data/file && sync")
    refusal = guest.cli("snapshot", "restore", "calm", check=False)
    assert "chv stop guest" in refusal.stderr
    guest.cli("stop", "guest")
    assert "VolumeSnapshot default/calm" in guest.cli("snapshot", "restore", "calm").stderr
    guest.cli("start", "guest")
    guest.cli("wait", "vm/guest", "--for", "SSHReady", "--timeout", "170s")
    assert guest.ssh("guest", "cat /data/file").stdout == "before\n"
    guest.cli("snapshot", "rm", "calm")
    assert of(guest, "root").get("snapshots", []) == []
    assert guest.ssh("guest", "cat /data/file").stdout == "before\n"


def test_backup_of_a_running_guest_goes_on_when_the_agent_is_killed(guest: LiveNode) -> None:
    target = places(guest, "backups") / "root"
    target.mkdir(mode=0o700)
    operation = guest.cli(
        "volume", "backup", "root", "--target", str(target), "--rate", "8Mi", "--no-wait"
    ).stdout.strip()
    guest.kill("agent")
    guest.up()
    guest.await_state("TenantReady")
    shown = wait_for(lambda: _ended(guest, operation), 120, "the end of the backup")
    assert (shown["verb"], shown["state"]) == ("backup", "Succeeded"), shown
    assert (target / "1.qcow2").exists()


def test_cancelled_backup_leaves_no_backup(guest: LiveNode) -> None:
    target = places(guest, "backups") / "cut"
    target.mkdir(mode=0o700)
    operation = guest.cli(
        "volume", "backup", "root", "--target", str(target), "--rate", "1Mi", "--no-wait"
    ).stdout.strip()
    guest.cli("ops", "cancel", operation)
    ended = wait_for(lambda: _ended(guest, operation), 60, "the end of the backup")
    assert ended["state"] == "Cancelled"
    assert list(target.glob("*.qcow2")) == []
    assert guest.ssh("guest", "cat /data/file").stdout == "before\n"


def test_move_under_a_running_guest_keeps_what_it_wrote(guest: LiveNode) -> None:
    guest.ssh("guest", "echo on the way > /data/move && sync")
    guest.cli("volume", "move", "root", "--pool", "fast")
    assert Path(of(guest, "root")["location"]).is_relative_to(places(guest, "pool"))
    assert guest.ssh("guest", "cat /data/move; echo more >> /data/move; sync").stdout == (
        "on the way\n"
    )
    assert "StorageLost" not in [
        each["type"] for each in guest.status("guest")["conditions"] if each["status"] == "True"
    ]


def _ended(node: LiveNode, operation: str) -> dict[str, Any] | None:
    shown: dict[str, Any] = json.loads(node.cli("ops", "show", operation, "-o", "json").stdout)
    return shown if shown["state"] not in ("Pending", "Running") else None
