"""SIGKILL of the agent in the middle of its transactions, on a real node: no event is lost.

Real daemons, the fake VMM. Somebody follows with `chv events --follow` over all lives of the agent;
in the end everything that is true was told, each once and in order.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live_node import GUEST, ROOT, LiveNode, live_node, need, wait_for

pytestmark = [pytest.mark.root, need()]

LONG = bool(os.environ.get("CHV_LONG"))
SEED = 20_261_201
COMMITS = range(2, 24)  # of the agent's, while it starts and makes a VM
POINTS = [
    f"common.store.commit.{moment}={number}*off->1*kill"
    for number in COMMITS
    for moment in ("before", "after")
]
OUTCOMES = {
    "Succeeded": "OperationSucceeded",
    "Failed": "OperationFailed",
    "Cancelled": "OperationCancelled",
    "Superseded": "OperationSuperseded",
}


class Follower:
    """`chv events --follow --json` as a process."""

    def __init__(self, node: LiveNode, path: Path) -> None:
        self.path = path
        environment = os.environ | {"CHV_SOCKET": (node.directory / "socket").read_text().strip()}
        with path.open("w") as out, path.with_suffix(".err").open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "chv.cli", "events", "--follow", "--json"],
                stdout=out, stderr=err, cwd=ROOT, env=environment,
            )  # fmt: skip

    def events(self) -> list[dict[str, Any]]:
        lines = self.path.read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(10)


@pytest.fixture(scope="module")
def node() -> Iterator[LiveNode]:
    with live_node(CHV_VMM="fake", CHV_TEST_BUILD="1") as running:
        yield running


@contextlib.contextmanager
def following(node: LiveNode, path: Path) -> Iterator[Follower]:
    follower = Follower(node, path)
    try:
        yield follower
    finally:
        follower.end()


def test_a_kill_in_any_transaction_loses_no_event_and_doubles_none(
    node: LiveNode, tmp_path: Path
) -> None:
    (tmp_path / "guest.yaml").write_text(GUEST)
    points = POINTS if LONG else random.Random(SEED).sample(POINTS, 1)
    with following(node, tmp_path / "events") as follower:
        wait_for(follower.events, 20, "the first events")
        for point in points:
            node.restart(point)
            node.cli("apply", "-f", str(tmp_path / "guest.yaml"), check=False)
            node.await_agent_death()
            node.restart()
            node.apply(GUEST)
            node.cli("delete", "-f", str(tmp_path / "guest.yaml"))
        newest = kept(node)[-1]["seq"]
        wait_for(lambda: follower.events()[-1]["seq"] >= newest, 20, "all events")
        heard = follower.events()
        assert "waiting for the agent" in follower.path.with_suffix(".err").read_text()
    assert [event["seq"] for event in heard] == list(range(1, len(heard) + 1))
    assert heard[:newest] == kept(node)[:newest]
    assert broken_chains(heard) == []
    assert untold_operations(node, heard) == []


def kept(node: LiveNode) -> list[dict[str, Any]]:
    return [json.loads(line) for line in node.cli("events", "--json").stdout.splitlines()]


def broken_chains(events: list[dict[str, Any]]) -> list[str]:
    """Each condition and phase goes on from where it was told to be."""
    found, known = [], dict[tuple[str, str], str]()
    for event in events:
        if event["reason"] not in ("Condition", "Phase") or event["kind"] == "Node":
            continue
        data = event["data"]
        key = (event["uid"], data.get("type", "phase"))
        start = "False" if "type" in data else "Pending"
        if known.get(key, start) != data["from"]:
            found.append(f"{event['seq']}: {key} was told to be {known.get(key, start)}, {data}")
        known[key] = data["to"]
    return found


def untold_operations(node: LiveNode, events: list[dict[str, Any]]) -> list[str]:
    """Each operation that is on record began and ended once, as was told."""
    found = []
    for operation in json.loads(node.cli("ops", "ls", "--limit", "500", "-o", "json").stdout):
        told = [event["reason"] for event in events if event["operation_id"] == operation["id"]]
        ends = [reason for reason in told if reason in OUTCOMES.values()]
        if told.count("OperationBegun") != 1 or ends != [OUTCOMES[operation["state"]]]:
            found.append(f"{operation['id']} is {operation['state']}, told was {told}")
    return found
