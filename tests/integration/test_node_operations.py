"""Operations on a real node with the fake VMM: who asked and why, and one end, over kills."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from chv.cli.connect import client
from chv.common.errors import Conflict
from chv.common.wire import agent as api
from tests.integration.leak_planter import IDS, stray, worker_id_of
from tests.integration.live_node import LiveNode, live_node, need, wait_for

pytestmark = [pytest.mark.root, need()]


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        running.down()
        path = running.dev.config_path
        path.write_text(path.read_text().replace("settle_s = 10.0", "settle_s = 0.2"))
        running.up()
        yield running


def operations(node: LiveNode, *filters: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(node.cli("ops", "ls", "--json", *filters).stdout)
    return found


def newest(node: LiveNode, verb: str) -> dict[str, Any]:
    return operations(node, "--verb", verb)[0]


def leak_id(node: LiveNode, name: str) -> str:
    found = json.loads(node.cli("leaks", "--json", "--now").stdout)["leaks"]
    return next(str(leak["id"]) for leak in found if leak["name"] == name)


def ended(node: LiveNode, verb: str) -> dict[str, Any]:
    """The newest operation of a verb, once it has ended."""
    wait_for(lambda: newest(node, verb)["ended_at"], 60, f"the end of {verb}")
    return newest(node, verb)


def test_every_upkeep_verb_is_an_operation_with_requester_and_reason(node: LiveNode) -> None:
    node.cli("key", "create", "disk", "--reason", "first key")
    node.cli("key", "rm", "disk", "--reason", "no longer")
    node.cli("daemon", "restart", "console", "--reason", "upgrade")
    node.cli("image", "gc", "--reason", "tidy")
    shown = {each["verb"]: each for each in operations(node, "--since", "1h")}
    for verb, reason in (
        ("create_key", "first key"),
        ("delete_key", "no longer"),
        ("restart_daemon", "upgrade"),
        ("collect_images", "tidy"),
    ):
        assert (shown[verb]["state"], shown[verb]["reason"]) == ("Succeeded", reason)
        assert shown[verb]["requester"].endswith("(uid=0)")
    table = node.cli("ops", "ls", "--kind", "key").stdout
    assert "first key" in table and "restart_daemon" not in table
    assert "first key" in node.cli("ops", "show", shown["create_key"]["id"]).stdout
    assert operations(node, "--state", "Failed", "--verb", "create_key") == []


def test_a_leak_that_is_no_leak_says_how_they_are_called(node: LiveNode) -> None:
    refused = node.cli("leaks", "reap", "web", check=False)
    assert refused.returncode == 2
    assert "10 characters of 0-9 and a-f" in refused.stderr
    assert "chv leaks" in refused.stderr
    assert node.cli("leaks", "reap", "0" * 10, check=False).returncode == 4


@pytest.mark.parametrize(
    "point", ["agent.leak.reap.before", "agent.leak.reap.after", "agent.chore.end.before"]
)
def test_a_reap_in_which_the_agent_is_killed_is_brought_to_its_end(
    node: LiveNode, point: str
) -> None:
    process = stray(node.dev.layout, "vmm", IDS.uid())
    try:
        node.restart(f"{point}=kill")
        key = leak_id(node, f"{worker_id_of(process)}")
        lost = node.cli("leaks", "reap", key, "--reason", "left over", check=False)
        assert lost.returncode != 0
        node.await_agent_death()
        node.up()
        operation = ended(node, "reap_leak")
        assert (operation["state"], operation["name"]) == ("Succeeded", key)
        assert operation["reason"] == "left over"
        assert process.wait(timeout=10) == -signal.SIGTERM
        assert node.cli("leaks", "--now").stdout == "no leaks\n"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("point", ["agent.chore.do.before", "agent.chore.do.after"])
def test_an_import_in_which_the_agent_is_killed_is_brought_to_its_end(
    node: LiveNode, point: str
) -> None:
    source = node.directory / "disk.raw"
    source.write_bytes(point.encode() * 4096)
    name = point.rpartition(".")[2]
    node.restart(f"{point}=kill")
    lost = node.cli("image", "import", str(source), "--name", name, "--reason", "r", check=False)
    assert lost.returncode != 0
    node.await_agent_death()
    node.up()
    operation = ended(node, "import")
    assert (operation["state"], operation["name"]) == ("Succeeded", name), operation
    node.cli("wait", f"image/{name}", "--for", "Ready")
    node.cli("image", "rm", name, "--reason", "r")


@pytest.mark.parametrize("point", ["agent.chore.do.before", "agent.chore.end.before"])
def test_a_key_in_which_the_agent_is_killed_is_there_or_said_not_to_be(
    node: LiveNode, point: str
) -> None:
    request = api.PutKey(name="late", requester="test", idempotency_key=point)
    node.restart(f"{point}=kill")
    assert node.cli("key", "create", "other", check=False).returncode != 0
    node.await_agent_death()
    node.up()
    operation = ended(node, "create_key")
    there = (node.dev.layout.keys / "default" / "other").exists()
    assert operation["state"] == ("Succeeded" if there else "Failed")
    assert there == (point == "agent.chore.end.before")
    if there:
        node.cli("key", "rm", "other")
    with client(node._socket()["CHV_SOCKET"]) as agent:
        first = agent.call(api.PUT_KEY, request)
        assert agent.call(api.PUT_KEY, request) == first
        with pytest.raises(Conflict):
            agent.call(
                api.PUT_KEY,
                api.PutKey(name="late2", requester="test", idempotency_key=point),
            )
    node.cli("key", "rm", "late")


def test_a_failed_operation_is_shown_and_not_cancelled(node: LiveNode) -> None:
    fifo = node.directory / "endless"
    os.mkfifo(fifo)
    refused = node.cli("image", "import", str(fifo), "--name", "endless", check=False)
    assert refused.returncode == 2
    assert "is not a regular file" in refused.stderr
    operation = newest(node, "import")
    assert (operation["state"], operation["error"]["code"]) == ("Failed", "INVALID_ARGUMENT")
    late = node.cli("ops", "cancel", operation["id"], check=False)
    assert late.returncode == 6
    assert "it has ended" in late.stderr
