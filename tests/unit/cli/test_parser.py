"""The grammar: every command has a handler that exists."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from chv.cli.__main__ import main, split_remote
from chv.cli.operations import seconds
from chv.cli.output import age
from chv.cli.parser import build_parser
from chv.common.errors import InvalidArgument


def handlers(parser: argparse.ArgumentParser) -> Iterator[str]:
    if handler := parser.get_default("handler"):
        yield handler
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from handlers(child)


def test_every_command_has_an_existing_handler() -> None:
    found = set(handlers(build_parser()))
    assert len(found) >= 15
    for handler in found:
        module, function = handler.split(":")
        assert callable(getattr(importlib.import_module(f"chv.cli.commands.{module}"), function))


def test_get_imports_no_event_loop() -> None:
    code = (
        "import sys; sys.argv=['chv','--socket','/nowhere','get','vm'];"
        "from chv.cli.__main__ import main; code = main();"
        "heavy = {'asyncio','anyio','yaml','aiosqlite','pyroute2','qemu'} & set(sys.modules);"
        "print(code, sorted(heavy))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "CHV_SOCKET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.strip() == "69 []"


def test_errors_go_to_standard_error_with_their_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--socket", "/nowhere/agent.sock", "get", "vm"]) == 69
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("chv: UNAVAILABLE:")


def test_unknown_kind_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get", "pod"]) == 2
    assert "vm, volume, snapshot, network, image" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "value"), [("90s", 90.0), ("5m", 300.0), ("250ms", 0.25)])
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "5", "-1s", "0s", "2h", "5 m", "1e3s"])
def test_bad_durations_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        seconds(text)


def test_age_of_nothing_is_a_dash() -> None:
    assert age("") == "-"
    assert age("2020-01-01T00:00:00.000Z").endswith("d")


@pytest.mark.parametrize(
    ("argv", "ours", "remote"),
    [
        (["ssh", "a"], ["ssh", "a"], None),
        (["ssh", "a", "-n", "b", "--", "ls", "-l"], ["ssh", "a", "-n", "b"], ["ls", "-l"]),
        (["ssh", "a", "--", "sh", "--", "x"], ["ssh", "a"], ["sh", "--", "x"]),
    ],
)
def test_remote_command_is_cut_off_and_not_parsed(
    argv: list[str], ours: list[str], remote: list[str] | None
) -> None:
    assert split_remote(argv) == (ours, remote)
    assert build_parser().parse_args(ours).name == "a"
