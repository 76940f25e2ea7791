"""`chv leaks` on a real node: nothing on a healthy one, all that was planted, and its end."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.leak_planter import IDS, Planted, planted, stray, worker_id_of
from tests.integration.live_node import GUEST, LiveNode, live_node, need, wait_for

pytestmark = [pytest.mark.root, need()]


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        quicken(running)
        running.apply(GUEST)
        yield running


def quicken(node: LiveNode) -> None:
    """A thing counts as a leak after half a second; every look is asked for."""
    node.down()
    path = node.dev.config_path
    text = path.read_text()
    assert "settle_s = 10.0" in text
    path.write_text(text.replace("settle_s = 10.0", "settle_s = 0.5"))
    node.up()


def leaks(node: LiveNode, *arguments: str) -> dict[str, dict[str, Any]]:
    """Leaks by name and kind, looked for now."""
    found = json.loads(node.cli("leaks", "--json", "--now", *arguments).stdout)
    assert found["unread"] == {}
    return {f"{leak['kind']} {leak['name']}": leak for leak in found["leaks"]}


def test_healthy_node_that_is_busy_has_no_leaks(node: LiveNode) -> None:
    assert leaks(node) == {}
    for verb in ("stop", "start", "restart"):
        node.cli(verb, "guest", "--no-wait")
        assert leaks(node) == {}
    node.cli("wait", "vm/guest", "--for", "Running", check=False)
    node.cli("daemon", "restart", "console")
    assert leaks(node) == {}
    assert node.cli("leaks", "--now").stdout == "no leaks\n"


KINDS = {
    "process": "process",
    "process of stord": "process",
    "netns": "netns",
    "link": "link",
    "nft": "nft",
    "socket": "socket",
    "export": "socket",
    "file": "file",
    "volume": "file",
    "mount": "mount",
    "cgroup": "cgroup",
}
# A directory under a mount, or with things of others in it, goes after these.
LAST = ("netns", "file", "directory of nwd")


def test_one_planted_leak_of_every_kind_is_shown_with_evidence_and_reaped(node: LiveNode) -> None:
    dev = node.dev
    assert dev.sandbox is not None
    with planted(dev.layout, dev.sandbox.host) as found:
        shown = leaks(node)
        by_what = {
            what: shown[f"{kind} {found.names[what]}"]
            for what, kind in KINDS.items()
            if what in found.names
        }
        check_evidence(by_what, found)
        refused = node.cli("leaks", "reap", by_what["volume"]["id"], check=False)
        assert "FAILED_PRECONDITION" in refused.stderr
        assert Path(found.names["volume"]).exists()
        for what in sorted(by_what, key=lambda each: each in LAST):
            leak = by_what[what]
            assert node.cli("leaks", "adopt", leak["id"], check=False).returncode == 6
            node.cli("leaks", "reap", leak["id"], *(["--data"] if leak["data"] else []))
        assert [process.wait(timeout=10) for process in found.pids] == [-15, -15]
        left = leaks(node)
        directory = left.pop(f"file {found.names['directory of nwd']}")  # that the mount had hidden
        node.cli("leaks", "reap", directory["id"])
        assert left == {}
        assert not any(Path(name).exists() for name in found.names.values() if name[0] == "/")
    assert leaks(node) == {}
    assert node.status("guest")["phase"] == "Running"


def check_evidence(shown: dict[str, dict[str, Any]], found: Planted) -> None:
    process = shown["process"]
    assert process["evidence"]["pid"] == str(found.pids[0].pid)
    assert found.names["process"] in process["evidence"]["cmdline"]
    assert process["evidence"]["started"]
    assert process["daemon"] == "agent"
    assert shown["process of stord"]["daemon"] == "stord"
    inode = os.stat(f"/run/netns/{found.names['netns']}").st_ino  # noqa: PTH116
    assert shown["netns"]["evidence"]["inode"] == str(inode)
    assert shown["link"]["evidence"]["type"] == "tun"
    assert shown["nft"]["evidence"]["table"] == found.names["nft"]
    assert shown["mount"]["evidence"]["source"] == "chv-test"
    assert int(shown["volume"]["evidence"]["size_bytes"]) >= 8192
    assert shown["volume"]["data"]
    assert shown["export"]["daemon"] == "stord"
    assert all(leak["actions"] == ["reap"] for leak in shown.values())
    assert all(leak["since"] for leak in shown.values())


def test_a_leak_that_has_changed_meanwhile_is_not_reaped(node: LiveNode) -> None:
    path = node.dev.layout.api / "stray"
    path.write_text("one")
    leak = leaks(node)[f"file {path}"]
    path.write_text("another")
    refused = node.cli("leaks", "reap", leak["id"], check=False)
    assert refused.returncode == 5
    assert "CONFLICT" in refused.stderr
    assert path.read_text() == "another"
    again = leaks(node)[f"file {path}"]
    assert again["id"] != leak["id"]
    node.cli("leaks", "reap", again["id"])
    assert not path.exists()


def test_nothing_is_reaped_while_a_daemon_cannot_say_whose_it_is(node: LiveNode) -> None:
    process = stray(node.dev.layout, "vmm", IDS.uid())
    try:
        leak = leaks(node)[f"process {worker_id_of(process)}"]
        pid = node.daemon_pid("nwd")
        subprocess.run(["kill", "-STOP", str(pid)], check=True)
        try:
            node.await_state("Degraded", timeout_s=10)
            refused = node.cli("leaks", "reap", leak["id"], check=False)
        finally:
            subprocess.run(["kill", "-CONT", str(pid)], check=True)
        assert refused.returncode == 69
        assert process.poll() is None
        node.await_state("TenantReady")
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("point", ["", "agent.leak.adopt.after=kill"])
def test_the_vmm_of_a_recorded_vm_is_taken_up_again(node: LiveNode, point: str) -> None:
    before = node.workers("vmm")
    node.down()
    with sqlite3.connect(node.dev.layout.database("agent")) as store:
        store.execute("DELETE FROM workers")
    store.close()
    node.restart(point)
    ((worker_id, pid),) = before.items()
    leak = leaks(node)[f"process {worker_id}"]
    assert leak["title"] == "VirtualMachine default/guest"
    assert leak["actions"] == ["adopt", "reap"]
    assert node.status("guest")["phase"] == "Unknown"

    words = ("--reason", "the store came from a copy")
    taken = node.cli("leaks", "adopt", leak["id"], *words, check=not point)
    if point:
        assert taken.returncode != 0
        node.await_agent_death()
        node.up()

    wait_for(lambda: node.status("guest")["phase"] == "Running", 20, "the VM running again")
    wait_for(lambda: adoption(node)["state"] == "Succeeded", 20, "the end of the operation")
    assert adoption(node)["reason"] == words[1]
    assert node.workers("vmm") == {worker_id: pid}
    assert leaks(node) == {}
    node.cli("restart", "guest", "--force", "--timeout", "30s")
    assert len(node.workers("vmm")) == 1


def adoption(node: LiveNode) -> dict[str, Any]:
    """The operation of the newest adoption."""
    found: list[dict[str, Any]] = json.loads(
        node.cli("ops", "ls", "--verb", "adopt_leak", "--json").stdout
    )
    return found[0]
