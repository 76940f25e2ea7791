"""Every command that changes something takes a reason; those that wait say what goes on."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, cast

import pytest

from chv.cli.commands.ops import moment
from chv.cli.operations import final, going_on, how_far
from chv.cli.parser import build_parser
from chv.common.rpc.blocking import BlockingClient
from chv.common.wire.agent import Operation
from chv.common.wire.agent_operations import OperationProgress, QueuePlace

# These read, or act beside the agent's operations.
READS = {
    "get", "describe", "wait", "ssh", "console", "logs", "why", "history", "diff", "ops", "ops ls",
    "ops show", "volume ls", "volume show", "snapshot ls", "key ls", "storage status",
    "storage jobs", "storage metrics", "image ls", "net explain", "net log", "net capture",
    "net stats", "leaks", "daemon list", "node status", "fit", "events", "upstream status",
    "node inventory",
}  # fmt: skip
BESIDE = {
    "up": "starts and ends a development node; what it defines says so itself",
    "down": "the same",
    "demo": "a node of its own",
    "verify": "its objects are its own, and gone at its end",
    "doctor": "looks at the machine",
}


def commands(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, set[str]]]:
    options = {name for action in parser._actions for name in action.option_strings}
    if parser.get_default("handler"):
        yield path, options
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, f"{path} {name}".strip())


def test_every_command_that_changes_something_takes_a_reason() -> None:
    found = dict(commands(build_parser()))
    lacking = {
        path
        for path, options in found.items()
        if "--reason" not in options and path not in READS and path not in BESIDE
    }
    assert lacking == set()


@pytest.mark.parametrize(
    ("progress", "queue", "words"),
    [
        (None, None, ""),
        (OperationProgress(done=512 << 20, total=1 << 30), None, "50% of 1Gi"),
        (OperationProgress(done=3 << 20), None, "3 MiB"),
        (OperationProgress(done=1, total=4, unit="VMs"), None, "1 of 4 VMs"),
        (None, QueuePlace(position=2, waits_for="a start slot"), "queue 2, for a start slot"),
    ],
)
def test_how_far_it_is_fits_on_a_line(
    progress: OperationProgress | None, queue: QueuePlace | None, words: str
) -> None:
    assert how_far(operation(progress=progress, queue=queue)) == words


def operation(**more: Any) -> Operation:
    values: dict[str, Any] = {
        "id": "op-1",
        "verb": "stop",
        "kind": "VirtualMachine",
        "namespace": "default",
        "name": "web",
        "uid": "u",
        "generation": 1,
        "requester": "cli",
    }
    return Operation(**values | more)


class _Interrupted:
    def call(self, *_: object, **__: object) -> None:
        raise KeyboardInterrupt


def test_an_interrupted_wait_says_that_the_operation_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyboardInterrupt):
        final(cast("BlockingClient", _Interrupted()), "op-1", 5.0)
    said = capsys.readouterr().err
    assert "op-1 goes on" in said and "chv ops cancel op-1" in said


def test_what_was_interrupted_before_it_was_accepted_is_not_said_to_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(KeyboardInterrupt), going_on(lambda: ""):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == ""


def test_since_is_a_time_or_how_long_ago() -> None:
    assert moment("2026-01-01T00:00:00Z") == "2026-01-01T00:00:00Z"
    assert moment("") == ""
    assert moment("10m") > "2020" and moment("10m").endswith("Z")
